"""``POST /v1/audio/speech``: a text read aloud over HTTP, as OpenAI's API has it.

Each piece of the text is a response of a short session that the client does not see, in the place
that conversations leave. Its sound is encoded and sent as it comes; the next piece is asked for
once that of the one before has been sent.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, TypeAdapter

from mosstalk.audio.encoding import FORMATS, SoundEncoder
from mosstalk.audio.time_stretch import FASTEST, SLOWEST, TimeStretch
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import TextError
from mosstalk.offline.text_normalizer import TextRules, readable
from mosstalk.server.admission import Refusal, RefusedError, ServerContext
from mosstalk.server.realtime.session_request import Voice, named_voice, require_voice
from mosstalk.server.realtime.validation import (
    ClientObject,
    number,
    too_long,
    validate,
)
from mosstalk.server.session_reply import EVENTS, SessionReply, event
from mosstalk.server.uploads import json_fields
from mosstalk.session.commands import Message, ReplyMode
from mosstalk.session.events import AudioDelta
from mosstalk.session.sound import pcm_of, samples_of

_FAILED = Refusal(500, "server_error", "the text could not be read; the server's log says more")
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage",
     "shimmer", "verse")
)  # fmt: skip
"""Pipecat asks for no other, and LiveKit for one of these unless told: the default voice speaks."""
_SILENT = Refusal(500, "no_sound", "the model ended its replies without a sound; try other words")


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
    asked = validate(_REQUEST, json_fields(body, limits, SpeechRequest), limits)
    if len(asked.input) > limits.text_chars:
        raise too_long("input", f"{limits.text_chars} characters", len(asked.input))
    if asked.voice_name not in voices and asked.voice_name in OPENAI_VOICES:
        return asked.model_copy(update={"voice": Voice(id=context.session_defaults.voice)})
    require_voice(asked.voice_name, voices, "voice")
    return asked


class SpeechReply(SessionReply):
    """Reads a text aloud to one client."""

    param, failed = "input", _FAILED

    def __init__(self, context: ServerContext, key: str, asked: SpeechRequest) -> None:
        super().__init__(context, key)
        self._asked = asked
        self._encoder = _Encoder(asked.response_format or "mp3", asked.speed or 1.0)
        self._events = asked.stream_format == "sse"
        self.kind = EVENTS if self._events else FORMATS[self._encoder.name]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The sound, in the format that was asked for."""
        async for pcm in self._sound(await self._pieces()):
            self.unsent_s = len(pcm) / 2 / OUTPUT_RATE
            if chunk := await asyncio.to_thread(self._encoder.push, pcm):
                yield self._shown(chunk)
            self.unsent_s = 0.0
        if chunk := await asyncio.to_thread(self._encoder.finish):
            yield self._shown(chunk)
        if not self.begun:
            raise RefusedError(_SILENT)
        if self._events:
            yield event({"type": "speech.audio.done", "usage": self.tokens()})

    async def _pieces(self) -> list[str]:
        """The text as the model can read it: one piece, one response."""
        rules = self.context.engine.ready.result().text
        try:
            async with self.context.long_work:
                return await asyncio.to_thread(_pieces_of, self._asked.input, rules)
        except TextError as error:
            raise RefusedError(self.wrong(str(error))) from None

    async def _sound(self, pieces: list[str]) -> AsyncIterator[bytes]:
        """The sound of all pieces, int16, in their order."""
        settings = replace(
            self.context.session_defaults, task="speak", instructions=None, turn_detection=None,
            reply=ReplyMode.AUDIO, voice=self._asked.voice_name,
        )  # fmt: skip
        await self.open(settings)
        for piece in pieces:
            async for told in self.answers_to(Message("user", (piece,))):
                if isinstance(told, AudioDelta):
                    yield told.pcm

    def _shown(self, chunk: bytes) -> bytes:
        if not self._events:
            return chunk
        return event({"type": "speech.audio.delta", "audio": base64.b64encode(chunk).decode()})


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


def _pieces_of(text: str, rules: TextRules) -> list[str]:
    return readable(text, rules).pieces
