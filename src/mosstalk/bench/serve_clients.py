"""Clients of ``mosstalk bench serve``: people with microphones, in a process of their own.

Each keeps one WebSocket of OpenAI's Realtime protocol and speaks turn after turn: sound goes out
in frames at the pace of a microphone, the answer is played as it comes, without a buffer. Nothing
here imports torch or the server.
"""

import asyncio
import base64
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

RATE = 24_000
"""Samples a second of all sound, both ways."""
FIRST_AUDIO_MS = 240.0
"""First audio is there once so much sound has come: what a first hop of 5 codes gives. It makes 400
ms, of which the last 160 wait to be joined to the next hop."""
COMPLETED = "completed"
_NO_ANSWER = "no answer"
_BYTES_PER_S = 2 * RATE
_OPEN_S = 30.0
_ANSWER_S = 60.0
"""A turn without any event of its answer for so long has failed."""
_JITTER_DB = 3.0
_NOISE = 1e-4
_HISTORY = ("we", "talked", "for", "a", "while", "about", "the", "weather")
_MOST_WORDS = 4_000
"""Of one item: servers bound an item's text."""
_TOKENS_PER_S = 12.5
"""Rows of MOSS-Speech, one audio token each, for a second of sound."""

Pcm = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Pattern:
    """How a client talks.

    Attributes:
        heard_s: length of the user's turn, speech to its end.
        spoken_s: longest answer that is asked for, in seconds.
        pause_s: from the end of the answer's sound to the next turn.
        frame_ms: length of a frame of the microphone.
        hands_free: whether the server finds where turns end; else the client commits.
        history_words: words that are typed into the conversation before its first turn.
    """

    heard_s: float = 4.0
    spoken_s: float = 6.0
    pause_s: float = 0.5
    frame_ms: int = 20
    hands_free: bool = False
    history_words: int = 0

    @property
    def turn_s(self) -> float:
        """From the beginning of one turn to that of the next, if answers are as long as asked."""
        return self.heard_s + self.spoken_s + self.pause_s


@dataclass(frozen=True)
class ClientPlan:
    """What one process does.

    Attributes:
        url: the server's WebSocket.
        headers: sent with each handshake.
        pattern: how each client talks.
        phases_s: by the number of each client, when it begins its first turn after the common
            beginning.
        turns: how many turns each speaks.
        speech: (n,) int16 at 24 kHz.
        ends: places in it where sentences end, each at least ``heard_s`` from its beginning.
        seed: of gains, noise and places.
    """

    url: str
    headers: dict[str, str]
    pattern: Pattern
    phases_s: dict[int, float]
    turns: int
    speech: Pcm
    ends: Sequence[int]
    seed: int


@dataclass
class Turn:
    """What one turn took; times in milliseconds, None for what did not happen.

    Attributes:
        client: whose it was.
        turn: its number, from 0.
        begun_s: when its speech began, after the common beginning.
        status: how the response ended, or what went wrong.
        commit_to_audio_ms: to first audio from the commit's sending, or hands-free from the end
            of the last word.
        decision_to_audio_ms: hands-free, from ``input_audio_buffer.committed`` to first audio.
        first_delta_ms: length of the first ``output_audio.delta``.
        audio_ms: length of all sound.
        words: how many the answer's transcript has; None from a server that sends none.
        written_ms: from the commit, or the last word, to the last text before the first sound:
            how long a model takes that writes its answer first.
        real_time_factor: from commit, or last word, to the last sound, over the sound's length.
        input_tokens: rows of the conversation that the answer followed, if the server tells.
        server_ms: by name, what the server says that it took, as ``session.events.Timings``.
        gaps_ms: time between deltas that follow one another.
        underruns_ms: each silence of a player that buffers nothing.
    """

    client: int
    turn: int
    begun_s: float
    status: str = _NO_ANSWER
    commit_to_audio_ms: float | None = None
    decision_to_audio_ms: float | None = None
    first_delta_ms: float | None = None
    audio_ms: float = 0.0
    words: int | None = None
    written_ms: float | None = None
    real_time_factor: float | None = None
    input_tokens: float | None = None
    server_ms: dict[str, float] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    underruns_ms: list[float] = field(default_factory=list)


@dataclass
class _Answer:
    """The answer to one turn as it arrives and is played; times of the monotonic clock.

    ``asked_s``: when the turn was committed, or its last word ended. ``owed``: turns that the
    server has committed and not yet answered.
    """

    turn: Turn
    asked_s: float
    hands_free: bool
    decided_s: float | None = None
    owed: int = 0
    _came_s: float = 0.0
    _plays_until_s: float = 0.0

    def take(self, event: dict[str, Any], now_s: float) -> bool:
        """One event; whether it was the answer's last."""
        kind, turn = event["type"], self.turn
        if kind == "input_audio_buffer.committed":
            self.decided_s, self.owed = now_s, self.owed + 1
        elif kind == "response.output_audio.delta":
            self._sound(1000 * len(base64.b64decode(event["delta"])) / _BYTES_PER_S, now_s)
        elif kind == "response.output_audio_transcript.delta" and turn.first_delta_ms is None:
            turn.written_ms = 1000 * (now_s - self.asked_s)
        elif kind == "response.output_audio_transcript.done":
            turn.words = len(event["transcript"].split())
        elif kind == "error":
            turn.status = _code(event)
        elif kind == "response.done":
            self.owed -= 1
            if turn.status == _NO_ANSWER:
                turn.status = _status(event["response"]) if turn.audio_ms else "no sound"
            turn.input_tokens = (event["response"].get("usage") or {}).get("input_tokens")
            turn.server_ms = _server_ms(event["response"])
            if turn.audio_ms:
                turn.real_time_factor = 1000 * (self._came_s - self.asked_s) / turn.audio_ms
            self._count_first(self._came_s)  # of an answer shorter than a hop
            return self.owed <= 0 and now_s >= self.asked_s
        return False

    @property
    def over_s(self) -> float:
        """When its sound has been played."""
        return self._plays_until_s or time.monotonic()

    def _sound(self, ms: float, now_s: float) -> None:
        turn = self.turn
        if now_s < self.asked_s:
            turn.status = "answered before the turn's end"
        if turn.first_delta_ms is None:
            turn.first_delta_ms, self._plays_until_s = ms, now_s
        else:
            turn.gaps_ms.append(1000 * (now_s - self._came_s))
        if now_s > self._plays_until_s:
            turn.underruns_ms.append(1000 * (now_s - self._plays_until_s))
            self._plays_until_s = now_s
        self._came_s = now_s
        self._plays_until_s += ms / 1000
        turn.audio_ms += ms
        if turn.audio_ms >= FIRST_AUDIO_MS:
            self._count_first(now_s)

    def _count_first(self, at_s: float) -> None:
        turn = self.turn
        if turn.commit_to_audio_ms is None and turn.audio_ms:
            turn.commit_to_audio_ms = 1000 * (at_s - self.asked_s)
            if self.hands_free and self.decided_s is not None:
                turn.decision_to_audio_ms = 1000 * (at_s - self.decided_s)


class Client:
    """One conversation."""

    def __init__(self, plan: ClientPlan, number: int) -> None:
        self.turns: list[Turn] = []
        self.lags_ms: list[float] = []
        """How much later than due each frame was sent: the client's own fault."""
        self._plan, self._pattern, self._number = plan, plan.pattern, number
        self._random = np.random.default_rng((plan.seed, number))
        self._socket: ClientConnection | None = None
        quiet = self._random.standard_normal(RATE * self._pattern.frame_ms // 1000)
        self._quiet = _append((quiet * 32767 * _NOISE).astype(np.int16))

    async def open(self) -> str | None:
        """Connect and agree on how turns end; why not, if the server refuses."""
        try:
            self._socket = await connect(
                self._plan.url,
                additional_headers=self._plan.headers,
                open_timeout=_OPEN_S,
                max_size=None,
                compression=None,
            )
            await self._wait("session.created")
            await self._socket.send(json.dumps(self._settings()))
            await self._wait("session.updated")
            for item in self._history():
                await self._socket.send(json.dumps(item))
        except InvalidStatus as error:
            return f"status {error.response.status_code}"
        except (OSError, TimeoutError, WebSocketException) as error:
            return f"{type(error).__name__}: {error}"
        return None

    async def talk(self, begin_s: float) -> None:
        """Speak every turn, the first one's phase after ``begin_s`` on the monotonic clock."""
        at_s = begin_s + self._plan.phases_s[self._number]
        for number in range(self._plan.turns):
            turn = Turn(self._number, number, at_s - begin_s)
            self.turns.append(turn)
            try:
                at_s = await self._turn(turn, at_s)
            except TimeoutError:
                return
            except ConnectionClosed as error:
                turn.status = f"closed: {error}"
                return

    async def close(self) -> None:
        """End the conversation."""
        if self._socket:
            await self._socket.close()

    @property
    def _connection(self) -> ClientConnection:
        assert self._socket, "a client talks once it is let in"
        return self._socket

    def _settings(self) -> dict[str, Any]:
        detection = {"type": "server_vad", "interrupt_response": False}
        pcm = {"type": "audio/pcm", "rate": RATE}
        heard = {"format": pcm, "turn_detection": detection if self._pattern.hands_free else None}
        tokens = max(1, round(self._pattern.spoken_s * _TOKENS_PER_S))
        session = {
            "type": "realtime",
            "audio": {"input": heard, "output": {"format": pcm}},
            "max_output_tokens": tokens,
        }
        return {"type": "session.update", "session": session}

    def _history(self) -> Iterator[dict[str, Any]]:
        """Typed turns of so many words in all."""
        words = list(islice(cycle(_HISTORY), self._pattern.history_words))
        for start in range(0, len(words), _MOST_WORDS):
            text = " ".join(words[start : start + _MOST_WORDS])
            content = [{"type": "input_text", "text": text}]
            item = {"type": "message", "role": "user", "content": content}
            yield {"type": "conversation.item.create", "item": item}

    async def _turn(self, turn: Turn, at_s: float) -> float:
        """Speak, and listen to the answer; when the next turn begins."""
        if not self._pattern.hands_free:
            frames = self._frames()
            await self._send(frames, at_s)
            committed_s = time.monotonic()
            await self._connection.send(json.dumps({"type": "input_audio_buffer.commit"}))
            await self._connection.send(json.dumps({"type": "response.create"}))
            return await self._listen(turn, committed_s)
        # A last word ends anywhere in a frame.
        quiet = int(self._random.integers(RATE * self._pattern.frame_ms // 1000))
        frames = self._frames(quiet)
        speaking = asyncio.create_task(self._keep_sending(frames, at_s))
        try:
            ended_s = at_s + len(frames) * self._pattern.frame_ms / 1000 - quiet / RATE
            next_s = await self._listen(turn, ended_s)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            return next_s
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)

    async def _send(self, frames: list[str], at_s: float) -> None:
        frame_s = self._pattern.frame_ms / 1000
        for number, frame in enumerate(frames, 1):
            due_s = at_s + number * frame_s  # a frame is there once its last sample is
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.lags_ms.append(1000 * (time.monotonic() - due_s))
            await self._connection.send(frame)

    async def _keep_sending(self, frames: list[str], at_s: float) -> None:
        """Speech, then a quiet room until cancelled: a microphone that is left open."""
        await self._send(frames, at_s)
        at_s += len(frames) * self._pattern.frame_ms / 1000
        while True:
            await self._send([self._quiet], at_s)
            at_s += self._pattern.frame_ms / 1000

    def _frames(self, quiet: int = 0) -> list[str]:
        """Another stretch of speech each time, and samples of a quiet room, ready to be sent."""
        length = int(self._pattern.heard_s * RATE)
        end = int(self._random.choice(self._plan.ends))
        sound = np.pad(self._plan.speech[end - length + quiet : end], (0, quiet)) / 32767
        gain = 10 ** (self._random.uniform(-_JITTER_DB, _JITTER_DB) / 20)
        noise = _NOISE * self._random.standard_normal(length)
        pcm = (32767 * (gain * sound + noise)).clip(-32768, 32767).astype(np.int16)
        size = RATE * self._pattern.frame_ms // 1000
        return [_append(pcm[start : start + size]) for start in range(0, length, size)]

    async def _listen(self, turn: Turn, asked_s: float) -> float:
        """Play the answer to what was asked at ``asked_s``; when the next turn begins."""
        answer = _Answer(turn, asked_s, self._pattern.hands_free)
        while not answer.take(await self._next(), time.monotonic()):
            pass
        return answer.over_s + self._pattern.pause_s

    async def _wait(self, kind: str) -> None:
        while (event := await self._next())["type"] != kind:
            if event["type"] == "error":
                raise ConnectionError(_code(event))

    async def _next(self) -> dict[str, Any]:
        async with asyncio.timeout(_ANSWER_S):
            event: dict[str, Any] = json.loads(await self._connection.recv())
        return event


def _code(event: dict[str, Any]) -> str:
    return str(event["error"].get("code") or event["error"]["message"])


def _status(response: dict[str, Any]) -> str:
    """How a response ended; one that is as long as was asked for has completed."""
    details = response.get("status_details") or {}
    cut = response["status"] == "incomplete" and details.get("reason") == "max_output_tokens"
    return COMPLETED if cut else str(response["status"])


def _server_ms(response: dict[str, Any]) -> dict[str, float]:
    """Those of a mosstalk server's figures of a response that are milliseconds and were taken."""
    figures = (response.get("mosstalk") or {}).get("timings") or {}
    return {name: ms for name, ms in figures.items() if name.endswith("_ms") and ms is not None}


def _append(pcm: Pcm) -> str:
    sound = base64.b64encode(pcm.tobytes()).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": sound})


def run(plan: ClientPlan, end: Connection) -> None:
    """The process: send why clients were refused, wait for the time to begin, send what came.

    ``end`` gets the list of reasons, gives the beginning on the monotonic clock, or None for
    clients that are to leave at once, and gets every ``Turn`` and all frames' lags in milliseconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    asyncio.run(_run(plan, end))


async def _run(plan: ClientPlan, end: Connection) -> None:
    clients = [Client(plan, number) for number in plan.phases_s]
    end.send([why for why in await asyncio.gather(*(c.open() for c in clients)) if why])
    begin_s = await asyncio.to_thread(end.recv)
    if begin_s is not None:
        await asyncio.gather(*(client.talk(begin_s) for client in clients))
    await asyncio.gather(*(client.close() for client in clients))
    turns = [turn for client in clients for turn in client.turns]
    end.send((turns, np.array([lag for client in clients for lag in client.lags_ms])))
