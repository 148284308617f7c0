"""One client, everybody's server: what an attack costs an honest neighbour.

The neighbour talks real turns with a real server, push to talk, each over a connection of its own.
Attackers are functions that run in processes of their own at the lowest priority, because the
machine's cores are the server's as well::

    alone = talk(server, turns=6)
    with attack(server, attackers.endless_headers):
        under = talk(server, turns=6)
        under.stop_s = stop(server)
    under.assert_honest(alone)

An attacker takes the WebSocket's URL and what else it is given, calls ``attackers.begun`` once its
attack is under way, and goes on until it is ended; after ``LONGEST_S`` it ends in any case. Its
module should import little, since every attacker is a fresh interpreter.
"""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from server_rig import Server, Talker, question
from websockets.exceptions import WebSocketException

TRIES = 3
LONGEST_S = 240
"""An attacker ends by itself after this."""
SLOWER, LEAST_MS = 3.0, 600.0
"""The neighbour's p95 may be so many times that alone, or this, whichever is more."""
HEALTH_MS, FRONT_MIB, STOP_S = 500.0, 100.0, 5.0
_PATIENCE_S = 15.0
_GIVE_UP = 2
"""Failed turns in a row after which the neighbour goes: nothing more is learnt."""
_SPEECH = question()
_ASK = {"type": "response.create", "response": {"max_output_tokens": 22}}
_LOOK_S = 0.05
_RUN = """
import importlib, json, os, signal, sys
os.nice(19)
signal.alarm(int(sys.argv[1]))
module, name, url, more = sys.argv[2:]
getattr(importlib.import_module(module), name)(url, **json.loads(more))
"""


@dataclass
class Stay:
    """What the neighbour met: each turn's commit to first audio, and what else was measured.

    ``health_ms`` are the times of every /health during the turns, inf for one without an answer;
    ``front_mib`` the front's peak of resident memory; ``stop_s`` how long SIGTERM took.
    """

    first_audio_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    front_mib: float = 0.0
    stop_s: float | None = None

    @property
    def p95_ms(self) -> float:
        """95th percentile of commit to first audio; inf without a turn."""
        if not self.first_audio_ms:
            return float("inf")
        return float(np.percentile(self.first_audio_ms, 95))

    @property
    def health_p95_ms(self) -> float:
        """95th percentile of the answers' times to /health; inf if many had none."""
        return float(np.percentile(self.health_ms, 95, method="higher"))

    def is_slow(self, alone: "Stay") -> bool:
        """Whether its times are beyond what they may be; only they depend on who else computes."""
        return self.p95_ms > self._most_ms(alone) or self.health_p95_ms > HEALTH_MS

    def _most_ms(self, alone: "Stay") -> float:
        return max(SLOWER * alone.p95_ms, LEAST_MS)

    def assert_honest(self, alone: "Stay") -> None:
        """Print the figures, and check that nobody stood in the neighbour's way."""
        most_ms = self._most_ms(alone)
        grown_mib = self.front_mib - alone.front_mib
        stopped = "not asked" if self.stop_s is None else f"{self.stop_s:.1f} s"
        figures = (
            f"neighbour: p95 to first audio {self.p95_ms:.0f} ms over {len(self.first_audio_ms)} "
            f"turns (alone {alone.p95_ms:.0f}, at most {most_ms:.0f}), "
            f"{len(self.failed)} failed, /health p95 {self.health_p95_ms:.0f} ms, at most "
            f"{max(self.health_ms):.0f} (alone {max(alone.health_ms):.0f}), "
            f"front {alone.front_mib:.0f} {grown_mib:+.0f} MiB, SIGTERM {stopped}"
        )
        print(figures)
        assert alone.failed == [], alone.failed
        assert self.failed == [], (self.failed, figures)
        assert self.p95_ms <= most_ms, figures
        assert max(self.health_ms) < float("inf"), figures
        assert self.health_p95_ms <= HEALTH_MS, figures
        assert grown_mib <= FRONT_MIB, figures
        assert self.stop_s is None or self.stop_s <= STOP_S, figures


def assert_honest(tried: Callable[[], tuple[Stay, Stay]]) -> None:
    """Check what the neighbour met alone and under an attack; once more if only times are too slow.

    The machine may compute something else while there is an attack. None of the attacks is as
    short as that: where a limit is missing the neighbour fails, or is slow, every time.
    """
    alone, under = tried()
    for _ in range(TRIES - 1):
        if under.failed or not under.is_slow(alone):
            break
        alone, under = tried()
    under.assert_honest(alone)


def assert_withstood(
    opened: Callable[[], AbstractContextManager[Server]],
    turns: int,
    attacker: Callable[..., None],
    **more: Any,
) -> None:
    """Check so many turns alone and beside an attacker, and SIGTERM, on a server of their own."""

    def tried() -> tuple[Stay, Stay]:
        with opened() as server:
            alone = talk(server, turns)
            with attack(server, attacker, **more):
                under = talk(server, turns)
                under.stop_s = stop(server)
            return alone, under

    assert_honest(tried)


def talk(server: Server, turns: int) -> Stay:
    """Talk so many turns, and one before them whose time does not count; what was met."""
    stay = Stay()
    with _Looking(server, stay):
        asyncio.run(_turns(server, 1 + turns, stay))
    stay.first_audio_ms = stay.first_audio_ms[1:]
    return stay


def stop(server: Server) -> float:
    """Send SIGTERM; how long the server took to end, in seconds. It is killed if it will not."""
    begun_s = time.monotonic()
    server.signal(signal.SIGTERM)
    try:
        server.process.wait(4 * STOP_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
    return time.monotonic() - begun_s


@contextmanager
def attack(
    server: Server, attacker: Callable[..., None], processes: int = 1, **more: Any
) -> Iterator[None]:
    """Have so many attackers under way while the block runs; ``more`` is what they are given."""
    words = [attacker.__module__, attacker.__name__, server.socket, json.dumps(more)]
    command = [sys.executable, "-c", _RUN, str(LONGEST_S), *words]
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": here, "PYTHONUNBUFFERED": "1"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        for process in running:
            assert process.stdout
            assert process.stdout.readline() == "begun\n", "the attack did not begin"
        yield
        ended = [process.poll() for process in running]
        gone = server.process.poll() is not None
        assert gone or ended == [None] * processes, f"an attacker ended: {ended}"
    finally:
        for process in running:
            process.kill()
            process.communicate()


async def _turns(server: Server, turns: int, stay: Stay) -> None:
    in_a_row = 0
    for _ in range(turns):
        try:
            async with asyncio.timeout(_PATIENCE_S):
                stay.first_audio_ms.append(await _turn(server))
            in_a_row = 0
        except (TimeoutError, OSError, WebSocketException, AssertionError) as error:
            stay.failed.append(f"{type(error).__name__}: {error}"[:200])
            in_a_row += 1
            if in_a_row == _GIVE_UP:
                return


async def _turn(server: Server) -> float:
    """A spoken question and the whole answer; milliseconds from the commit to the first sound."""
    dialling: dict[str, Any] = {"open_timeout": _PATIENCE_S, "close_timeout": 1.0}
    async with Talker(server, additional_headers=server.headers, **dialling) as talker:
        await talker.say(_SPEECH)
        begun_s = time.perf_counter()
        await talker.send({"type": "input_audio_buffer.commit"}, _ASK)
        await talker.wait("response.output_audio.delta")
        first_ms = 1000 * (time.perf_counter() - begun_s)
        response = (await talker.wait("response.done"))["response"]
        assert response["status"] in ("completed", "incomplete"), response["status_details"]
        return first_ms


class _Looking:
    """Asks /health and looks at the front's memory again and again, in a thread."""

    def __init__(self, server: Server, stay: Stay) -> None:
        self._server, self._stay, self._over = server, stay, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self._stay.health_ms.append(self._asked_ms())
            self._stay.front_mib = max(self._stay.front_mib, self._resident_mib())
            if self._over.wait(_LOOK_S):
                return

    def _asked_ms(self) -> float:
        begun_s = time.perf_counter()
        address = self._server.url.removeprefix("http://")
        asking = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
        try:
            asking.request("GET", "/health")
            answered = asking.getresponse().status == 200
        except OSError:
            answered = False
        finally:
            asking.close()
        return 1000 * (time.perf_counter() - begun_s) if answered else float("inf")

    def _resident_mib(self) -> float:
        pages = Path(f"/proc/{self._server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20
