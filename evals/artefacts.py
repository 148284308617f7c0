"""Faults of speech that a program can name: each detector says what it found, and where."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mosstalk.audio.loudness import loudness_jump
from mosstalk.audio.sound import Samples
from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import vocoder_mel

_Values = npt.NDArray[np.float64]

CLIPPED_PEAK = 0.985
"""Vocoders of this family limit their sound to 0.99."""
_CLIPPED_RUN = 3
DROPOUT_MS = 300
DROPOUT_DB = -50.0
"""Below the loudest frames of the same sound by this much counts as silence."""
_SPEECH_DB = -35.0
SHORTEST_PART = 0.75
LONGEST_PART = 1.5
"""Of the teacher's length, first to last word."""
ABRUPT_DB = -15.0
"""A last frame above this, beside the loudest frames, is the middle of a word."""
REPEATED_MS = 400
REPEATED_LIKENESS = 0.92
"""The teacher reading the held-out sentences reaches 0.87; 600 ms played twice, 0.95."""
_FRAME_MS = 1000 * MEL_FRAME_SAMPLES // OUTPUT_RATE
_LOUD_PERCENTILE = 95.0
_SILENCE = 1e-10
KINDS = ("silent", "clipping", "dropout", "cut short", "runs on", "repeated", "level jump")


@dataclass(frozen=True)
class Artefact:
    """A fault: its kind, and a few words on where and how much."""

    kind: str
    detail: str


def find_artefacts(samples: Samples, teacher: Samples) -> list[Artefact]:
    """Faults of a sound (n,) at 24 kHz; ``teacher`` is the same sentence as it should sound.

    Every detector is also run on the teacher in the bench, so that its false alarms show.
    """
    levels = frame_levels(samples)
    if not len(levels) or levels.max() < 10 * np.log10(_SILENCE) + 20:
        return [Artefact("silent", "no sound at all")]
    details = {
        "clipping": _clipping(samples),
        "dropout": _dropout(levels),
        "cut short": _length(samples, teacher, short=True) or _abrupt_end(levels),
        "runs on": _length(samples, teacher, short=False),
        "repeated": _repeated(samples),
        "level jump": _level_jump(samples),
    }
    return [Artefact(kind, detail) for kind, detail in details.items() if detail]


def frame_levels(samples: Samples) -> _Values:
    """Mean power of each 20 ms in dB of full scale, (frames,)."""
    whole = samples[: len(samples) // MEL_FRAME_SAMPLES * MEL_FRAME_SAMPLES].astype(np.float64)
    power = np.square(whole).reshape(-1, MEL_FRAME_SAMPLES).mean(axis=1)
    return np.asarray(10 * np.log10(power + _SILENCE))


def _clipping(samples: Samples) -> str:
    """Runs of at least three samples at the limit."""
    at_limit = np.abs(samples) >= CLIPPED_PEAK
    starts, ends = _runs(at_limit)
    long = ends - starts >= _CLIPPED_RUN
    if not long.any():
        return ""
    return f"{int(long.sum())} runs of samples at the limit, first at {_at(starts[long][0], 1)}"


def _dropout(levels: _Values) -> str:
    """Silence between the first and the last speech."""
    loud = float(np.percentile(levels, _LOUD_PERCENTILE))
    first, last = _ends_of_speech(levels)
    starts, ends = _runs(levels[first:last] < loud + DROPOUT_DB)
    if not len(starts):
        return ""
    longest = int((ends - starts).argmax())
    length_ms = int(ends[longest] - starts[longest]) * _FRAME_MS
    if length_ms <= DROPOUT_MS:
        return ""
    return f"{length_ms} ms of silence at {_at(starts[longest] + first)}"


def _length(samples: Samples, teacher: Samples, *, short: bool) -> str:
    ends = (_ends_of_speech(frame_levels(sound)) for sound in (samples, teacher))
    own, wanted = (last - first for first, last in ends)
    part = own / max(wanted, 1)
    if (part < SHORTEST_PART) if short else (part > LONGEST_PART):
        return f"{part:.0%} of the teacher's length"
    return ""


def _abrupt_end(levels: _Values) -> str:
    """Speech in the very last 20 ms: a sentence dies away before its sound ends."""
    loud = float(np.percentile(levels, _LOUD_PERCENTILE))
    return "still loud at its end" if levels[-1] > loud + ABRUPT_DB else ""


def _repeated(samples: Samples) -> str:
    """A stretch of 400 ms whose mel comes again later, frame by frame.

    Frames are 20 ms of log-mel less the sound's own mean spectrum; likeness is the cosine of
    two stretches. Stretches that are mostly pause are left out.
    """
    size = REPEATED_MS // _FRAME_MS
    if len(samples) < 2 * size * MEL_FRAME_SAMPLES:
        return ""
    mel = vocoder_mel(torch.from_numpy(samples)).numpy().astype(np.float64)
    loud = mel.mean(axis=1) > mel.mean()
    mel -= mel.mean(axis=0)
    best, where = 0.0, (0, 0)
    for lag in range(size, len(mel) - size):
        likeness = _likeness(mel[:-lag], mel[lag:], loud[:-lag] & loud[lag:], size)
        if len(likeness) and likeness.max() > best:
            at = int(likeness.argmax())
            best, where = float(likeness[at]), (at, at + lag)
    if best < REPEATED_LIKENESS:
        return ""
    return f"what is said at {_at(where[0])} comes again at {_at(where[1])}"


def _likeness(first: _Values, second: _Values, loud: npt.NDArray[np.bool_], size: int) -> _Values:
    """Cosine of each stretch of ``size`` frames with the one beside it; 0 where it is a pause."""

    def summed(values: _Values) -> _Values:
        total = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(total[size:] - total[:-size])

    products = (first * second).sum(1), np.square(first).sum(1), np.square(second).sum(1)
    both, one, other = map(summed, products)
    spoken = summed(loud.astype(np.float64)) > size / 2
    return np.where(spoken, both / np.sqrt(np.maximum(one * other, _SILENCE)), 0.0)


def _level_jump(samples: Samples) -> str:
    jump = loudness_jump(samples, OUTPUT_RATE)
    if jump is None:
        return ""
    return f"{jump.decibels:.0f} dB between {jump.quiet_s:.1f} s and {jump.loud_s:.1f} s"


def _ends_of_speech(levels: _Values) -> tuple[int, int]:
    """Frames [first, last) from the first to the last that is loud enough for speech."""
    if not len(levels):
        return 0, 0
    loud = np.flatnonzero(levels > np.percentile(levels, _LOUD_PERCENTILE) + _SPEECH_DB)
    return int(loud[0]), int(loud[-1]) + 1


def _runs(flags: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and end of each stretch of true values."""
    edges = np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _at(place: int, samples: int = MEL_FRAME_SAMPLES) -> str:
    return f"{place * samples / OUTPUT_RATE:.2f} s"
