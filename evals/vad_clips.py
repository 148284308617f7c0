"""Sounds for detectors of speech: speech whose place is known, in noise, and what is no speech."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from evals.readings import (
    LISTENED,
    Reading,
    asset_recordings,
    at_hand,
    librivox_clips,
    read_aloud,
    telephone_prompts,
)
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.reporting.sentences import read_sentences

Mask = npt.NDArray[np.bool_]

CELL_SAMPLES = INPUT_RATE // 100
"""Truth is told in steps of 10 ms."""
_SILENCE_S = 1.0
_BELOW_LOUD_DB = 35.0
_LONGEST_GAP_CELLS = 20
_LOUD_PERCENTILE = 95
_LOWEST_HZ = 50.0
_Draw = np.random.Generator
_Wave = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clip:
    """Samples (n,) at 16 kHz, and in which of their steps of 10 ms (n // 160,) somebody speaks."""

    samples: Samples
    speech: Mask

    @property
    def seconds(self) -> float:
        """Length of the clip."""
        return len(self.samples) / INPUT_RATE

    @property
    def onset_samples(self) -> int:
        """Where speech begins."""
        return int(np.argmax(self.speech)) * CELL_SAMPLES

    @property
    def end_samples(self) -> int:
        """Where speech has ended."""
        return (len(self.speech) - int(np.argmax(self.speech[::-1]))) * CELL_SAMPLES


def speech_level(samples: Samples) -> float:
    """Root of the mean square over the steps in which there is speech, of samples (n,)."""
    cells = _powers(samples)
    return float(np.sqrt(cells[_speech_in(cells)].mean()))


def clip_of(samples: Samples, noise_db: float | None = None, seed: int = 0) -> Clip:
    """Clean speech (n,) at 16 kHz with a second of silence on both sides, and pink noise in it.

    ``noise_db`` is how far speech lies above the noise; None adds none. Speech is where the
    clean sound lies within 35 dB of its loud parts, and in gaps of up to 200 ms.
    """
    silence = np.zeros(int(_SILENCE_S * INPUT_RATE), np.float32)
    whole = np.concatenate([silence, samples, silence])
    speech = _speech_in(_powers(whole))
    if noise_db is not None:
        level = speech_level(samples) * 10 ** (-noise_db / 20)
        whole = whole + pink_noise(len(whole), level, seed)
    return Clip(whole, speech)


def pink_noise(count: int, level: float, seed: int) -> Samples:
    """Noise (count,) of equal power in every octave above 50 Hz; ``level`` is its RMS."""
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(count))
    spectrum /= np.sqrt(np.maximum(np.fft.rfftfreq(count, 1 / INPUT_RATE), _LOWEST_HZ))
    noise = np.fft.irfft(spectrum, count)
    return np.asarray(noise * (level / noise.std()), np.float32)


def _powers(samples: Samples) -> npt.NDArray[np.float64]:
    cells = samples[: len(samples) // CELL_SAMPLES * CELL_SAMPLES].reshape(-1, CELL_SAMPLES)
    return np.asarray(np.square(cells, dtype=np.float64).mean(axis=1))


def _speech_in(powers: npt.NDArray[np.float64]) -> Mask:
    loud = np.percentile(powers[powers > 0], _LOUD_PERCENTILE)
    speech = np.asarray(powers > loud * 10 ** (-_BELOW_LOUD_DB / 10))
    places = np.flatnonzero(speech)
    for before, after in pairwise(places):
        if after - before <= _LONGEST_GAP_CELLS:
            speech[before:after] = True
    return speech


def speakers(count: int, voices: int = 4) -> tuple[list[Reading], list[str]]:
    """Up to ``count`` readings each of people and other programs' voices that are at hand.

    The second list names what is missing.
    """
    sentences = read_sentences()[:count]
    read = (partial(read_aloud, voice, sentences) for voice in LISTENED[:voices])
    return at_hand((asset_recordings, librivox_clips, partial(telephone_prompts, count), *read))


def sounds_without_speech(seconds: float = 20.0, seed: int = 0) -> dict[str, Samples]:
    """Silence, noises, clicks and tones (n,) at 16 kHz, by name."""
    count = int(seconds * INPUT_RATE)
    draw = np.random.default_rng(seed)
    white = (0.03 * draw.standard_normal(count)).astype(np.float32)
    return {
        "silence": np.zeros(count, np.float32),
        "white noise, -30 dB": white,
        "pink noise, -50 dB": pink_noise(count, 10 ** (-50 / 20), seed),
        "pink noise, -30 dB": pink_noise(count, 10 ** (-30 / 20), seed),
        "clicks, one a second": _events(seconds, 1.0, draw, _click),
        "knocks, one a second": _events(seconds, 1.0, draw, _knock),
        "notes of a piano": _events(seconds, 0.25, draw, _note),
        "mains hum": _hum(count),
    }


def _events(
    seconds: float, every_s: float, draw: _Draw, make: Callable[[_Draw, _Wave], _Wave]
) -> Samples:
    times = np.arange(int(every_s * INPUT_RATE)) / INPUT_RATE
    waves = [make(draw, times) for _ in range(int(seconds / every_s))]
    loudest = [draw.uniform(0.1, 0.9) / np.abs(wave).max() for wave in waves]
    joined = np.concatenate([wave * loud for wave, loud in zip(waves, loudest, strict=True)])
    return joined.astype(np.float32)


def _click(draw: _Draw, times: _Wave) -> _Wave:
    return draw.standard_normal(len(times)) * np.exp(-times / draw.uniform(0.001, 0.01))


def _knock(draw: _Draw, times: _Wave) -> _Wave:
    body = np.sin(2 * np.pi * draw.uniform(80, 250) * times) * np.exp(-times / 0.03)
    return body + 0.3 * draw.standard_normal(len(times)) * np.exp(-times / 0.005)


def _note(draw: _Draw, times: _Wave) -> _Wave:
    hz = 220 * 2 ** (draw.integers(0, 25) / 12)
    partials = [np.sin(2 * np.pi * hz * k * times) / k**1.5 for k in range(1, 8)]
    return np.sum(partials, axis=0) * np.exp(-times * 5)


def _hum(count: int) -> Samples:
    times = np.arange(count) / INPUT_RATE
    partials = [np.sin(2 * np.pi * 50 * k * times) / k for k in range(1, 12)]
    return (0.05 * np.sum(partials, axis=0)).astype(np.float32)
