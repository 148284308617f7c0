"""Conversations that go on in another connection to the same server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import run
from openai import AsyncOpenAI
from openai.types.websocket_reconnection import ReconnectingEvent, ReconnectingOverrides
from realtime_rig import Caller, judge
from resume_rig import (
    ASKED,
    back,
    both,
    history,
    lose,
    refusal,
    resume_of,
    rows_of,
    talk,
    token_of,
    words,
)
from server_rig import QUICK, Server, Talker, serving, typed
from session_rig import BY_HAND, host
from typer.testing import CliRunner
from websockets import Origin
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mosstalk.cli import app
from mosstalk.server.conversations import unpacked
from mosstalk.server.realtime.protocol import RealtimeProtocol, Resumption
from mosstalk.server.realtime.session_config import ServedModel
from mosstalk.server.store import MemoryStore, Written
from mosstalk.session.events import SessionOpened

KEY, OTHER = "alpha-key", "beta-key"
SETTINGS = {"type": "session.update", "session": {
    "type": "realtime", "instructions": "Answer in one word.", "max_output_tokens": 60,
    "output_modalities": ["audio"]}}  # fmt: skip


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps recordings."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(cache_folder: Path, records: Path) -> Iterator[Server]:
    """A server that keeps conversations in its process, and has one place for a key."""
    words = ("--record", str(records), "--max-sessions", "2", "--log-level", "debug")
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


def test_a_lost_conversation_goes_on_as_if_it_had_not_been(server: Server, records: Path) -> None:
    ids, sounds, answers = list[str](), list[bytes](), list[str]()

    async def whole() -> None:
        async with Talker(server) as talker:
            await talker.send(SETTINGS)
            for text in ASKED:
                await talker.ask(text)
            sounds.append(talker.pcm())
            ids.append(talker.events[0]["session"]["id"])
            answers.extend(item_words(talker))

    async def in_two() -> None:
        talker = await Talker(server).__aenter__()
        await talker.send(SETTINGS)
        for text in ASKED[:2]:
            await talker.ask(text)
        first = talker.events[0]["session"]
        assert resume_of(talker) == {"token": token_of(talker), "seconds": 300.0}
        lose(talker)
        async with back(server, token_of(talker)) as again:
            session = again.events[0]["session"]
            assert session["instructions"] == "Answer in one word."
            assert session["max_output_tokens"] == 60
            assert session["id"] != first["id"]
            items = await history(again)
            assert resume_of(again)["items"] == 4
            assert [item["role"] for item in items] == ["user", "assistant"] * 2
            assert [words(item) for item in items[::2]] == list(ASKED[:2])
            assert [words(item) for item in items[1::2]] == answers[:2]
            done = await again.ask(ASKED[2])
            # Its rows were read again before anything was asked.
            assert done["usage"]["input_token_details"]["cached_tokens"] > 0
            sounds.append(talker.pcm() + again.pcm())
            ids.append(session["id"])

    run(whole())
    run(in_two())
    assert sounds[0] == sounds[1], "the same answers, to the last sample"
    one, two = (rows_of(server, records, each) for each in ids)
    assert one == two, "and the same rows"


def item_words(talker: Talker) -> list[str]:
    """What the replies said, in their order."""
    done = [each for each in talker.events if each["type"] == "response.done"]
    return [words(each["response"]["output"][0]) for each in done]


def test_a_reply_that_is_cut_off_keeps_what_was_sent_and_can_be_cut_to_what_was_heard(
    server: Server, records: Path
) -> None:
    ids = []

    async def main() -> None:
        talker = await talk(server, ASKED[0])
        await talker.send(typed(ASKED[1]), {"type": "response.create"})
        await talker.wait("response.output_audio.delta")
        lose(talker)
        async with back(server, token_of(talker)) as again:
            items = await history(again)
            assert [item["role"] for item in items] == ["user", "assistant"] * 2
            assert [item["status"] for item in items[2:]] == ["completed", "incomplete"]
            cut = {"item_id": items[3]["id"], "content_index": 0, "audio_end_ms": 100}
            await again.send({"type": "conversation.item.truncate"} | cut)
            told = await again.wait("conversation.item.truncated")
            assert told["audio_end_ms"] == 100
            assert told["mosstalk"]["codes"] == 2
            ids.append(again.events[0]["session"]["id"])
            token = token_of(again)
            lose(again)
        async with back(server, token) as third:  # the cut holds there too
            items = await history(third)
            assert [item["status"] for item in items[2:]] == ["completed", "incomplete"]
            ids.append(third.events[0]["session"]["id"])

    run(main())
    rows = [rows_of(server, records, each) for each in ids]
    assert rows[0] == rows[1]


def test_items_that_only_the_client_sees_come_back_at_their_place(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}

    async def main() -> None:
        talker = await talk(server, ASKED[0])
        await talker.send({"type": "conversation.item.create", "item": call | {"id": "call_1"}})
        await talker.wait("conversation.item.done")
        await talker.ask(ASKED[1])
        await talker.send({"type": "conversation.item.delete", "item_id": "call_1"})
        await talker.wait("conversation.item.deleted")
        await talker.send({"type": "conversation.item.create", "item": call | {"id": "call_2"}})
        await talker.wait("conversation.item.done")
        lose(talker)
        async with back(server, token_of(talker)) as again:
            kinds = [item["type"] for item in await history(again)]
            assert kinds == ["message"] * 4 + ["function_call"]

    run(main())


def test_a_token_is_good_for_once_also_when_two_come_at_a_time(server: Server) -> None:
    tokens = []

    async def main() -> None:
        talker = await talk(server, ASKED[0])
        lose(talker)
        tokens.append(token_of(talker))
        came = await both(*(back(server, tokens[0]).__aenter__() for _ in range(2)))
        ins = [each for each in came if isinstance(each, Talker)]
        outs = [each for each in came if isinstance(each, InvalidStatus)]
        assert [len(ins), len(outs)] == [1, 1], came
        assert len(await history(ins[0])) == 2
        await ins[0].socket.close()

    run(main())
    used = refusal(server, tokens[0])
    made_up = refusal(server, "resume_" + 43 * "A")
    assert used == made_up, "nobody learns which tokens there are"
    assert (used["status"], used["code"], used["param"]) == (400, "invalid_resume_token", "resume")
    assert "begin anew" in used["message"]
    assert refusal(server, "x" * 4000) == used
    server.await_nothing_held()


def test_who_comes_back_takes_the_place_of_its_connection_that_nobody_has_missed_yet(
    server: Server,
) -> None:
    server.await_nothing_held()
    name = 'mosstalk_sessions_closed_total{reason="resumed"}'
    before = server.metrics().get(name, 0)

    async def main() -> None:
        async with Talker(server):  # one of the two places
            talker = await talk(server, ASKED[0])
            async with back(server, token_of(talker)) as again:
                assert len(await history(again)) == 2
                assert await talker.closed() == (
                    1000, "the conversation was taken up elsewhere, or deleted"
                )  # fmt: skip

    run(main())
    server.await_nothing_held()
    assert server.metrics()[name] == before + 1


def test_a_server_that_is_full_refuses_and_the_token_still_holds(server: Server) -> None:
    async def main() -> None:
        talker = await talk(server, ASKED[0])
        lose(talker)
        await asyncio.to_thread(server.await_nothing_held)
        async with Talker(server), Talker(server):
            with pytest.raises(InvalidStatus) as refused:
                await back(server, token_of(talker)).__aenter__()
            assert refused.value.response.status_code == 503
        await asyncio.to_thread(server.await_nothing_held)
        header = {"X-Mosstalk-Resume": token_of(talker)}
        async with Talker(server, additional_headers=header) as again:
            assert len(await history(again)) == 2

    run(main())


def test_openais_package_comes_back_by_itself_with_the_token_it_was_told(server: Server) -> None:
    """As docs/clients/openai-python.md has it."""
    told = list[Any]()

    def resume(_: ReconnectingEvent) -> ReconnectingOverrides:
        created = [each for each in told if each.type == "session.created"][-1]
        return {"extra_query": {"resume": created.session.mosstalk["resume"]["token"]}}

    async def main() -> None:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        connecting = client.realtime.connect(model="mosstalk", on_reconnecting=resume)
        async with connecting as connection:
            item: Any = typed(ASKED[0])["item"]
            await connection.conversation.item.create(item=item)
            await connection.response.create()
            async for event in connection:
                told.append(event)
                if event.type == "response.done":
                    connection._connection.transport.abort()
                if [each.type for each in told].count("session.created") == 2:
                    break
            shown = told[-1].session.mosstalk["resume"]
            assert shown["items"] == 2
            await connection.close()

    run(main())


def test_a_page_is_told_why_within_its_connection(server: Server) -> None:
    async def main() -> None:
        url = f"{server.socket}?resume=resume_{43 * 'B'}"
        async with connect(url, origin=Origin(server.url)) as page:
            event = json.loads(await page.recv())
            judge(event)
            assert event["error"]["code"] == "invalid_resume_token"
            await page.wait_closed()
            assert page.close_code == 1008

    run(main())


def test_tokens_stand_in_clear_in_no_log_and_no_recording(server: Server, records: Path) -> None:
    tokens = []

    async def main() -> None:
        async with Talker(server) as talker:
            tokens.append(token_of(talker))

    run(main())
    server.await_nothing_held()
    refusal(server, tokens[0] + "x")
    text = json.dumps(server.logs) + "".join(server.lines)
    assert tokens[0] not in text
    for path in records.rglob("*"):
        if path.is_file():
            assert tokens[0].encode() not in path.read_bytes(), path
    wires = [path.read_text() for path in records.glob("*/wire.jsonl")]
    assert any(f"{tokens[0][:11]}..." in wire for wire in wires)


def test_a_conversation_is_deleted_with_its_recordings(server: Server, records: Path) -> None:
    """With its token, while somebody still talks; the token is worth nothing from then on."""
    before, tokens = set(records.iterdir()), list[str]()

    def delete(token: str, status: int) -> dict[str, Any]:
        shown = {"X-Mosstalk-Resume": token}
        answer = httpx.delete(f"{server.url}/v1/realtime/conversation", headers=shown)
        assert answer.status_code == status, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def main() -> None:
        lost = await talk(server, ASKED[0])
        lose(lost)
        async with back(server, token_of(lost)) as talker:
            await history(talker)
            told = await asyncio.to_thread(delete, token_of(talker), 200)
            assert (told["object"], told["deleted"]) == ("conversation.deleted", True)
            assert told["id"].startswith("conv_")
            assert told["mosstalk"] == {"recordings": 2}
            assert await talker.closed() == (
                1000, "the conversation was taken up elsewhere, or deleted"
            )  # fmt: skip
            again = await asyncio.to_thread(delete, token_of(talker), 400)
            assert again["error"]["code"] == "invalid_resume_token"
        tokens.append(token_of(talker))

    run(main())
    assert refusal(server, tokens[0])["code"] == "invalid_resume_token"
    server.await_nothing_held()
    assert set(records.iterdir()) == before


def test_a_session_that_transcribes_has_no_token(server: Server) -> None:
    async def main() -> None:
        async with Talker(server, model="any&intent=transcription") as talker:
            assert "resume" not in talker.events[0]["session"]["mosstalk"]

    run(main())


def test_a_token_is_of_use_with_its_own_key_alone_and_for_its_time(cache_folder: Path) -> None:
    keys = ("--api-key", KEY, "--api-key", OTHER, "--resume-s", "4")
    with serving(*QUICK, *keys, cache=cache_folder) as server:

        def bearer(key: str) -> dict[str, Any]:
            return {"additional_headers": {"Authorization": f"Bearer {key}"}}

        tokens = []

        async def lost() -> None:
            async with Talker(server, **bearer(KEY)) as talker:
                await talker.ask(ASKED[0])
                tokens.append(token_of(talker))

        async def found() -> None:
            async with back(server, tokens[0], **bearer(KEY)) as again:
                assert len(await history(again)) == 2
                tokens.append(token_of(again))

        run(lost())
        foreign = refusal(server, tokens[0], **bearer(OTHER))
        assert foreign["code"] == "invalid_resume_token"
        run(found())  # which the other key has not used up
        server.headers = {"Authorization": f"Bearer {KEY}"}
        kept = "mosstalk_conversations_kept"
        server.await_metrics(lambda values: values[kept] == 0)
        assert refusal(server, tokens[-1], **bearer(KEY)) == foreign


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--store", "http://localhost"), "give memory, none or redis://HOST:PORT/DATABASE"),
        (("--store", "redis://localhost:many"), "give redis://HOST:PORT/DATABASE"),
        (("--resume-s", "0"), "--resume-s must be above 0; to keep nothing: --store none"),
    ],
)
def test_a_store_that_is_none_is_told_at_the_start(words: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words, "--print-config"])
    assert result.exit_code == 2
    assert says in result.output


def test_the_password_of_a_store_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSSTALK_STORE", "rediss://:secret@example.org/0")
    result = CliRunner().invoke(app, ["serve", "--resume-s", "9", "--print-config"])
    assert json.loads(result.output)["store"] == {"url": "rediss", "resume_s": 9.0}
    monkeypatch.delenv("MOSSTALK_STORE")
    result = CliRunner().invoke(app, ["serve", "--store", "none", "--print-config"])
    assert json.loads(result.output)["store"] is None


# The parts.


def test_a_memory_is_bounded_in_number_bytes_and_time() -> None:
    async def main() -> None:
        now_s = 0.0
        store = MemoryStore(most=2, most_bytes=100, now=lambda: now_s)
        for key in "abc":
            assert await store.write(key, {"head": b"x"}, (), 10, whole=True) is Written.DONE
        assert len(store) == 2
        assert await store.take("a", 1) is None
        assert await store.write("b", {"item:1": bytes(85)}, (), 10, whole=False) is Written.DONE
        assert len(store) == 1, "the other one made room"
        assert await store.write("c", {"x": b""}, (), 10, whole=False) is Written.UNKNOWN
        now_s = 10.0
        assert await store.take("b", 1) is None
        await store.close()

    run(main())


def test_what_is_taken_is_taken_for_whoever_had_it_until_it_is_given_back() -> None:
    async def main() -> None:
        store = MemoryStore()
        await store.write("a", {"head": b"1", "item:1": b"2", "item:2": b"3"}, (), 10, whole=True)
        await store.write("a", {"item:3": b"4"}, ("item:1",), 10, whole=False)
        fields = {"head": b"1", "item:2": b"3", "item:3": b"4"}
        assert await store.take("a", 10) == fields
        assert await store.take("a", 10) is None
        assert await store.write("a", {"head": b"9"}, (), 10, whole=True) is Written.TAKEN
        await store.give_back("a", fields, 10)
        assert await store.take("a", 10) == fields
        await store.close()

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head": b"no json"},
        {"head": b'{"format": 9}'},
        {"head": b'{"format": 1, "asked": {}, "conversation_id": "c", "items": ["i"]}'},
    ],
)
def test_what_is_damaged_is_no_conversation(fields: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(fields)


def test_rows_of_another_model_are_refused_before_they_are_read() -> None:
    async def main() -> None:
        async with host() as house:
            session = await house.open(BY_HAND)
            client = Caller(RealtimeProtocol(ServedModel("moss")), session)
            client.send("conversation.item.create", item=typed("Hello.")["item"])
            done = await client.until("conversation.item.done")
            kept = session.kept(done["item"]["id"])
            assert kept
            await session.close()
            beyond = house.pipeline.model.config.vocab_size
            for row in ((beyond, 0), (-1, 0), (0, house.pipeline.model.config.audio_vocab_size)):
                with pytest.raises(Exception, match="another model: begin anew"):
                    await house.open(BY_HAND, [type(kept)(kept.item, (*kept.rows, row))])
            assert not house.sessions

    run(main())


def test_a_conversation_that_goes_on_keeps_its_id_and_says_what_came_back() -> None:
    resumption = Resumption("resume_x", 9.0, "conv_1", ())
    protocol = RealtimeProtocol(ServedModel("moss"), lambda: 1.0, resumption=resumption)
    client = Caller(protocol)
    (created,) = client.hear(SessionOpened("sess_1", protocol.settings, clock=0))
    told = created["session"]["mosstalk"]["resume"]
    assert told == {"token": "resume_x", "seconds": 9.0, "items": 0}
    assert protocol.conversation_id == "conv_1"
