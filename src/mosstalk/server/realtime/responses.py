"""One response on the wire, from ``response.create`` to ``response.done``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.items import new_item, shown_item
from mosstalk.server.realtime.session_config import (
    MODALITIES,
    UNKNOWN_VOICE,
    ServedModel,
    SessionConfig,
    instructions_of,
)
from mosstalk.server.realtime.validation import AudioFormat, Encoder, WireError
from mosstalk.session import events
from mosstalk.session.commands import CreateResponse, Message, ReplyMode
from mosstalk.session.events import Reason, ResponseDone, ResponseStatus

_REASONS = {
    Reason.TURN_DETECTED: "turn_detected",
    Reason.CLIENT_CANCELLED: "client_cancelled",
    Reason.SESSION_CLOSED: "client_cancelled",
    Reason.MAX_LENGTH: "max_output_tokens",
    Reason.CONTEXT: "max_output_tokens",
    Reason.REPETITION: "max_output_tokens",
}
"""The protocol knows four reasons and clients no others; the true one stands beside it."""


@dataclass(frozen=True)
class ResponseConfig:
    """How a response is shown, whatever the session knows of it."""

    output_format: AudioFormat
    voice: str
    max_output_tokens: told.Length
    metadata: dict[str, str] | None = None
    warnings: tuple[str, ...] = ()
    in_conversation: bool = True

    @classmethod
    def of_session(cls, session: SessionConfig) -> "ResponseConfig":
        """How a response is shown that nobody has asked for in so many words."""
        settings = session.settings
        return cls(session.output_format, settings.voice, settings.limits.rows or "inf")

    def response(
        self, response_id: str, reply: ReplyMode, conversation_id: str | None, status: str
    ) -> told.Response:
        """The protocol's response, as far as it is known before it is made."""
        return told.Response(
            id=response_id,
            status=status,
            conversation_id=conversation_id,
            output_modalities=MODALITIES[reply],
            max_output_tokens=self.max_output_tokens,
            audio=told.Audio(output=told.AudioOutput(format=self.output_format, voice=self.voice)),
            metadata=self.metadata,
            mosstalk=told.Vendor(warnings=list(self.warnings)) if self.warnings else None,
        )


def requested(
    request: asked.ResponseRequest,
    session: SessionConfig,
    served: ServedModel,
    command_id: str,
    is_read: Callable[[str], bool | None],
) -> tuple[ResponseConfig, CreateResponse]:
    """How a response that a ``response.create`` asks for is shown, and its command.

    ``is_read`` says whether the session has an item; None: there is none of that id.

    Raises:
        WireError: it cannot be served.
    """
    spoken, usual = request.audio.output, ResponseConfig.of_session(session)
    given = None
    if request.input is not None:
        given = tuple(_inputs(request.input, session, served, is_read))
    config = ResponseConfig(
        spoken.format or usual.output_format,
        usual.voice if spoken.voice_name is None else served.voice(spoken.voice_name),
        request.max_output_tokens or usual.max_output_tokens,
        request.metadata,
        _warnings(request, served, len(request.input or ()) - len(given or ())),
        in_conversation=request.conversation != "none",
    )
    return config, CreateResponse(
        reply=request.output_modalities,
        instructions=instructions_of(request.instructions),
        voice=config.voice,
        max_rows=request.max_output_tokens,
        in_conversation=config.in_conversation,
        input=given,
        metadata=request.metadata or {},
        command_id=command_id,
    )


def _warnings(request: asked.ResponseRequest, served: ServedModel, unread: int) -> tuple[str, ...]:
    """What is asked for and has no effect."""
    names = [name for name in ("prompt", "temperature", "reasoning") if getattr(request, name)]
    found = {
        f"tools are taken, but this model calls none ({len(request.tools)})": request.tools,
        UNKNOWN_VOICE: not served.knows_voice_of(request.audio.output),
        f"without effect: {', '.join(names)}": names,
        f"of the input {unread} items are not read by the model": unread,
    }
    return tuple(warning for warning, is_so in found.items() if is_so)


def _inputs(
    items: list[Any],
    session: SessionConfig,
    served: ServedModel,
    is_read: Callable[[str], bool | None],
) -> Iterator[str | Message]:
    """What the response answers in place of the conversation, without what is not read."""
    for place, each in enumerate(items):
        path = f"response.input[{place}]"
        known = None if each.id is None else is_read(each.id)
        if known:
            yield each.id
        elif not isinstance(each, asked.ItemReference):
            item = new_item(each, path, session.input_format, served.limits)
            if item.message:
                yield item.message
        elif known is None:
            message = f"There is no item '{each.id}' to read."
            raise WireError("invalid_item_id", message, f"{path}.id")


@dataclass
class _Part:
    """A part of the item's content: sound with what is written of it, or text."""

    index: int
    spoken: bool
    written: str = ""

    def content(self, prefix: str = "") -> told.Content:
        """As ``response.content_part`` events have it; with "output_" before it as the item has."""
        kind: Any = prefix + ("audio" if self.spoken else "text")
        if self.spoken:
            return told.AudioContent(type=kind, transcript=self.written or None)
        return told.TextContent(type=kind, text=self.written)


@dataclass
class ActiveResponse:
    """A response that is being made; every method gives the events that are due."""

    response_id: str
    reply: ReplyMode
    config: ResponseConfig
    conversation_id: str | None
    item_id: str = ""
    parts: list[_Part] = field(default_factory=list)
    _encoder: Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = Encoder(self.config.output_format)

    def created(self) -> told.ResponseEvent:
        """Its first event."""
        return told.ResponseEvent(type="response.created", response=self._response("in_progress"))

    def item_added(self, item: told.Item) -> told.OutputItemEvent:
        """Its item, which must come before anything of it."""
        self.item_id = item.id
        return told.OutputItemEvent(
            type="response.output_item.added", response_id=self.response_id, item=item
        )

    def begin(self) -> told.ContentPart:
        """The first part, which is of the kind that was asked for."""
        return self._open(spoken=self.reply is ReplyMode.AUDIO)

    def sound(self, pcm: bytes) -> Iterator[told.Event]:
        """More sound."""
        if delta := self._encoder.push(pcm):
            yield told.Delta(
                type="response.output_audio.delta", **self._where(self._spoken()), delta=delta
            )

    def text(self, text: str) -> Iterator[told.Event]:
        """More text that nobody speaks. Beside sound it is a part of its own."""
        part = next((part for part in self.parts if not part.spoken), None)
        if part is None:
            yield self._open(spoken=False)
            part = self.parts[-1]
        part.written += text
        yield told.Delta(type="response.output_text.delta", **self._where(part), delta=text)

    def transcript(self, text: str) -> Iterator[told.Event]:
        """More of what the sound says: from the model, or what someone has written down of it."""
        part = self._spoken()
        part.written += text
        yield told.Delta(
            type="response.output_audio_transcript.delta", **self._where(part), delta=text
        )

    def said(self, text: str) -> None:
        """So much of what was written has been spoken, where the response ends before its end."""
        for part in self.parts:
            if part.spoken:
                part.written = text

    def finish(self, *, cut: bool) -> Iterator[told.Event]:
        """Nothing more comes: the ends of all parts.

        ``cut``: what resampling held back is not sent.
        """
        for part in self.parts:
            where = self._where(part)
            if part.spoken:
                if rest := "" if cut else self._encoder.push(b"", last=True):
                    yield told.Delta(type="response.output_audio.delta", **where, delta=rest)
                yield told.ContentDone(type="response.output_audio.done", **where)
                kind: Any = "response.output_audio_transcript.done"
                yield told.ContentDone(type=kind, **where, transcript=part.written)
            else:
                yield told.ContentDone(type="response.output_text.done", **where, text=part.written)
            yield told.ContentPart(type="response.content_part.done", **where, part=part.content())

    def item_done(self, item: told.Item) -> told.OutputItemEvent:
        """Its item as it is in the end."""
        return told.OutputItemEvent(
            type="response.output_item.done", response_id=self.response_id, item=item
        )

    @property
    def content(self) -> list[told.Content]:
        """What the item holds so far."""
        return [part.content("output_") for part in self.parts]

    def done(self, event: ResponseDone) -> told.ResponseEvent:
        """Its last event, with what it cost and where its time went."""
        response = self._response(event.status.value)
        content = {"content": self.content}
        response.output = [shown_item(item).model_copy(update=content) for item in event.items]
        response.status_details = _details(event)
        response.usage = _usage(event.usage)
        response.mosstalk = told.Vendor(
            warnings=list(self.config.warnings) or None,
            timings={
                name: None if value is None else round(value, 3)
                for name, value in vars(event.timings).items()
            },
            reason=event.reason and event.reason.value,
        )
        return told.ResponseEvent(type="response.done", response=response)

    def _response(self, status: str) -> told.Response:
        return self.config.response(self.response_id, self.reply, self.conversation_id, status)

    def _open(self, *, spoken: bool) -> told.ContentPart:
        part = _Part(len(self.parts), spoken)
        self.parts.append(part)
        where = self._where(part)
        return told.ContentPart(type="response.content_part.added", **where, part=part.content())

    def _spoken(self) -> _Part:
        return next(part for part in self.parts if part.spoken)

    def _where(self, part: _Part) -> dict[str, Any]:
        """What events about a part have in common."""
        return {
            "response_id": self.response_id,
            "item_id": self.item_id,
            "content_index": part.index,
        }


def _details(event: ResponseDone) -> told.StatusDetails | None:
    """Why it ended; None for one that came to its end."""
    if event.status is ResponseStatus.COMPLETED:
        return None
    if event.status is ResponseStatus.FAILED:
        message = event.message or "the response failed"
        error = {"type": "server_error", "code": "server_error", "message": message}
        return told.StatusDetails(type="failed", error=error)
    reason = None if event.reason is None else _REASONS[event.reason]
    return told.StatusDetails(type=event.status.value, reason=reason)


def _usage(usage: events.Usage) -> told.Usage:
    read, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return told.Usage(
        total_tokens=read + made,
        input_tokens=read,
        output_tokens=made,
        input_token_details={
            "text_tokens": usage.input_text,
            "audio_tokens": usage.input_audio,
            "cached_tokens": usage.cached,
        },
        output_token_details={
            "text_tokens": usage.output_text,
            "audio_tokens": usage.output_audio,
        },
    )
