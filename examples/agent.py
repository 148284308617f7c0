"""A voice agent: an asyncio program that listens and speaks through a running server.

    make talk                            # in another terminal
    .venv/bin/pip install 'openai[realtime]'
    .venv/bin/python examples/agent.py assets/capital.flac answer.wav

The client is OpenAI's own, unchanged; only the address is another. Sound files stand for the
microphone and one for the loudspeaker, and the server hears by itself where the user's turns end.
If the connection is lost, the conversation goes on in another one, at whichever server answers
there, and what was being asked is asked again.
"""

import argparse
import asyncio
import base64
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from openai.types.websocket_reconnection import ReconnectingEvent, ReconnectingOverrides

import mosstalk

RATE = 24_000
PIECE = RATE // 10  # samples of 100 ms


async def microphone(connection: Any, recording: Path) -> None:
    """Send a recording at the pace of a microphone, then silence until this task is cancelled."""
    speech = mosstalk.read_audio(recording, RATE).samples
    pcm = np.clip(speech * 32767, -32768, 32767).astype("<i2")
    position = 0
    while True:
        piece = pcm[position : position + PIECE]
        position += PIECE
        sound = piece.tobytes().ljust(2 * PIECE, b"\0")
        await connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())
        await asyncio.sleep(PIECE / RATE)


class Agent:
    """One conversation: asks and plays the answers, in one connection or, if need be, in several.

    ``say`` is told, line by line, what happens.
    """

    def __init__(
        self, url: str, loudspeaker: wave.Wave_write, say: Callable[[str], object] = print
    ) -> None:
        self._url, self._loudspeaker, self._say = url, loudspeaker, say
        self._listening: asyncio.Task[None] | None = None
        self._token = ""
        """What takes the conversation up again."""

    async def converse(self, questions: Iterable[Path]) -> None:
        """Ask one question after the other, each once the answer before it is complete."""
        client = AsyncOpenAI(base_url=self._url, api_key="none")
        connecting = client.realtime.connect(model="mosstalk", on_reconnecting=self._lost)
        async with connecting as connection:
            for question in questions:
                await self._ask(connection, question)

    async def _ask(self, connection: Any, question: Path) -> None:
        self._listen(connection, question)
        async for event in connection:
            if event.type == "session.created":
                resume = event.session.mosstalk.get("resume", {})
                self._token = resume.get("token", "")
                if "items" in resume:
                    self._say(f"the conversation goes on after {resume['items']} items")
                    self._listen(connection, question)
            elif event.type == "input_audio_buffer.speech_started":
                self._say("the user speaks")  # an agent that plays something stops it here
            elif event.type == "response.output_audio.delta":
                self._loudspeaker.writeframes(base64.b64decode(event.delta))
            elif event.type == "response.done":
                # One that failed, or was interrupted at once, holds nothing.
                parts = [part for item in event.response.output for part in item.content]
                words = " ".join(part.transcript or "" for part in parts)
                self._say(f"the answer is {event.response.status}: {words}")
                break
            elif event.type == "error":
                raise RuntimeError(event.error.message)
        self._stop_listening()

    def _listen(self, connection: Any, question: Path) -> None:
        self._stop_listening()
        self._listening = asyncio.create_task(microphone(connection, question))

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening.cancel()

    def _lost(self, attempt: ReconnectingEvent) -> ReconnectingOverrides:
        """How to connect again, to go on where the lost connection was."""
        self._stop_listening()
        if attempt.attempt == 1:
            self._say("the connection was lost")
        if not self._token:
            return {"abort": True}
        return {"extra_query": {"resume": self._token}}


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "questions", type=Path, nargs="+", help="sound files: what the microphone hears"
    )
    parser.add_argument("answer", type=Path, help="a .wav to write: what the loudspeaker plays")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's address")
    args = parser.parse_args()

    with wave.open(str(args.answer), "wb") as loudspeaker:
        loudspeaker.setnchannels(1)
        loudspeaker.setsampwidth(2)
        loudspeaker.setframerate(RATE)
        await Agent(args.url, loudspeaker).converse(args.questions)


if __name__ == "__main__":
    asyncio.run(main())
