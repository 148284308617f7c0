"""One connection's talk: a client's events to commands, a session's events to a client's.

Synchronous and without sockets: whoever has the socket passes on what a ``Step`` holds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from mosstalk.server.realtime.errors import WireError, refusal
from mosstalk.server.realtime.heard import Heard
from mosstalk.server.realtime.reading import (
    Fields,
    WireLimits,
    event_of,
    is_text,
    require_plain,
)
from mosstalk.server.realtime.settings import Served
from mosstalk.server.realtime.state import State
from mosstalk.server.realtime.told import Told
from mosstalk.server.realtime.transcripts import Transcript
from mosstalk.session.commands import Command
from mosstalk.session.events import Event
from mosstalk.session.settings import SessionSettings

__all__ = ["Dialogue", "Step", "Transcript", "WireLimits"]
_LONGEST_EVENT_ID = 512
_MOST_UPDATES = 4
"""Updates of a session that may wait for its answer; each is answered with all of the session."""


@dataclass
class Step:
    """What one message or event leads to, each list in order.

    Attributes:
        commands: for the session.
        events: for the client, ready to be written as JSON.
        notes: lines for the log; they hold nothing that was said.
    """

    commands: list[Command] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Dialogue:
    """Makes no error of its own: what a client does wrong becomes an ``error`` event.

    Attributes:
        settings: what to open the session with.

    Args:
        model: the name under which the model is served, whatever the client calls it.
        asked_model: what the client called it in its URL.
        voices: names that the session knows; any other is spoken by the defaults' voice.
        limits: how much one message may bring.
        defaults: what holds until the client says otherwise.
        transcribes: whether ``from_transcript`` will be called for turns of the user.
        now: the time of day in seconds since 1970.
    """

    def __init__(
        self,
        *,
        model: str,
        asked_model: str | None = None,
        voices: Sequence[str] = ("default",),
        limits: WireLimits | None = None,
        defaults: SessionSettings | None = None,
        transcribes: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        served = Served(
            model,
            tuple(voices),
            defaults or SessionSettings(),
            limits or WireLimits(),
            asked_model,
            transcribes,
        )
        self._state = State(served, now)
        self.settings: SessionSettings = self._state.session.settings
        self._heard, self._told = Heard(self._state), Told(self._state)
        self._stamp, self._stamped = token_hex(4), 0

    @property
    def waits(self) -> bool:
        """Whether the session should answer before more of the client's is heard."""
        return bool(self._state.waiting) or len(self._state.updates) > _MOST_UPDATES

    def from_client(self, raw: str | bytes) -> Step:
        """What a WebSocket message, text or binary, leads to."""
        event = Fields({})
        try:
            event = event_of(raw, self._state.served.limits)
            require_plain(event, raw)
            event.text("event_id", _LONGEST_EVENT_ID)
        except WireError as error:
            self._state.out.events.append(_error(error, event))
            return self._step()
        self._state.waiting.append(event)
        self._hear_waiting()
        return self._step()

    def from_session(self, event: Event) -> Step:
        """What an event of the session leads to."""
        self._told.take(event)
        self._hear_waiting()
        return self._step()

    def from_transcript(self, transcript: Transcript) -> Step:
        """What someone beside the model has heard in an item."""
        self._told.transcript(transcript)
        return self._step()

    def _hear_waiting(self) -> None:
        """Hear what the client has sent, as far as its order allows it now."""
        state = self._state
        while state.waiting:
            event = state.waiting[0]
            try:
                if self._heard.must_wait(event):
                    return
                self._heard.take(event)
            except WireError as error:
                state.out.events.append(_error(error, event))
            state.waiting.popleft()

    def _step(self) -> Step:
        """What has come together, every event with an id."""
        out = self._state.take_out()
        step = Step(out.commands, notes=out.notes)
        for event in out.events:
            self._stamped += 1
            step.events.append({"event_id": f"event_{self._stamp}_{self._stamped}", **event})
        return step


def _error(error: WireError, event: Fields) -> dict[str, Any]:
    body = refusal(error.code, str(error), error.param)
    event_id = event.value.get("event_id")
    if isinstance(event_id, str) and len(event_id) <= _LONGEST_EVENT_ID and is_text(event_id):
        body["event_id"] = event_id
    return {"type": "error", "error": body}
