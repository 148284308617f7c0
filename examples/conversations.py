"""Hold many conversations at once: one engine computes the next step of all of them together.

    .venv/bin/python examples/conversations.py 4

Each conversation is told its own sentence and answers in sound; all of them share one model.
`mosstalk serve` does the same for clients of the network.
"""

import argparse
import asyncio
import time

import mosstalk
from mosstalk.session import Host, SessionSettings
from mosstalk.session.commands import CreateResponse, CreateText
from mosstalk.session.events import AudioDelta, ResponseDone, Timings

TOLD = ("The train is late.", "I like green apples.", "My sister sings.", "It is cold today.")


async def converse(host: Host, text: str) -> Timings:
    """Tell one session something, listen to its whole answer, and return what it took."""
    async with await host.open(SessionSettings(turn_detection=None)) as session:
        session.do(CreateText("user", text))
        session.do(CreateResponse())
        samples = 0
        async for event in session:
            if isinstance(event, AudioDelta):
                samples += event.samples  # event.pcm is 16-bit PCM at 24 kHz, to be played at once
            elif isinstance(event, ResponseDone):
                wait_ms = event.timings.commit_to_first_audio_ms or 0.0
                print(f"{text} -> {samples / 24_000:.2f} s, the first after {wait_ms:.0f} ms")
                return event.timings
    raise RuntimeError("the session ended before its answer")


async def main(count: int) -> None:
    async with Host.load(*mosstalk.default_model()) as host:
        began = time.perf_counter()
        talks = (converse(host, TOLD[index % len(TOLD)]) for index in range(count))
        answers = await asyncio.gather(*talks)
        took, sound = time.perf_counter() - began, sum(each.audio_s for each in answers)
        print(f"{count} conversations: {sound:.1f} s of sound in {took:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "count", type=int, nargs="?", default=len(TOLD), help="how many talk at once"
    )
    asyncio.run(main(parser.parse_args().count))
