"""What is known of one connection between its messages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mosstalk.server.realtime.items import NewItem, new_id
from mosstalk.server.realtime.ledger import Ledger
from mosstalk.server.realtime.reading import Fields
from mosstalk.server.realtime.requests import Wish
from mosstalk.server.realtime.responses import OpenResponse
from mosstalk.server.realtime.settings import Served, WireSession, opened
from mosstalk.session.commands import Command


@dataclass
class Out:
    """What is to be passed on; events without ids."""

    commands: list[Command] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Creation:
    """An item that the session was told to make; ``after`` is where the client wants it."""

    item: NewItem
    after: str | None


class State:
    """``session`` is what the session has confirmed, ``planned`` what it was last told.

    Attributes:
        updates: by command id, the session object that holds once the session confirms it.
        creations: by command id, items that are being made.
        wishes: by command id, how a response is to be shown once it begins.
        responses: by response id, those that are being made.
        waiting: the client's events that have not been heard yet.
    """

    def __init__(self, served: Served, now: Callable[[], float]) -> None:
        self.served, self.now = served, now
        self.session = self.planned = opened(served)
        self.session_id = ""
        self.conversation_id = new_id("conv")
        self.expires_at = 0
        self.ledger = Ledger(served.limits.kept_chars)
        self.updates: dict[str, WireSession] = {}
        self.creations: dict[str, Creation] = {}
        self.wishes: dict[str, Wish] = {}
        self.responses: dict[str, OpenResponse] = {}
        self.latest_response_id: str | None = None
        self.waiting: deque[Fields] = deque()
        self.out = Out()
        self._commands = 0

    def command_id(self, event: Fields) -> str:
        """A new command's id, which carries the id of the event that it comes from."""
        self._commands += 1
        return f"{self._commands}:{event.text('event_id') or ''}"

    def take_out(self) -> Out:
        """What has come together since the last time."""
        out, self.out = self.out, Out()
        return out

    def tell(self, *events: dict[str, Any]) -> None:
        """Pass events on to the client."""
        self.out.events.extend(events)

    def do(self, *commands: Command) -> None:
        """Pass commands on to the session."""
        self.out.commands.extend(commands)

    def is_read(self, item_id: str) -> bool | None:
        """Whether the session has an item, or is about to; None: there is no such item."""
        listed = self.ledger.find(item_id)
        return listed.read if listed else self.is_coming(item_id) or None

    def is_coming(self, item_id: str) -> bool:
        """Whether the session was told to make an item and has not done it yet."""
        return any(each.item.item_id == item_id for each in self.creations.values())


def event_id_of(command_id: str | None) -> str | None:
    """The id of the client's event that a command came from."""
    return (command_id or "").partition(":")[2] or None
