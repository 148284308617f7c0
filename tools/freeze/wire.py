"""Conversations over a WebSocket: a corpus of clients' messages, and what the server tells.

A conversation is a file of JSON lines, each one step of a client:

    {"about": "...", "headers": {...}}   the first line; headers may be left out
    {"send": {...}}                      an event as it is; "$name" stands for what was kept
    {"raw": "..."}                       a message as it is
    {"by_hand": {...}}                   a session.update without turn detection, with these fields
    {"say": "question", "from_s": 0, "to_s": 1.5, "piece_ms": 100, "form": "pcm"}   recorded sound
    {"typed": "..."}                     a typed turn
    {"answer": {...}}                    a response with these fields, to its end
    {"wait": "response.done", "keep": {"name": "response.id"}}
    {"heard_s": 0.8}                     wait for so much sound of the response that is being made
    {"settle": "name"}                   wait until the server's front has answered all before

Every step that changes anything waits for the server's word before the next is taken, so that what
is told does not depend on the time that anything takes.
"""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from .subject import HERE

CORPUS = HERE / "corpus"
RATE = 24_000
_PATIENCE_S = 30.0
_AUDIO = ("response.output_audio.delta", "response.audio.delta")
_WHOLE = {"QUESTION": "question", "SENTENCE": "librivox"}
"""Recordings that stand whole in an event, by the names that are put for them."""


class Client:
    """Takes the steps of a conversation and keeps what it is told."""

    def __init__(self, sounds: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.close: list[Any] = []
        self._sounds = sounds
        self._kept = {name: self._whole(say) for name, say in _WHOLE.items()}
        self.heard_samples = 0
        """What was waited for last; of an interrupted response that much is always there."""

    def _whole(self, name: str) -> Any:
        return self._pieces(name, piece_ms=60_000)[0]

    async def talk(self, port: int, steps: list[dict[str, Any]]) -> None:
        """Take all steps, then close."""
        url = f"ws://127.0.0.1:{port}/v1/realtime?model=mosstalk"
        headers = steps[0].get("headers", {})
        async with connect(url, max_size=None, additional_headers=headers) as self._socket:
            try:
                await self._wait("session.created")
                for step in steps[1:]:
                    await self._take(dict(step))
            except ConnectionClosed:
                pass
            await self._socket.close()
            self.close = [self._socket.close_code, self._socket.close_reason]

    async def _take(self, step: dict[str, Any]) -> None:
        self._step = step
        kind, value = next(iter(step.items()))
        if kind == "say":
            for piece in self._pieces(**step):
                await self._send({"type": "input_audio_buffer.append", "audio": piece})
        elif kind == "wait":
            event = await self._wait(value)
            for name, place in step.get("keep", {}).items():
                self._kept[name] = _at(event, place)
        else:
            plain: dict[str, Callable[[Any], Awaitable[None]]] = {
                "send": self._send, "raw": self._raw, "by_hand": self._by_hand,
                "typed": self._typed, "answer": self._answer, "heard_s": self._heard,
                "settle": self._settle,
            }  # fmt: skip
            await plain[kind](value)

    async def _raw(self, message: str) -> None:
        await self._socket.send(message)

    async def _by_hand(self, fields: dict[str, Any]) -> None:
        turns = {"audio": {"input": {"turn_detection": None}}}
        for asked in (turns, fields) if fields else (turns,):
            await self._send({"type": "session.update", "session": {"type": "realtime"} | asked})
            await self._wait("session.updated")

    async def _typed(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self._send({"type": "conversation.item.create", "item": item})
        await self._wait("conversation.item.done", "conversation.item.created")

    async def _answer(self, fields: dict[str, Any]) -> None:
        await self._send({"type": "response.create", "response": fields})
        await self._wait("response.done")

    async def _heard(self, seconds: float) -> None:
        self.heard_samples = int(seconds * RATE)
        while len(self._sound_of_last()) < self.heard_samples:
            await self._hear()

    async def _settle(self, name: str) -> None:
        asking = {"type": "conversation.item.retrieve", "item_id": name, "event_id": name}
        await self._send(asking)
        while True:
            event = await self._hear()
            if event["type"] == "error" and event["error"]["event_id"] == name:
                return

    async def _send(self, event: dict[str, Any]) -> None:
        text = json.dumps(event)
        for name, value in self._kept.items():
            text = text.replace(f'"${name}"', json.dumps(value))
        await self._socket.send(text)

    async def _wait(self, *kinds: str) -> dict[str, Any]:
        while (event := await self._hear())["type"] not in kinds:
            pass
        return event

    async def _hear(self) -> dict[str, Any]:
        try:
            message = await asyncio.wait_for(self._socket.recv(), _PATIENCE_S)
        except TimeoutError:
            told = [event["type"] for event in self.events[-5:]]
            raise RuntimeError(f"{self._step}: nothing comes after {told}") from None
        event: dict[str, Any] = json.loads(message)
        self.events.append(event)
        return event

    def _sound_of_last(self) -> bytes:
        created = [e for e in self.events if e["type"] == "response.created"]
        last = created[-1]["response"]["id"] if created else None
        deltas = [e for e in self.events if e["type"] in _AUDIO and e["response_id"] == last]
        return b"".join(base64.b64decode(e["delta"]) for e in deltas)[::2]

    def _pieces(
        self, say: str, from_s: float = 0.0, to_s: float | None = None, piece_ms: int = 100,
        form: str = "pcm", rate: int = RATE, loud: float = 1.0,
    ) -> list[str]:  # fmt: skip
        sound = loud * self._recorded(say, rate)
        sound = sound[int(from_s * rate) : None if to_s is None else int(to_s * rate)]
        form_of = {"pcm": _pcm16, "pcmu": _mu_law}[form]
        size = rate * piece_ms // 1000
        parts = (sound[start : start + size] for start in range(0, len(sound), size))
        return [base64.b64encode(form_of(part)).decode() for part in parts]

    def _recorded(self, name: str, rate: int) -> NDArray[np.float64]:
        if name == "silence":
            return 1e-4 * np.random.default_rng(0).standard_normal(60 * rate)
        samples, its_rate = soundfile.read(self._sounds / f"{name}.flac")
        return np.asarray(soxr.resample(samples, its_rate, rate), np.float64)


def _at(event: Any, place: str) -> Any:
    for key in place.split("."):
        event = event[int(key) if key.isdigit() else key]
    return event


def _pcm16(samples: NDArray[np.float64]) -> bytes:
    return np.round(samples.clip(-1, 1) * 32_767).astype("<i2").tobytes()


def _mu_law(samples: NDArray[np.float64]) -> bytes:
    """G.711: a sign, three bits of exponent, four of mantissa, all inverted."""
    level = (
        np.minimum(np.abs(np.round(samples.clip(-1, 1) * 32_767)).astype(np.int64), 32_635) + 132
    )
    exponent = np.floor(np.log2(level)).astype(np.int64) - 7
    mantissa = (level >> (exponent + 3)) & 0x0F
    sign = np.where(samples < 0, 0x80, 0)
    return (~(sign | (exponent << 4) | mantissa) & 0xFF).astype(np.uint8).tobytes()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a conversation."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def corpus(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Conversations for one server by name."""
    return {path.stem: read_steps(path) for path in sorted((CORPUS / folder).glob("*.jsonl"))}


def converse(port: int, steps: list[dict[str, Any]], sounds: Path) -> Client:
    """A client that has had this conversation."""
    client = Client(sounds)
    asyncio.run(client.talk(port, steps))
    return client
