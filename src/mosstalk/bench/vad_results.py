"""What is measured of detectors of speech: everything that ``bench vad`` prints and writes."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.bench.barge_in import SETTINGS, BargeInRow, barge_in_table, measure_barge_in
from mosstalk.bench.people import asset_recordings
from mosstalk.bench.sentences import read_sentences
from mosstalk.bench.tables import Table
from mosstalk.bench.vad import (
    Alarm,
    Cost,
    Found,
    alarm_table,
    cost_table,
    found_table,
    measure_alarm,
    measure_cost,
    measure_found,
)
from mosstalk.bench.vad_clips import clip_of, sounds_of, sounds_without_speech, speakers
from mosstalk.bench.voices import TEACHER, read_aloud
from mosstalk.errors import BenchError, DetectorError
from mosstalk.progress import Progress
from mosstalk.vad.frames import Detector
from mosstalk.vad.opening import open_detector

FORMAT = "mosstalk-vad-1"
_KINDS = ("silero", "webrtc")
_NOISES = {"clean": None, "20 dB": 20.0, "10 dB": 10.0, "5 dB": 5.0, "0 dB": 0.0}


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
    sounds = [sound for reading in readings for sound in sounds_of(reading)]
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
        assistant = list(sounds_of(asset_recordings()))[1:]
        return assistant, [s for s in sounds if not any(np.array_equal(s, a) for a in assistant)]
    results.settings["assistant"] = reading.name
    return list(sounds_of(reading)), sounds
