"""Conversations that go on at another server, kept in a real Redis while servers are killed."""

import asyncio
import base64
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import run
from resume_rig import ASKED, Store, back, both, history, lose, refusal, rows_of, talk, token_of
from server_rig import POLL_S, QUICK, START_S, Server, Talker, serving, typed
from session_rig import pocket
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import Reply, Row
from mosstalk.session.events import ItemStatus, KeptItem

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One for all servers of this file."""
    with Store.running(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the second server keeps recordings."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def second(store: Store, records: Path, cache_folder: Path) -> Iterator[Server]:
    """The server that stays."""
    words = ("--store", store.url, "--record", str(records))
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


@pytest.fixture
def first(store: Store, cache_folder: Path) -> Iterator[Server]:
    """The server that is killed; its address is in the environment, as a password would be."""
    with serving(*QUICK, cache=cache_folder, env={"MOSSTALK_STORE": store.url}) as running:
        yield running


async def until(met: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    end_s = time.monotonic() + START_S
    while not met():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(POLL_S)


def contains(rows: list[Row], part: list[Row]) -> bool:
    """Whether rows follow one another somewhere among others."""
    return any(rows[at : at + len(part)] == part for at in range(len(rows) - len(part) + 1))


def test_a_server_that_is_killed_in_the_middle_of_a_reply_loses_what_was_not_heard_of_it(
    second: Server, store: Store, records: Path, cache_folder: Path
) -> None:
    ids, kept = list[str](), list[KeptItem]()

    def replies() -> list[KeptItem]:
        """The second reply, as it is kept wherever it is."""
        return [each.items[3] for each in store.conversations() if len(each.items) == 4]

    async def main(first: Server) -> None:
        talker = await talk(first, ASKED[0])
        await talker.send(typed(ASKED[1]), {"type": "response.create"})
        await talker.wait("response.output_audio.delta")
        heard = -(-len(second_reply(talker)) // 2 // OUTPUT_SAMPLES_PER_CODE)
        # So much was heard at most: what came is kept beside it, a moment later.
        await until(lambda: any((each.heard_codes or 0) >= heard for each in replies()), "kept")
        first.process.send_signal(signal.SIGKILL)
        await talker.closed()
        assert talker.kinds().count("response.done") == 1, "it was killed too late"
        (before,) = replies()
        assert before.heard_codes
        assert before.heard_codes >= heard
        async with back(second, token_of(talker)) as again:
            items = await history(again)
            assert [item["role"] for item in items] == ["user", "assistant"] * 2
            assert [item["status"] for item in items] == [*3 * ["completed"], "incomplete"]
            ids.append(again.events[0]["session"]["id"])
            done = await again.ask(ASKED[2])
            assert done["status"] in ("completed", "incomplete")
            assert again.pcm()
        assert await asyncio.to_thread(code_of, second, token_of(talker)) == "invalid_resume_token"
        kept.append(before)
        codes = len(second_reply(talker)) / 2 / OUTPUT_SAMPLES_PER_CODE
        print(f"{codes:.0f} codes were sent, {before.heard_codes} of them are kept")

    long = ("--script", "speech:150", "--store", store.url)
    with serving(*QUICK, *long, cache=cache_folder) as first:
        run(main(first))
    # The model has read that much of the reply, to the code, and then what came after.
    ids_of, (reply,) = pocket().ids, kept
    drawn = Reply(list(reply.rows), list(reply.modes or ()))
    codes = drawn.codes(ids_of)[: reply.heard_codes]
    assert len(codes) == reply.heard_codes
    rows = [(ids_of.modality_pad, code) for code in (*codes, ids_of.eosp)]
    assert contains(rows_of(second, records, ids[0]), rows)


async def ended_when_typed_at(talker: Talker) -> tuple[int, str]:
    """Code and reason with which a connection ends whose conversation is taken up elsewhere.

    It is found out when something is to be kept: of what is typed here, or of what was said
    before, and then it may be closed already.
    """
    with suppress(ConnectionClosed):
        await talker.send(typed("Nobody hears this."))
    return await talker.closed()


def code_of(server: Server, token: str) -> str:
    """The code of the error with which a token is refused."""
    return str(refusal(server, token)["code"])


def second_reply(talker: Talker) -> bytes:
    """The sound of the reply that came after the first one."""
    done = next(at for at, each in enumerate(talker.events) if each["type"] == "response.done")
    deltas = [e for e in talker.events[done:] if e["type"] == "response.output_audio.delta"]
    return b"".join(base64.b64decode(each["delta"]) for each in deltas)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_who_comes_to_another_server_hears_what_it_would_have_heard(
    end: signal.Signals, first: Server, second: Server, store: Store, records: Path
) -> None:
    sounds, ids = [], []
    store.client.flushall()

    def is_kept() -> bool:
        """Whether both answers are kept as they ended: killed before, it would lose the end."""
        kept = [each.items for each in store.conversations() if len(each.items) == 4]
        return any(items[-1].item.status is ItemStatus.COMPLETED for items in kept)

    async def main() -> None:
        whole = await talk(second, *ASKED)
        sounds.append(whole.pcm())
        ids.append(whole.events[0]["session"]["id"])
        await whole.socket.close()
        talker = await talk(first, *ASKED[:2])
        if end is signal.SIGKILL:
            await until(is_kept, "kept")
        first.process.send_signal(end)
        await talker.closed()
        async with back(second, token_of(talker)) as again:
            assert len(await history(again)) == 4
            await again.ask(ASKED[2])
            sounds.append(talker.pcm() + again.pcm())
            ids.append(again.events[0]["session"]["id"])

    run(main())
    assert sounds[0] == sounds[1]
    assert rows_of(second, records, ids[0]) == rows_of(second, records, ids[1])


def test_of_two_servers_that_are_asked_at_once_one_has_it_and_the_old_connection_ends(
    first: Server, second: Server
) -> None:
    async def main() -> None:
        talker = await talk(first, ASKED[0])
        token = token_of(talker)
        came = await both(*(back(each, token).__aenter__() for each in (second, second)))
        ins = [each for each in came if isinstance(each, Talker)]
        outs = [each for each in came if isinstance(each, InvalidStatus)]
        assert [len(ins), len(outs)] == [1, 1], came
        assert len(await history(ins[0])) == 2
        code, reason = await ended_when_typed_at(talker)
        assert (code, reason) == (1000, "the conversation was taken up elsewhere, or deleted")
        await ins[0].socket.close()

    run(main())
    failures = {n: v for n, v in first.metrics().items() if "store_failures_total" in n}
    assert failures
    assert not any(failures.values())


def test_another_process_that_speaks_with_clients_goes_on_as_well(
    store: Store, cache_folder: Path
) -> None:
    words = ("--store", store.url, "--front-processes", "2")
    with serving(*QUICK, *words, cache=cache_folder) as server:
        server.await_metrics(lambda values: values["mosstalk_front_processes"] == 2)

        async def main() -> None:
            talker = await talk(server, ASKED[0])  # at one of them, and then at the other
            async with back(server, token_of(talker)) as again:
                assert len(await history(again)) == 2
                assert (await ended_when_typed_at(talker))[0] == 1000

        run(main())
        server.await_nothing_held()
        assert server.metrics()["mosstalk_conversations_resumed_total"] == 1


def test_what_is_kept_names_no_token_and_goes_in_time(store: Store, cache_folder: Path) -> None:
    with serving(*QUICK, "--store", store.url, "--resume-s", "2", cache=cache_folder) as server:
        tokens = []

        async def main() -> None:
            store.client.flushall()
            talker = await talk(server, ASKED[0])
            tokens.append(token_of(talker))
            (kept,) = store.conversations()
            size = sum(len(name) + len(value) for name, value in kept.fields.items())
            print(f"{len(kept.items)} items are {size} bytes")
            (key,) = store.client.keys("*")
            dump = key + b"".join(store.client.hgetall(key).values())
            assert tokens[0].encode() not in dump
            assert 0 < store.client.pttl(key) <= 2667
            lose(talker)

        run(main())
        end_s = time.monotonic() + START_S
        while store.client.dbsize():
            assert time.monotonic() < end_s, "nothing goes"
            time.sleep(POLL_S)
        assert refusal(server, tokens[0])["code"] == "invalid_resume_token"


def test_talks_go_on_while_the_store_is_away_and_are_kept_again_when_it_is_back(
    first: Server, second: Server, store: Store
) -> None:
    up = "mosstalk_store_up"
    failed = 'mosstalk_store_failures_total{operation="write"}'

    async def main() -> None:
        talker = await talk(first, ASKED[0])
        store.kill()
        done = await talker.ask(ASKED[1])
        assert done["status"] == "completed"
        await asyncio.to_thread(first.await_metrics, lambda m: m[up] == 0 and m[failed] > 0)
        async with Talker(second) as fresh:  # who is new is let in
            with pytest.raises(InvalidStatus) as refused:
                await back(second, token_of(fresh)).__aenter__()
            response = refused.value.response
            assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
        store.start()
        await asyncio.to_thread(first.await_metrics, lambda m: m[up] == 1)
        await asyncio.to_thread(
            first.await_log, lambda: any("answers again" in str(line) for line in first.logs)
        )
        first.process.send_signal(signal.SIGKILL)
        await talker.closed()
        async with back(second, token_of(talker)) as again:
            assert len(await history(again)) == 4

    run(main())
    assert any("the store of conversations fails" in str(line) for line in first.logs)


def test_a_store_that_is_stopped_holds_up_no_sound(first: Server, store: Store) -> None:
    assert store.process

    async def main() -> None:
        talker = await talk(first, ASKED[0])
        assert store.process
        store.process.send_signal(signal.SIGSTOP)  # it takes connections, and answers nobody
        try:
            for text in ASKED[1:]:
                done = await talker.ask(text)
                assert done["status"] == "completed"
        finally:
            store.process.send_signal(signal.SIGCONT)
        up = "mosstalk_store_up"
        await asyncio.to_thread(first.await_metrics, lambda m: m[up] == 1)
        await talker.socket.close()

    run(main())
