"""``POST /v1/audio/speech``: a text read aloud over HTTP, as OpenAI's API has it.

Each piece of the text is a response of a short session that the client does not see, in the place
that conversations leave. Its sound is encoded and sent as it comes; the next piece is asked for
once that of the one before has been sent.
"""

import asyncio
import base64
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, TypeAdapter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mosstalk.audio.encoding import FORMATS, SoundEncoder
from mosstalk.audio.time_stretch import FASTEST, SLOWEST, TimeStretch
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError, TextError
from mosstalk.offline.text_normalizer import TextRules, readable
from mosstalk.server.admission import (
    LEFT_S,
    LONGEST_NAMED,
    Refusal,
    RefusedError,
    ServerContext,
)
from mosstalk.server.engine_client import SessionProxy
from mosstalk.server.observers import SessionMetrics, SessionObserver
from mosstalk.server.realtime.session_request import Voice, named_voice
from mosstalk.server.realtime.validation import (
    ClientObject,
    WireError,
    number,
    parse_message,
    require_plain,
    too_long,
    unknown_value,
    validate,
)
from mosstalk.session import commands, events
from mosstalk.session.events import CloseReason, ErrorCode, ResponseStatus
from mosstalk.session.sound import pcm_of, samples_of

_LOG = logging.getLogger(__name__)
_EVENTS = "text/event-stream"
_BY_REQUEST = (ErrorCode.CONTEXT_FULL, ErrorCode.BAD_ITEM, ErrorCode.BAD_VALUE)
"""Errors of a session that another text would not have met with."""
_FAILED = Refusal(500, "server_error", "the text could not be read; the server's log says more")
_SILENT = Refusal(500, "no_sound", "the model ended its replies without a sound; try other words")
_STOPPED = Refusal(503, "dead", "the session has ended before the text did; ask again", 10.0)


class SpeechRequest(ClientObject):
    """What is asked for. ``instructions`` are taken, and the model follows none."""

    model: str
    input: str
    voice: Annotated[Voice | None, BeforeValidator(named_voice)] = None
    instructions: str | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float | None, number(SLOWEST, FASTEST)] = None
    stream_format: Literal["audio", "sse"] | None = None

    @property
    def voice_name(self) -> str:
        """The voice that is asked for, "" if none is."""
        return (self.voice.id if self.voice else None) or ""


_REQUEST = TypeAdapter(SpeechRequest)


def speech_request(body: bytes, context: ServerContext) -> SpeechRequest:
    """The request in a body.

    Raises:
        WireError: it is none, its text is too long or empty, or there is no such voice.
    """
    limits, voices = context.limits, context.engine.ready.result().voices
    message = parse_message(body, limits)
    require_plain(message, body)
    for name in sorted(message.keys() - SpeechRequest.model_fields.keys()):
        shown = name[:LONGEST_NAMED]
        raise WireError("unknown_parameter", f"Unknown parameter: '{shown}'.", shown)
    asked = validate(_REQUEST, message, limits)
    if len(asked.input) > limits.text_chars:
        raise too_long("input", f"{limits.text_chars} characters", len(asked.input))
    if not asked.voice_name:
        there = f"Missing required parameter: 'voice'. There are: {', '.join(voices)}."
        raise WireError("missing_required_parameter", there, "voice")
    if asked.voice_name not in voices:
        raise WireError("invalid_value", unknown_value(asked.voice_name, voices), "voice")
    return asked


class SpeechReply(Response):
    """Reads a text aloud to one client, as one of the server's connections.

    The answer begins with the first bytes of sound, so that whatever fails before has a status of
    its own. What fails later ends the connection before the body is whole; of ``sse`` it is told
    by an event. A client that goes away ends it.
    """

    def __init__(self, context: ServerContext, key: str, asked: SpeechRequest) -> None:
        super().__init__()
        self.key, self.unsent_s = key, 0.0
        self._context, self._asked = context, asked
        self._session: SessionProxy | None = None
        self._observers: list[SessionObserver] = []
        self._encoder = _Encoder(asked.response_format or "mp3", asked.speed or 1.0)
        self._events = asked.stream_format == "sse"
        self._usage = Counter[str]()
        self._begun = False
        self._sent_away = asyncio.Event()
        self._reason: str = CloseReason.CLIENT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the session is over when this returns."""
        context = self._context
        if refusal := context.refuse_now(self.key):  # since the request began to come
            context.note_refusal(refusal)
            await refusal.answer()(scope, receive, send)
            return
        context.connections.add(self)
        speaking = asyncio.create_task(self._speak(scope, receive, send))
        leaving = asyncio.create_task(_gone(receive))
        ending = asyncio.create_task(self._sent_away.wait())
        tasks = (speaking, leaving, ending)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not speaking.done():
                self._reason = "vanished" if leaving.done() else "drain"
            elif speaking.exception():
                self._reason = "fault"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_session()
            context.leave(self)
            for observer in self._observers:
                observer.on_close(self._reason, self._session.rows if self._session else None)
        if not speaking.cancelled():
            speaking.result()

    def drain(self) -> None:
        """Nothing: the text has an end."""

    def send_away(self) -> None:
        """End now, because the server does."""
        self._sent_away.set()

    async def _speak(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as long as the client takes it off."""
        try:
            await self._answer(scope, receive, send)
        except TimeoutError:
            self._reason = "stalled"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the sound, or with why there is none."""
        try:
            async for chunk in self._chunks():
                await self._send(send, chunk)
            if not self._begun:
                raise RefusedError(_SILENT)
            await self._send(send, self._done(), last=True)
        except RefusedError as error:
            await self._refuse(error.refusal, scope, receive, send)

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal.status >= 500 and self._session:
            self._reason = CloseReason.ERROR
            _LOG.warning("a text was not read to its end: %s", refusal.message)
        if not self._begun:
            await refusal.answer()(scope, receive, send)
        elif self._events:
            told = {"type": "error", "error": refusal.error()}
            await self._send(send, _event(told), last=True)

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The body of the answer, as it is made.

        Raises:
            RefusedError: the text cannot be read, or not now.
        """
        async for pcm in self._sound(await self._pieces()):
            self.unsent_s = len(pcm) / 2 / OUTPUT_RATE
            if chunk := await asyncio.to_thread(self._encoder.push, pcm):
                yield self._shown(chunk)
            self.unsent_s = 0.0
        if chunk := await asyncio.to_thread(self._encoder.finish):
            yield self._shown(chunk)

    async def _pieces(self) -> list[str]:
        """The text as the model can read it: one piece, one response."""
        rules = self._context.engine.ready.result().text
        try:
            async with self._context.long_work:
                return await asyncio.to_thread(_pieces_of, self._asked.input, rules)
        except TextError as error:
            raise RefusedError(_wrong(str(error))) from None

    async def _sound(self, pieces: list[str]) -> AsyncIterator[bytes]:
        """The sound of all pieces, int16, in their order."""
        session = await self._open()
        left = iter(pieces)
        self._ask(session, next(left))
        async for event in session:
            for observer in self._observers:
                observer.on_event(event)
            if isinstance(event, events.AudioDelta):
                yield event.pcm
            elif isinstance(event, events.ErrorRaised):
                raise RefusedError(_refusal_of(event))
            elif isinstance(event, events.Closed):
                raise RefusedError(_STOPPED)
            elif isinstance(event, events.ResponseDone):
                self._usage.update(_tokens(event.usage))
                if event.status is ResponseStatus.FAILED:
                    raise RefusedError(_FAILED)
                piece = next(left, None)
                if piece is None:
                    return
                self._ask(session, piece)

    async def _open(self) -> SessionProxy:
        """A session that reads aloud, in the voice that was asked for."""
        context = self._context
        settings = replace(
            context.session_defaults, task="speak", instructions=None, turn_detection=None,
            reply=commands.ReplyMode.AUDIO, voice=self._asked.voice_name,
        )  # fmt: skip
        settings = context.fitted(settings)
        self._observers.append(SessionMetrics(context.metrics, settings, self.key))
        if context.recorder:
            info = context.engine.ready.result()
            self._observers.append(context.recorder.open(settings, info))
        try:
            self._session = await context.engine.open(settings, rows=context.recorder is not None)
        except MosstalkError as error:
            self._observers.clear()
            refusal = Refusal.of(error)
            if isinstance(error, EngineFullError | EngineStoppedError):
                context.note_refusal(refusal)
            raise RefusedError(refusal) from None
        return self._session

    def _ask(self, session: SessionProxy, piece: str) -> None:
        message = commands.Message("user", (piece,))
        command = commands.CreateResponse(in_conversation=False, input=(message,))
        for observer in self._observers:
            observer.on_command(command)
        session.tell(command)

    async def _close_session(self) -> None:
        """End the session and see it end, so that its blocks are free."""
        session = self._session
        if session is None:
            return
        session.close(self._reason)
        try:
            async with asyncio.timeout(2 * LEFT_S):
                async for event in session:
                    for observer in self._observers:
                        observer.on_event(event)
        except TimeoutError:
            _LOG.error("a session that reads aloud did not end")

    # To the client.

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        """Send more of the body, after the head; raise TimeoutError for who takes nothing off."""
        async with asyncio.timeout(self._context.limits.stalled_s):
            if not self._begun:
                self._begun = True
                kind = _EVENTS if self._events else FORMATS[self._encoder.name]
                headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": not last})

    def _shown(self, chunk: bytes) -> bytes:
        if not self._events:
            return chunk
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(chunk).decode()})

    def _done(self) -> bytes:
        """What follows the sound."""
        if not self._events:
            return b""
        usage = {name: self._usage[name] for name in ("input_tokens", "output_tokens")}
        usage["total_tokens"] = sum(usage.values())
        return _event({"type": "speech.audio.done", "usage": usage})


class _Encoder:
    """The model's sound to what is sent; for another thread."""

    def __init__(self, name: str, speed: float) -> None:
        self.name = name
        self._encoder = SoundEncoder(name, OUTPUT_RATE)
        self._stretch = None if speed == 1 else TimeStretch(speed, OUTPUT_RATE)
        self._pushed = False

    def push(self, pcm: bytes) -> bytes:
        """What follows with more sound."""
        if self._stretch:
            pcm = pcm_of(self._stretch.push(samples_of(np.frombuffer(pcm, "<i2"))))
        self._pushed = self._pushed or bool(pcm)
        return self._encoder.push(pcm) if pcm else b""

    def finish(self) -> bytes:
        """The end; nothing where there was no sound."""
        rest = pcm_of(self._stretch.finish()) if self._stretch else b""
        if not (self._pushed or rest):
            return b""
        return (self._encoder.push(rest) if rest else b"") + self._encoder.finish()


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _pieces_of(text: str, rules: TextRules) -> list[str]:
    return readable(text, rules).pieces


def _event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()


def _tokens(usage: events.Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.input_text + usage.input_audio,
        "output_tokens": usage.output_text + usage.output_audio,
    }


def _wrong(message: str) -> Refusal:
    return Refusal(400, "invalid_value", message, param="input")


def _refusal_of(event: events.ErrorRaised) -> Refusal:
    """What an error of the session means to who asked for the text."""
    if event.code is ErrorCode.ENGINE_FULL:
        return Refusal(503, "full", event.message, event.retry_after_s or 1.0)
    if event.code is ErrorCode.ENGINE_STOPPED:
        return replace(_STOPPED, message=event.message)
    return _wrong(event.message) if event.code in _BY_REQUEST else _FAILED
