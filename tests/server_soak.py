"""Sessions that talk, interrupt and vanish, for long: ``python tests/server_soak.py``.

Prints resident memory of both processes every half a minute. At the end it prints errors, blocks
in use, and how fast memory, descriptors and threads of either process and blocks grew after a
warm-up. The pool of K and V is small, because memory becomes resident when it is first written to:
a large one would hide a leak for hours. The small form of it is in ``test_server_clients.py``.

    python tests/server_soak.py --minutes 60 --clients 8 --paced   # an hour of eight conversations
"""

import argparse
import asyncio
import base64
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
from server_rig import BY_HAND, RATE, Server, Talker, question, sentence, serving, silence, typed
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
    """Growth an hour by least squares, and half the width of its 95 % interval.

    The interval is a bootstrap over minutes, as neighbouring samples are alike; below ten minutes
    there is none.
    """

    an_hour: float
    half_width: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64], held: npt.NDArray[np.float64]) -> "Slope":
        hours = seconds / 3600
        minutes = (seconds // 60).astype(int)
        random = np.random.default_rng(0)
        known = np.unique(minutes)
        drawn = []
        for _ in range(_DRAWS if len(known) >= 10 else 0):
            taken = [np.flatnonzero(minutes == n) for n in random.choice(known, len(known))]
            places = np.concatenate(taken)
            drawn.append(np.polyfit(hours[places], held[places], 1)[0])
        low, high = np.percentile(drawn, [2.5, 97.5]) if drawn else (-np.inf, np.inf)
        return cls(float(np.polyfit(hours, held, 1)[0]), float(high - low) / 2)

    def __str__(self) -> str:
        return f"{self.an_hour:+.1f} ± {self.half_width:.1f} an hour"


@dataclass
class Soak:
    """What has happened so far; ``samples`` are seconds, and what was held then by its name.

    ``paced``: who has asked hears the answer to its end before the next turn.
    """

    server: Server
    hands_free: bool
    paced: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def sample(self) -> dict[str, float]:
        """Look at both processes; the metrics."""
        metrics = self.server.metrics()
        processes = {"front": self.server.process.pid, "worker": self.server.worker_id}
        held = {
            "front, MiB": metrics["process_resident_memory_bytes"] / 2**20,
            "worker, MiB": metrics["mosstalk_worker_memory_bytes"] / 2**20,
            "blocks": metrics[USED],
        }
        for name, pid in processes.items():
            for what, folder in ("descriptors", "fd"), ("threads", "task"):
                held[f"{name}, {what}"] = len(list(Path(f"/proc/{pid}/{folder}").iterdir()))
        self.samples.append((time.monotonic() - self.begun_s, held))
        return metrics

    def slopes(self) -> dict[str, Slope]:
        """Growth of each over all but the first samples."""
        kept = self.samples[int(_WARM_UP * len(self.samples)) :]
        seconds = np.array([at for at, _ in kept])
        return {
            name: Slope.of(seconds, np.array([held[name] for _, held in kept]))
            for name in kept[0][1]
        }


async def soak(
    server: Server, minutes: float, clients: int, *, hands_free: bool, paced: bool = False
) -> Soak:
    """Let clients talk for so long."""
    state = Soak(server, hands_free, paced)
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
                if state.paced and what in ("spoken", "typed"):
                    await asyncio.sleep(_length_s(talker))
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


def _length_s(talker: Talker) -> float:
    """How long the latest answer's sound lasts."""
    sound = [e for e in talker.events if e["type"] == "response.output_audio.delta"]
    if not sound:
        return 0.0
    latest = [e["delta"] for e in sound if e["response_id"] == sound[-1]["response_id"]]
    return sum(len(base64.b64decode(each)) for each in latest) / 2 / RATE


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
    seconds, held = state.samples[-1]
    print(
        f"{seconds:6.0f} s  front {held['front, MiB']:7.1f} MiB  "
        f"worker {held['worker, MiB']:7.1f} MiB  "
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
    parser.add_argument("--paced", action="store_true", help="answers are heard to their end")
    chosen = parser.parse_args()
    words = (*POOL, *(("--vad", "none") if chosen.push_to_talk else ()))
    with tempfile.TemporaryDirectory() as cache, serving(*words, cache=Path(cache)) as server:
        hands_free, paced = not chosen.push_to_talk, chosen.paced
        running = soak(server, chosen.minutes, chosen.clients, hands_free=hands_free, paced=paced)
        state = asyncio.run(running)
        server.await_nothing_held()
        metrics = server.metrics()
    print(dict(state.done))
    for name, slope in state.slopes().items():
        print(f"{name}: {slope}")
    print(f"{len(state.errors)} errors {Counter(state.errors)}")
    print(f"{metrics[USED]:.0f} blocks in use at the end")


if __name__ == "__main__":
    main()
