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


@dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands have."""

    command_id: str | None = None


@dataclass(frozen=True, eq=False)
class Push(Command):
    """Sound from the microphone, at the session's ``input_rate``. ``rate``, if said, must be it."""

    pcm: Pcm
    rate: int | None = None

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
    """A turn of typed text by ``role`` ("user", "system" or "assistant").

    It comes after ``previous_item_id``: None is the end, ``ROOT`` the beginning.
    """

    role: str
    text: str
    item_id: str | None = None
    previous_item_id: str | None = None


@dataclass(frozen=True, eq=False)
class CreateAudio(Command):
    """A turn of recorded speech by the user; ``rate``, if said, must be the session's."""

    pcm: Pcm
    rate: int | None = None
    item_id: str | None = None
    previous_item_id: str | None = None

    @property
    def samples(self) -> int:
        """How many samples it brings."""
        return sample_count(self.pcm)


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
    by speech; ``input_item_ids`` are then the items that it reads, None for all of them.
    ``max_rows`` bounds it further. ``metadata`` comes back with its events.
    """

    response_id: str | None = None
    reply: ReplyMode | None = None
    instructions: str | None = None
    voice: str | None = None
    max_rows: int | None = None
    in_conversation: bool = True
    input_item_ids: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CancelResponse(Command):
    """End a response; None is the conversation's own. Its item keeps what was sent of it."""

    response_id: str | None = None


@dataclass(frozen=True)
class UpdateSettings(Command):
    """New settings from here on, whole. A response that is being made keeps its own.

    ``input_rate`` cannot change once sound was pushed.
    """

    settings: SessionSettings


@dataclass(frozen=True)
class Close(Command):
    """End the session."""

    reason: str = "client"


def sample_count(pcm: Pcm) -> int:
    """How many samples there are; half a sample at the end counts for none."""
    return len(pcm) // 2 if isinstance(pcm, bytes) else len(pcm)
