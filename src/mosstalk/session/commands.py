"""What a session can be told, and what can be chosen for it: plain values for any process.

Every command may carry a ``command_id``; an error that it causes names it. Items and responses
without an id are given one by the session.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from mosstalk.conversation import SYSTEM_PROMPTS
from mosstalk.errors import OptionError
from mosstalk.vad.turns import TurnDetection

INPUT_RATES = (24_000, 16_000, 8_000)
"""Sample rates in Hz that a session takes; it always speaks at 24 kHz."""


class ReplyMode(StrEnum):
    """What a reply is made of."""

    AUDIO = "audio"
    TEXT = "text"


INSTRUCTIONS = {
    ReplyMode.AUDIO: SYSTEM_PROMPTS["speech"],
    ReplyMode.TEXT: SYSTEM_PROMPTS["text"],
}
"""The model's own, by the kind of reply."""


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

    A reply that is written before it is spoken has room for its text beside these seconds, and
    speaks longer where the text leaves some of that. ``rows`` None is the checkpoint's.
    ``repeating_s``: a reply whose codes go round in one short cycle for longer has run away and is
    ended, as is one that first writes as many tokens that do so; None lets it.
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
    the reply that is being made or played. ``task`` is what replies are for, one of
    ``offline.defaults.TASKS``: the checkpoint's choices and prompt for it hold where nothing else
    was chosen. Whether replies are written before they are spoken follows from the task that a
    session begins with. ``echo_gate`` tells the assistant's own voice, come back through the
    microphone, from the user's. Off for headsets, telephones and clients that cancel echo
    themselves: where none comes back the gate can only be wrong.
    ``script`` forces a reply's modes and length, for random weights, which never end one.
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
    task: str = "chat"

    def __post_init__(self) -> None:
        """Raise OptionError for a rate that is not taken."""
        if self.input_rate not in INPUT_RATES:
            known = ", ".join(map(str, INPUT_RATES))
            raise OptionError(f"input_rate must be one of {known} Hz, not {self.input_rate}")


def _require_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{name} must be above 0 and finite, not {value}")


# Commands.

Pcm = bytes | npt.NDArray[np.int16] | npt.NDArray[np.float32]
"""Mono sound: bytes of little-endian int16, or an array (n,) of int16 or of float in [-1, 1]."""

ROOT = "root"
"""``previous_item_id`` of an item that comes first."""


@dataclass(frozen=True, eq=False)
class Sound:
    """Recorded speech; ``rate`` None is the session's ``input_rate``."""

    pcm: Pcm
    rate: int | None = None


@dataclass(frozen=True, eq=False)
class Message:
    """What one role says: text and sound, in the order in which the model reads them.

    ``role`` is "user", "system" or "assistant"; sound can be the user's alone.
    """

    role: str
    parts: tuple[str | Sound, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands have."""

    command_id: str | None = None


@dataclass(frozen=True, eq=False)
class Push(Command):
    """Sound from the microphone, at ``rate`` Hz, one of ``INPUT_RATES``.

    None is the session's ``input_rate``. The rate may change from one push to the next, in the
    middle of a turn too. ``paused_s``: how long before it nothing was recorded. None leaves that to
    the session's clocks; a replay says what the session found then (``InputPaused``).
    """

    pcm: Pcm
    rate: int | None = None
    paused_s: float | None = None

    @property
    def samples(self) -> int:
        """How many samples it brings."""
        return sample_count(self.pcm)


@dataclass(frozen=True)
class Commit(Command):
    """End the user's turn here and make an item of it. Asks for no response by itself.

    At least 100 ms must have been pushed since the last turn; hands-free, speech must be under
    way.
    """

    item_id: str | None = None


@dataclass(frozen=True)
class Clear(Command):
    """Forget the sound that was pushed since the last turn."""


@dataclass(frozen=True)
class CreateText(Command):
    """``CreateMessage`` of one text."""

    role: str
    text: str
    item_id: str | None = None
    previous_item_id: str | None = None


@dataclass(frozen=True, eq=False)
class CreateAudio(Command):
    """``CreateMessage`` of one sound of the user's."""

    pcm: Pcm
    rate: int | None = None
    item_id: str | None = None
    previous_item_id: str | None = None

    @property
    def samples(self) -> int:
        """How many samples it brings."""
        return sample_count(self.pcm)


@dataclass(frozen=True, eq=False)
class CreateMessage(Command):
    """A turn that was typed or recorded, or both.

    It comes after ``previous_item_id``: None is the end, ``ROOT`` the beginning.
    """

    message: Message
    item_id: str | None = None
    previous_item_id: str | None = None


NewItem = CreateText | CreateAudio | CreateMessage


@dataclass(frozen=True)
class DeleteItem(Command):
    """Take an item out of the conversation."""

    item_id: str


@dataclass(frozen=True)
class Truncate(Command):
    """Cut a spoken reply to what was heard of it, in milliseconds from its first sample.

    ``heard_ms`` None asks the session, which knows when it sent what. More than there is cuts
    nothing; what an earlier cut took stays gone.
    """

    item_id: str
    heard_ms: float | None = None


@dataclass(frozen=True)
class CreateResponse(Command):
    """Answer what was said. What is None is as the session's settings say.

    ``in_conversation`` off makes a response that neither enters the conversation nor is ended
    by speech. ``input`` is what it answers in place of the conversation: ids of items, and
    messages that no item is made of; None is the conversation. ``max_rows`` bounds it further.
    ``metadata`` comes back with its events.
    """

    response_id: str | None = None
    reply: ReplyMode | None = None
    instructions: str | None = None
    voice: str | None = None
    max_rows: int | None = None
    in_conversation: bool = True
    input: tuple[str | Message, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CancelResponse(Command):
    """End a response; None is the conversation's own. Its item keeps what was sent of it."""

    response_id: str | None = None


@dataclass(frozen=True)
class UpdateSettings(Command):
    """New settings from here on, whole. A response that is being made keeps its own."""

    settings: SessionSettings


@dataclass(frozen=True)
class Close(Command):
    """End the session."""

    reason: str = "client"


def sample_count(pcm: Pcm) -> int:
    """How many samples there are; half a sample at the end counts for none."""
    return len(pcm) // 2 if isinstance(pcm, bytes) else len(pcm)


def messages_of(command: Command) -> list[Message]:
    """The messages that a command brings, in their order: what the model reads anew for it."""
    if isinstance(command, CreateText):
        return [Message(command.role, (command.text,))]
    if isinstance(command, CreateAudio):
        return [Message("user", (Sound(command.pcm, command.rate),))]
    if isinstance(command, CreateMessage):
        return [command.message]
    if isinstance(command, CreateResponse):
        return [each for each in command.input or () if isinstance(each, Message)]
    return []


def sounds_of(command: Command) -> list[Sound]:
    """All sound that a command brings, in its order."""
    if isinstance(command, Push):
        return [Sound(command.pcm, command.rate)]
    parts = (part for message in messages_of(command) for part in message.parts)
    return [part for part in parts if isinstance(part, Sound)]
