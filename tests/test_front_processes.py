"""Several processes with sockets: who talks where, and what stays true for all of them together."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from conftest import run
from server_rig import BY_HAND, QUICK, Server, Talker, append, question, serving
from test_server_ends import ANSWER, CODES, LONG, WHOLE, begin

from mosstalk.server.admission import ServeOptions
from mosstalk.server.front_process import SESSIONS, front_processes
from mosstalk.server.ipc import WorkerOptions

MODULE = "mosstalk.server.front_process"
UP = "mosstalk_front_processes"
LIMITS = ("--limit", "per_key=5", "--limit", "connections=12")


def both_up(server: Server) -> Server:
    """The server, once two front processes take connections."""
    server.await_metrics(lambda values: values[UP] == 2)
    return server


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's recordings are."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(cache_folder: Path, kept: Path) -> Iterator[Server]:
    """A server with two front processes, whose answers are long."""
    words = ("--front-processes", "2", *LIMITS, "--record", str(kept))
    with serving(*LONG, *words, cache=cache_folder) as running:
        yield both_up(running)


def fronts_of(server: Server, sessions: set[str]) -> Counter[str]:
    """In which processes these sessions were opened."""
    server.await_log(lambda: sessions <= {each["session"] for each in opened(server)})
    return Counter(each["process"] for each in opened(server) if each["session"] in sessions)


def opened(server: Server) -> list[dict[str, str]]:
    """What was logged of sessions that were opened."""
    return server.logged("session opened")


def test_connections_are_spread_evenly_and_counted_together(server: Server) -> None:
    async def main() -> None:
        before = server.metrics()
        async with AsyncExitStack() as stack:
            talkers = [await stack.enter_async_context(Talker(server)) for _ in range(4)]
            ids = {each.events[0]["session"]["id"] for each in talkers}
            for talker in talkers:
                await talker.send(BY_HAND)
                await talker.wait("session.updated")
            assert fronts_of(server, ids) == {"front-1": 2, "front-2": 2}
            after = server.metrics()
            assert after["mosstalk_sessions_opened_total"] == 4 + before.get(
                "mosstalk_sessions_opened_total", 0
            )
            messages = 'mosstalk_messages_total{direction="in"}'
            assert after[messages] - before[messages] == 4
            server.await_metrics(lambda values: values["mosstalk_sessions"] == 4)

    run(main())
    server.await_nothing_held()


def test_an_answer_is_the_same_as_the_first_fronts_own(server: Server, cache_folder: Path) -> None:
    async def heard(asked: Server) -> bytes:
        async with Talker(asked) as talker:
            await talker.send(BY_HAND, append(question()), {"type": "input_audio_buffer.commit"})
            await talker.send(ANSWER)
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] in WHOLE
            return talker.pcm()

    async def main(alone: Server) -> None:
        here = await heard(server)
        assert np.frombuffer(here, "<i2").any()
        assert here == await heard(alone)

    with serving(*LONG, "--front-processes", "0", cache=cache_folder) as alone:
        run(main(alone))


def test_a_keys_connections_are_counted_over_all_processes(server: Server) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(Talker(server))
            with pytest.raises(Exception, match="HTTP 429"):
                await Talker(server).__aenter__()
        async with Talker(server):  # as soon as one has gone
            pass

    run(main())


def test_connections_that_were_handed_over_count_against_the_limit(server: Server) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(Talker(server))
            writers = []
            for _ in range(9):  # idle ones; the oldest makes room for the next from the ninth on
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writers.append((reader, writer))
            gone = await asyncio.wait_for(writers[0][0].read(), 5)
            assert gone == b""
            for _, writer in writers:
                writer.close()

    server.await_nothing_held()
    port = int(server.url.rpartition(":")[2])
    run(main())


def test_a_killed_process_takes_its_own_conversations_along_and_has_a_successor(
    server: Server,
) -> None:
    async def main() -> None:
        async with Talker(server) as one, Talker(server) as other:
            for talker in (one, other):
                await begin(talker)
            sent = server.metrics()['mosstalk_messages_total{direction="out"}']
            (process,) = fronts_of(server, {one.events[0]["session"]["id"]})
            victim = server.child_id(MODULE)  # the first was started first: front-1
            os.kill(victim, signal.SIGKILL)
            lost, left = (one, other) if process == "front-1" else (other, one)
            assert (await lost.closed())[0] in (0, 1006)
            assert (await left.wait("response.done"))["response"]["status"] == "completed"
            assert len(left.pcm()) == CODES * 1920 * 2
            await asyncio.to_thread(
                server.await_metrics, lambda values: values["mosstalk_sessions"] == 1
            )
            both_up(server)
            assert victim not in server.child_ids(MODULE)
            assert server.metrics()['mosstalk_messages_total{direction="out"}'] >= sent
        async with AsyncExitStack() as stack:
            talkers = [await stack.enter_async_context(Talker(server)) for _ in range(2)]
            ids = {each.events[0]["session"]["id"] for each in talkers}
            assert fronts_of(server, ids) == {"front-1": 1, "front-2": 1}

    server.await_nothing_held()
    run(main())
    assert [line["level"] for line in server.logged("front-1 has ended")] == ["error"]


def test_a_signal_lets_answers_in_every_process_finish(server: Server, kept: Path) -> None:
    """The last of the server that the tests above share: it ends it."""

    async def main() -> None:
        async with Talker(server) as idle, Talker(server) as one, Talker(server) as other:
            for talker in (one, other):
                await begin(talker)
            server.signal(signal.SIGTERM)
            assert await idle.closed() == (1012, "the server ends; connect again")
            for talker in (one, other):
                done = (await talker.wait("response.done"))["response"]
                assert done["status"] == "completed"
                assert len(talker.pcm()) == CODES * 1920 * 2
                assert (await talker.closed())[0] == 1012

    server.await_metrics(lambda values: values["mosstalk_sessions"] == 0)
    run(main())
    assert server.wait() == 0
    assert not server.faults()
    whole = [folder for folder in kept.iterdir() if (folder / "rows.json").exists()]
    assert len(whole) == len(opened(server)) - 1, "all but that of the one that was killed"


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_a_worker_that_dies_ends_them_all(
    cache_folder: Path,
) -> None:
    async def hang(server: Server) -> None:
        async with Talker(server) as talker:
            (process,) = fronts_of(server, {talker.events[0]["session"]["id"]})
            victims = server.child_ids(MODULE)
            hung = victims[int(process[-1]) - 1]
            os.kill(hung, signal.SIGSTOP)
            assert (await talker.closed())[0] in (0, 1006)
            await asyncio.to_thread(both_up, server)
            assert hung not in server.child_ids(MODULE)

    async def die(server: Server) -> None:
        async with Talker(server) as one, Talker(server) as other:
            os.kill(server.worker_id, signal.SIGKILL)
            for talker in (one, other):
                assert (await talker.closed())[0] == 1011

    words = (*QUICK, "--front-processes", "2", "--watchdog", "3")
    with serving(*words, cache=cache_folder) as server:
        both_up(server)
        run(hang(server))
        run(die(server))
        assert server.wait() == 70


def test_there_are_as_many_as_a_crowd_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(sessions: int, **more: object) -> int:
        return front_processes(ServeOptions(worker=WorkerOptions(sessions=sessions), **more))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert usual(SESSIONS) == 0
    assert usual(SESSIONS + 1) == 2
    assert usual(256) == 3
    assert usual(10_000) == 4, "others need processors too"
    assert usual(256, transcriber="whisper-tiny") == 0
    assert usual(4, front_processes=1) == 1
