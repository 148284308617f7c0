"""How long codes of live sound take: 400 ms pushed into many streams at once."""

from collections.abc import Sequence

import numpy as np
import torch

from mosstalk.bench.timed import Timed, run_timed
from mosstalk.codec.audio import Samples
from mosstalk.codec.live_codes import LiveCodes
from mosstalk.codec.live_tokenizer import LiveTokenizer
from mosstalk.units import INPUT_RATE

PUSH_S = 0.4
_WARM_UPS = 3


def sound_like_speech(seconds: float, seed: int) -> Samples:
    """Noise (n,) at 16 kHz that swells and falls like syllables, peak 0.3, louder towards the end
    of its first second than ever after: then no push has anything to repair.
    """
    random, count = np.random.default_rng(seed), round(seconds * INPUT_RATE)
    time_s = np.arange(count) / INPUT_RATE
    swell = 0.5 - 0.45 * np.cos(2 * np.pi * (3 + seed % 3) * time_s)
    first = np.where((time_s > 0.3) & (time_s < 0.4), 3.0, 1.0)
    sound = random.standard_normal(count) * swell * first
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)


def measure_pushes(
    live: LiveTokenizer, streams: int, at_s: float, pushes: int
) -> tuple[Timed, dict[str, float]]:
    """``pushes`` of 400 ms into ``streams`` streams that have heard ``at_s`` s, after a few others.

    Every stream's codes must equal the offline ones at the end; where one stream's do not, no
    push is valid. Also returns how many pages' bytes a second of sound takes.
    """
    longest_s = at_s + PUSH_S * (pushes + _WARM_UPS)
    sounds = [sound_like_speech(longest_s, seed) for seed in range(streams)]
    states = [live.open() for _ in sounds]
    heard = round(at_s * INPUT_RATE)
    if heard:
        live.push_many(states, [sound[:heard] for sound in sounds])
    device = live.tokenizer.encoder.codebook.weight.device
    size, times = round(PUSH_S * INPUT_RATE), list[float]()
    for start in range(heard, len(sounds[0]) - size + 1, size):
        pieces = [sound[start : start + size] for sound in sounds]
        times.append(run_timed(lambda: live.push_many(states, pieces), device).ms)  # noqa: B023
    held = live.pages.taken * live.pages.page_bytes / (streams * longest_s)
    for state in states:
        live.finish(state)
    fault = _fault(live, states, sounds)
    kept = tuple(times[_WARM_UPS:])
    name = f"{streams} x 400 ms after {at_s:g} s"
    wrong = (fault,) * len(kept) if fault else ()
    return Timed(name, times[0], _WARM_UPS, kept, wrong), {"bytes_per_s": held}


def _fault(live: LiveTokenizer, states: Sequence[LiveCodes], sounds: Sequence[Samples]) -> str:
    for number, (state, sound) in enumerate(zip(states, sounds, strict=True)):
        whole = live.tokenizer.encode(torch.from_numpy(sound))
        if state.codes != whole:
            differ = sum(a != b for a, b in zip(state.codes, whole, strict=False))
            return f"stream {number}: {differ} of {len(whole)} codes unlike the offline ones"
    return ""
