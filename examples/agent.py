"""A voice agent: an asyncio program that listens and speaks through a running server.

    make talk                            # in another terminal
    .venv/bin/pip install openai
    .venv/bin/python examples/agent.py assets/capital.flac answer.wav

The client is OpenAI's own, unchanged; only the address is another. A sound file stands for the
microphone and one for the loudspeaker, and the server hears by itself where the user's turn ends.
"""

import argparse
import asyncio
import base64
import wave
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

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


async def answer(connection: Any, loudspeaker: wave.Wave_write) -> None:
    """Play what the model says until its first reply is complete."""
    async for event in connection:
        if event.type == "input_audio_buffer.speech_started":
            print("the user speaks")  # an agent that plays something stops it here
        elif event.type == "response.output_audio.delta":
            loudspeaker.writeframes(base64.b64decode(event.delta))
        elif event.type == "response.done":
            print(f"the answer is {event.response.status}")
            return
        elif event.type == "error":
            raise RuntimeError(event.error.message)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", type=Path, help="a sound file: what the microphone hears")
    parser.add_argument("answer", type=Path, help="a .wav to write: what the loudspeaker plays")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's address")
    args = parser.parse_args()

    client = AsyncOpenAI(base_url=args.url, api_key="none")
    with wave.open(str(args.answer), "wb") as loudspeaker:
        loudspeaker.setnchannels(1)
        loudspeaker.setsampwidth(2)
        loudspeaker.setframerate(RATE)
        async with client.realtime.connect(model="mosstalk") as connection:
            listening = asyncio.create_task(microphone(connection, args.question))
            await answer(connection, loudspeaker)
            listening.cancel()


if __name__ == "__main__":
    asyncio.run(main())
