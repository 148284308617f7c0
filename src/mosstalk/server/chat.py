"""``POST /v1/chat/completions``: the next turn of a conversation, as OpenAI's API has it.

The client sends the whole conversation each time. Its messages are laid out as the items of a
Realtime session are, and answered by a response of a short session, which the client does not see.
"""

import asyncio
import base64
import json
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex
from typing import Any

from mosstalk.audio.encoding import sound_file
from mosstalk.audio.sound import SHORTEST_MS, audio_blocks
from mosstalk.constants import CODES_PER_SECOND, INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import AudioError
from mosstalk.server.admission import LONGEST_NAMED, Refusal, RefusedError, ServerContext
from mosstalk.server.chat_request import (
    SOUND,
    STREAMED,
    AudioPart,
    ChatMessage,
    TextPart,
    chat_request,
)
from mosstalk.server.realtime.items import joined_parts
from mosstalk.server.realtime.session_config import instructions_of
from mosstalk.server.realtime.validation import WireError
from mosstalk.server.session_reply import EVENTS, UploadReply, event, under
from mosstalk.session.commands import Message, ReplyMode, SessionSettings
from mosstalk.session.events import (
    AudioDelta,
    ResponseDone,
    ResponseStatus,
    TextDelta,
    new_id,
)
from mosstalk.session.sound import pcm_of

_FAILED = Refusal(500, "server_error", "no answer was made; the server's log says more")


# Replies that a later request may name.


class SpokenReplies:
    """The words of spoken replies by id, each for the key that it was made for.

    They are kept for ``KEPT_S``, and of those of one key the latest ``most_chars`` characters.
    """

    KEPT_S = 3600
    _COST = 256
    """Characters that a reply counts beside its words."""

    def __init__(self, most_chars: int, now: Callable[[], float] = time.time) -> None:
        """``now`` is the time in seconds since 1970."""
        self._most, self._now = most_chars, now
        self._kept = defaultdict[str, OrderedDict[str, tuple[str, int]]](OrderedDict)

    def keep(self, key: str, reply_id: str, words: str) -> int:
        """Keep a reply; until when, in seconds since 1970."""
        expires_at, kept = int(self._now()) + self.KEPT_S, self._kept[key]
        kept[reply_id] = words, expires_at
        self._forget(kept)
        return expires_at

    def words_of(self, key: str, reply_id: str) -> str | None:
        """What a reply said; None if there is none of that id, or no longer."""
        kept = self._kept.get(key, OrderedDict())
        self._forget(kept)
        return kept.get(reply_id, (None, 0))[0]

    def _forget(self, kept: OrderedDict[str, tuple[str, int]]) -> None:
        """Drop what has expired, and the oldest that is too much."""
        now, chars = self._now(), sum(self._COST + len(words) for words, _ in kept.values())
        while kept:
            oldest, (words, expires_at) = next(iter(kept.items()))
            if chars <= self._most and now < expires_at:
                return
            del kept[oldest]
            chars -= self._COST + len(words)


# The reply.


@dataclass
class _MadeReply:
    """What was made so far; ``transcript`` is what the sound says, ``text`` what nobody speaks."""

    text: str = ""
    transcript: str = ""
    pcm: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None


class ChatReply(UploadReply):
    """Answers one client's conversation."""

    param, failed = "messages", _FAILED

    def __init__(self, context: ServerContext, key: str, spoken: SpokenReplies) -> None:
        """``spoken``: the replies that a message may name."""
        super().__init__(context, key)
        self._spoken, self._reply = spoken, _MadeReply()
        self._heard_s = 0.0
        """Length of the sound that was read so far."""
        self._head = {
            "id": f"chatcmpl-{token_hex(12)}",
            "created": int(time.time()),
            "model": context.model,
        }
        self._audio_id = new_id("audio")

    def read(self, body: bytes, _: str) -> None:
        """Take the request that is in a body, whatever its type is said to be."""
        self._asked = chat_request(body, self.context)
        self.kind = EVENTS if self._asked.stream else "application/json"

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer: as events while it is made, or as a document at its end."""
        asked, expires = self._asked, dict[str, int]()
        async for made in self._made():
            if asked.stream:
                if not self.begun:
                    yield self._chunk(self._first_delta())
                yield self._chunk(self._delta(made))
            self.unsent_s = 0.0
        if asked.is_spoken:
            kept_until = self._spoken.keep(self.key, self._audio_id, self._reply.transcript)
            expires = {"expires_at": kept_until}
        if not asked.stream:
            yield await self._document(expires)
            return
        if not self.begun:
            yield self._chunk(self._first_delta())
        if expires:
            yield self._chunk({"audio": expires})
        yield self._chunk({}, self._reply.finish_reason)
        if self._shows_usage:
            yield event(self._shown("chat.completion.chunk", choices=[], usage=self._usage()))
        yield b"data: [DONE]\n\n"

    async def _made(self) -> AsyncIterator[TextDelta | AudioDelta]:
        """The reply while it is made; what is told has been added to the answer before."""
        reply, context = self._reply, self.context
        instructions, messages = await self._read_messages()
        await self.open(self._settings(instructions))
        async for told in self.answers_to(*messages):
            if isinstance(told, ResponseDone):
                completed = told.status is ResponseStatus.COMPLETED
                reply.finish_reason = "stop" if completed else "length"
            elif isinstance(told, TextDelta):
                if told.spoken:
                    reply.transcript += told.text
                else:
                    reply.text += told.text
                yield told
            elif isinstance(told, AudioDelta):
                reply.pcm += told.pcm
                yield told
        if context.transcriber and reply.pcm and not reply.transcript:
            write = partial(context.transcriber.write, bytes(reply.pcm), OUTPUT_RATE)
            reply.transcript = (await under(context.transcribing, write)).text
            if reply.transcript:
                yield TextDelta("", "", reply.transcript, spoken=True)

    def _settings(self, instructions: str | None) -> SessionSettings:
        asked, defaults = self._asked, self.context.session_defaults
        chosen = {
            name: value
            for name in ("temperature", "top_p", "seed")
            if (value := getattr(asked, name)) is not None
        }
        if asked.temperature is not None:
            chosen["greedy"] = asked.temperature == 0
        rows = asked.max_completion_tokens or asked.max_tokens or defaults.limits.rows
        voice = asked.audio.voice if asked.audio else None
        return replace(
            defaults,
            instructions=instructions_of(instructions) or defaults.instructions,
            turn_detection=None,
            reply=ReplyMode.AUDIO if asked.is_spoken else ReplyMode.TEXT,
            voice=(voice and voice.id) or defaults.voice,
            sampling=replace(defaults.sampling, **chosen),
            limits=replace(defaults.limits, rows=rows),
        )

    # What is answered.

    async def _read_messages(self) -> tuple[str | None, tuple[Message, ...]]:
        """The instructions, which a system message that comes first gives, and all that is said.

        Raises:
            RefusedError: something cannot be heard or read, or nobody has said anything.
        """
        try:
            read = [
                await self._message(each, f"messages[{place}]")
                for place, each in enumerate(self._asked.messages)
            ]
            self._asked.messages.clear()  # sound takes memory
        except WireError as error:
            raise RefusedError(Refusal.of(error)) from None
        instructions = None
        if read and read[0].role == "system":
            instructions = "\n".join(part for part in read.pop(0).parts if isinstance(part, str))
        messages = tuple(each for each in read if each.parts)
        if not any(each.role == "user" for each in messages):
            raise RefusedError(self.wrong("messages: nothing of a user's is there to be answered"))
        return instructions, messages

    async def _message(self, message: ChatMessage, path: str) -> Message:
        """A message as the model gets it: without parts if it gets nothing of it."""
        parts, role = list[str | bytes](), message.role
        if role in ("tool", "function"):
            return Message(role, ())
        for place, part in enumerate(message.content):
            if isinstance(part, AudioPart):
                where = f"{path}.content[{place}]"
                if role != "user":
                    text = f"Invalid '{where}': the sound of a user alone can be heard."
                    raise WireError("invalid_value", text, where)
                parts.append(await self._sound(part.input_audio.data, f"{where}.input_audio.data"))
            else:
                parts.append(part.text if isinstance(part, TextPart) else part.refusal)
        if message.audio and role == "assistant":
            parts.append(self._words_of(message.audio.id, f"{path}.audio.id"))
        role = "system" if role == "developer" else role
        return Message(role, tuple(joined_parts([each for each in parts if each], INPUT_RATE)))

    def _words_of(self, reply_id: str, path: str) -> str:
        """What an earlier reply said."""
        words, shown = self._spoken.words_of(self.key, reply_id), reply_id[:LONGEST_NAMED]
        if words is None:
            message = (
                f"There is no reply '{shown}' here: it has expired, was not made to its end, or "
                "belongs to another key. Send its transcript as 'content'."
            )
            raise WireError("audio_not_found", message, path)
        if not words:
            message = (
                f"What was said in the reply '{shown}' is not known: this model does not write "
                "it, and this server has no --transcriber. Leave the message out."
            )
            raise WireError("audio_without_transcript", message, path)
        return words

    async def _sound(self, encoded: str, path: str) -> bytes:
        """A sound file at 16 kHz, of what length of sound the model's context could hold."""
        context, pcm = self.context, bytearray()
        rows, limits = context.engine.ready.result().context_rows, context.limits
        longest_s = min(
            rows / CODES_PER_SECOND, limits.audio_bytes / 2 / INPUT_RATE - self._heard_s
        )
        try:
            file = await asyncio.to_thread(base64.b64decode, encoded, validate=True)
            blocks = audio_blocks(file, INPUT_RATE, longest_s)
            next_block = partial(asyncio.to_thread, next, blocks, None)
            while (block := await under(context.long_work, next_block)) is not None:
                pcm += pcm_of(block)
        except AudioError as error:
            found = str(error).removeprefix("file: ")
            raise WireError("invalid_value", f"Invalid '{path}': {found}.", path) from None
        except ValueError as error:
            message = f"Invalid '{path}'. Expected base64-encoded audio bytes: {error}."
            raise WireError("invalid_value", message, path) from None
        self._heard_s += len(pcm) / 2 / INPUT_RATE
        if len(pcm) < SHORTEST_MS * 2 * INPUT_RATE // 1000:
            message = f"Invalid '{path}': too short to be heard; send at least {SHORTEST_MS} ms."
            raise WireError("audio_too_short", message, path)
        return bytes(pcm)

    # The reply.

    def _first_delta(self) -> dict[str, Any]:
        """Who speaks, and for sound the id of it: clients join what comes twice."""
        if not self._asked.is_spoken:
            return {"role": "assistant", "content": "", "refusal": None}
        audio = {"id": self._audio_id, "transcript": ""}
        return {"role": "assistant", "content": None, "refusal": None, "audio": audio}

    def _delta(self, made: TextDelta | AudioDelta) -> dict[str, Any]:
        if isinstance(made, AudioDelta):
            self.unsent_s = made.audio_ms / 1000
            return {"audio": {SOUND: base64.b64encode(made.pcm).decode()}}
        return {"audio": {"transcript": made.text}} if made.spoken else {"content": made.text}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {
            "index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None,
        }  # fmt: skip
        usage = {"usage": None} if self._shows_usage else {}
        return event(self._shown("chat.completion.chunk", choices=[choice], **usage))

    async def _document(self, expires: dict[str, int]) -> bytes:
        asked, reply = self._asked, self._reply
        message: dict[str, Any] = {
            "role": "assistant", "content": reply.text, "refusal": None, "annotations": [],
        }  # fmt: skip
        if asked.is_spoken:
            assert asked.audio, "it was required"
            name = "pcm" if asked.audio.format == STREAMED else asked.audio.format
            make = partial(sound_file, name, bytes(reply.pcm), OUTPUT_RATE)
            file = await asyncio.to_thread(make) if reply.pcm else b""
            message["content"] = reply.text or None
            message["audio"] = {
                "id": self._audio_id,
                SOUND: base64.b64encode(file).decode(),
                "transcript": reply.transcript,
                **expires,
            }
        choice = {
            "index": 0, "message": message, "finish_reason": reply.finish_reason,
            "logprobs": None,
        }  # fmt: skip
        shown = self._shown("chat.completion", choices=[choice], usage=self._usage())
        return json.dumps(shown).encode()

    def _shown(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, **fields}

    @property
    def _shows_usage(self) -> bool:
        options = self._asked.stream_options
        return bool(options and options.include_usage)

    def _usage(self) -> dict[str, Any]:
        counted, tokens = self.usage, self.tokens()
        return {
            "prompt_tokens": tokens["input_tokens"],
            "completion_tokens": tokens["output_tokens"],
            "total_tokens": tokens["total_tokens"],
            "prompt_tokens_details": {
                "text_tokens": counted["input_text"],
                "audio_tokens": counted["input_audio"],
                "cached_tokens": counted["cached"],
            },
            "completion_tokens_details": {
                "text_tokens": counted["output_text"],
                "audio_tokens": counted["output_audio"],
            },
        }
