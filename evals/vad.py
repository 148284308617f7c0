"""How well, how soon and how fast detectors find speech, and users who talk over an assistant."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from evals.intervals import Spread, spread
from evals.readings import OLDER, TEACHER, asset_recordings, at_hand, read_aloud, speakers
from evals.vad_clips import (
    CELL_SAMPLES,
    EARLY_S,
    SETTINGS,
    Call,
    Clip,
    Mask,
    Setting,
    clip_of,
    simulate,
    sounds_without_speech,
)
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import BenchError, DetectorError
from mosstalk.progress import Progress
from mosstalk.reporting.sentences import read_sentences
from mosstalk.reporting.tables import Table, figure
from mosstalk.vad import Detector, EchoGate, Frames, open_detector
from mosstalk.vad.turns import SpeechStarted, SpeechStopped, TurnDetection, TurnDetector, TurnEvent

_PUSH_SAMPLES = INPUT_RATE // 50
_STREAMS, _ROUNDS = 64, 20
_MS = 1000 / INPUT_RATE
_SPEECH = TurnDetection().threshold
FORMAT = "mosstalk-vad-1"
_KINDS = ("silero", "webrtc")
_VOICES = 4
"""Synthetic ones, beside people."""
_ECHO_DIES_SAMPLES = INPUT_RATE * 3 // 5
_SOON_SAMPLES, _LATE_SAMPLES = INPUT_RATE // 2, INPUT_RATE
_PREFIX_SAMPLES = INPUT_RATE * 3 // 5
"""A turn that begins so long before its user, or later, is not the user's alone."""
_NOISES = {"clean": None, "20 dB": 20.0, "10 dB": 10.0, "5 dB": 5.0, "0 dB": 0.0}


@dataclass(frozen=True)
class Found:
    """What one detector made of clips; shares are of time, in clips and not of clips.

    Attributes:
        found: share of speech in frames that are called speech.
        false: share of the rest in such frames.
        delay_ms: from the first speech until a turn is known to have begun, pushed in pieces.
        end_ms: from the last speech to where the turn is said to have ended; below 0 too early.
        missed, cut: clips with no turn, and with more turns than one.
    """

    detector: str
    noise: str
    clips: int
    seconds: float
    found: float
    false: float
    delay_ms: Spread
    end_ms: Spread
    missed: int
    cut: int


@dataclass(frozen=True)
class Alarm:
    """What one detector made of a sound without speech."""

    detector: str
    sound: str
    seconds: float
    false: float
    turns: int


@dataclass(frozen=True)
class Cost:
    """Microseconds for a window: pushed in pieces of 20 ms, and 64 streams in one call."""

    detector: str
    window_ms: float
    alone_us: float
    together_us: float


def measure_found(detector: Detector, noise: str, clips: Sequence[Clip]) -> Found:
    """Hear each clip as a stream of its own."""
    hits, alarms, starts, ends, turns = [], [], [], [], []
    for clip in clips:
        speech, told = _hear(detector, clip.samples)
        called = _called_speech(detector, speech, len(clip.speech))
        hits.append(called[clip.speech])
        alarms.append(called[~clip.speech])
        started = [known for event, known in told if isinstance(event, SpeechStarted)]
        stopped = [event for event, _ in told if isinstance(event, SpeechStopped)]
        turns.append(len(started))
        starts += [_MS * (known - clip.onset_samples) for known in started[:1]]
        ends += [_MS * (each.end_samples - clip.end_samples) for each in stopped[-1:]]
    return Found(
        detector.name,
        noise,
        len(clips),
        sum(clip.seconds for clip in clips),
        float(np.concatenate(hits).mean()),
        float(np.concatenate(alarms).mean()),
        spread(starts),
        spread(ends),
        missed=sum(count == 0 for count in turns),
        cut=sum(count > 1 for count in turns),
    )


def measure_alarm(detector: Detector, sound: str, samples: Samples) -> Alarm:
    """Hear a sound (n,) in which nobody speaks."""
    speech, told = _hear(detector, samples)
    started = sum(isinstance(event, SpeechStarted) for event, _ in told)
    false = float((speech >= _SPEECH).mean())
    return Alarm(detector.name, sound, len(samples) / INPUT_RATE, false, started)


def measure_cost(detector: Detector, samples: Samples) -> Cost:
    """Time the detector over samples (n,), a second of them at least."""
    state, spent = detector.start(), 0.0
    for start in range(0, len(samples), _PUSH_SAMPLES):
        piece = samples[start : start + _PUSH_SAMPLES]
        begun = time.perf_counter()
        state, _ = detector.push(state, piece)
        spent += time.perf_counter() - begun
    length = detector.window_samples
    together = _time_together(detector, samples[:length]) / _STREAMS
    return Cost(detector.name, _MS * length, 1e6 * spent * length / len(samples), 1e6 * together)


def _time_together(detector: Detector, window: Samples) -> float:
    """The median time of a window of many streams in one call, in seconds."""
    states = [detector.start() for _ in range(_STREAMS)]
    spent = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        states = [state for state, _ in detector.push_many(states, [window] * _STREAMS)]
        spent.append(time.perf_counter() - begun)
    return float(np.median(spent))


def _called_speech(detector: Detector, speech: Samples, cells: int) -> Mask:
    """Whether each step of 10 ms lies in a frame that is speech; after the last frame it is not."""
    samples = np.repeat(speech >= _SPEECH, detector.frame_samples)
    middles = np.arange(cells) * CELL_SAMPLES + CELL_SAMPLES // 2
    return np.asarray(np.append(samples, False)[np.minimum(middles, len(samples))])


def _hear(detector: Detector, samples: Samples) -> tuple[Samples, list[tuple[TurnEvent, int]]]:
    """Speech of the frames in samples (n,), and each event with how many were heard by then."""
    turns = TurnDetector(minimum_speech_ms=detector.minimum_speech_ms)
    heard = list(_in_pieces(detector, samples))
    told = [(event, known) for known, _, frames in heard for event in turns.push(frames)]
    return np.concatenate([frames.speech for *_, frames in heard]), told


def _in_pieces(detector: Detector, samples: Samples) -> Iterator[tuple[int, Samples, Frames]]:
    """How many samples are heard by now, the last piece of them, and its frames."""
    state = detector.start()
    for begin in range(0, len(samples), _PUSH_SAMPLES):
        piece = samples[begin : begin + _PUSH_SAMPLES]
        state, frames = detector.push(state, piece)
        yield begin + len(piece), piece, frames


def found_table(rows: Iterable[Found]) -> Table:
    """How well and how soon speech is found."""
    return Table(
        "Speech: how much of it is found, and how soon",
        "Found, false: share of speech, and of the rest, in frames called speech. Start: from the "
        "first speech until a turn is known to have begun, as sound comes in pieces of 20 ms. End: "
        "from the last speech to where the turn is said to have ended (known silence_duration_ms "
        "later). Missed, cut: clips without a turn, and with more than one.",
        ("", "clips", "s", "found %", "false %", "start ms", "most", "end ms", "missed", "cut"),
        tuple(
            (
                *(f"{row.detector}, {row.noise}", str(row.clips), f"{row.seconds:.0f}"),
                *(f"{100 * row.found:.1f}", f"{100 * row.false:.1f}"),
                *map(figure, (row.delay_ms.median, row.delay_ms.highest, row.end_ms.median)),
                *(str(row.missed), str(row.cut)),
            )
            for row in rows
        ),
    )


def alarm_table(rows: Iterable[Alarm]) -> Table:
    """What is taken for speech and is none."""
    return Table(
        "Sounds without speech",
        "False: share of frames called speech. Turns: how many began.",
        ("", "s", "false %", "turns"),
        tuple(
            (
                f"{row.detector}, {row.sound}",
                *(f"{row.seconds:.0f}", f"{100 * row.false:.1f}", str(row.turns)),
            )
            for row in rows
        ),
    )


def cost_table(rows: Iterable[Cost]) -> Table:
    """What a window costs."""
    return Table(
        "Cost on this machine, one thread",
        f"Alone: one stream in pieces of 20 ms. Together: {_STREAMS} streams a call, for each.",
        ("", "window ms", "alone us", "together us"),
        tuple(
            (
                row.detector,
                *(f"{row.window_ms:.0f}", f"{row.alone_us:.0f}", f"{row.together_us:.0f}"),
            )
            for row in rows
        ),
    )


@dataclass(frozen=True)
class BargeInRow:
    """What became of calls of one setting.

    Attributes:
        replies: how many were played in full, with nobody talking over them.
        interrupted: how many of these were taken for a user.
        users: how many talked over a reply.
        soon, late: share of them heard within 500 ms, and within a second.
        whole: share of them whose turn has their first sound, and at most 600 ms before it.
        median_ms, p95_ms: from a user's first sound until a turn was known to have begun, over
            all users; None if so many were never heard.
        gate_us: what the gate cost, for a second of sound.
    """

    setting: Setting
    replies: int
    interrupted: int
    users: int
    soon: float | None
    late: float | None
    whole: float | None
    median_ms: float | None
    p95_ms: float | None
    gate_us: float


class _Start(NamedTuple):
    """A turn that begins at sample ``begin`` was known to when ``known`` samples were heard."""

    begin: int
    known: int


def measure_barge_in(
    detector: Detector,
    setting: Setting,
    assistant: Sequence[Samples],
    users: Sequence[Samples],
    seeds: Iterable[int],
    *,
    gate: Callable[[], EchoGate] | None = EchoGate,
) -> BargeInRow:
    """Hear a simulated call of sounds at 16 kHz for each seed; ``gate`` None leaves it out."""
    replies, interrupted, delays, whole = 0, 0, list[float](), list[bool]()
    spent_s = heard_s = 0.0
    for seed in seeds:
        call = simulate(setting, assistant, users, seed)
        started, seconds = _starts(detector, call, gate() if gate else None)
        spent_s, heard_s = spent_s + seconds, heard_s + len(call.microphone) / INPUT_RATE
        alone = call.replies if call.user_samples is None else call.replies[:-1]
        replies += len(alone)
        interrupted += sum(
            any(start <= each.known < end + _ECHO_DIES_SAMPLES for each in started)
            for start, end in alone
        )
        if call.user_samples is not None:
            delay, has_all = _heard(started, call.user_samples)
            delays.append(delay)
            whole.append(has_all)
    return BargeInRow(
        setting, replies, interrupted, len(delays),
        _share(delays, _SOON_SAMPLES), _share(delays, _LATE_SAMPLES),
        float(np.mean(whole)) if whole else None,
        _percentile_ms(delays, 50), _percentile_ms(delays, 95),
        1e6 * spent_s / max(heard_s, 1e-9),
    )  # fmt: skip


def _starts(detector: Detector, call: Call, gate: EchoGate | None) -> tuple[list[_Start], float]:
    """The turns that began, as a session hears them; the seconds that the gate took."""
    turns = TurnDetector(minimum_speech_ms=detector.minimum_speech_ms)
    started, spent_s = list[_Start](), 0.0
    if gate:
        gate.played(call.played, 0)
    for known, piece, frames in _in_pieces(detector, call.microphone):
        if gate:
            begun_s = time.perf_counter()
            frames = gate.heard(piece, frames)
            spent_s += time.perf_counter() - begun_s
        turns.playing = any(
            start <= known < end + _ECHO_DIES_SAMPLES for start, end in call.replies
        )
        events = turns.push(frames)
        started += [_Start(e.start_samples, known) for e in events if isinstance(e, SpeechStarted)]
        if call.user_samples is not None and started and started[-1].known >= call.user_samples:
            break  # the reply ends here
    return started, spent_s


def _heard(started: Sequence[_Start], begin: int) -> tuple[float, bool]:
    """Samples until a user who begins at ``begin`` is heard, and whether from there on."""
    turn = next((each for each in started if each.known >= begin), None)
    if turn is None:
        return float("inf"), False
    return turn.known - begin, begin - _PREFIX_SAMPLES <= turn.begin <= begin


def _share(delays: Sequence[float], limit: int) -> float | None:
    return float(np.mean([each <= limit for each in delays])) if delays else None


def _percentile_ms(delays: Sequence[float], percent: int) -> float | None:
    if not delays:
        return None
    samples = np.percentile(delays, percent, method="higher")
    return float(1000 * samples / INPUT_RATE) if np.isfinite(samples) else None


def barge_in_table(rows: Iterable[BargeInRow]) -> Table:
    """Interruptions, wrong and right."""
    return Table(
        "Interruptions, in simulated rooms",
        "Echo: over what was played. User: over the echo. Delays of the echo 20 to 400 ms, "
        "reverberation 0.2 to 0.7 s. Interrupted: replies that their own echo ended. In 0.5 s, "
        "in 1 s: users who talked over a reply, by the time until a turn was known to have begun; "
        "whole: that turn has their first sound. Users begin 1 to 2.5 s after a call's third "
        "reply, or (early) 0.05 to 1 s after its first or third. Gate: its cost, for a second "
        "of sound.",
        (
            *("", "replies", "interrupted", "users", "in 0.5 s %", "in 1 s %", "whole %"),
            *("median ms", "p95 ms", "gate us"),
        ),
        tuple(
            (
                _named(row.setting),
                *(str(row.replies), str(row.interrupted), str(row.users)),
                *(figure(share, 0, 100) for share in (row.soon, row.late, row.whole)),
                *map(figure, (row.median_ms, row.p95_ms, row.gate_us)),
            )
            for row in rows
        ),
    )


def _named(setting: Setting) -> str:
    echo = "headphones" if setting.echo_db is None else f"echo {setting.echo_db:+.0f} dB"
    if setting.user_db is None:
        return echo
    early = ", early" if setting.after_s == EARLY_S else ""
    which = f"{early} over the first" if setting.replies == 1 else early
    return f"{echo}, user {setting.user_db:+.0f} dB{which}"


@dataclass
class DetectorResults:
    """Figures of every detector, and what could not be measured."""

    settings: dict[str, str] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    barge_in: list[BargeInRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """For people; of calls only where there were any."""
        whole = [found_table(self.found), alarm_table(self.alarms), cost_table(self.costs)]
        return [*whole, barge_in_table(self.barge_in)] if self.barge_in else whole


def measure_detectors(
    kinds: Sequence[str], clips: int, calls: int, tell: Progress
) -> DetectorResults:
    """Measure detectors of these kinds, or all that are installed.

    Speech is ``clips`` of each speaker, echo is met in ``calls`` simulated calls a setting.

    Raises:
        DetectorError: a detector that was asked for, or every one, is not installed.
    """
    results = DetectorResults()
    detectors = [open_detector(kind) for kind in kinds]
    if not kinds:
        detectors, results.skipped = at_hand(partial(open_detector, kind) for kind in _KINDS)
    if not detectors:
        raise DetectorError(results.skipped[0])
    readings, missing = speakers(clips, read_sentences()[:clips], OLDER[:_VOICES])
    results.skipped += missing
    if not readings:
        raise BenchError(f"there is no speech to find: {'; '.join(missing)}")
    sounds = [sound for reading in readings for sound in reading.heard]
    results.settings = {
        "detectors": "; ".join(detector.description for detector in detectors),
        "speech": ", ".join(f"{reading.name} ({len(reading)})" for reading in readings),
        "noise": "pink, by its distance from the speech",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    steps = len(detectors) + (len(SETTINGS) if calls else 0)
    for place, detector in enumerate(detectors):
        tell(detector.name, place, steps)
        for noise, noise_db in _NOISES.items():
            heard = [clip_of(sound, noise_db, seed) for seed, sound in enumerate(sounds)]
            results.found.append(measure_found(detector, noise, heard))
        for name, sound in sounds_without_speech().items():
            results.alarms.append(measure_alarm(detector, name, sound))
        results.costs.append(measure_cost(detector, np.concatenate(sounds)))
    if calls:
        assistant, users = _both_sides(clips, sounds, results)
        for place, setting in enumerate(SETTINGS):
            tell("simulated calls", len(detectors) + place, steps)
            seeds = range(place * calls, (place + 1) * calls)
            row = measure_barge_in(detectors[0], setting, assistant, users, seeds)
            results.barge_in.append(row)
    return results


def _both_sides(
    clips: int, sounds: list[Samples], results: DetectorResults
) -> tuple[list[Samples], list[Samples]]:
    """Sounds of the assistant and of users; without Kokoro one person plays the assistant."""
    try:
        reading = read_aloud(TEACHER, read_sentences()[-clips:])
    except BenchError as error:
        results.skipped.append(str(error))
        assistant = list(asset_recordings().heard)[1:]
        return assistant, [s for s in sounds if not any(np.array_equal(s, a) for a in assistant)]
    results.settings["assistant"] = reading.name
    return list(reading.heard), sounds
