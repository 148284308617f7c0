"""Two replicas of the small model behind one address, by a real Ray, with real clients."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import command_environment, require_package, require_program, run
from resume_rig import Store, back, history, token_of, words
from server_rig import POLL_S, Talker, ask, free_port, typed
from websockets.exceptions import ConnectionClosed, InvalidStatus

# Slow: Ray takes half a minute to start and ten seconds to end, and asks for an extra of 300 MB.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACES, REPLICAS = 2, 2
TRIES = 6
START_S = 240.0
REPLICA = b"ray::ServeReplica"
"""What the process of a replica is called."""
FILE = f"""\
port: PORT
replicas: {REPLICAS}
cpus: 0.5
serve:
  vad: none
  temperature: 0
  seed: 0
  max-sessions: {PLACES}
  drain-timeout: 20
  transcriber: none
  store: STORE
"""


class Fleet:
    """``mosstalk fleet`` as a process of its own, all of whose files are in ``folder``."""

    def __init__(self, folder: Path, cache: Path, file: str = FILE) -> None:
        self.port, self._printed = free_port(), folder / "printed"
        self.socket = f"ws://127.0.0.1:{self.port}/v1/realtime"
        (folder / "fleet.yaml").write_text(file.replace("PORT", str(self.port)))
        (folder / "tmp").mkdir()
        self.kept = [folder / "tmp", folder / "home"]
        """Where Ray and HAProxy could leave something."""
        ports = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT")
        more = {f"RAY_SERVE_{name}": str(free_port()) for name in ports}
        more |= {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder / "home"),
        }
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mosstalk.cli", "fleet", str(folder / "fleet.yaml")],
                env=command_environment(cache) | more,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text()

    def await_that(self, met: Callable[[], bool], most_s: float = START_S) -> None:
        """Wait until something is so."""
        end_s = time.monotonic() + most_s
        while not met():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < end_s, self.printed()
            time.sleep(POLL_S * 10)

    def processes(self) -> dict[int, bytes]:
        """Itself and all processes below it, by id, with what each is called."""
        parents = dict[int, int]()
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                stat = (each / "stat").read_text()
                parents[int(each.name)] = int(stat.rpartition(")")[2].split()[1])
        found, left = dict[int, bytes](), [self.process.pid]
        while left:  # a child may well have a smaller id than its parent
            found[left[0]] = b""
            with suppress(OSError):
                found[left[0]] = Path(f"/proc/{left[0]}/cmdline").read_bytes()
            left = [*left[1:], *(pid for pid, parent in parents.items() if parent == left[0])]
        return found

    def replicas(self) -> list[int]:
        """The process ids of its replicas."""
        return [pid for pid, name in self.processes().items() if name.startswith(REPLICA)]

    def sessions(self) -> list[int]:
        """How many sessions are open, of each replica that is up."""
        found: dict[str, int] = {}
        for _ in range(50):
            lines = ask("GET", f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            found[values["process_start_time_seconds"]] = int(float(values["mosstalk_sessions"]))
            if len(found) == REPLICAS:
                break
        return sorted(found.values())

    def replica_sockets(self) -> list[str]:
        """Where each replica itself takes connections, past the ingress."""
        (line,) = [line for line in self.processes().values() if b"haproxy\0-db" in line]
        words = line.decode().split("\0")
        config = Path(words[words.index("-f") + 1]).read_text()
        servers = re.findall(r"^\s*server \S+ ([\d.]+:\d+)", config, re.MULTILINE)
        return [f"ws://{address}/v1/realtime" for address in servers]

    def stop(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            processes = self.processes()
            self.process.kill()
            for each in processes:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """What both replicas keep conversations in."""
    redis = Store(tmp_path_factory.mktemp("redis"), free_port())
    if shutil.which("redis-server"):
        redis.start()
    yield redis
    redis.kill()


@pytest.fixture(scope="module")
def fleet(cache_folder: Path, store: Store) -> Iterator[Fleet]:
    """Two replicas, ready. Its folder has a short name: Ray's sockets are in it."""
    require_package("ray", "fleet")
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    running = Fleet(folder, cache_folder, FILE.replace("STORE", store.url))
    try:
        running.await_that(lambda: "\nready: " in running.printed())
        # A moment later the ingress knows them all.
        running.await_that(lambda: running.sessions() == [0] * REPLICAS)
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


async def await_sessions(fleet: Fleet, numbers: list[int]) -> None:
    """Wait until so many sessions are open, of each replica."""
    await asyncio.to_thread(fleet.await_that, lambda: fleet.sessions() == numbers)


async def said_hello(talker: Talker) -> bytes:
    """The sound of the answer to a typed turn."""
    await talker.send(typed("Hello"), {"type": "response.create"})
    done = await talker.wait("response.done")
    assert done["response"]["status"] == "completed", done
    return talker.pcm()


def test_connections_are_spread_evenly_and_one_too_many_is_refused_at_once(fleet: Fleet) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            talkers = list[Talker]()
            for each in range(1, PLACES + 1):
                for _ in range(REPLICAS):
                    talkers.append(await stack.enter_async_context(Talker(fleet)))
                await await_sessions(fleet, [each] * REPLICAS)
            with pytest.raises(InvalidStatus) as refused:
                await stack.enter_async_context(Talker(fleet))
            answer = refused.value.response
            error = json.loads(answer.body)["error"]
            assert (answer.status_code, error["code"]) == (503, "full")
            assert int(answer.headers["Retry-After"]) == error["retry_after_s"]
            # A page, which cannot see the status, is told within the connection.
            page = Talker(fleet, origin=f"http://127.0.0.1:{fleet.port}")
            with pytest.raises(ConnectionClosed):
                await stack.enter_async_context(page)
            assert page.events[0]["error"]["code"] == "full"
            sounds = await asyncio.gather(*map(said_hello, talkers))
            assert sounds[0]
            assert len(set(sounds)) == 1  # whichever replica answers

    run(main())


def test_nobody_is_refused_while_a_place_is_free(fleet: Fleet) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await await_sessions(fleet, [0] * REPLICAS)
            for _ in range(PLACES * REPLICAS - 1):
                await stack.enter_async_context(Talker(fleet))
            for _ in range(20):
                async with Talker(fleet):
                    pass
                await await_sessions(fleet, [PLACES - 1, PLACES])

    run(main())


def test_everything_else_of_a_server_is_there(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.port}"
    assert ask("GET", f"{url}/ready").json()["status"] == "ready"
    assert ask("GET", f"{url}/v1/models").json()["data"][0]["id"] == "mosstalk-pocket"
    assert "<html" in ask("GET", url).text
    body = {"model": "any", "input": "Good morning.", "voice": "default", "response_format": "wav"}
    spoken = ask("POST", f"{url}/v1/audio/speech", json=body)
    assert (spoken.status_code, spoken.content[:4]) == (200, b"RIFF")
    missing = ask("GET", f"{url}/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")


@dataclass
class Behind:
    """A replica, past the ingress."""

    socket: str


@pytest.mark.alone
def test_the_ingress_adds_two_milliseconds_at_most(fleet: Fleet) -> None:
    async def main() -> None:
        await await_sessions(fleet, [0] * REPLICAS)
        async with (
            Talker(Behind(fleet.replica_sockets()[0])) as straight,
            Talker(fleet) as through,
        ):
            for _ in range(TRIES):  # Ray's own processes compute at times, on the same two cores
                took_ms: dict[Talker, list[float]] = {straight: [], through: []}
                for _ in range(300):
                    for talker, each in took_ms.items():
                        begun_s = time.perf_counter()
                        await talker.send({"type": "input_audio_buffer.clear"})
                        await talker.wait("input_audio_buffer.cleared")
                        each.append(1000 * (time.perf_counter() - begun_s))
                (p50, p95), (through_p50, through_p95) = (
                    np.percentile(each, (50, 95)) for each in took_ms.values()
                )
                print(
                    f"an event and its answer, ms, p50 / p95: {p50:.2f} / {p95:.2f}, through the "
                    f"ingress {through_p50:.2f} / {through_p95:.2f}, so {through_p95 - p95:.2f} "
                    "more at p95"
                )
                if abs(through_p95 - p95) <= 2:
                    return
        raise AssertionError("the ingress adds more, or something else computes all the time")

    run(main())


def test_a_key_for_a_page_opens_every_replica(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.port}/v1/realtime/client_secrets"
    key = ask("POST", url, json={}).json()["value"]

    async def main() -> None:
        await await_sessions(fleet, [0] * REPLICAS)
        async with AsyncExitStack() as stack:
            for _ in range(PLACES * REPLICAS):
                shown = {"Authorization": f"Bearer {key}"}
                await stack.enter_async_context(Talker(fleet, additional_headers=shown))

    run(main())


@pytest.mark.system
def test_a_conversation_goes_on_at_another_replica_when_its_own_is_killed(
    fleet: Fleet, store: Store
) -> None:
    require_program("redis-server")

    async def again(talker: Talker) -> float | None:
        """How many seconds after its connection was lost a client goes on; None: it was not."""
        with suppress(ConnectionClosed):
            await said_hello(talker)
            return None
        lost_s = time.monotonic()
        while True:
            with suppress(InvalidStatus, OSError):  # until the ingress knows that one is gone
                async with back(fleet, token_of(talker)) as resumed:
                    resumed_s = time.monotonic() - lost_s
                    items = await history(resumed)
                    assert [each["role"] for each in items] == ["user", "assistant"]
                    assert words(items[1])
                    assert await said_hello(resumed)
                    return resumed_s

    def both_kept() -> bool:
        return [len(each.items) for each in store.conversations()] == [2] * REPLICAS

    async def main() -> None:
        await await_sessions(fleet, [0] * REPLICAS)
        store.client.flushall()  # what other tests have left
        async with AsyncExitStack() as stack:
            talkers = [await stack.enter_async_context(Talker(fleet)) for _ in range(REPLICAS)]
            for talker in talkers:
                await said_hello(talker)
            await asyncio.to_thread(fleet.await_that, both_kept)
            os.kill(fleet.replicas()[0], signal.SIGKILL)
            took = await asyncio.gather(*map(again, talkers))
        (took_s,) = [each for each in took if each is not None]
        print(f"resumed {took_s:.2f} s after the connection was lost")
        await await_sessions(fleet, [0] * REPLICAS)

    run(main(), 180)


def test_a_killed_replica_takes_its_own_clients_along_and_has_a_successor(fleet: Fleet) -> None:
    async def lost(talker: Talker) -> bool:
        """Whether the connection broke, without a word; False: an answer came first."""
        try:
            await said_hello(talker)
        except ConnectionClosed as error:
            return error.rcvd is None
        return False

    async def main() -> None:
        await await_sessions(fleet, [0] * REPLICAS)
        async with AsyncExitStack() as stack:
            talkers = [
                await stack.enter_async_context(Talker(fleet)) for _ in range(PLACES * REPLICAS)
            ]
            first, *_ = replicas = fleet.replicas()
            os.kill(first, signal.SIGKILL)
            assert Counter(await asyncio.gather(*map(lost, talkers))) == {
                True: PLACES,
                False: PLACES * (REPLICAS - 1),
            }
            await await_sessions(fleet, [0, PLACES])
            assert len(set(fleet.replicas()) - set(replicas)) == 1
            newcomers = [await stack.enter_async_context(Talker(fleet)) for _ in range(PLACES)]
            assert all(await asyncio.gather(*map(said_hello, newcomers)))

    run(main())


def test_a_signal_lets_replies_finish_and_leaves_nothing_behind(fleet: Fleet) -> None:
    async def main() -> None:
        await await_sessions(fleet, [0] * REPLICAS)
        async with AsyncExitStack() as stack:
            talkers = [await stack.enter_async_context(Talker(fleet)) for _ in range(REPLICAS)]
            for talker in talkers:
                await talker.send(typed("Hello"), {"type": "response.create"})
                await talker.wait("response.output_audio.delta")
            fleet.process.send_signal(signal.SIGTERM)
            for talker in talkers:
                done = await talker.wait("response.done")
                assert done["response"]["status"] == "completed"
                assert (await talker.closed())[0] == 1012

    started = fleet.processes()
    run(main())
    assert fleet.process.wait(90) == 0, fleet.printed()
    end_s = time.monotonic() + 30
    while left := [pid for pid in started if runs(pid)]:
        assert time.monotonic() < end_s, left
        time.sleep(POLL_S)
    assert [path for folder in fleet.kept for path in folder.rglob("*")] == []


def test_a_fleet_that_cannot_serve_says_why_and_ends(cache_folder: Path) -> None:
    require_package("ray", "fleet")
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    one = FILE.replace(f"replicas: {REPLICAS}", "replicas: 1").replace("STORE", "none")
    fleet = Fleet(folder, cache_folder, f"{one}  model: nowhere\n  codec: nowhere\n")
    try:
        assert fleet.process.wait(START_S) == 70, fleet.printed()
        lines = fleet.printed().splitlines()
        (why,) = (line for line in lines if line.startswith("replicas: ") and ";" in line)
        assert str(folder / "nowhere") in why
        assert "Traceback" not in why
    finally:
        fleet.stop()
        shutil.rmtree(folder)


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
