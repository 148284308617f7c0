"""What is known of one connection between its messages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.effective_session import EffectiveSession, ServedModel, opened
from mosstalk.server.realtime.item_list import ItemList
from mosstalk.server.realtime.items import new_id
from mosstalk.server.realtime.responses import ActiveResponse, ResponseConfig
from mosstalk.session.commands import Command


@dataclass(frozen=True)
class Transcript:
    """What someone beside the model has written down of an item's sound.

    The sound lasted ``audio_s``; ``failed`` says why there is no text.
    """

    item_id: str
    text: str = ""
    audio_s: float = 0.0
    failed: str | None = None


@dataclass
class ProtocolOutput:
    """What one message or event leads to, each list in order.

    Attributes:
        commands: for the session.
        events: for the client.
        notes: lines for the log; they hold nothing that was said.
    """

    commands: list[Command] = field(default_factory=list)
    events: list[told.Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PendingItem:
    """An item that the session was told to make; ``after`` is where the client wants it."""

    item: shown.Item
    after: str | None


class ProtocolState:
    """``session`` is what the session has confirmed, ``planned`` what it was last told.

    Attributes:
        updates: by command id, the session object that holds once the session confirms it.
        creations: by command id, items that are being made.
        wishes: by command id, how a response is to be shown once it begins.
        responses: by response id, those that are being made.
        waiting: the client's events that have not been heard yet, and errors told in their place.
    """

    def __init__(self, served: ServedModel, now: Callable[[], float]) -> None:
        self.served, self.now = served, now
        self.session = self.planned = opened(served)
        self.session_id = ""
        self.conversation_id = new_id("conv")
        self.expires_at = 0
        self.items = ItemList(served.limits.kept_chars)
        self.updates: dict[str, EffectiveSession] = {}
        self.creations: dict[str, PendingItem] = {}
        self.configs: dict[str, ResponseConfig] = {}
        self.responses: dict[str, ActiveResponse] = {}
        self.latest_response_id: str | None = None
        self.waiting: deque[asked.ClientEvent | told.Error] = deque()
        self.step = ProtocolOutput()
        self._commands = 0

    def command_id(self, event: asked.Event) -> str:
        """A new command's id, which carries the id of the event that it comes from."""
        self._commands += 1
        return f"{self._commands}:{event.event_id or ''}"

    def take_step(self) -> ProtocolOutput:
        """What has come together since the last time."""
        step, self.step = self.step, ProtocolOutput()
        return step

    def tell(self, *events: told.Event) -> None:
        """Pass events on to the client."""
        self.step.events.extend(events)

    def note(self, *notes: str) -> None:
        """Pass lines on to the log."""
        self.step.notes.extend(notes)

    def do(self, *commands: Command) -> None:
        """Pass commands on to the session."""
        self.step.commands.extend(commands)

    def is_read(self, item_id: str) -> bool | None:
        """Whether the session has an item, or is about to; None: there is no such item."""
        listed = self.items.find(item_id)
        return listed.read if listed else self.is_coming(item_id) or None

    def is_coming(self, item_id: str) -> bool:
        """Whether the session was told to make an item and has not done it yet."""
        return any(each.item.id == item_id for each in self.creations.values())


def event_id_of(command_id: str | None) -> str | None:
    """The id of the client's event that a command came from."""
    return (command_id or "").partition(":")[2] or None
