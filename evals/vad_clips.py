"""Sounds for detectors of speech: speech whose place is known, in noise, and what is no speech.

And calls without headphones, simulated: the assistant's voice comes back, and a user talks over it.
A room is an exponentially decaying tail behind the direct sound (Polack 1988), a loudspeaker
eight bands of random loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE

Mask = npt.NDArray[np.bool_]

CELL_SAMPLES = INPUT_RATE // 100
"""Truth is told in steps of 10 ms."""
_SILENCE_S = 1.0
_BELOW_LOUD_DB = 35.0
_LONGEST_GAP_CELLS = 20
_LOUD_PERCENTILE = 95
_LOWEST_HZ = 50.0
ASSISTANT_DB = -20.0
"""Level of the assistant's speech as it is sent."""
_PAUSE_S = 0.25
_LEAD_S = 0.6
_REST_S = 1.0
_DELAY_MS = (20.0, 400.0)
_REVERBERATION_S = (0.2, 0.7)
_DIRECT_DB = (-3.0, 10.0)
_NOISE_DB = (-75.0, -60.0)
_LOSS_DB = 8.0
_LOUDSPEAKER_TAPS = 512
EARLY_S = (0.05, 1.0)
"""Users who begin at once: over a conversation's first reply, of which nothing is known yet."""
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


@dataclass(frozen=True)
class Setting:
    """Levels in dB: the echo's over what was played (None: headphones), the user's over the echo.

    ``user_db`` None: nobody talks. With headphones the user is as loud as over an echo of -12.
    The user begins ``after_s`` (lowest, highest) seconds after the last of the ``replies`` does,
    which last for ``reply_s`` at least.
    """

    echo_db: float | None
    user_db: float | None = None
    replies: int = 3
    after_s: tuple[float, float] = (1.0, 2.5)
    reply_s: float = 5.0


@dataclass(frozen=True)
class Call:
    """What is played and what the microphone hears, (n,) at 16 kHz, side by side.

    ``replies`` are the first and last sample of each in ``played``; ``user_samples`` is where
    the user begins to speak, in the last reply.
    """

    played: Samples
    microphone: Samples
    replies: tuple[tuple[int, int], ...]
    user_samples: int | None


def simulate(
    setting: Setting, assistant: Sequence[Samples], users: Sequence[Samples], seed: int
) -> Call:
    """One call: replies out of ``assistant``'s sounds, a user's sound over the last of them."""
    draw = np.random.default_rng(seed)
    played, replies = _replies(setting, assistant, draw)
    echo_db = -12.0 if setting.echo_db is None else setting.echo_db
    level = 10 ** ((ASSISTANT_DB + echo_db) / 20)
    microphone = np.asarray(
        pink_noise(len(played), 10 ** (draw.uniform(*_NOISE_DB) / 20), seed), np.float64
    )
    echo = _convolved(played, _room(draw))
    late = np.zeros(int(draw.uniform(*_DELAY_MS) * INPUT_RATE / 1000))
    echo = np.concatenate([late, echo])[: len(echo)]
    if setting.echo_db is not None:
        microphone += echo * (level / speech_level(echo.astype(np.float32)))
    begin = None
    if setting.user_db is not None:
        clip = clip_of(users[int(draw.integers(len(users)))])
        user = clip.samples[clip.onset_samples :]  # from the first speech on
        begin = int(replies[-1][0] + draw.uniform(*setting.after_s) * INPUT_RATE)
        loud = level * 10 ** (setting.user_db / 20) / speech_level(user)
        end = min(begin + len(user), len(microphone))
        microphone[begin:end] += loud * user[: end - begin]
    return Call(played, microphone.astype(np.float32), replies, begin)


def _replies(
    setting: Setting, sounds: Sequence[Samples], draw: _Draw
) -> tuple[Samples, tuple[tuple[int, int], ...]]:
    pieces, places = [_silence(_LEAD_S)], []
    for _ in range(setting.replies):
        reply = [_silence(0)]
        while sum(map(len, reply)) < setting.reply_s * INPUT_RATE:
            sound = sounds[int(draw.integers(len(sounds)))]
            level = np.float32(10 ** (ASSISTANT_DB / 20) / speech_level(sound))
            reply += [sound * level, _silence(_PAUSE_S)]
        start = sum(map(len, pieces))
        places.append((start, start + sum(map(len, reply))))
        pieces += [*reply, _silence(_REST_S)]
    return np.concatenate(pieces), tuple(places)


def _silence(seconds: float) -> Samples:
    return np.zeros(int(seconds * INPUT_RATE), np.float32)


def _room(draw: _Draw) -> _Wave:
    """From loudspeaker to microphone: direct sound, tail, and the loudspeaker's own bands."""
    decay_s = draw.uniform(*_REVERBERATION_S)
    times = np.arange(int(decay_s * INPUT_RATE)) / INPUT_RATE
    tail = draw.standard_normal(len(times)) * 10 ** (-3 * times / decay_s)
    tail *= np.sqrt(10 ** (-draw.uniform(*_DIRECT_DB) / 10) / np.square(tail).sum())
    tail[0] = 1
    return _convolved(tail, _loudspeaker(draw))


def _loudspeaker(draw: _Draw) -> _Wave:
    """Bands of random loss between 150 and 350 Hz below and 5 to 7.9 kHz above."""
    hz = np.fft.rfftfreq(_LOUDSPEAKER_TAPS, 1 / INPUT_RATE)[1:]
    bands = np.geomspace(60, INPUT_RATE / 2, 9)
    gain = np.interp(np.log(hz), np.log(bands), draw.uniform(-_LOSS_DB, _LOSS_DB, len(bands)))
    for edge in (draw.uniform(150, 350) / hz, hz / draw.uniform(5000, 7900)):
        gain -= 24 * np.log2(np.maximum(edge, 1))
    response = np.append(0.0, 10 ** (gain / 20))
    return np.asarray(np.roll(np.fft.irfft(response), _LOUDSPEAKER_TAPS // 8))


def _convolved(sound: npt.NDArray[np.floating], impulse: _Wave) -> _Wave:
    size = len(sound) + len(impulse)
    spectrum = np.fft.rfft(sound, size) * np.fft.rfft(impulse, size)
    return np.asarray(np.fft.irfft(spectrum, size)[: len(sound)])


_OVER_ECHO = (
    *(Setting(echo, user) for user in (0.0, 5.0, 10.0) for echo in (-6.0, -18.0, -30.0)),
    Setting(None, 5.0),
)
SETTINGS = (
    *(Setting(echo_db) for echo_db in (-6.0, -12.0, -18.0, -24.0, -30.0)),
    *_OVER_ECHO,
    *(replace(setting, replies=1, after_s=EARLY_S) for setting in _OVER_ECHO),
    *(Setting(echo_db, 5.0, after_s=EARLY_S) for echo_db in (-6.0, -18.0, -30.0, None)),
)
"""Echo alone; a user over the echo, and over headphones: in the third reply's midst, at the
beginning of the first one, and at that of the third one."""
