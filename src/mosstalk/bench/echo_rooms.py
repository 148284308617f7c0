"""Simulated calls without headphones: the assistant's voice comes back, and a user talks over it.

A room is an exponentially decaying tail behind the direct sound (Polack 1988), a loudspeaker
eight bands of random loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.bench.vad_clips import clip_of, pink_noise, speech_level
from mosstalk.constants import INPUT_RATE

_Draw = np.random.Generator
_Wave = npt.NDArray[np.float64]

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
    echo = _delayed(echo, int(draw.uniform(*_DELAY_MS) * INPUT_RATE / 1000))
    if setting.echo_db is not None:
        microphone += echo * (level / speech_level(echo.astype(np.float32)))
    begin = None
    if setting.user_db is not None:
        user = _user(users[int(draw.integers(len(users)))])
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


def _user(sound: Samples) -> Samples:
    """From the first speech on."""
    clip = clip_of(sound)
    return clip.samples[clip.onset_samples :]


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


def _delayed(sound: _Wave, samples: int) -> _Wave:
    return np.concatenate([np.zeros(samples), sound])[: len(sound)]
