"""Commit to first audio through the WebSocket, one client: ``python tests/server_latency.py``.

A recorded question is sent at the pace of a microphone, committed, and answered; printed are the
client's time from the commit to the first sound, and the session's own for the same turns. With
``--hands-free`` the time runs from the last sample of speech, and the detector's wait is in it.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from server_rig import BY_HAND, Server, Talker, question, serving, silence
from server_soak import ANSWER, COMMIT, stream


async def turns(server: Server, count: int, *, hands_free: bool) -> list[dict[str, float]]:
    """Milliseconds of each turn: what the client saw, and what the session says."""
    found = []
    for _ in range(count):
        async with Talker(server) as talker:
            if not hands_free:
                await talker.send(BY_HAND)
                await talker.wait("session.updated")
            begun_s = time.perf_counter()
            await stream(talker, question() + silence(1.0 if hands_free else 0.0))
            if not hands_free:
                begun_s = time.perf_counter()
                await talker.send(COMMIT, ANSWER)
            await talker.wait("response.output_audio.delta")
            seen_ms = 1000 * (time.perf_counter() - begun_s)
            response: dict[str, Any] = (await talker.wait("response.done"))["response"]
            timings = response["mosstalk"]["timings"]
            found.append({"client": seen_ms} | {k: v for k, v in timings.items() if v is not None})
    return found


def main() -> None:
    """Run it as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--hands-free", action="store_true")
    chosen = parser.parse_args()
    vad = () if chosen.hands_free else ("--vad", "none")
    words = ("--temperature", "0", "--seed", "0", *vad)
    with tempfile.TemporaryDirectory() as cache, serving(*words, cache=Path(cache)) as server:
        found = asyncio.run(turns(server, chosen.turns + 1, hands_free=chosen.hands_free))[1:]
    for name in found[0]:
        if name != "client" or not chosen.hands_free:
            values = [each[name] for each in found]
            p50, p95 = np.percentile(values, [50, 95])
            print(f"{name:<28} p50 {p50:8.2f}  p95 {p95:8.2f}  of {len(values)} turns")


if __name__ == "__main__":
    main()
