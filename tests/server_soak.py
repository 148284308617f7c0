"""Sessions that talk, interrupt and vanish, for long: ``python tests/server_soak.py``.

Prints resident memory of both processes every half a minute, and at the end the slope of each
after a warm-up in MiB an hour, errors, and blocks in use. The pool of K and V is small, because
memory becomes resident when it is first written to: a large one would hide a leak for hours. The
small form of it is in ``test_server_clients.py``.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from server_rig import BY_HAND, Server, Talker, question, sentence, serving, silence, typed
from websockets.exceptions import ConnectionClosed, InvalidStatus

COMMIT, ANSWER = {"type": "input_audio_buffer.commit"}, {"type": "response.create"}
PIECE_MS, PATIENCE_S = 100, 60.0
POOL = ("--kv-gib", "0.03")
EXPECTED = {"response_cancel_not_active", "input_audio_buffer_commit_empty"}
"""Errors that come of doing two things at once, as people do."""
USED = 'mosstalk_kv_blocks{state="used"}'
_FULL, _COME_BACK_S = 503, 0.2
_WARM_UP = 0.2
"""Share of the samples that the slope leaves out."""
_DRAWS = 1000


@dataclass(frozen=True)
class Slope:
    """MiB an hour by least squares, and half the width of its 95 % interval.

    The interval is a bootstrap over minutes, as neighbouring samples are alike; below ten minutes
    there is none.
    """

    mib_an_hour: float
    half_width: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64], held: npt.NDArray[np.float64]) -> "Slope":
        hours, mib = seconds / 3600, held / 2**20
        minutes = (seconds // 60).astype(int)
        random = np.random.default_rng(0)
        known = np.unique(minutes)
        drawn = []
        for _ in range(_DRAWS if len(known) >= 10 else 0):
            taken = [np.flatnonzero(minutes == n) for n in random.choice(known, len(known))]
            places = np.concatenate(taken)
            drawn.append(np.polyfit(hours[places], mib[places], 1)[0])
        low, high = np.percentile(drawn, [2.5, 97.5]) if drawn else (-np.inf, np.inf)
        return cls(float(np.polyfit(hours, mib, 1)[0]), float(high - low) / 2)

    def __str__(self) -> str:
        return f"{self.mib_an_hour:+.1f} ± {self.half_width:.1f} MiB an hour"


@dataclass
class Soak:
    """What has happened so far; ``samples`` are (seconds, front's bytes, worker's bytes)."""

    server: Server
    hands_free: bool
    begun_s: float = field(default_factory=time.monotonic)
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def sample(self) -> dict[str, float]:
        """Look at both processes; the metrics."""
        metrics = self.server.metrics()
        self.samples.append(
            (
                time.monotonic() - self.begun_s,
                metrics["process_resident_memory_bytes"],
                metrics["mosstalk_worker_memory_bytes"],
            )
        )
        return metrics

    def slopes(self) -> list[Slope]:
        """Growth of front and worker over all but the first samples."""
        seconds, *held = np.array(self.samples[int(_WARM_UP * len(self.samples)) :]).T
        return [Slope.of(seconds, each) for each in held]


async def soak(server: Server, minutes: float, clients: int, *, hands_free: bool) -> Soak:
    """Let clients talk for so long."""
    state = Soak(server, hands_free)
    end_s = state.begun_s + 60 * minutes
    talking = [asyncio.create_task(_client(state, Random(n), end_s)) for n in range(clients)]
    while not all(task.done() for task in talking):
        await asyncio.wait(talking, timeout=min(5.0, 6 * minutes))
        metrics = await asyncio.to_thread(state.sample)
        if len(state.samples) % 6 == 0:
            _report(state, metrics)
    await asyncio.gather(*talking)
    return state


async def _client(state: Soak, random: Random, end_s: float) -> None:
    """One person who comes again and again."""
    while time.monotonic() < end_s:
        try:
            await _visit(state, random, end_s)
        except InvalidStatus as refused:
            # Full, while those who vanished are still being missed: come back a little later.
            if refused.response.status_code != _FULL:
                raise
            state.done["refused"] += 1
            await asyncio.sleep(_COME_BACK_S)
        except (ConnectionClosed, OSError) as error:
            state.errors.append(f"{type(error).__name__}: {error}")


async def _visit(state: Soak, random: Random, end_s: float) -> None:
    talker = Talker(state.server)
    hands_free = state.hands_free and random.random() < 0.5
    async with talker:
        if not hands_free:
            await talker.send(BY_HAND)
        # In turn: a model may repeat what it hears, and who speaks along with it is its echo.
        words = cycle([question(), sentence()])
        for _ in range(random.randint(1, 4)):
            if time.monotonic() > end_s:
                break
            what = random.choice(["spoken", "typed", "cancelled", "cut", "vanished"])
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await (_speak if hands_free else _ask)(talker, random, what, words)
            except TimeoutError:
                state.errors.append(
                    f"{what}, hands-free {hands_free}: nothing after {_last(talker)}"
                )
                break
            state.done[f"{'hands-free' if hands_free else 'by hand'} {what}"] += 1
            if what == "vanished":
                talker.socket.transport.abort()
                break
        told = [e["error"]["code"] for e in talker.events if e["type"] == "error"]
        state.errors += [code for code in told if code not in EXPECTED]


def _last(talker: Talker) -> str:
    """The latest events, without repetition."""
    kinds = [kind for kind in talker.kinds() if not kind.endswith("delta")]
    return " ".join(kinds[-6:])


async def _ask(talker: Talker, random: Random, what: str, words: Iterator[bytes]) -> None:
    """A turn that the client ends, and what it does with the answer."""
    if what == "typed" or random.random() < 0.5:
        await talker.send(typed("Good morning."), ANSWER)
    else:
        await talker.say(next(words))
        await talker.send(COMMIT, ANSWER)
    await _listen(talker, what)


async def _speak(talker: Talker, random: Random, what: str, words: Iterator[bytes]) -> None:
    """A turn that the server finds, at the pace of a microphone; sometimes into the answer."""
    del random
    await stream(talker, next(words) + silence(1.0))
    if what == "cut":
        await talker.wait("response.output_audio.delta")
        await stream(talker, next(words) + silence(1.0))
    await _listen(talker, "spoken" if what in ("cut", "cancelled") else what)


async def stream(talker: Talker, pcm: bytes) -> None:
    """Append sound at the pace of a microphone."""
    size, loop = 48 * PIECE_MS, asyncio.get_running_loop()
    due_s = loop.time()
    for start in range(0, len(pcm), size):
        await talker.say(pcm[start : start + size])
        due_s += PIECE_MS / 1000
        await asyncio.sleep(max(0.0, due_s - loop.time()))


async def _listen(talker: Talker, what: str) -> None:
    if what == "vanished":
        await talker.wait("response.created")
        return
    if what in ("cancelled", "cut"):
        item = (await talker.wait("response.output_item.added"))["item"]["id"]
        await talker.wait("response.output_audio.delta")
        await talker.send({"type": "response.cancel"})
        if what == "cut":
            cut = {"type": "conversation.item.truncate", "content_index": 0, "audio_end_ms": 200}
            await talker.send({**cut, "item_id": item})
    await talker.wait("response.done")


def _report(state: Soak, metrics: dict[str, float]) -> None:
    seconds, front, worker = state.samples[-1]
    print(
        f"{seconds:6.0f} s  front {front / 2**20:7.1f} MiB  worker {worker / 2**20:7.1f} MiB  "
        f"{metrics['mosstalk_sessions']:.0f} sessions  "
        f"{metrics[USED]:.0f} blocks  "
        f"{sum(state.done.values())} turns  {len(state.errors)} errors",
        flush=True,
    )


def main() -> None:
    """Run it as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--push-to-talk", action="store_true", help="without a speech detector")
    chosen = parser.parse_args()
    words = (*POOL, *(("--vad", "none") if chosen.push_to_talk else ()))
    with tempfile.TemporaryDirectory() as cache, serving(*words, cache=Path(cache)) as server:
        running = soak(server, chosen.minutes, chosen.clients, hands_free=not chosen.push_to_talk)
        state = asyncio.run(running)
        server.await_nothing_held()
        metrics = server.metrics()
    front, worker = state.slopes()
    print(dict(state.done))
    print(f"slope front {front}, worker {worker}")
    print(f"{len(state.errors)} errors {Counter(state.errors)}")
    print(f"{metrics[USED]:.0f} blocks in use at the end")


if __name__ == "__main__":
    main()
