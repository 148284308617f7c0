"""What can be chosen for a session: plain values that another process can make and send."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from mosstalk.errors import OptionError
from mosstalk.vad.turns import TurnDetection

INPUT_RATES = (24_000, 16_000, 8_000)
"""Sample rates in Hz that a session takes; it always speaks at 24 kHz."""


class ReplyMode(StrEnum):
    """What a reply is made of."""

    AUDIO = "audio"
    TEXT = "text"


class ContextPolicy(StrEnum):
    """What becomes of a conversation that fills the model's context."""

    DROP = "drop"
    """The oldest turns are dropped between turns, until a part of the context is left."""
    REFUSE = "refuse"
    """Responses are refused from then on."""


class Playback(StrEnum):
    """Who says how much of an interrupted reply was heard."""

    CLIENT = "client"
    """The client, by ``Truncate``: until then all that was sent counts as heard."""
    SESSION = "session"
    """The session, which cuts by its own clock at the moment of the interruption."""


@dataclass(frozen=True)
class Sampling:
    """How ids are drawn; None is the checkpoint's. ``greedy`` is temperature 0.

    Without a ``seed`` each reply gets a random one.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    greedy: bool = False


@dataclass(frozen=True)
class ReplyLimits:
    """How long a reply may be: ``longest_s`` of sound, ``rows`` in all; the lower one ends it.

    ``rows`` None is the checkpoint's. ``repeating_s``: a reply whose codes go round in one short
    cycle for longer has run away and is ended; None lets it.
    """

    longest_s: float = 60.0
    rows: int | None = None
    repeating_s: float | None = 2.0

    def __post_init__(self) -> None:
        """Raise OptionError for a reply of no length."""
        _require_positive(longest_s=self.longest_s, rows=self.rows, repeating_s=self.repeating_s)


@dataclass(frozen=True)
class Durations:
    """When a session ends by itself: ``idle_s`` after the last sign of life, ``longest_s`` in all.

    A sign of life is speech, a command other than ``Push``, or sound of a reply that is playing.
    ``turn_s`` is the longest turn of a user: hands-free it is answered then, by hand what goes
    beyond it is refused.
    """

    idle_s: float = 300.0
    longest_s: float = 3600.0
    turn_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise OptionError for a session of no length."""
        _require_positive(idle_s=self.idle_s, longest_s=self.longest_s, turn_s=self.turn_s)


@dataclass(frozen=True)
class Context:
    """What happens when the context fills: see ``ContextPolicy``.

    Between turns, once more than the share ``full`` of it is used, the oldest turns are dropped
    until the share ``keep`` is left. ``rows`` makes the context smaller than the model's.
    """

    policy: ContextPolicy = ContextPolicy.DROP
    full: float = 0.75
    keep: float = 0.5
    rows: int | None = None

    def __post_init__(self) -> None:
        """Raise OptionError for shares that leave nothing, or room for nothing new."""
        _require_positive(rows=self.rows)
        if not 0 < self.keep <= self.full < 1:
            raise OptionError(
                f"of the context keep ({self.keep}) may be at most full ({self.full}); both must "
                "lie between 0 and 1"
            )


@dataclass(frozen=True)
class SessionSettings:
    """All that is chosen for a session.

    ``instructions`` None is the model's own prompt for the kind of reply, "" none at all.
    ``turn_detection`` None leaves the ends of turns to ``Commit``. Hands-free,
    ``create_response`` answers each turn at its end and ``interrupt_response`` lets speech end
    the reply that is being made or played. ``echo_gate`` tells the assistant's own voice, come
    back through the microphone, from the user's. Off for headsets, telephones and clients that
    cancel echo themselves: where none comes back the gate can only be wrong. ``script`` forces a
    reply's modes and length, for random weights, which never end one.
    """

    input_rate: int = 24_000
    instructions: str | None = None
    reply: ReplyMode = ReplyMode.AUDIO
    voice: str = "default"
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    create_response: bool = True
    interrupt_response: bool = True
    echo_gate: bool = True
    playback: Playback = Playback.CLIENT
    sampling: Sampling = field(default_factory=Sampling)
    limits: ReplyLimits = field(default_factory=ReplyLimits)
    durations: Durations = field(default_factory=Durations)
    context: Context = field(default_factory=Context)
    script: str | None = None

    def __post_init__(self) -> None:
        """Raise OptionError for a rate that is not taken."""
        if self.input_rate not in INPUT_RATES:
            known = ", ".join(map(str, INPUT_RATES))
            raise OptionError(f"input_rate must be one of {known} Hz, not {self.input_rate}")


def _require_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{name} must be above 0 and finite, not {value}")
