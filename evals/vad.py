"""What is measured of detectors of speech: how well, how soon and how fast they find it."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from evals.barge_in import SETTINGS, BargeInRow, barge_in_table, measure_barge_in
from evals.intervals import Spread, spread
from evals.readings import TEACHER, asset_recordings, read_aloud
from evals.vad_clips import (
    CELL_SAMPLES,
    Clip,
    Mask,
    clip_of,
    sounds_without_speech,
    speakers,
)
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import BenchError, DetectorError
from mosstalk.progress import Progress
from mosstalk.reporting.sentences import read_sentences
from mosstalk.reporting.tables import Table, figure
from mosstalk.vad.detectors import Detector, Frames, open_detector
from mosstalk.vad.turns import SpeechStarted, SpeechStopped, TurnDetection, TurnDetector

_PUSH_SAMPLES = INPUT_RATE // 50
_STREAMS = 64
_ROUNDS = 20
_MS = 1000 / INPUT_RATE
FORMAT = "mosstalk-vad-1"
_KINDS = ("silero", "webrtc")
_NOISES = {"clean": None, "20 dB": 20.0, "10 dB": 10.0, "5 dB": 5.0, "0 dB": 0.0}


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
    detectors = [open_detector(kind) for kind in kinds] or _installed(results)
    _measure(detectors, clips, calls, results, tell)
    return results


def _installed(results: DetectorResults) -> list[Detector]:
    found: list[Detector] = []
    for kind in _KINDS:
        try:
            found.append(open_detector(kind))
        except DetectorError as error:
            results.skipped.append(str(error))
    if not found:
        raise DetectorError(results.skipped[0])
    return found


def _measure(
    detectors: Sequence[Detector], clips: int, calls: int, results: DetectorResults, tell: Progress
) -> None:
    readings, missing = speakers(clips)
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


def _both_sides(
    clips: int, sounds: list[Samples], results: DetectorResults
) -> tuple[list[Samples], list[Samples]]:
    """Sounds of the assistant and of users; without festival one person plays the assistant."""
    try:
        reading = read_aloud(TEACHER, read_sentences()[-clips:])
    except BenchError as error:
        results.skipped.append(str(error))
        assistant = list(asset_recordings().heard)[1:]
        return assistant, [s for s in sounds if not any(np.array_equal(s, a) for a in assistant)]
    results.settings["assistant"] = reading.name
    return list(reading.heard), sounds
