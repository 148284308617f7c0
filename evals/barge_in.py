"""Whether the assistant interrupts itself, and how soon a user who talks over it is heard.

Calls without headphones are simulated: the assistant's voice comes back, and a user talks over it.
A room is an exponentially decaying tail behind the direct sound (Polack 1988), a loudspeaker
eight bands of random loss.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evals.vad_clips import clip_of, pink_noise, speech_level
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.reporting.tables import Table, figure
from mosstalk.vad.detectors import Detector
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.turns import SpeechStarted, TurnDetector

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
EARLY_S = (0.05, 1.0)
"""Users who begin at once: over a conversation's first reply, of which nothing is known yet."""
_PIECE_SAMPLES = INPUT_RATE // 50
_ECHO_DIES_SAMPLES = INPUT_RATE * 3 // 5
_SOON_SAMPLES, _LATE_SAMPLES = INPUT_RATE // 2, INPUT_RATE
_PREFIX_SAMPLES = INPUT_RATE * 3 // 5
"""A turn that begins so long before its user, or later, is not the user's alone."""


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


SETTINGS = (
    *(Setting(echo_db) for echo_db in (-6.0, -12.0, -18.0, -24.0, -30.0)),
    *(
        Setting(echo_db, user_db)
        for user_db in (0.0, 5.0, 10.0)
        for echo_db in (-6.0, -18.0, -30.0)
    ),
    Setting(None, 5.0),
    *(
        Setting(echo_db, user_db, replies=1, after_s=EARLY_S)
        for user_db in (0.0, 5.0, 10.0)
        for echo_db in (-6.0, -18.0, -30.0)
    ),
    Setting(None, 5.0, replies=1, after_s=EARLY_S),
    *(Setting(echo_db, 5.0, after_s=EARLY_S) for echo_db in (-6.0, -18.0, -30.0, None)),
)
"""Echo alone; a user over the echo, and over headphones: in the third reply's midst, at the
beginning of the first one, and at that of the third one."""


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


@dataclass(frozen=True)
class _Start:
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
        interrupted += sum(_any_within(started, *place) for place in alone)
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
    state, started, spent_s = detector.start(), [], 0.0
    if gate:
        gate.played(call.played, 0)
    for begin in range(0, len(call.microphone), _PIECE_SAMPLES):
        piece = call.microphone[begin : begin + _PIECE_SAMPLES]
        known = begin + len(piece)
        state, frames = detector.push(state, piece)
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


def _any_within(started: Sequence[_Start], start: int, end: int) -> bool:
    return any(start <= each.known < end + _ECHO_DIES_SAMPLES for each in started)


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
