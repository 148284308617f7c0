"""Scores of sound against sound: how far a resynthesis is from the recording it came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evals.extras import INSTALL_PESQ, extra
from evals.intervals import Spread, spread
from evals.readings import Reading
from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.progress import Progress

_Values = npt.NDArray[np.float64]

LSD_N_FFT = 1024
LSD_HOP = OUTPUT_RATE // 100
LSD_FLOOR_DB = -60.0
LSD_SILENCE_DB = -40.0
_ENVELOPE_HOP = OUTPUT_RATE // 1000
_ENVELOPE_WINDOW = 10
"""Envelope values are 1 ms apart and average 10 ms."""
_LARGEST_LAG_MS = 100
_JUMP_PERCENTILE = 99.9
_Score = Callable[[Samples, Samples], float | None]


def aligned(reference: Samples, other: Samples) -> tuple[Samples, Samples]:
    """Both sounds (n,) at 24 kHz cut to where they overlap, ``other`` moved to fit.

    The shift is the one, of at most 100 ms either way, at which the two envelopes (root mean
    square of 10 ms, every 1 ms) correlate best.
    """
    lag = _best_lag(_envelope(reference), _envelope(other)) * _ENVELOPE_HOP
    first, second = reference[max(-lag, 0) :], other[max(lag, 0) :]
    length = min(len(first), len(second))
    return first[:length], second[:length]


def _envelope(samples: Samples) -> _Values:
    whole = samples[: len(samples) // _ENVELOPE_HOP * _ENVELOPE_HOP].astype(np.float64)
    power = np.square(whole).reshape(-1, _ENVELOPE_HOP).mean(axis=1)
    return np.sqrt(np.convolve(power, np.full(_ENVELOPE_WINDOW, 1 / _ENVELOPE_WINDOW), "same"))


def _best_lag(reference: _Values, other: _Values) -> int:
    """By how many envelope values ``other`` comes late; at most a quarter of the shorter one."""
    limit = min(_LARGEST_LAG_MS, len(reference) // 4, len(other) // 4)
    likeness = np.correlate(other - other.mean(), reference - reference.mean(), "full")
    same = len(reference) - 1  # where neither is late
    return int(likeness[same - limit : same + limit + 1].argmax()) - limit


def log_spectral_distance(reference: Samples, other: Samples) -> float:
    """Log-spectral distance in dB of two aligned sounds (n,) at 24 kHz (Gray and Markel 1976).

    With X and Y the magnitudes of short-time spectra (Hann window of 1024 samples, every 10
    ms) of the reference and of the other sound brought to the reference's root mean square::

        LSD = mean over t of sqrt(mean over f of (20 log10(X(t, f) / Y(t, f)))^2)

    Magnitudes are kept above -60 dB of the reference's largest; frames more than 40 dB below
    the reference's loudest count as pauses and are left out. Up to 12 kHz. 0 is equality.

    Raises:
        ValueError: the lengths differ, or are below one window.
    """
    if len(reference) != len(other) or len(reference) < LSD_N_FFT:
        raise ValueError("two sounds of one length are compared, of at least 1024 samples")
    first, second = _magnitudes(reference), _magnitudes(other * _gain(reference, other))
    floor = max(float(first.max()), 1e-9) * 10 ** (LSD_FLOOR_DB / 20)
    power = np.square(first).sum(axis=1)
    spoken = power >= power.max() * 10 ** (LSD_SILENCE_DB / 10)
    ratio = np.maximum(first[spoken], floor) / np.maximum(second[spoken], floor)
    return float(np.sqrt(np.square(20 * np.log10(ratio)).mean(axis=1)).mean())


def _gain(reference: Samples, other: Samples) -> float:
    powers = [float(np.square(samples, dtype=np.float64).mean()) for samples in (reference, other)]
    return (powers[0] / powers[1]) ** 0.5 if powers[1] > 0 else 1.0


def _magnitudes(samples: Samples) -> _Values:
    """(frames, bins) of a short-time spectrum."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, LSD_N_FFT)[::LSD_HOP]
    return np.abs(np.fft.rfft(frames * np.hanning(LSD_N_FFT), axis=1))


def stoi(reference: Samples, other: Samples) -> float:
    """Short-time objective intelligibility (Taal et al. 2011), 0 to 1, of aligned sounds.

    Raises:
        BenchError: the package ``pystoi`` is not installed.
    """
    return float(extra("pystoi").stoi(reference, other, OUTPUT_RATE))


def pesq(reference: Samples, other: Samples) -> float | None:
    """Wide-band PESQ (ITU-T P.862.2, 1.0 to 4.6) at 16 kHz; None where no speech is found.

    Raises:
        BenchError: the package ``pesq`` is not installed.
    """
    package: Any = extra("pesq", INSTALL_PESQ)
    first, second = (resample(sound, OUTPUT_RATE, INPUT_RATE) for sound in (reference, other))
    score = float(package.pesq(INPUT_RATE, first, second, "wb", package.PesqError.RETURN_VALUES))
    return score if score > 0 else None


def seam_jumps(samples: Samples, seams: Sequence[int]) -> list[float]:
    """Jump at each seam relative to the 99.9th percentile of all jumps of the same sound.

    A jump is the difference of neighbouring samples; a seam is the index of the first sample
    of a hop. Above 1, a seam is steeper than all but a thousandth of the sound itself.
    """
    jumps = np.abs(np.diff(samples.astype(np.float64)))
    usual = max(float(np.percentile(jumps, _JUMP_PERCENTILE)), 1e-9)
    return [float(jumps[seam - 1]) / usual for seam in seams if 0 < seam < len(samples)]


_SCORES: dict[str, _Score] = {"pesq": pesq, "stoi": stoi, "lsd_db": log_spectral_distance}


@dataclass(frozen=True)
class CodecRow:
    """Wide-band PESQ, STOI and log-spectral distance in dB; None where a package is missing.

    A score has fewer values than sounds where it found no speech to judge.
    """

    name: str
    pesq: Spread | None
    stoi: Spread | None
    lsd_db: Spread | None


def codec_rows(
    recordings: Reading, others: Sequence[Reading], tell: Progress
) -> tuple[list[CodecRow], list[str]]:
    """A row for each of ``others``, aligned with the recordings, and what was skipped."""
    skipped = dict[str, str]()
    rows = []
    for other in others:
        scores = dict[str, list[float]]()
        for place, sounds in enumerate(zip(recordings.sounds, other.sounds, strict=True)):
            tell(f"comparing {other.name}", place, len(other))
            pair = aligned(*sounds)
            for name in _SCORES.keys() - skipped:
                try:
                    score = _SCORES[name](*pair)
                except BenchError as error:
                    skipped[name] = f"{name}: {error}"
                    continue
                scores.setdefault(name, []).extend([] if score is None else [score])
        spreads = {name: spread(scores[name]) for name in scores}
        rows.append(CodecRow(other.name, *(spreads.get(name) for name in _SCORES)))
    return rows, list(skipped.values())
