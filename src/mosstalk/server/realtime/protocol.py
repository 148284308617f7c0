"""One connection's talk: a client's events to commands, a session's events to a client's.

Synchronous and without sockets: whoever has the socket passes on what a ``ProtocolOutput`` holds.
"""

import time
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.client_event_handler import ClientEventHandler
from mosstalk.server.realtime.client_events import CLIENT_EVENT
from mosstalk.server.realtime.effective_session import ServedModel
from mosstalk.server.realtime.server_event_emitter import ServerEventEmitter
from mosstalk.server.realtime.session_request import LONGEST_ID
from mosstalk.server.realtime.state import ProtocolOutput, ProtocolState, Transcript
from mosstalk.server.realtime.validation import (
    WireError,
    WireLimits,
    event_of,
    is_text,
    require_plain,
    validated,
)
from mosstalk.session.events import Event
from mosstalk.session.settings import SessionSettings

__all__ = ["ProtocolOutput", "RealtimeProtocol", "Transcript", "WireLimits"]
_MOST_UPDATES = 4
"""Updates of a session that may wait for its answer; each is answered with all of the session."""


class RealtimeProtocol:
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
        served = ServedModel(
            model,
            tuple(voices),
            defaults or SessionSettings(),
            limits or WireLimits(),
            asked_model,
            transcribes,
        )
        self._state = ProtocolState(served, now)
        self.settings: SessionSettings = self._state.session.settings
        self._handler, self._emitter = (
            ClientEventHandler(self._state),
            ServerEventEmitter(self._state),
        )
        self._stamp, self._stamped = token_hex(4), 0

    @property
    def waits(self) -> bool:
        """Whether the session should answer before more of the client's is heard."""
        return bool(self._state.waiting) or len(self._state.updates) > _MOST_UPDATES

    def from_client(self, raw: str | bytes) -> ProtocolOutput:
        """What a WebSocket message, text or binary, leads to."""
        state, value = self._state, dict[str, Any]()
        try:
            value = event_of(raw, state.served.limits)
            require_plain(value, raw)
        except WireError as error:
            state.tell(_error(error, value.get("event_id")))
            return self._step()
        try:
            state.waiting.append(validated(CLIENT_EVENT, value, state.served.limits))
        except WireError as error:
            state.waiting.append(_error(error, value.get("event_id")))
        self._hear_waiting()
        return self._step()

    def from_session(self, event: Event) -> ProtocolOutput:
        """What an event of the session leads to."""
        self._emitter.take(event)
        self._hear_waiting()
        return self._step()

    def from_transcript(self, transcript: Transcript) -> ProtocolOutput:
        """What someone beside the model has heard in an item."""
        self._emitter.transcript(transcript)
        return self._step()

    def _hear_waiting(self) -> None:
        """Hear what the client has sent, as far as its order allows it now."""
        state = self._state
        while state.waiting:
            event = state.waiting[0]
            try:
                if isinstance(event, told.Error):
                    state.tell(event)
                elif self._handler.must_wait(event):
                    return
                else:
                    self._handler.take(event)
            except WireError as error:
                state.tell(_error(error, event.event_id))
            state.waiting.popleft()

    def _step(self) -> ProtocolOutput:
        """What has come together, every event with an id."""
        step = self._state.take_step()
        for event in step.events:
            self._stamped += 1
            event.event_id = f"event_{self._stamp}_{self._stamped}"
        return step


def _error(error: WireError, event_id: Any) -> told.Error:
    """``event_id`` as the client has sent it, which may be anything."""
    named = isinstance(event_id, str) and len(event_id) <= LONGEST_ID and is_text(event_id)
    body = told.ErrorBody(
        code=error.code,
        message=str(error),
        param=error.param,
        event_id=event_id if named else None,
    )
    return told.Error(error=body)
