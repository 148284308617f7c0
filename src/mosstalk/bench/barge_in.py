"""Whether the assistant interrupts itself, and how soon a user who talks over it is heard."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mosstalk.bench.echo_rooms import Call, Setting, simulate
from mosstalk.bench.spread import Spread, spread
from mosstalk.bench.tables import NONE, Table
from mosstalk.codec.audio import Samples
from mosstalk.units import INPUT_RATE
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.frames import Detector, Frames
from mosstalk.vad.turns import SpeechStarted, TurnDetector

SETTINGS = (
    *(Setting(echo_db) for echo_db in (-6.0, -12.0, -18.0, -24.0, -30.0)),
    *(
        Setting(echo_db, user_db)
        for user_db in (0.0, 5.0, 10.0)
        for echo_db in (-6.0, -18.0, -30.0)
    ),
    Setting(None, 5.0),
)
"""Echo alone, a user over the echo, and a user over headphones."""
_ECHO_DIES_SAMPLES = INPUT_RATE * 3 // 5
_SOON_SAMPLES, _LATE_SAMPLES = INPUT_RATE // 2, INPUT_RATE


@dataclass(frozen=True)
class BargeInRow:
    """What became of calls of one setting.

    Attributes:
        replies: how many were played in full, with nobody talking over them.
        interrupted: how many of these were taken for a user.
        users: how many talked over a reply.
        soon, late: share of them heard within 500 ms, and within a second.
        delay_ms: of those heard within that second.
    """

    setting: Setting
    replies: int
    interrupted: int
    users: int
    soon: float | None
    late: float | None
    delay_ms: Spread


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
    replies, interrupted, delays = 0, 0, []
    for seed in seeds:
        call = simulate(setting, assistant, users, seed)
        started = _starts(detector, call, gate() if gate else None)
        alone = call.replies if call.user_samples is None else call.replies[:-1]
        replies += len(alone)
        interrupted += sum(_any_within(started, *place) for place in alone)
        if call.user_samples is not None:
            delays.append(_delay(started, call.user_samples))
    soon, late = (_share(delays, limit) for limit in (_SOON_SAMPLES, _LATE_SAMPLES))
    heard = [1000 / INPUT_RATE * each for each in delays if each <= _LATE_SAMPLES]
    return BargeInRow(setting, replies, interrupted, len(delays), soon, late, spread(heard))


def _starts(detector: Detector, call: Call, gate: EchoGate | None) -> list[int]:
    """The samples at which turns were known to have begun."""
    _, frames = detector.push(detector.start(), call.microphone)
    if gate:
        gate.played(call.played, 0)
        frames = gate.heard(call.microphone, frames)
    turns = TurnDetector(minimum_speech_ms=detector.minimum_speech_ms)
    started = []
    for frame in frames:
        turns.playing = any(
            start <= frame.end_samples < end + _ECHO_DIES_SAMPLES for start, end in call.replies
        )
        one = Frames(
            frame.start_samples, frames.frame_samples, np.array([frame.speech], np.float32)
        )
        started += [e.decided_samples for e in turns.push(one) if isinstance(e, SpeechStarted)]
    return started


def _any_within(started: Sequence[int], start: int, end: int) -> bool:
    return any(start <= each < end + _ECHO_DIES_SAMPLES for each in started)


def _delay(started: Sequence[int], begin: int) -> float:
    after = [each - begin for each in started if each >= begin]
    return after[0] if after else float("inf")


def _share(delays: Sequence[float], limit: int) -> float | None:
    return float(np.mean([each <= limit for each in delays])) if delays else None


def barge_in_table(rows: Iterable[BargeInRow]) -> Table:
    """Interruptions, wrong and right."""
    return Table(
        "Interruptions, in simulated rooms",
        "Echo: over what was played. User: over the echo. Delays of the echo 20 to 400 ms, "
        "reverberation 0.2 to 0.7 s. Interrupted: replies that their own echo ended. Heard: users "
        "who talked over a reply, by the time until a turn was known to have begun.",
        ("", "replies", "interrupted", "users", "in 0.5 s %", "in 1 s %", "median ms"),
        tuple(
            (
                _named(row.setting),
                *(str(row.replies), str(row.interrupted), str(row.users)),
                *(_percent(row.soon), _percent(row.late)),
                NONE if row.delay_ms.median is None else f"{row.delay_ms.median:.0f}",
            )
            for row in rows
        ),
    )


def _named(setting: Setting) -> str:
    echo = "headphones" if setting.echo_db is None else f"echo {setting.echo_db:+.0f} dB"
    return echo if setting.user_db is None else f"{echo}, user {setting.user_db:+.0f} dB"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}"
