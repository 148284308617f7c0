"""Two replicas of the small model behind one address, by a real Ray, with real clients."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from conftest import require_package, run
from fleet_rig import REPLICAS, START_S, Fleet, await_sessions, fleet_file, running_fleet
from prometheus_rig import Prometheus, queries, settings_of_a_fleet
from server_rig import POLL_S, Talker, ask, typed
from websockets.exceptions import ConnectionClosed, InvalidStatus

# Slow: Ray takes half a minute to start and ten seconds to end, and asks for an extra of 300 MB.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACES = 2
FILE = fleet_file(vad="none", max_sessions=PLACES)


@pytest.fixture(scope="module")
def fleet(cache_folder: Path) -> Iterator[Fleet]:
    """Two replicas, ready."""
    with running_fleet(cache_folder, FILE) as running:
        yield running


async def said_hello(talker: Talker) -> bytes:
    """The sound of the answer to a typed turn."""
    await talker.send(typed("Hello"), {"type": "response.create"})
    done = await talker.wait("response.done")
    assert done["response"]["status"] == "completed", done
    return talker.pcm()


async def let_in(fleet: Fleet, stack: AsyncExitStack, most_s: float = 30.0) -> Talker:
    """A client that asks again while it is refused, as one was on a busy machine."""
    end_s = time.monotonic() + most_s
    while True:
        try:
            return await stack.enter_async_context(Talker(fleet))
        except InvalidStatus:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(POLL_S)


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


def test_replicas_have_as_much_of_the_processor_as_whoever_started_them(fleet: Fleet) -> None:
    niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in fleet.replicas()]
    assert niceness == [os.getpriority(os.PRIO_PROCESS, fleet.process.pid)] * REPLICAS


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
            newcomers = [await let_in(fleet, stack) for _ in range(PLACES)]
            assert all(await asyncio.gather(*map(said_hello, newcomers)))

    run(main())


def test_prometheus_finds_every_replica_and_the_successor_of_one_that_was_killed(
    fleet: Fleet, tmp_path: Path
) -> None:
    prometheus = Prometheus(settings_of_a_fleet(fleet.url), tmp_path)

    def up() -> set[str]:
        """The replicas whose own metrics it reads."""
        return {labels["replica"] for labels, value in prometheus.query("up") if value}

    def shown(name: str) -> list[float]:
        """What the dashboard shows."""
        return [value for _, value in prometheus.query(queries()[name])]

    try:
        prometheus.await_ready()
        prometheus.await_true(lambda: len(up()) == REPLICAS, "not all replicas are found")
        before, pids = up(), set(fleet.replicas())
        assert shown("Sessions, places") == [PLACES * REPLICAS]
        assert shown("Servers ready, value") == [REPLICAS]
        os.kill(min(pids), signal.SIGKILL)
        prometheus.await_true(lambda: len(up() | before) > REPLICAS, "no successor is found")
        prometheus.await_true(lambda: len(up()) == REPLICAS, "the other one is lost")
        assert len(up() & before) == REPLICAS - 1
        prometheus.await_true(lambda: len(prometheus.query("up")) == REPLICAS, "one stays down")
        ((_, number),) = prometheus.query('count(last_over_time(up{job="mosstalk"}[30m]))')
        assert number == REPLICAS + 1
        assert shown("Sessions, places") == [PLACES * REPLICAS]
    finally:
        prometheus.stop()


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
    one = fleet_file("1", vad="none", max_sessions=PLACES)
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
