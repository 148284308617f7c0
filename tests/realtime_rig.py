"""What tests of the Realtime protocol share: a judge of events, and a client without a socket."""

import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel, TypeAdapter
from session_rig import BY_HAND, host

from mosstalk import Pipeline
from mosstalk.audio.sound import Samples
from mosstalk.server.realtime.protocol import ProtocolOutput, RealtimeProtocol
from mosstalk.server.realtime.server_events import SERVER_EVENT
from mosstalk.server.realtime.session_config import ServedModel
from mosstalk.session.commands import (
    Command,
    CreateAudio,
    CreateMessage,
    CreateResponse,
    CreateText,
    DeleteItem,
    ReplyMode,
    UpdateSettings,
)
from mosstalk.session.events import (
    AudioDelta,
    Closed,
    Event,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemStatus,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    SessionOpened,
    SettingsUpdated,
    TextDelta,
    Timings,
    Usage,
)
from mosstalk.session.session import Session

Wire = dict[str, Any]
_GA: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
UNTYPED = {"mosstalk", "id", "object", "expires_at", "call_id"}
"""Fields that the types lack: the vendor's own, and what the API's own sessions have as well."""
VOICES = ("default", "alto")


def judge(event: Wire) -> None:
    """Check an event against the `openai` package's types, strictly, and that it adds nothing."""
    assert event["event_id"], event
    parsed = _GA.validate_json(json.dumps(event), strict=True)
    assert parsed.type == event["type"]
    assert set(_extras(parsed)) <= UNTYPED, (event, list(_extras(parsed)))


def _extras(value: Any) -> Iterator[str]:
    """Names of fields that the types do not have, however deep."""
    if isinstance(value, list):
        for each in value:
            yield from _extras(each)
    elif isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))


def b64(samples: Samples) -> str:
    """Float samples as base64 of PCM16."""
    return base64.b64encode((samples * 32767).astype("<i2").tobytes()).decode()


def told(protocol: RealtimeProtocol, **event: Any) -> ProtocolOutput:
    """What a client's event leads to."""
    return protocol.from_client(json.dumps(event))


@dataclass
class Caller:
    """A client: what it is sent is checked and kept. Without a session, commands are kept."""

    protocol: RealtimeProtocol
    session: Session | None = None
    events: list[Wire] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def send(self, kind: str, **more: Any) -> list[Wire]:
        """Send an event; what comes back at once."""
        return self.raw(json.dumps({"type": kind, **more}))

    def raw(self, message: str | bytes) -> list[Wire]:
        """Send a message; what comes back at once."""
        return self.take(self.protocol.from_client(message))

    def hear(self, *events: Event) -> list[Wire]:
        """Have the session tell something; what comes of it."""
        return [wire for event in events for wire in self.take(self.protocol.from_session(event))]

    def take(self, step: ProtocolOutput) -> list[Wire]:
        """Check and keep what a step holds; its events."""
        messages = [event.to_json() for event in step.events]
        events = [json.loads(message) for message in messages]
        for event, message in zip(events, messages, strict=True):
            judge(event)
            assert SERVER_EVENT.validate_json(message).to_json() == message, "read as written"
        for command in step.commands:
            if self.session:
                self.session.do(command)
        self.commands += step.commands
        self.events += events
        self.notes += step.notes
        return events

    def say(self, samples: Samples) -> None:
        """Send sound in appends of 100 ms."""
        for start in range(0, len(samples), 2400):
            self.send("input_audio_buffer.append", audio=b64(samples[start : start + 2400]))

    async def until(self, kind: str, **where: Any) -> Wire:
        """Listen until an event of that kind, with these fields, comes."""
        assert self.session
        async for event in self.session:
            for wire in self.hear(event):
                if wire["type"] == kind and where.items() <= wire.items():
                    return wire
            assert not isinstance(event, Closed), self.kinds
        raise AssertionError("the session told nothing more")

    @property
    def kinds(self) -> list[str]:
        """Types of all events so far."""
        return [event["type"] for event in self.events]

    def all(self, kind: str) -> list[Wire]:
        """All events of a kind so far."""
        return [event for event in self.events if event["type"] == kind]

    def sound(self, response_id: str) -> bytes:
        """The sound of a response so far, decoded from base64."""
        sent = self.all("response.output_audio.delta")
        deltas = [event for event in sent if event["response_id"] == response_id]
        return b"".join(base64.b64decode(delta["delta"], validate=True) for delta in deltas)


def caller(*, begins: Wire | None = None, **more: Any) -> Caller:
    """A client of a session that is told of by hand, and that has opened."""
    options: Wire = {"model": "moss", "voices": VOICES} | more
    client = Caller(RealtimeProtocol(ServedModel(**options), lambda: 1000.0, begins or {}))
    client.hear(SessionOpened("sess_1", client.protocol.settings, clock=0))
    return client


@asynccontextmanager
async def call(
    *, hands_free: bool = False, pipeline: Pipeline | None = None, **more: Any
) -> AsyncIterator[Caller]:
    """A client of a real session of the pocket model, unless another is given."""
    async with host(hands_free=hands_free, pipeline=pipeline) as house:
        options: Wire = {"model": "moss", "voices": house.voice_names, "defaults": BY_HAND} | more
        protocol = RealtimeProtocol(ServedModel(**options))
        async with await house.open(protocol.settings) as session:
            client = Caller(protocol, session)
            yield client
        async for event in session:
            client.hear(event)


def obeyed(command: Command) -> list[Event]:
    """What a session tells that does as it is told, as far as its client sees it."""
    command_id = command.command_id
    if isinstance(command, UpdateSettings):
        return [SettingsUpdated(command.settings, command_id, clock=0)]
    if isinstance(command, CreateText | CreateAudio | CreateMessage):
        role = command.role if isinstance(command, CreateText) else "user"
        item = Item(str(command.item_id), role)
        return [kind(item, None, command_id=command_id, clock=0) for kind in (ItemAdded, ItemDone)]
    if isinstance(command, CreateResponse):
        return response(command)
    if isinstance(command, DeleteItem):
        return [ItemDeleted(command.item_id, command_id, clock=0)]
    return []


def response(command: CreateResponse, *, text: str = "Yes.") -> list[Event]:
    """A whole response of some sound and text."""
    reply, own = command.reply or ReplyMode.AUDIO, command.in_conversation
    item = Item("item_r", "assistant", status=ItemStatus.IN_PROGRESS, response_id="resp_1")
    done = Item("item_r", "assistant", text, 80, response_id="resp_1")
    written = TextDelta("resp_1", "item_r", text, clock=0)
    spoken = AudioDelta("resp_1", "item_r", 0, bytes(3840), clock=0)
    return [
        ResponseStarted("resp_1", reply, own, command.metadata, command.command_id, clock=0),
        ItemAdded(item, None, own, clock=0),
        *([spoken] if reply is ReplyMode.AUDIO else []),
        *([written] if text else []),
        ItemDone(done, None, own, clock=0),
        ResponseDone(
            "resp_1", ResponseStatus.COMPLETED, None, (done,), Usage(3, 4, 2, 1, 5), Timings(),
            own, clock=0,
        ),
    ]  # fmt: skip


def tone(seconds: float, rate: int = 24_000) -> Samples:
    """A steady tone."""
    return (0.3 * np.sin(np.arange(int(seconds * rate)) * 0.1)).astype(np.float32)
