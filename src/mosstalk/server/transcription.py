"""``POST /v1/audio/transcriptions``: a sound file written down, as OpenAI's API has it.

The file is decoded and cut into pieces as they are needed. Each is written down by the server's
transcriber if it has one, otherwise by the model: as a response of a short session, which the
client does not see.
"""

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter

from mosstalk.audio.sound import SHORTEST_MS, SILENCE_PEAK, Samples, audio_blocks
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import AudioError
from mosstalk.offline.pieces import LONGEST_S, cut_blocks
from mosstalk.server.admission import LONGEST_NAMED, Refusal, RefusedError
from mosstalk.server.captions import BUSY, GONE, Transcriber
from mosstalk.server.limits import Limits
from mosstalk.server.realtime.validation import (
    ClientObject,
    WireError,
    fault,
    number,
    too_long,
    validate,
)
from mosstalk.server.session_reply import EVENTS, UploadReply, event, under
from mosstalk.server.uploads import Part, form_parts
from mosstalk.session.commands import Message, ReplyMode, Sound
from mosstalk.session.events import TextDelta
from mosstalk.session.sound import pcm_of

_FAILED = Refusal(500, "server_error", "the sound was not written down; the server's log says more")
_BUSY = Refusal(503, "transcriber_busy", BUSY, 2.0)
_GONE = Refusal(503, "transcriber", f"{GONE}: try again in a moment", 5.0)
_CODE_S = 0.08
"""Sound that one row of the context holds."""
_BLANKS = re.compile(r"\s+")
_UNKNOWN = "unknown"
_UNMEASURED = ("avg_logprob", "compression_ratio", "no_speech_prob")
_PLAIN = "text/plain; charset=utf-8"


def _truth(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value)


def _number(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        raise fault(f"a number, not {value[:80]!r}.") from None


def _segments_alone(value: Any) -> Any:
    if "word" in value:
        message = "Words are not timed here: 'timestamp_granularities' takes 'segment' alone."
        raise fault(message, "unknown_value")
    return value


def _nothing_more(value: Any) -> Any:
    if value:
        message = f"Nothing can be included here, and no '{value[0][:80]}'."
        raise fault(message, "unknown_value")
    return value


class TranscriptionRequest(ClientObject):
    """What is asked for, beside the file. ``prompt`` is taken, and the model follows none."""

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float | None, number(0, 1), BeforeValidator(_number)] = None
    stream: Annotated[bool, BeforeValidator(_truth)] = False
    chunking_strategy: Literal["auto"] | None = None
    timestamp_granularities: Annotated[
        list[Literal["segment"]], BeforeValidator(_segments_alone)
    ] = Field(default_factory=list)
    include: Annotated[list[str], BeforeValidator(_nothing_more)] = Field(default_factory=list)


_REQUEST = TypeAdapter(TranscriptionRequest)
_LISTS = ("timestamp_granularities", "include")
_STREAMED = ("json", "text")
_FILE = "file"


def transcription_request(parts: list[Part], limits: Limits) -> tuple[TranscriptionRequest, bytes]:
    """The request in the parts of a form, and the file's bytes.

    Raises:
        WireError: a field is missing, unknown, twice there, or of no such value.
    """
    fields, file = dict[str, Any](), None
    for part in parts:
        name = part.name.removesuffix("[]")
        if name in fields or (name == _FILE and file is not None):
            if name not in _LISTS:
                raise WireError("invalid_form", f"'{name}' is there twice.", name)
        elif name not in (_FILE, *TranscriptionRequest.model_fields):
            shown = name[:LONGEST_NAMED]
            raise WireError("unknown_parameter", f"Unknown parameter: '{shown}'.", shown)
        if name == _FILE:
            file = part.content
        elif name in _LISTS:
            fields.setdefault(name, []).append(_text(part, limits))
        else:
            fields[name] = _text(part, limits)
    asked = validate(_REQUEST, fields, limits)
    if asked.stream and asked.response_format not in _STREAMED:
        names = " and ".join(_STREAMED)
        raise WireError("invalid_value", f"'stream' goes with {names} alone.", "response_format")
    if file is None:
        raise WireError("missing_required_parameter", f"Missing required parameter: '{_FILE}'.",
                        _FILE)  # fmt: skip
    return asked, file


def _text(part: Part, limits: Limits) -> str:
    if len(part.content) > limits.text_chars:
        raise too_long(part.name, f"{limits.text_chars} bytes", len(part.content))
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise WireError("invalid_value", f"'{part.name}' is no UTF-8.", part.name) from None


@dataclass(frozen=True)
class _Segment:
    """A piece of the sound that has words; its times are in seconds."""

    id: int
    start: float
    end: float
    text: str


@dataclass
class _Transcript:
    """What was written down so far: blanks and line ends are single blanks, none at its ends."""

    text: str = ""
    segments: list[_Segment] = field(default_factory=list)
    duration_s: float = 0.0
    _blank: str = ""
    _begun_at: int = 0

    def begin(self) -> None:
        """A new piece."""
        self._begun_at, self._blank = len(self.text), " "

    def push(self, text: str) -> str:
        """Add text; what is new of the whole now."""
        joined = _BLANKS.sub(" ", self._blank + text)
        new = joined.rstrip() if self.text else joined.strip()
        self._blank = " " if joined.endswith(" ") else ""
        self.text += new
        return new

    def end(self, start_s: float, end_s: float) -> None:
        """The piece is whole; it lasted from ``start_s`` to ``end_s``."""
        if said := self.text[self._begun_at :].strip():
            times = round(start_s, 3), round(end_s, 3)
            self.segments.append(_Segment(len(self.segments), *times, said))


class TranscriptionReply(UploadReply):
    """Reads a client's file, and answers with what is said in it."""

    param, failed = _FILE, _FAILED

    def read(self, body: bytes, content_type: str) -> None:
        """Take the request that is in a form."""
        parts = form_parts(content_type, body)
        self._asked, self._file = transcription_request(parts, self.context.limits)
        kind = "application/json" if self._asked.response_format.endswith("json") else _PLAIN
        self.kind = EVENTS if self._asked.stream else kind
        self._whole = _Transcript()

    async def chunks(self) -> AsyncIterator[bytes]:
        """What is said: as events while it is written down, or as a document at the end."""
        whole, streams = self._whole, self._asked.stream
        async for start_s, piece in self._pieces():
            whole.duration_s = start_s + len(piece) / INPUT_RATE
            if np.abs(piece).max() < SILENCE_PEAK:
                continue
            whole.begin()
            async for text in self._written(piece):
                if (new := whole.push(text)) and streams:
                    yield event({"type": "transcript.text.delta", "delta": new})
            whole.end(start_s, whole.duration_s)
        if streams:
            usage = {} if self._transcriber else {"usage": self._usage()}
            yield event({"type": "transcript.text.done", "text": whole.text} | usage)
        else:
            yield self._document()

    async def _pieces(self) -> AsyncIterator[tuple[float, Samples]]:
        """The sound at 16 kHz in pieces that the model can hear, each with its start in seconds."""
        context, place = self.context, 0
        rows = context.engine.ready.result().context_rows
        blocks = audio_blocks(self._file, INPUT_RATE, context.limits.upload_sound_s)
        pieces = cut_blocks(blocks, INPUT_RATE, min(LONGEST_S, _CODE_S * rows / 2))
        while True:
            try:
                next_piece = partial(asyncio.to_thread, next, pieces, None)
                piece = await under(context.long_work, next_piece)
            except AudioError as error:
                raise RefusedError(self.wrong(str(error))) from None
            if piece is None:
                return
            if len(piece) < SHORTEST_MS * INPUT_RATE // 1000:
                message = f"file: too short to be heard; send at least {SHORTEST_MS} ms"
                raise RefusedError(replace(self.wrong(message), reason="audio_too_short"))
            yield place / INPUT_RATE, piece
            place += len(piece)

    async def _written(self, piece: Samples) -> AsyncIterator[str]:
        """What is said in a piece, as it is written."""
        pcm = await asyncio.to_thread(pcm_of, piece)
        if transcriber := self._transcriber:
            write = partial(transcriber.write, pcm, INPUT_RATE, self._asked.language)
            written = await under(self.context.transcribing, write)
            if written.failed:
                raise RefusedError({BUSY: _BUSY, GONE: _GONE}.get(written.failed, _FAILED))
            yield written.text
            return
        if not self.has_session:
            await self._open()
        async for told in self.answers_to(Message("user", (Sound(pcm, INPUT_RATE),))):
            if isinstance(told, TextDelta):
                yield told.text

    @property
    def _transcriber(self) -> Transcriber | None:
        """Who writes the file down; None: the model, as nobody else hears that language."""
        found = self.context.transcriber
        return found if found and found.info.hears(self._asked.language) else None

    async def _open(self) -> None:
        defaults, chosen = self.context.session_defaults, self._asked.temperature
        sampling = defaults.sampling
        if chosen is not None:
            sampling = replace(sampling, temperature=chosen, greedy=chosen == 0)
        settings = replace(
            defaults, task="transcribe", instructions=None, turn_detection=None,
            reply=ReplyMode.TEXT, sampling=sampling,
        )  # fmt: skip
        await self.open(settings)

    # The answer.

    def _document(self) -> bytes:
        """The answer in the format that was asked for."""
        whole, kind = self._whole, self._asked.response_format
        if kind == "text":
            return f"{whole.text}\n".encode()
        if kind == "srt":
            return b"".join(_cue(each).encode() for each in whole.segments)
        if kind == "vtt":
            return "\n\n".join(["WEBVTT", *map(_web_cue, whole.segments), ""]).encode()
        if kind == "json":
            return json.dumps({"text": whole.text, "usage": self._usage()}).encode()
        # What nobody measures is 0, as clients expect a number.
        unknown = dict.fromkeys(_UNMEASURED, 0.0) | {"seek": 0, "tokens": list[int]()}
        unknown["temperature"] = self._asked.temperature or 0.0
        document = {
            "task": "transcribe",
            "language": self._asked.language or _UNKNOWN,
            "duration": round(whole.duration_s, 3),
            "text": whole.text,
            "segments": [asdict(each) | unknown for each in whole.segments],
            "usage": self._duration(),
        }
        return json.dumps(document).encode()

    def _usage(self) -> dict[str, Any]:
        if self._transcriber:
            return self._duration()
        heard = {"audio_tokens": self.usage["input_audio"], "text_tokens": self.usage["input_text"]}
        return {"type": "tokens", **self.tokens(), "input_token_details": heard}

    def _duration(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self._whole.duration_s, 3)}


def _clock(seconds: float, comma: str) -> str:
    minutes, ms = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{comma}{ms % 1000:03}"


def _cue(segment: _Segment) -> str:
    """Of SubRip."""
    times = f"{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}"
    return f"{segment.id + 1}\n{times}\n{segment.text.replace('-->', '->')}\n\n"


def _web_cue(segment: _Segment) -> str:
    """Of WebVTT."""
    times = f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}"
    return f"{times}\n{html.escape(segment.text, quote=False)}"
