"""What a session tells, in the protocol's words, one method an event."""

from collections.abc import Callable
from typing import Any

from mosstalk.constants import INPUT_RATE
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.errors import FAILED_RESPONSES, error_body, failure
from mosstalk.server.realtime.items import cut, new_id, shown_item, transcribed
from mosstalk.server.realtime.responses import (
    ActiveResponse,
    ResponseConfig,
    default_config,
    response_object,
)
from mosstalk.server.realtime.state import ProtocolState, Transcript, event_id_of
from mosstalk.session import events
from mosstalk.session.events import CloseReason, ErrorCode

_ASKED_FOR = (None, "CreateResponse")
_ENDS: dict[str, str] = {
    CloseReason.IDLE: "Nothing has happened in this session for too long.",
    CloseReason.LONGEST: "Your session has lasted as long as it may.",
}


class ServerEventEmitter:
    """Takes a session's events and passes on the client's."""

    def __init__(self, state: ProtocolState) -> None:
        self._state = state
        self._takers: dict[type[events.Event], Callable[[Any], None]] = {
            events.SessionOpened: self._opened,
            events.SettingsUpdated: self._updated,
            events.SpeechStarted: self._speech_started,
            events.SpeechStopped: self._speech_stopped,
            events.IdleTimeout: self._idle,
            events.InputPaused: lambda _: None,  # the protocol has no word for it
            events.TurnCommitted: self._committed,
            events.InputCleared: self._cleared,
            events.ItemAdded: self._item_added,
            events.ItemDone: self._item_done,
            events.ItemTruncated: self._truncated,
            events.ItemDeleted: self._deleted,
            events.ContextDropped: self._dropped,
            events.ResponseStarted: self._started,
            events.AudioDelta: self._sound,
            events.TextDelta: self._text,
            events.ResponseDone: self._done,
            events.ErrorRaised: self._error,
            events.Closed: self._closed,
        }

    def take(self, event: events.Event) -> None:
        """Tell the client of an event."""
        self._takers[type(event)](event)

    # The session.

    def _opened(self, event: events.SessionOpened) -> None:
        state = self._state
        state.session_id = event.session_id
        state.expires_at = int(state.now() + event.settings.durations.longest_s)
        state.tell(told.SessionEvent(type="session.created", session=self._session()))

    def _updated(self, event: events.SettingsUpdated) -> None:
        state = self._state
        session = state.updates.pop(event.command_id or "", None)
        state.session = session or state.session
        state.tell(told.SessionEvent(type="session.updated", session=self._session()))

    def _session(self) -> shown.Session:
        ids = {"id": self._state.session_id, "expires_at": self._state.expires_at}
        return self._state.session.body.model_copy(update=ids)

    def _closed(self, event: events.Closed) -> None:
        self._state.waiting.clear()
        message = _ENDS.get(event.reason)
        if message:
            body = told.ErrorBody(code="session_expired", message=message)
            self._state.tell(told.Error(error=body))

    # The user's turns.

    def _speech_started(self, event: events.SpeechStarted) -> None:
        self._state.tell(told.SpeechStarted(audio_start_ms=event.start_ms, item_id=event.item_id))

    def _speech_stopped(self, event: events.SpeechStopped) -> None:
        vendor = told.SpeechVendor(
            speech_end_ms=event.speech_end * 1000 // INPUT_RATE, vad_wait_ms=event.wait_ms
        )
        self._state.tell(
            told.SpeechStopped(audio_end_ms=event.end_ms, item_id=event.item_id, mosstalk=vendor)
        )

    def _idle(self, event: events.IdleTimeout) -> None:
        self._state.tell(
            told.TimeoutTriggered(
                audio_start_ms=event.start * 1000 // INPUT_RATE,
                audio_end_ms=event.end * 1000 // INPUT_RATE,
                item_id=event.item_id,
            )
        )

    def _committed(self, event: events.TurnCommitted) -> None:
        before = self._state.items.last_id
        self._state.tell(told.InputCommitted(previous_item_id=before, item_id=event.item_id))

    def _cleared(self, _: events.InputCleared) -> None:
        self._state.tell(told.InputCleared())

    # Items.

    def _item_added(self, event: events.ItemAdded) -> None:
        state = self._state
        creation = state.creations.get(event.command_id or "")
        item = creation.item if creation else shown_item(event.item)
        response = state.responses.get(event.item.response_id or "")
        if response:
            state.tell(response.item_added(item))
        if event.in_conversation:
            state.items.add(item, creation.after if creation else None)
            before = state.items.before(item.id)
            state.tell(
                told.ItemEvent(type="conversation.item.added", previous_item_id=before, item=item)
            )
        if response:
            state.tell(*response.begin())

    def _item_done(self, event: events.ItemDone) -> None:
        state = self._state
        creation = state.creations.pop(event.command_id or "", None)
        response = state.responses.get(event.item.response_id or "")
        item = creation.item if creation else shown_item(event.item)
        if response:
            whole = event.item.status is events.ItemStatus.COMPLETED
            state.tell(*response.finish(cut=not whole))
            item = item.model_copy(update={"content": response.content})
            state.tell(response.item_done(item))
        listed = state.items.find(item.id)
        if listed and event.in_conversation:
            listed.item = item
            before = state.items.before(item.id)
            state.tell(
                told.ItemEvent(type="conversation.item.done", previous_item_id=before, item=item)
            )

    def _truncated(self, event: events.ItemTruncated) -> None:
        listed = self._state.items.find(event.item_id)
        if listed:
            listed.item = cut(listed.item)
        self._state.tell(
            told.ItemTruncated(
                item_id=event.item_id,
                audio_end_ms=event.audio_ms,
                mosstalk=told.TruncatedVendor(codes=event.codes, by_server=event.by_session),
            )
        )

    def _deleted(self, event: events.ItemDeleted) -> None:
        self._state.items.remove(event.item_id)
        self._state.tell(told.ItemDeleted(item_id=event.item_id))

    def _dropped(self, event: events.ContextDropped) -> None:
        """As the protocol has it, items that made room are still there, but are not read."""
        for item_id in event.item_ids:
            self._state.items.forget(item_id)
        self._state.note(f"{len(event.item_ids)} oldest items made room")

    def transcript(self, transcript: Transcript) -> None:
        """Tell what was heard in an item."""
        state, item_id = self._state, transcript.item_id
        listed = state.items.find(item_id)
        response = next(
            (each for each in state.responses.values() if each.item_id == item_id), None
        )
        if listed:
            listed.item = transcribed(listed.item, transcript.text or None)
        if response:
            state.tell(*response.transcript(transcript.text))
        elif listed and isinstance(listed.item, shown.Message) and listed.item.role == "user":
            state.tell(_transcription(transcript))

    # Responses.

    def _started(self, event: events.ResponseStarted) -> None:
        state = self._state
        config = state.configs.pop(event.command_id or "", None) or default_config(state.session)
        conversation_id = state.conversation_id if event.in_conversation else None
        response = ActiveResponse(event.response_id, event.reply, config, conversation_id)
        state.responses[event.response_id] = response
        state.latest_response_id = event.response_id
        state.tell(response.created())

    def _sound(self, event: events.AudioDelta) -> None:
        self._state.tell(*self._state.responses[event.response_id].sound(event.pcm))

    def _text(self, event: events.TextDelta) -> None:
        self._state.tell(*self._state.responses[event.response_id].text(event.text))

    def _done(self, event: events.ResponseDone) -> None:
        response = self._state.responses.pop(event.response_id)
        self._state.tell(response.done(event), told.RateLimitsUpdated())

    # What went wrong.

    def _error(self, event: events.ErrorRaised) -> None:
        state, command_id = self._state, event.command_id or ""
        config = state.configs.pop(command_id, None)
        state.creations.pop(command_id, None)
        if state.updates.pop(command_id, None):
            latest = list(state.updates.values())
            state.planned = latest[-1] if latest else state.session
        if event.code in FAILED_RESPONSES and event.command in _ASKED_FOR:
            self._fail(event, config or default_config(state.session))
            return
        state.tell(told.Error(error=error_body(event, event_id_of(event.command_id))))

    def _fail(self, event: events.ErrorRaised, config: ResponseConfig) -> None:
        """A response that could not be begun, as one that has failed."""
        state = self._state
        conversation_id = state.conversation_id if config.in_conversation else None
        about = (new_id("resp"), state.session.settings.reply, config, conversation_id)
        done = response_object(*about, "failed")
        done.status_details = failure(event)
        if event.retry_after_s is not None:
            done.mosstalk = shown.ResponseVendor(retry_after_s=event.retry_after_s)
        state.tell(
            told.ResponseEvent(
                type="response.created", response=response_object(*about, "in_progress")
            ),
            told.ResponseEvent(type="response.done", response=done),
        )
        if event.code is ErrorCode.ENGINE_FULL:
            state.note("a response was refused: the engine is full")


def _transcription(transcript: Transcript) -> told.Event:
    if transcript.failed is not None:
        fault = told.TranscriptionFault(message=transcript.failed)
        return told.TranscriptionFailed(item_id=transcript.item_id, error=fault)
    usage = told.Duration(seconds=round(transcript.audio_s, 3))
    return told.TranscriptionCompleted(
        item_id=transcript.item_id, transcript=transcript.text, usage=usage
    )
