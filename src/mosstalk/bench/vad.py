"""How well, how soon and how fast detectors find speech."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.bench.spread import Spread, spread
from mosstalk.bench.tables import Table
from mosstalk.bench.vad_clips import CELL_SAMPLES, Clip, Mask
from mosstalk.constants import INPUT_RATE
from mosstalk.vad.frames import Detector, Frames
from mosstalk.vad.turns import SpeechStarted, SpeechStopped, TurnDetection, TurnDetector

_PUSH_SAMPLES = INPUT_RATE // 50
_STREAMS = 64
_ROUNDS = 20
_MS = 1000 / INPUT_RATE


@dataclass(frozen=True)
class Found:
    """What one detector made of clips; shares are of time, in clips and not of clips.

    Attributes:
        found: share of speech in frames that are called speech.
        false: share of the rest in such frames.
        delay_ms: from the first speech to the sample at which a turn is known to have begun.
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
    """Microseconds for a frame: pushed in pieces of 20 ms, and 64 streams in one call."""

    detector: str
    frame_ms: float
    alone_us: float
    together_us: float


def measure_found(
    detector: Detector, noise: str, clips: Sequence[Clip], settings: TurnDetection | None = None
) -> Found:
    """Hear each clip as a stream of its own."""
    settings = settings or TurnDetection()
    hits, alarms, starts, ends, turns = [], [], [], [], []
    for clip in clips:
        frames = _hear(detector, clip.samples)
        called = _called_speech(frames, len(clip.speech), settings.threshold)
        hits.append(called[clip.speech])
        alarms.append(called[~clip.speech])
        started, stopped = _turns(detector, frames, settings)
        turns.append(len(started))
        starts += [_MS * (each.decided_samples - clip.onset_samples) for each in started[:1]]
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
    settings = TurnDetection()
    frames = _hear(detector, samples)
    started, _ = _turns(detector, frames, settings)
    false = float((frames.speech >= settings.threshold).mean())
    return Alarm(detector.name, sound, len(samples) / INPUT_RATE, false, len(started))


def measure_cost(detector: Detector, samples: Samples) -> Cost:
    """Time the detector over samples (n,), a second of them at least."""
    state, spent, frames = detector.start(), 0.0, 0
    for start in range(0, len(samples), _PUSH_SAMPLES):
        piece = samples[start : start + _PUSH_SAMPLES]
        begun = time.perf_counter()
        state, found = detector.push(state, piece)
        spent += time.perf_counter() - begun
        frames += len(found)
    length = detector.frame_samples
    together = _time_together(detector, samples[:length]) / _STREAMS
    return Cost(detector.name, _MS * length, 1e6 * spent / frames, 1e6 * together)


def _time_together(detector: Detector, frame: Samples) -> float:
    """The median time of a frame of many streams in one call, in seconds."""
    states = [detector.start() for _ in range(_STREAMS)]
    spent = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        states = [state for state, _ in detector.push_many(states, [frame] * _STREAMS)]
        spent.append(time.perf_counter() - begun)
    return float(np.median(spent))


def _hear(detector: Detector, samples: Samples) -> Frames:
    return detector.push(detector.start(), samples)[1]


def _called_speech(frames: Frames, cells: int, threshold: float) -> Mask:
    """Whether each step of 10 ms lies in a frame that is speech; after the last frame it is not."""
    samples = np.repeat(frames.speech >= threshold, frames.frame_samples)
    middles = np.arange(cells) * CELL_SAMPLES + CELL_SAMPLES // 2
    return np.asarray(np.append(samples, False)[np.minimum(middles, len(samples))])


def _turns(
    detector: Detector, frames: Frames, settings: TurnDetection
) -> tuple[list[SpeechStarted], list[SpeechStopped]]:
    turns = TurnDetector(settings, minimum_speech_ms=detector.minimum_speech_ms)
    events = turns.push(frames)
    started = [event for event in events if isinstance(event, SpeechStarted)]
    return started, [event for event in events if isinstance(event, SpeechStopped)]


def found_table(rows: Iterable[Found]) -> Table:
    """How well and how soon speech is found."""
    return Table(
        "Speech: how much of it is found, and how soon",
        "Found, false: share of speech, and of the rest, in frames called speech. Start: from the "
        "first speech until a turn is known to have begun. End: from the last speech to where the "
        "turn is said to have ended (known silence_duration_ms later). Missed, cut: clips without "
        "a turn, and with more than one.",
        ("", "clips", "s", "found %", "false %", "start ms", "most", "end ms", "missed", "cut"),
        tuple(
            (
                *(f"{row.detector}, {row.noise}", str(row.clips), f"{row.seconds:.0f}"),
                *(f"{100 * row.found:.1f}", f"{100 * row.false:.1f}"),
                *(_ms(row.delay_ms.median), _ms(row.delay_ms.highest), _ms(row.end_ms.median)),
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
    """What a frame costs."""
    return Table(
        "Cost on this machine, one thread",
        f"Alone: one stream in pieces of 20 ms. Together: {_STREAMS} streams a call, for each.",
        ("", "frame ms", "alone us", "together us"),
        tuple(
            (
                row.detector,
                *(f"{row.frame_ms:.0f}", f"{row.alone_us:.0f}", f"{row.together_us:.0f}"),
            )
            for row in rows
        ),
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
