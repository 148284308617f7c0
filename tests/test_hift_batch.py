"""HiFT in batches: the same sound as one reply alone, whoever joins and leaves."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import GOLDENS, examples
from hypothesis import given
from hypothesis import strategies as st
from seams import jumps_at, seam_samples
from test_hift import FRAME, HELD, make_mel, make_vocoder, splits
from torch import Tensor

from mosstalk.codec.hift_step import fades
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.codec.vocoder import VocoderReply
from mosstalk.config import HiftConfig
from mosstalk.errors import CodecFullError, DeviceError, OptionError
from mosstalk.files import read_json
from mosstalk.models.hift import HiftStream, HiftVocoder
from mosstalk.models.weights import fill, fold_weight_norm, open_safetensors
from mosstalk.runtime.device import pick_device
from mosstalk.verify.compare import read_case

CASES = sorted(path for path in GOLDENS.glob("hift*") if (path / "case.json").exists())
BOUND = 5e-4


def batched(vocoder: HiftVocoder | None = None, **options: Any) -> BatchedHift:
    return BatchedHift(vocoder or make_vocoder(), replace(HiftOptions(replies=8), **options))


def alone(mel: Tensor, sizes: list[int], seed: int) -> list[Tensor]:
    """What ``HiftStream`` gives for each call."""
    stream, last = HiftStream(make_vocoder(), seed), len(sizes) - 1
    parts = mel.split(sizes, dim=1)
    return [stream.push(part, final=index == last) for index, part in enumerate(parts)]


# The same sound.


@examples(20)
@given(
    cuts=st.lists(splits(), min_size=1, max_size=3),
    joins=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_replies_sound_as_alone_whoever_joins_and_leaves(
    cuts: list[list[int]], joins: list[int]
) -> None:
    hift, heard = batched(), [list[Tensor]() for _ in cuts]
    parts = [list(make_mel(sum(cut), seed).split(cut, dim=1)) for seed, cut in enumerate(cuts)]
    replies: dict[int, VocoderReply] = {}
    for call in range(max(map(len, parts)) + max(joins)):
        due = [n for n, part in enumerate(parts) if 0 <= call - joins[n] < len(part)]
        for n in due:
            if n not in replies:
                replies[n] = hift.open(seed=n)
        work = [
            (replies[n], parts[n][call - joins[n]], call - joins[n] == len(parts[n]) - 1)
            for n in due
        ]
        for n, wave, (reply, _, final) in zip(due, hift.push(work), work, strict=True):
            heard[n].append(wave)
            if final:
                hift.close(reply)

    for seed, cut in enumerate(cuts):
        expected = alone(make_mel(sum(cut), seed), cut, seed)
        for found, wave in zip(heard[seed], expected, strict=True):
            # Phases add up over a reply: of 99 frames, the longest here, 1.2e-4 was the most found.
            torch.testing.assert_close(found, wave, rtol=0, atol=2e-4)
    assert hift.figures().slots_used == 0


def golden(name: str) -> tuple[HiftVocoder, dict[str, Tensor], list[int]]:
    case = read_case(GOLDENS / name)
    vocoder = HiftVocoder(HiftConfig.from_dict(case.get("config")))
    store = fold_weight_norm(open_safetensors(case.weights / "hift.safetensors"))
    device = pick_device("auto")
    fill(vocoder, store, where=name, device=device, dtype=torch.float32)
    return vocoder, case.expected, case.settings.get("chunks", [])


CHUNKED = [path.name for path in CASES if read_json(path / "case.json").get("chunks")]


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("company", [0, 2])
def test_chunks_of_the_goldens_are_met_within_5e_4(name: str, company: int) -> None:
    vocoder, expected, chunks = golden(name)
    hift = batched(vocoder)
    others = [hift.open(seed) for seed in range(company)]
    reply = hift.open()
    for index, part in enumerate(expected["mel"].split(chunks, dim=1)):
        hift.push([(other, make_mel(20, index), False) for other in others])
        source = expected[f"chunk{index}.source"]
        final = index == len(chunks) - 1
        wave = hift.push_with_source(reply, part, source, final=final)
        torch.testing.assert_close(wave.cpu(), expected[f"chunk{index}.wave"], rtol=0, atol=BOUND)


def test_resetting_one_row_leaves_the_others_bit_identical() -> None:
    def run(*, disturb: bool) -> list[Tensor]:
        hift, heard = batched(), []
        first, second = hift.open(1), hift.open(2)
        for call in range(4):
            if disturb and call == 2:
                hift.close(second)
                second = hift.open(7)
            mel = make_mel(20, call)
            work = [(first, mel, False), (second, make_mel(28 if disturb else 20, 9), False)]
            heard.append(hift.push(work)[0])
        return heard

    for calm, disturbed in zip(run(disturb=False), run(disturb=True), strict=True):
        assert torch.equal(calm, disturbed)


def test_a_reopened_slot_begins_as_a_fresh_one() -> None:
    hift = batched(replies=1)
    heard = []
    for _ in range(2):
        reply = hift.open(3)
        heard.append([hift.push([(reply, make_mel(20, call), False)])[0] for call in range(2)])
        hift.close(reply)
    assert all(torch.equal(one, two) for one, two in zip(*heard, strict=True))


def test_an_hour_of_audio_is_followed_as_exactly_as_its_start() -> None:
    # Float32 could not even count samples past 2^24, which is 12 minutes.
    vocoder, hour = make_vocoder(187.3), 180_000
    stream, hift = HiftStream(vocoder, 4), batched(vocoder)
    reply = hift.open(4)
    for call in range(3):
        mel = make_mel(20, call)
        expected, found = stream.push(mel), hift.push([(reply, mel, False)])[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        if call == 0:
            stream.frames_done += hour
            hift._state.first_sample[reply.slot] += hour * FRAME


def test_float16_is_near_float32() -> None:
    exact, rough = (batched(dtype=dtype) for dtype in ("float32", "float16"))
    waves = []
    for hift in (exact, rough):
        reply = hift.open()
        waves.append(torch.cat([hift.push([(reply, make_mel(20, n), False)])[0] for n in range(2)]))
    error = (waves[0] - waves[1]).norm() / waves[0].norm()
    assert 0 < float(error) < 0.05


# Refusals.


def test_a_full_vocoder_refuses_at_once_and_has_room_again_after_a_close() -> None:
    hift = batched(replies=2)
    first, _ = hift.open(), hift.open()
    with pytest.raises(CodecFullError, match="all 2 places of the vocoder are taken"):
        hift.open()
    hift.close(first)
    hift.close(first)
    assert hift.open().slot == first.slot
    assert hift.figures().slots_used == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"replies": 0}, OptionError),
        ({"crossfade": "none"}, OptionError),
        ({"dtype": "float8"}, DeviceError),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        batched(**options)


def test_what_push_takes_is_checked() -> None:
    hift = batched()
    reply = hift.open()
    mel = make_mel(20)
    with pytest.raises(AssertionError, match="once a call"):
        hift.push([(reply, mel, False), (reply, mel, False)])
    with pytest.raises(AssertionError, match="at least 8 frames"):
        hift.push([(reply, mel[:, :7], False)])
    with pytest.raises(AssertionError, match="80 bands"):
        hift.push([(reply, mel[:60], False)])
    hift.push([(reply, mel, True)])
    with pytest.raises(AssertionError, match="has ended"):
        hift.push([(reply, mel, True)])


# Seams.


def test_a_normalised_fade_adds_to_one_and_the_published_to_1_08() -> None:
    cpu = torch.device("cpu")
    rise, fall = fades(HELD, "published", cpu)
    torch.testing.assert_close(rise + fall, torch.full((HELD,), 1.08), rtol=0, atol=3e-4)
    rise, fall = fades(HELD, "normalised", cpu)
    torch.testing.assert_close(rise + fall, torch.ones(HELD))


def streamed(crossfade: str, sizes: list[int]) -> Tensor:
    hift = batched(make_vocoder(200.0), crossfade=crossfade)
    reply, last = hift.open(), len(sizes) - 1
    parts = make_mel(sum(sizes)).split(sizes, dim=1)
    work = [(reply, part, index == last) for index, part in enumerate(parts)]
    return torch.cat([hift.push([one])[0] for one in work])


def test_the_normalised_fade_is_the_offline_sound_where_its_context_is_enough() -> None:
    sizes = [60, 40, 40]
    whole = streamed("normalised", [sum(sizes)])
    found = {kind: streamed(kind, sizes) for kind in ("published", "normalised")}
    # The middle of a fade: both sides have context, and the published halves are 8 % too loud.
    middle = slice(60 * FRAME - HELD // 2 - 240, 60 * FRAME - HELD // 2 + 240)
    gains = {
        kind: float((wave[middle] @ whole[middle]) / whole[middle].square().sum())
        for kind, wave in found.items()
    }
    assert gains["published"] / gains["normalised"] == pytest.approx(1.08, abs=0.01)


def test_a_jump_at_a_seam_is_found_and_one_elsewhere_is_not_taken_for_it() -> None:
    sizes = [20, 20, 20, 20]
    wave = torch.sin(torch.arange(sum(sizes) * FRAME) * 0.05)
    seams = seam_samples(sizes)
    assert [(end - start) for start, end in pairwise(seams)][::2] == [HELD] * 3

    calm = jumps_at(wave, seams)
    assert calm.largest_step_at_seams <= calm.largest_step
    wave[seams[2] :] += 0.5
    broken = jumps_at(wave, seams)
    assert broken.largest_step_at_seams > 5 * broken.largest_step
    assert max(calm.beside) < 1.01
    assert broken.beside[2] > 50 > 1.01 > max(broken.beside[:2])
    assert "0.5" in str(broken)
