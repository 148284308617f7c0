"""What a session can be told: plain values that another process can make and send.

Every command may carry a ``command_id``; an error that it causes names it. Items and responses
without an id are given one by the session.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mosstalk.session.settings import ReplyMode, SessionSettings

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
