"""One response on the wire, from ``response.created`` to ``response.done``."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mosstalk.server.realtime.audio import Encoder
from mosstalk.server.realtime.errors import VENDOR
from mosstalk.server.realtime.requests import Wish
from mosstalk.session.events import Reason, ResponseDone, ResponseStatus, Timings, Usage
from mosstalk.session.settings import ReplyMode

Wire = dict[str, Any]
_REASONS = {
    Reason.TURN_DETECTED: "turn_detected",
    Reason.CLIENT_CANCELLED: "client_cancelled",
    Reason.SESSION_CLOSED: "client_cancelled",
    Reason.MAX_LENGTH: "max_output_tokens",
    Reason.CONTEXT: "max_output_tokens",
    Reason.REPETITION: "max_output_tokens",
}
"""The protocol knows four reasons and clients no others; the true one stands beside it."""


@dataclass
class _Part:
    """A part of the item's content: sound with what is written of it, or text."""

    index: int
    spoken: bool
    written: str = ""

    @property
    def shown(self) -> Wire:
        """As ``response.content_part`` events have it."""
        if self.spoken:
            return {"type": "audio", "transcript": self.written or None}
        return {"type": "text", "text": self.written}

    @property
    def content(self) -> Wire:
        """As the item has it."""
        if self.spoken:
            return {"type": "output_audio", "transcript": self.written or None}
        return {"type": "output_text", "text": self.written}


@dataclass
class OpenResponse:
    """A response that is being made; every method gives the events that are due."""

    response_id: str
    reply: ReplyMode
    wish: Wish
    conversation_id: str | None
    item_id: str = ""
    parts: list[_Part] = field(default_factory=list)
    _encoder: Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = Encoder(self.wish.output_format)

    def created(self) -> Wire:
        """``response.created``."""
        return {"type": "response.created", "response": self._shown("in_progress", None)}

    def item_added(self, item: Wire) -> Wire:
        """``response.output_item.added``, which must come before anything of the item."""
        self.item_id = str(item["id"])
        return self._event("response.output_item.added", item=item, item_id=None)

    def begin(self) -> Iterator[Wire]:
        """The first part, which is of the kind that was asked for."""
        yield self._open(spoken=self.reply is ReplyMode.AUDIO)

    def sound(self, pcm: bytes) -> Iterator[Wire]:
        """More sound."""
        delta = self._encoder.push(pcm)
        if delta:
            yield self._delta("response.output_audio.delta", self._spoken(), delta)

    def text(self, text: str) -> Iterator[Wire]:
        """More text. Beside sound it is a part of its own: it is no transcript."""
        part = next((part for part in self.parts if not part.spoken), None)
        if part is None:
            yield self._open(spoken=False)
            part = self.parts[-1]
        part.written += text
        yield self._delta("response.output_text.delta", part, text)

    def transcript(self, text: str) -> Iterator[Wire]:
        """What someone has written down of the sound so far unwritten."""
        part = self._spoken()
        part.written += text
        yield self._delta("response.output_audio_transcript.delta", part, text)

    def finish(self, *, cut: bool) -> Iterator[Wire]:
        """Nothing more comes: the ends of all parts. ``cut``: what resampling held back is not
        sent."""
        for part in self.parts:
            where = {"content_index": part.index}
            if part.spoken:
                rest = "" if cut else self._encoder.finish()
                if rest:
                    yield self._delta("response.output_audio.delta", part, rest)
                yield self._event("response.output_audio.done", **where)
                yield self._event(
                    "response.output_audio_transcript.done", transcript=part.written, **where
                )
            else:
                yield self._event("response.output_text.done", text=part.written, **where)
            yield self._event("response.content_part.done", part=part.shown, **where)

    def item_done(self, item: Wire) -> Wire:
        """``response.output_item.done``."""
        return self._event("response.output_item.done", item=item, item_id=None)

    @property
    def content(self) -> list[Wire]:
        """What the item holds so far."""
        return [part.content for part in self.parts]

    def done(self, event: ResponseDone, output: list[Wire]) -> Wire:
        """``response.done``, with what it cost and where its time went."""
        response = self._shown(str(event.status), _details(event), output)
        response["usage"] = _usage(event.usage)
        vendor = response.setdefault(VENDOR, {})
        vendor["timings"] = _timings(event.timings)
        if event.reason is not None:
            vendor["reason"] = str(event.reason)
        return {"type": "response.done", "response": response}

    def _open(self, *, spoken: bool) -> Wire:
        part = _Part(len(self.parts), spoken)
        self.parts.append(part)
        return self._event("response.content_part.added", content_index=part.index, part=part.shown)

    def _spoken(self) -> _Part:
        return next(part for part in self.parts if part.spoken)

    def _delta(self, kind: str, part: _Part, delta: str) -> Wire:
        return self._event(kind, content_index=part.index, delta=delta)

    def _event(self, kind: str, **more: Any) -> Wire:
        event = {
            "type": kind,
            "response_id": self.response_id,
            "item_id": self.item_id,
            "output_index": 0,
            **more,
        }
        return {name: value for name, value in event.items() if value is not None}

    def _shown(self, status: str, details: Wire | None, output: list[Wire] | None = None) -> Wire:
        return response_object(
            self.response_id, self.reply, self.wish, self.conversation_id, status, details, output
        )


def response_object(
    response_id: str,
    reply: ReplyMode,
    wish: Wish,
    conversation_id: str | None,
    status: str,
    details: Wire | None,
    output: list[Wire] | None = None,
) -> Wire:
    """The protocol's response; ``output`` are its items."""
    response = {
        "id": response_id,
        "object": "realtime.response",
        "status": status,
        "status_details": details,
        "output": output or [],
        "conversation_id": conversation_id,
        **wish.shown(reply),
        "usage": None,
    }
    if wish.warnings:
        response[VENDOR] = {"warnings": list(wish.warnings)}
    return response


def _details(event: ResponseDone) -> Wire | None:
    """Why it ended; None for one that came to its end."""
    if event.status is ResponseStatus.COMPLETED:
        return None
    details: Wire = {"type": str(event.status)}
    if event.status is ResponseStatus.FAILED:
        details["error"] = {
            "type": "server_error",
            "code": "server_error",
            "message": event.message or "the response failed",
        }
    elif event.reason is not None:
        details["reason"] = _REASONS[event.reason]
    return details


def _usage(usage: Usage) -> Wire:
    """Rows of the grid stand for tokens; of what was read before, its kind is not known."""
    read, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return {
        "total_tokens": read + made,
        "input_tokens": read,
        "output_tokens": made,
        "input_token_details": {
            "text_tokens": usage.input_text,
            "audio_tokens": usage.input_audio,
            "cached_tokens": usage.cached,
        },
        "output_token_details": {
            "text_tokens": usage.output_text,
            "audio_tokens": usage.output_audio,
        },
    }


def _timings(timings: Timings) -> Wire:
    return {
        name: None if value is None else round(value, 3) for name, value in vars(timings).items()
    }
