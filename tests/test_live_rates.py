"""Live codes of sound at every rate that sessions take, however it was cut: the offline ones."""

from itertools import pairwise

import numpy as np
import torch
from conftest import examples
from hypothesis import example, given
from hypothesis import strategies as st
from live_rig import KINDS, LIVE, Kind, noise, rising, speech

from mosstalk.audio.sound import Resampler, Samples
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.session.commands import INPUT_RATES
from mosstalk.session.sound import resampled

LONGEST_S = 65
TOGETHER = LiveTokenizer(
    LIVE["goldens"].tokenizer, options=LiveOptions(together=True, graphs=False, page_s=2)
)
WAYS = st.sampled_from([LIVE["goldens"], TOGETHER])
LENGTHS_S = st.one_of(
    st.floats(0, 0.2), st.floats(0, 3), st.floats(0, 12), st.floats(28, 32), st.just(LONGEST_S)
)


def in_slices(sound: Samples, cuts: list[float]) -> list[Samples]:
    """The sound cut at these shares of its length."""
    places = [0, *sorted(round(cut * len(sound)) for cut in cuts), len(sound)]
    return [sound[start:end] for start, end in pairwise(places)]


def codes_heard(live: LiveTokenizer, slices: list[Samples], rate: int) -> list[int]:
    """The codes of a turn that came in these slices through a session's resampler."""
    resampler, state = Resampler(rate), live.open()
    for piece in slices:
        live.push(state, resampler.push(piece))
    live.push_many([state], [resampler.flush()], [True])
    return state.codes


@examples(12)
@given(
    live=WAYS,
    kind=st.sampled_from(KINDS),
    rate=st.sampled_from(INPUT_RATES),
    seconds=LENGTHS_S,
    cuts=st.lists(st.floats(0, 1), max_size=40),
)
@example(LIVE["goldens"], speech, 8000, 0, [])
@example(TOGETHER, rising, 24_000, LONGEST_S, [n / 163 for n in range(163)])
@example(TOGETHER, noise, 16_000, LONGEST_S, [n / 650 for n in range(650)])
def test_sound_of_any_rate_and_length_cut_anyhow_has_the_offline_codes(
    live: LiveTokenizer, kind: Kind, rate: int, seconds: float, cuts: list[float]
) -> None:
    samples = max(1, round(seconds * rate))
    sound = np.asarray(kind(samples).numpy(), np.float32)

    codes = codes_heard(live, in_slices(sound, cuts), rate)

    assert codes == live.tokenizer.encode(torch.from_numpy(resampled(sound, rate)))
