"""How long codes of live sound take: 400 ms pushed into many streams at once."""

from collections.abc import Sequence

import numpy as np
import torch

from mosstalk.audio.sound import Samples
from mosstalk.bench.timed import Run, Timed, run_timed
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.constants import INPUT_RATE

PUSH_S = 0.4
_WARM_UPS = 3
_REPAIRS = 5
_LOUD, _SILENT = (0.5, 0.6), (0.3, 0.4)
"""Seconds of a sound."""
_LOUDER = 5.0


def sound_like_speech(seconds: float, seed: int) -> Samples:
    """Noise (n,) at 16 kHz that swells and falls like syllables, peak 0.3 after half a second.

    Never after its first pushes is it as loud again: then no later push has anything to repair.
    """
    return _scaled(_syllables(seconds, seed, _LOUD))


def sound_to_repair(seconds: float, seed: int) -> Samples:
    """The same with silence near its beginning, loudest in its last push.

    What lies below the loudest frame's floor is all encoded again then, from the silence on.
    """
    sound = _syllables(seconds, seed, (seconds - 0.2, seconds - 0.1))
    start, end = (round(at * INPUT_RATE) for at in _SILENT)
    sound[start:end] = 0
    return _scaled(sound)


def _syllables(seconds: float, seed: int, loud: tuple[float, float]) -> Samples:
    """Noise, at no other time as loud as between the two times ``loud``, by 14 dB."""
    random, count = np.random.default_rng(seed), round(seconds * INPUT_RATE)
    time_s = np.arange(count) / INPUT_RATE
    swell = 0.5 - 0.45 * np.cos(2 * np.pi * (3 + seed % 3) * time_s)
    swell[(time_s > loud[0]) & (time_s < loud[1])] = _LOUDER
    return (random.standard_normal(count) * swell).astype(np.float32)


def _scaled(sound: Samples) -> Samples:
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)


def measure_pushes(
    live: LiveTokenizer, streams: int, at_s: float, pushes: int
) -> tuple[Timed, dict[str, float]]:
    """``pushes`` of 400 ms into ``streams`` streams that have heard ``at_s`` s, after a few others.

    Nothing is repaired in them: see ``measure_repairing``. Every stream's codes must equal the
    offline ones at the end; where one stream's do not, no push is valid. Also returns how many
    pages' bytes a second of sound takes.
    """
    longest_s = at_s + PUSH_S * (pushes + _WARM_UPS)
    sounds = [sound_like_speech(longest_s, seed) for seed in range(streams)]
    states = _opened(live, sounds, at_s)
    size, runs = round(PUSH_S * INPUT_RATE), list[Run[list[Change]]]()
    for start in range(round(at_s * INPUT_RATE), len(sounds[0]) - size + 1, size):
        runs.append(_push(live, states, [sound[start : start + size] for sound in sounds]))
    held = live.pages.taken * live.pages.page_bytes / (streams * longest_s)
    fault = _fault(live, states, _offline(live, sounds))
    kept = runs[_WARM_UPS:]
    if any(change.repaired for run in kept for change in run.output):
        fault = fault or "a stream repaired in a push that is to have no repair"
    name = f"{streams} x 400 ms after {at_s:g} s"
    wrong = (fault,) * len(kept) if fault else ()
    times = tuple(run.ms for run in kept)
    return Timed(name, runs[0].ms, _WARM_UPS, times, wrong), {"bytes_per_s": held}


def measure_repairing(live: LiveTokenizer, streams: int, at_s: float) -> Timed:
    """Pushes of 400 ms in which one of ``streams`` streams encodes ``at_s`` seconds again.

    New streams for each of them. All codes must equal the offline ones at the end.
    """
    times, wrong = list[float](), list[str]()
    others = [sound_like_speech(at_s + PUSH_S, seed) for seed in range(1, streams)]
    expected = _offline(live, others)
    for number in range(1 + _REPAIRS):
        last = sound_to_repair(at_s + PUSH_S, number)
        sounds = [*others, last]
        states = _opened(live, sounds, at_s)
        run = _push(live, states, [sound[round(at_s * INPUT_RATE) :] for sound in sounds])
        times.append(run.ms)
        repaired = [change.repaired for change in run.output]
        fault = _fault(live, states, [*expected, *_offline(live, [last])])
        if number and repaired != [False] * (streams - 1) + [True]:
            fault = fault or f"{sum(repaired)} streams repaired, not the last alone"
        wrong += [fault] if fault else []
    name = f"{streams} x 400 ms after {at_s:g} s, one repairs"
    return Timed(name, times[0], 1, tuple(times[1:]), tuple(wrong))


def _opened(live: LiveTokenizer, sounds: Sequence[Samples], at_s: float) -> list[LiveCodes]:
    """Streams that have heard ``at_s`` seconds of their sound."""
    states, heard = [live.open() for _ in sounds], round(at_s * INPUT_RATE)
    if heard:
        live.push_many(states, [sound[:heard] for sound in sounds])
    return states


def _push(
    live: LiveTokenizer, states: Sequence[LiveCodes], pieces: Sequence[Samples]
) -> Run[list[Change]]:
    device = live.tokenizer.encoder.codebook.weight.device
    return run_timed(lambda: live.push_many(states, pieces), device)


def _offline(live: LiveTokenizer, sounds: Sequence[Samples]) -> list[list[int]]:
    return [live.tokenizer.encode(torch.from_numpy(sound)) for sound in sounds]


def _fault(live: LiveTokenizer, states: Sequence[LiveCodes], expected: list[list[int]]) -> str:
    """End the streams; what is wrong with their codes, nothing if they are the ``expected``."""
    for state in states:
        live.finish(state)
    for number, (state, whole) in enumerate(zip(states, expected, strict=True)):
        if state.codes != whole:
            differ = sum(a != b for a, b in zip(state.codes, whole, strict=False))
            return f"stream {number}: {differ} of {len(whole)} codes unlike the offline ones"
    return ""
