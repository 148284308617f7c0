"""Clients of ``mosstalk bench serve``: people with microphones, in a process of their own.

Each keeps one WebSocket of OpenAI's Realtime protocol and speaks turn after turn: sound goes out
in frames at the pace of a microphone, the answer is played as it comes, without a buffer. The
process reads a plan (``ClientPlan`` as a json object) from its first line of standard input, says
on its first line of output how many clients were let in, waits for the time to begin, and prints
what every turn took as its last line. It imports neither torch nor the server.
"""

import asyncio
import base64
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

RATE = 24_000
"""Samples a second of all sound, both ways."""
_BYTES_PER_S = 2 * RATE
_OPEN_S = 30.0
_ANSWER_S = 60.0
"""A turn without any event of its answer for so long has failed."""
_JITTER_DB = 3.0
_NOISE = 1e-4
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
    """

    heard_s: float = 4.0
    spoken_s: float = 6.0
    pause_s: float = 0.5
    frame_ms: int = 20
    hands_free: bool = False

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
        clients: numbers of this process' clients among all.
        phases_s: when each begins its first turn, after the common beginning.
        turns: how many turns each speaks.
        speech: a file that ``numpy.load`` reads, (n,) int16 at 24 kHz.
        ends: places in it where a sentence ends, each at least ``heard_s`` from its beginning.
        seed: of gains, noise and places.
    """

    url: str
    headers: dict[str, str]
    pattern: Pattern
    clients: list[int]
    phases_s: list[float]
    turns: int
    speech: str
    ends: list[int]
    seed: int


@dataclass
class Turn:
    """What one turn took; times in milliseconds, None for what did not happen.

    Attributes:
        client: whose it was.
        turn: its number, from 0.
        begun_s: when its speech began, after the common beginning.
        status: how the response ended, or what went wrong.
        commit_to_audio_ms: from the commit's sending, or hands-free from the end of the last
            word, to the first sound.
        decision_to_audio_ms: hands-free, from ``input_audio_buffer.committed`` to the first sound.
        first_delta_ms: length of that first sound.
        audio_ms: length of all sound.
        underruns_ms: each silence of a player that buffers nothing.
    """

    client: int
    turn: int
    begun_s: float
    status: str = "no answer"
    commit_to_audio_ms: float | None = None
    decision_to_audio_ms: float | None = None
    first_delta_ms: float | None = None
    audio_ms: float = 0.0
    underruns_ms: list[float] = field(default_factory=list)


class Client:
    """One conversation."""

    def __init__(self, plan: ClientPlan, place: int, speech: Pcm) -> None:
        self.turns: list[Turn] = []
        self.lags_ms: list[float] = []
        """How much later than due each frame was sent: the client's own fault."""
        self._plan, self._pattern, self._speech = plan, plan.pattern, speech
        self._number, self._phase_s = plan.clients[place], plan.phases_s[place]
        self._random = np.random.default_rng((plan.seed, self._number))
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
        except InvalidStatus as error:
            return f"status {error.response.status_code}"
        except (OSError, TimeoutError, WebSocketException) as error:
            return f"{type(error).__name__}: {error}"
        return None

    async def talk(self, begin_s: float) -> None:
        """Speak every turn, the first ``phase_s`` after ``begin_s`` on the monotonic clock."""
        at_s = begin_s + self._phase_s
        for number in range(self._plan.turns):
            turn = Turn(self._number, number, at_s - begin_s)
            self.turns.append(turn)
            try:
                at_s = await self._turn(turn, at_s)
            except TimeoutError:
                turn.status = "no answer"
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
        sound = {
            "input": {
                "format": pcm,
                "turn_detection": detection if self._pattern.hands_free else None,
            },
            "output": {"format": pcm},
        }
        session = {"type": "realtime", "audio": sound, "max_output_tokens": self._most_tokens}
        return {"type": "session.update", "session": session}

    @property
    def _most_tokens(self) -> int:
        return max(1, round(self._pattern.spoken_s * _TOKENS_PER_S))

    async def _turn(self, turn: Turn, at_s: float) -> float:
        """Speak, and listen to the answer; when the next turn begins."""
        frames = self._frames()
        if not self._pattern.hands_free:
            await self._send(frames, at_s)
            committed_s = time.monotonic()
            await self._connection.send(json.dumps({"type": "input_audio_buffer.commit"}))
            await self._connection.send(json.dumps({"type": "response.create"}))
            return await self._listen(turn, committed_s)
        speaking = asyncio.create_task(self._keep_sending(frames, at_s))
        try:
            ended_s = at_s + len(frames) * self._pattern.frame_ms / 1000
            over_s = await self._listen(turn, ended_s)
            await asyncio.sleep(max(0.0, over_s - time.monotonic()))
            return over_s
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)

    async def _send(self, frames: list[str], at_s: float) -> None:
        frame_s = self._pattern.frame_ms / 1000
        for number, frame in enumerate(frames):
            due_s = at_s + (number + 1) * frame_s  # a frame is there once its last sample is
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

    def _frames(self) -> list[str]:
        """Another stretch of speech each time, ready to be sent."""
        length = int(self._pattern.heard_s * RATE)
        end = int(self._random.choice(self._plan.ends))
        sound = self._speech[end - length : end] / 32767
        gain = 10 ** (self._random.uniform(-_JITTER_DB, _JITTER_DB) / 20)
        noise = _NOISE * self._random.standard_normal(length)
        pcm = (32767 * (gain * sound + noise)).clip(-32768, 32767).astype(np.int16)
        size = RATE * self._pattern.frame_ms // 1000
        return [_append(pcm[start : start + size]) for start in range(0, length, size)]

    async def _listen(self, turn: Turn, asked_s: float) -> float:
        """Play the answer to ``asked_s``; when the next turn begins."""
        decided_s, plays_until_s = asked_s, None
        while True:
            event = await self._next()
            now_s = time.monotonic()
            kind = event["type"]
            if kind == "input_audio_buffer.committed":
                decided_s = now_s
            elif kind == "response.output_audio.delta":
                length_s = len(base64.b64decode(event["delta"])) / _BYTES_PER_S
                turn.audio_ms += 1000 * length_s
                if plays_until_s is None:
                    plays_until_s = now_s
                    turn.first_delta_ms = 1000 * length_s
                    turn.commit_to_audio_ms = 1000 * (now_s - asked_s)
                    if self._pattern.hands_free:
                        turn.decision_to_audio_ms = 1000 * (now_s - decided_s)
                elif now_s > plays_until_s:
                    turn.underruns_ms.append(1000 * (now_s - plays_until_s))
                    plays_until_s = now_s
                plays_until_s += length_s
            elif kind == "error":
                turn.status = str(event["error"].get("code") or event["error"]["message"])
            elif kind == "response.done":
                response = event["response"]
                turn.status = _status(response)
                return (plays_until_s or now_s) + self._pattern.pause_s

    async def _wait(self, kind: str) -> None:
        while (await self._next())["type"] != kind:
            pass

    async def _next(self) -> dict[str, Any]:
        async with asyncio.timeout(_ANSWER_S):
            event: dict[str, Any] = json.loads(await self._connection.recv())
        return event


def _status(response: dict[str, Any]) -> str:
    """How a response ended; one that is as long as was asked for has completed."""
    details = response.get("status_details") or {}
    cut = response["status"] == "incomplete" and details.get("reason") == "max_output_tokens"
    return "completed" if cut else str(response["status"])


def _append(pcm: Pcm) -> str:
    sound = base64.b64encode(pcm.tobytes()).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": sound})


async def _read_line() -> dict[str, Any]:
    line = await asyncio.to_thread(sys.stdin.readline)
    found: dict[str, Any] = json.loads(line)
    return found


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


async def run() -> None:
    """Do what the plan on standard input says."""
    values = await _read_line()
    plan = ClientPlan(**values | {"pattern": Pattern(**values["pattern"])})
    speech: Pcm = np.load(Path(plan.speech))
    clients = [Client(plan, place, speech) for place in range(len(plan.clients))]
    refusals = [why for why in await asyncio.gather(*(c.open() for c in clients)) if why]
    _say({"admitted": len(clients) - len(refusals), "refusals": refusals})
    begin_s = (await _read_line())["begin_s"]
    if begin_s is not None:
        await asyncio.gather(*(client.talk(begin_s) for client in clients))
    await asyncio.gather(*(client.close() for client in clients))
    lags_ms = [lag for client in clients for lag in client.lags_ms]
    _say(
        {
            "turns": [asdict(turn) for client in clients for turn in client.turns],
            "lags_ms": np.percentile(lags_ms, [50, 99, 100]).tolist() if lags_ms else None,
        }
    )


if __name__ == "__main__":
    asyncio.run(run())
