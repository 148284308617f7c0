"""What a session tells, in the protocol's words.

Clients act on the codes of errors: Pipecat ends its session on any ``error`` event but two codes,
LiveKit passes over three, so both the code and the event that carries it are chosen with care.
"""

from typing import TYPE_CHECKING, Any

from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.items import shown_item, transcribed
from mosstalk.server.realtime.responses import ActiveResponse, ResponseConfig
from mosstalk.session import events
from mosstalk.session.commands import CreateResponse, DeleteItem
from mosstalk.session.events import CloseReason, ErrorCode, ErrorRaised, ms_of, new_id

if TYPE_CHECKING:
    from mosstalk.server.realtime.protocol import ProtocolState, Transcript

_INVALID, _SERVER, _BUSY = "invalid_request_error", "server_error", "rate_limit_error"
_CODES: dict[ErrorCode, tuple[str, str, str | None]] = {
    ErrorCode.HALF_SAMPLE: (_INVALID, "invalid_value", "audio"),
    ErrorCode.WRONG_RATE: (_INVALID, "invalid_value", "session.audio.input.format"),
    ErrorCode.BAD_SOUND: (_INVALID, "invalid_value", "audio"),
    ErrorCode.COMMIT_EMPTY: (_INVALID, "input_audio_buffer_commit_empty", None),
    ErrorCode.TURN_TOO_LONG: (_INVALID, "input_audio_buffer_full", None),
    ErrorCode.RESPONSE_ACTIVE: (_INVALID, "conversation_already_has_active_response", None),
    ErrorCode.RESPONSE_NOT_ACTIVE: (_INVALID, "response_cancel_not_active", None),
    ErrorCode.UNKNOWN_ITEM: (_INVALID, "invalid_item_id", "item_id"),
    ErrorCode.DUPLICATE_ITEM: (_INVALID, "item_create_duplicate_item_id", "item.id"),
    ErrorCode.BAD_ITEM: (_INVALID, "invalid_value", "item"),
    ErrorCode.BAD_VALUE: (_INVALID, "invalid_value", None),
    ErrorCode.UNKNOWN_VOICE: (_INVALID, "invalid_value", "session.audio.output.voice"),
    ErrorCode.CONTEXT_FULL: (_INVALID, "context_length_exceeded", None),
    ErrorCode.ENGINE_FULL: (_BUSY, "rate_limit_exceeded", None),
    ErrorCode.ENGINE_STOPPED: (_SERVER, "server_error", None),
    ErrorCode.RESPONSE_FAILED: (_SERVER, "server_error", None),
    ErrorCode.INTERNAL: (_SERVER, "server_error", None),
}
"""Type, code and param on the wire."""
_UNKNOWN_BEFORE = (_INVALID, "item_create_invalid_previous_item_id", "previous_item_id")
_CODES_OF_COMMANDS: dict[tuple[str | None, ErrorCode], tuple[str, str, str | None]] = {
    ("DeleteItem", ErrorCode.UNKNOWN_ITEM): (_INVALID, "item_delete_invalid_item_id", "item_id"),
    ("Truncate", ErrorCode.UNKNOWN_ITEM): (_INVALID, "item_truncate_invalid_item_id", "item_id"),
    ("Truncate", ErrorCode.BAD_ITEM): (_INVALID, "item_truncate_invalid_item_id", "item_id"),
    ("CreateText", ErrorCode.UNKNOWN_ITEM): _UNKNOWN_BEFORE,
    ("CreateAudio", ErrorCode.UNKNOWN_ITEM): _UNKNOWN_BEFORE,
    ("CreateMessage", ErrorCode.UNKNOWN_ITEM): _UNKNOWN_BEFORE,
    ("CreateResponse", ErrorCode.UNKNOWN_ITEM): (_INVALID, "invalid_item_id", "response.input"),
    ("CreateResponse", ErrorCode.BAD_ITEM): (_INVALID, "invalid_value", "response.input"),
}
"""The same where it depends on the command that was refused."""
_LEADS = {ErrorCode.RESPONSE_NOT_ACTIVE: "Cancellation failed: "}
"""LiveKit knows a cancel that came too late by how its message begins."""
_FAILED_RESPONSES = (ErrorCode.CONTEXT_FULL, ErrorCode.ENGINE_FULL, ErrorCode.RESPONSE_FAILED)
"""What keeps a response from being made is told as one that has failed: that ends no client."""
_WRITTEN = "written"
"""The command that frees a turn which was written down: no client has asked for it."""
_ENDS: dict[str, str] = {
    CloseReason.IDLE: "Nothing has happened in this session for too long.",
    CloseReason.LONGEST: "Your session has lasted as long as it may.",
}


class ServerEventEmitter:
    """Takes a session's events and passes on the client's."""

    def __init__(self, state: "ProtocolState") -> None:
        self._state = state

    def take(self, event: events.Event) -> None:
        """Tell the client of an event."""
        responses, tell = self._state.responses, self._state.tell
        if self._state.writing and self._written(event):
            return
        match event:
            case events.AudioDelta():  # first, because most are
                tell(*responses[event.response_id].sound(event.pcm))
            case events.TextDelta() | events.ResponseStarted() | events.ResponseDone():
                self._response(event)
            case events.ItemAdded():
                self._item_added(event)
            case events.ItemDone():
                self._item_done(event)
            case events.SessionOpened() | events.SettingsUpdated():
                self._session(event)
            case events.ErrorRaised():
                if event.command_id != _WRITTEN:  # such a turn was dropped before
                    self._error(event)
            case events.Closed():
                self._closed(event)
            case _:
                self._turn_or_change(event)

    def _closed(self, event: events.Closed) -> None:
        self._state.waiting.clear()
        if self._state.session.only_transcribes:
            return  # LiveKit's STT connects anew after a close, and never after an error
        if message := _ENDS.get(event.reason):
            body = told.ErrorBody(code="session_expired", message=message)
            self._state.tell(told.Error(error=body))

    def _session(self, event: events.SessionOpened | events.SettingsUpdated) -> None:
        state = self._state
        if isinstance(event, events.SessionOpened):
            state.session_id = event.session_id
            state.expires_at = int(state.now() + event.settings.durations.longest_s)
        else:
            state.session = state.updates.pop(event.command_id or "", state.session)
        created = isinstance(event, events.SessionOpened)
        own: dict[str, Any] = {"id": state.session_id, "expires_at": state.expires_at}
        own["mosstalk"] = self._vendor(created)
        state.tell(
            told.SessionEvent(
                type="session.created" if created else "session.updated",
                session=state.session.shown.model_copy(update=own),
            )
        )
        if created:
            self._show_resumed()

    def _vendor(self, created: bool) -> told.SessionVendor:
        """What the protocol has no field for, with how the conversation is taken up again."""
        state, resumption = self._state, self._state.resumption
        vendor = state.session.shown.mosstalk
        if resumption is None or state.session.only_transcribes:
            return vendor
        items = resumption.items if created else None
        count = None if items is None else len(items)
        resume = told.Resume(token=resumption.token, seconds=resumption.seconds, items=count)
        return vendor.model_copy(update={"resume": resume})

    def _show_resumed(self) -> None:
        """Tell of the items that have come back, as when they came; of a part, that it is there.

        The session tells the end of a reply that was not whole when the connection was lost.
        """
        state = self._state
        for listed in (state.resumption and state.resumption.items) or ():
            state.tell_of_item("conversation.item.added", listed.item)
            if listed.item.status != events.ItemStatus.IN_PROGRESS:
                state.tell_of_item("conversation.item.done", listed.item)

    def _turn_or_change(self, event: events.Event) -> None:
        """Tell of the user's turns, and of items that are less than they were."""
        state, tell = self._state, self._state.tell
        match event:
            case events.SpeechStarted():
                self._speech("speech_started", event.item_id, audio_start_ms=event.start_ms)
            case events.SpeechStopped():
                vendor = told.Vendor(
                    speech_end_ms=ms_of(event.speech_end), vad_wait_ms=event.wait_ms
                )
                about = {"audio_end_ms": event.end_ms, "mosstalk": vendor}
                self._speech("speech_stopped", event.item_id, **about)
            case events.IdleTimeout():
                silence = {"audio_start_ms": ms_of(event.start), "audio_end_ms": ms_of(event.end)}
                self._speech("timeout_triggered", event.item_id, **silence)
            case events.TurnCommitted():
                before = state.items.last_id
                tell(told.InputCommitted(previous_item_id=before, item_id=event.item_id))
            case events.InputCleared():
                tell(told.InputCleared())
            case events.ItemTruncated():
                vendor = told.Vendor(codes=event.codes, by_server=event.by_session)
                state.tell_truncated(event.item_id, event.audio_ms, vendor, event.said)
            case events.ItemDeleted():
                freed = event.command_id == _WRITTEN
                state.deletions.discard(event.command_id or "")
                (state.items.forget if freed else state.delete)(event.item_id)
            case events.ContextDropped():  # for the client they are still there
                for item_id in event.item_ids:
                    state.items.forget(item_id)
                state.note(f"{len(event.item_ids)} oldest items made room")

    def _speech(self, what: str, item_id: str, **about: Any) -> None:
        kind: Any = f"input_audio_buffer.{what}"
        self._state.tell(told.SpeechEvent(type=kind, item_id=item_id, **about))

    # Items and their transcripts.

    def _item_added(self, event: events.ItemAdded) -> None:
        state = self._state
        creation = state.creations.get(event.command_id or "")
        item = creation.item if creation else shown_item(event.item)
        response = state.responses.get(event.item.response_id or "")
        if response:
            state.tell(response.item_added(item))
        if event.in_conversation:
            state.items.add(item, creation.after if creation else None)
            state.tell_of_item("conversation.item.added", item)
        if response:
            state.tell(response.begin())

    def _item_done(self, event: events.ItemDone) -> None:
        state = self._state
        creation = state.creations.pop(event.command_id or "", None)
        response = state.responses.get(event.item.response_id or "")
        item = creation.item if creation else shown_item(event.item)
        if response:
            whole = event.item.status is events.ItemStatus.COMPLETED
            if not whole and event.item.text_is_spoken:
                response.said(event.item.text or "")
            state.tell(*response.finish(cut=not whole))
            item = item.model_copy(update={"content": response.content})
            state.tell(response.item_done(item))
        listed = state.items.find(item.id)
        if listed and event.in_conversation:
            listed.item = item
            state.tell_of_item("conversation.item.done", item)
            if state.session.only_transcribes:
                self._write_down(item.id)

    # What the user says, written down by the transcriber or by the model.

    def transcript(self, transcript: "Transcript") -> None:
        """Tell what was heard in an item."""
        state, item_id = self._state, transcript.item_id
        listed = state.items.find(item_id)
        if transcript.more:
            if listed:
                state.tell(_delta(item_id, transcript.text))
            return
        response = next(
            (each for each in state.responses.values() if each.item_id == item_id), None
        )
        if listed:
            listed.item = transcribed(listed.item, transcript.text or None)
        if response:
            state.tell(*response.transcript(transcript.text))
        elif listed and isinstance(listed.item, told.Message) and listed.item.role == "user":
            usage = {"type": "duration", "seconds": round(transcript.audio_s, 3)}
            state.tell(_transcription(item_id, transcript.text, transcript.failed, usage))
            if state.session.only_transcribes:
                self._forget(item_id)

    def _write_down(self, item_id: str) -> None:
        """Have a turn written down, of a session that does nothing else with it."""
        state = self._state
        if state.session.model_transcribes:
            state.unwritten.append(item_id)
            if not state.writing:
                self._write_next()
        elif not state.session.transcription.user:
            self._forget(item_id)

    def _write_next(self) -> None:
        """Have the model write down the first of the turns that wait for it."""
        state = self._state
        state.writing = None
        if state.unwritten:
            response_id = new_id("resp")
            state.writing = response_id, ""
            state.do(
                CreateResponse(
                    response_id, in_conversation=False, input=(state.unwritten[0],),
                    command_id=response_id,
                )
            )  # fmt: skip

    def _forget(self, item_id: str) -> None:
        """Free the rows of a turn that nobody reads any more; for the client it is still there."""
        if (listed := self._state.items.find(item_id)) and listed.read:
            self._state.do(DeleteItem(item_id, command_id=_WRITTEN))

    def _written(self, event: events.Event) -> bool:
        """Tell what the model writes down, if an event is of the response in which it does."""
        state = self._state
        assert state.writing
        (response_id, text), item_id = state.writing, state.unwritten[0]
        failed, usage = None, dict[str, Any]()
        match event:
            case events.TextDelta(response_id=its) if its == response_id:
                state.writing = response_id, text + event.text
                if item_id in state.items:
                    state.tell(_delta(item_id, event.text))
                return True
            case events.ResponseStarted(response_id=its):
                return its == response_id
            case events.ItemAdded(item=item) | events.ItemDone(item=item):
                return item.response_id == response_id
            case events.ErrorRaised(command_id=its) if its == response_id:
                failed = event.message
            case events.ResponseDone(response_id=its) if its == response_id:
                usage = _tokens(event.usage)
                if event.status is events.ResponseStatus.FAILED:
                    failed = event.message or "the model did not write it down"
            case _:
                return False
        if listed := state.items.find(item_id):
            listed.item = transcribed(listed.item, text or None)
            state.tell(_transcription(item_id, text, failed, usage))
        state.unwritten.popleft()
        self._forget(item_id)
        self._write_next()
        return True

    # Responses, and what went wrong.

    def _response(
        self, event: events.TextDelta | events.ResponseStarted | events.ResponseDone
    ) -> None:
        state = self._state
        if isinstance(event, events.TextDelta):
            response = state.responses[event.response_id]
            add = response.transcript if event.spoken else response.text
            state.tell(*add(event.text))
            return
        if isinstance(event, events.ResponseDone):
            done = state.responses.pop(event.response_id).done(event)
            state.tell(done, told.RateLimitsUpdated())
            return
        config = state.pending_responses.pop(event.command_id or "", None)
        response = ActiveResponse(
            event.response_id,
            event.reply,
            config or ResponseConfig.of_session(state.session),
            state.conversation_id if event.in_conversation else None,
        )
        state.responses[event.response_id] = response
        state.latest_response_id = event.response_id
        state.tell(response.created())

    def _error(self, event: ErrorRaised) -> None:
        state, command_id = self._state, event.command_id or ""
        config = state.pending_responses.pop(command_id, None)
        state.creations.pop(command_id, None)
        state.deletions.discard(command_id)
        if state.updates.pop(command_id, None):
            state.planned = next(reversed(state.updates.values()), state.session)
        if event.code in _FAILED_RESPONSES and event.command in (None, "CreateResponse"):
            self._fail(event, config or ResponseConfig.of_session(state.session))
            return
        kind, code, param = _on_the_wire(event)
        body = told.ErrorBody(
            type=kind,
            code=code,
            message=_LEADS.get(event.code, "") + event.message,
            param=param,
            event_id=command_id.partition(":")[2] or None,
            mosstalk=_retry(event),
        )
        state.tell(told.Error(error=body))

    def _fail(self, event: ErrorRaised, config: ResponseConfig) -> None:
        """A response that could not be begun, as one that has failed."""
        state = self._state
        conversation_id = state.conversation_id if config.in_conversation else None
        about = (new_id("resp"), state.session.settings.reply, conversation_id)
        done = config.response(*about, "failed")
        kind, code, _ = _on_the_wire(event)
        failed = {"type": kind, "code": code, "message": event.message}
        done.status_details = told.StatusDetails(type="failed", error=failed)
        done.mosstalk = _retry(event) or done.mosstalk
        begun = config.response(*about, "in_progress")
        state.tell(
            told.ResponseEvent(type="response.created", response=begun),
            told.ResponseEvent(type="response.done", response=done),
        )
        if event.code is ErrorCode.ENGINE_FULL:
            state.note("a response was refused: the engine is full")


def _on_the_wire(error: ErrorRaised) -> tuple[str, str, str | None]:
    """Type, code and param of what a session has refused or failed at."""
    return _CODES_OF_COMMANDS.get((error.command, error.code)) or _CODES[error.code]


def _retry(error: ErrorRaised) -> told.Vendor | None:
    after_s = error.retry_after_s
    return None if after_s is None else told.Vendor(retry_after_s=after_s)


def _delta(item_id: str, text: str) -> told.Event:
    kind: Any = "conversation.item.input_audio_transcription.delta"
    return told.Transcribed(type=kind, item_id=item_id, delta=text)


def _tokens(usage: events.Usage) -> dict[str, Any]:
    read, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return {
        "type": "tokens",
        "total_tokens": read + made,
        "input_tokens": read,
        "output_tokens": made,
        "input_token_details": {
            "audio_tokens": usage.input_audio,
            "text_tokens": usage.input_text,
        },
    }


def _transcription(
    item_id: str, text: str, failed: str | None, usage: dict[str, Any]
) -> told.Event:
    if failed is not None:
        fault = {"code": "audio_unintelligible", "message": failed, "param": None}
        error = {"type": "transcription_error"} | fault
        return told.Transcribed(
            type="conversation.item.input_audio_transcription.failed",
            item_id=item_id,
            error=error,
        )
    return told.Transcribed(
        type="conversation.item.input_audio_transcription.completed",
        item_id=item_id,
        transcript=text,
        usage=usage,
    )
