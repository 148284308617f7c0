"""One response on the wire, from ``response.create`` to ``response.done``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.audio import AudioFormat, Encoder
from mosstalk.server.realtime.effective_session import (
    MODALITIES,
    EffectiveSession,
    ServedModel,
    instructions_of,
    shown_format,
)
from mosstalk.server.realtime.items import new_item, shown_item
from mosstalk.server.realtime.validation import WireError
from mosstalk.session.commands import CreateResponse, Message
from mosstalk.session.events import Reason, ResponseDone, ResponseStatus, Usage
from mosstalk.session.settings import ReplyMode

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
    """How a response is to be shown, whatever the session knows of it."""

    output_format: AudioFormat
    voice: str
    max_output_tokens: shown.Length
    metadata: dict[str, str] | None = None
    warnings: tuple[str, ...] = ()
    in_conversation: bool = True


def default_config(session: EffectiveSession) -> ResponseConfig:
    """How a response is shown that nobody has asked for in so many words."""
    settings = session.settings
    return ResponseConfig(session.output_format, settings.voice, settings.limits.rows or "inf")


def request_of(
    request: asked.ResponseRequest,
    session: EffectiveSession,
    served: ServedModel,
    command_id: str,
    is_read: Callable[[str], bool | None],
) -> tuple[ResponseConfig, CreateResponse]:
    """How a response that a ``response.create`` asks for is shown, and its command.

    ``is_read`` says whether the session has an item; None: there is none of that id.

    Raises:
        WireError: it cannot be served.
    """
    spoken, default = request.audio.output, default_config(session)
    voice, longest = spoken.voice_name, request.max_output_tokens
    together = request.conversation != "none"
    given, unread = _inputs(request, session, served, is_read)
    config = ResponseConfig(
        spoken.format.audio if spoken.format else default.output_format,
        default.voice if voice is None else served.voice(voice),
        default.max_output_tokens if longest is None else longest,
        request.metadata,
        _warnings(request, served, unread),
        in_conversation=together,
    )
    return config, CreateResponse(
        reply=request.output_modalities,
        instructions=instructions_of(request.instructions),
        voice=config.voice,
        max_rows=longest,
        in_conversation=together,
        input=given,
        metadata=request.metadata or {},
        command_id=command_id,
    )


def _warnings(request: asked.ResponseRequest, served: ServedModel, unread: int) -> tuple[str, ...]:
    """What is asked for and has no effect."""
    warnings = []
    if request.tools:
        warnings.append(f"tools are taken, but this model calls none ({len(request.tools)})")
    voice = request.audio.output.voice_name
    if voice is not None and served.voice(voice) != voice:
        warnings.append("the voice is unknown: the default one speaks")
    inert = [name for name in ("prompt", "temperature", "reasoning") if getattr(request, name)]
    if inert:
        warnings.append(f"without effect: {', '.join(inert)}")
    if unread:
        warnings.append(f"of the input {unread} items are not read by the model")
    return tuple(warnings)


def _inputs(
    request: asked.ResponseRequest,
    session: EffectiveSession,
    served: ServedModel,
    is_read: Callable[[str], bool | None],
) -> tuple[tuple[str | Message, ...] | None, int]:
    """What the response answers in place of the conversation, and how much is left out of it."""
    if request.input is None:
        return None, 0
    given = list[str | Message]()
    for place, each in enumerate(request.input):
        path = f"response.input[{place}]"
        known = None if each.id is None else is_read(each.id)
        if each.id is not None and known:
            given.append(each.id)
        elif not isinstance(each, asked.ItemReference):
            item = new_item(each, path, session.input_format, served.limits)
            given += [item.message] if item.message else []
        elif known is None:
            message = f"There is no item '{each.id}' to read."
            raise WireError("invalid_item_id", message, f"{path}.id")
    return tuple(given), len(request.input) - len(given)


@dataclass
class _Part:
    """A part of the item's content: sound with what is written of it, or text."""

    index: int
    spoken: bool
    written: str = ""

    @property
    def told(self) -> shown.Part:
        """As ``response.content_part`` events have it."""
        if self.spoken:
            return shown.Sound(type="audio", transcript=self.written or None)
        return shown.Text(type="text", text=self.written)

    @property
    def content(self) -> shown.Part:
        """As the item has it."""
        if self.spoken:
            return shown.Sound(type="output_audio", transcript=self.written or None)
        return shown.Text(type="output_text", text=self.written)


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
        response = response_object(
            self.response_id, self.reply, self.config, self.conversation_id, "in_progress"
        )
        return told.ResponseEvent(type="response.created", response=response)

    def item_added(self, item: shown.Item) -> told.OutputItemEvent:
        """Its item, which must come before anything of it."""
        self.item_id = item.id
        return told.OutputItemEvent(
            type="response.output_item.added", response_id=self.response_id, item=item
        )

    def begin(self) -> Iterator[told.Event]:
        """The first part, which is of the kind that was asked for."""
        yield self._open(spoken=self.reply is ReplyMode.AUDIO)

    def sound(self, pcm: bytes) -> Iterator[told.Event]:
        """More sound."""
        delta = self._encoder.push(pcm)
        if delta:
            yield told.Delta(
                type="response.output_audio.delta", **self._where(self._spoken()), delta=delta
            )

    def text(self, text: str) -> Iterator[told.Event]:
        """More text. Beside sound it is a part of its own: it is no transcript."""
        part = next((part for part in self.parts if not part.spoken), None)
        if part is None:
            yield self._open(spoken=False)
            part = self.parts[-1]
        part.written += text
        yield told.Delta(type="response.output_text.delta", **self._where(part), delta=text)

    def transcript(self, text: str) -> Iterator[told.Event]:
        """What someone has written down of the sound so far unwritten."""
        part = self._spoken()
        part.written += text
        yield told.Delta(
            type="response.output_audio_transcript.delta", **self._where(part), delta=text
        )

    def finish(self, *, cut: bool) -> Iterator[told.Event]:
        """Nothing more comes: the ends of all parts. ``cut``: what resampling held back is not
        sent."""
        for part in self.parts:
            where = self._where(part)
            if part.spoken:
                rest = "" if cut else self._encoder.finish()
                if rest:
                    yield told.Delta(type="response.output_audio.delta", **where, delta=rest)
                yield told.AudioDone(**where)
                yield told.TranscriptDone(**where, transcript=part.written)
            else:
                yield told.TextDone(**where, text=part.written)
            yield told.ContentPartDone(**where, part=part.told)

    def item_done(self, item: shown.Item) -> told.OutputItemEvent:
        """Its item as it is in the end."""
        return told.OutputItemEvent(
            type="response.output_item.done", response_id=self.response_id, item=item
        )

    @property
    def content(self) -> list[shown.Part]:
        """What the item holds so far."""
        return [part.content for part in self.parts]

    def done(self, event: ResponseDone) -> told.ResponseEvent:
        """Its last event, with what it cost and where its time went."""
        response = response_object(
            self.response_id, self.reply, self.config, self.conversation_id, event.status.value
        )
        content = {"content": self.content}
        response.output = [shown_item(item).model_copy(update=content) for item in event.items]
        response.status_details = _details(event)
        response.usage = _usage(event.usage)
        response.mosstalk = shown.ResponseVendor(
            warnings=list(self.config.warnings) or None,
            timings={
                name: None if value is None else round(value, 3)
                for name, value in vars(event.timings).items()
            },
            reason=None if event.reason is None else event.reason.value,
        )
        return told.ResponseEvent(type="response.done", response=response)

    def _open(self, *, spoken: bool) -> told.ContentPartAdded:
        part = _Part(len(self.parts), spoken)
        self.parts.append(part)
        return told.ContentPartAdded(**self._where(part), part=part.told)

    def _spoken(self) -> _Part:
        return next(part for part in self.parts if part.spoken)

    def _where(self, part: _Part) -> "_Where":
        return {
            "response_id": self.response_id,
            "item_id": self.item_id,
            "content_index": part.index,
        }


class _Where(TypedDict):
    """What events about a part have in common."""

    response_id: str
    item_id: str
    content_index: int


def response_object(
    response_id: str,
    reply: ReplyMode,
    config: ResponseConfig,
    conversation_id: str | None,
    status: str,
) -> shown.Response:
    """The protocol's response, as far as it is known before it is made."""
    output = shown.OutputObject(format=shown_format(config.output_format), voice=config.voice)
    vendor = shown.ResponseVendor(warnings=list(config.warnings)) if config.warnings else None
    return shown.Response(
        id=response_id,
        status=status,
        status_details=None,
        output=[],
        conversation_id=conversation_id,
        output_modalities=MODALITIES[reply],
        max_output_tokens=config.max_output_tokens,
        audio=shown.ResponseAudio(output=output),
        metadata=config.metadata,
        mosstalk=vendor,
    )


def _details(event: ResponseDone) -> shown.StatusDetails | None:
    """Why it ended; None for one that came to its end."""
    if event.status is ResponseStatus.COMPLETED:
        return None
    if event.status is ResponseStatus.FAILED:
        message = event.message or "the response failed"
        error = shown.Failure(type="server_error", code="server_error", message=message)
        return shown.StatusDetails(type="failed", error=error)
    reason = None if event.reason is None else _REASONS[event.reason]
    return shown.StatusDetails(type=event.status.value, reason=reason)


def _usage(usage: Usage) -> shown.Usage:
    read, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return shown.Usage(
        total_tokens=read + made,
        input_tokens=read,
        output_tokens=made,
        input_token_details=shown.InputTokens(
            text_tokens=usage.input_text,
            audio_tokens=usage.input_audio,
            cached_tokens=usage.cached,
        ),
        output_token_details=shown.OutputTokens(
            text_tokens=usage.output_text, audio_tokens=usage.output_audio
        ),
    )
