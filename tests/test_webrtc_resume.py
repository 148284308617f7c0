"""Conversations by WebRTC that go on in another call, or over a WebSocket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require_package, run
from resume_rig import ASKED, back, history, lose, resume_of, rows_of, talk, token_of, words
from server_rig import QUICK, Server, serving, typed
from session_rig import pocket
from webrtc_rig import Caller, post

from mosstalk.constants import CODE_MS

CONNECT_S = 2


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps recordings."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(cache_folder: Path, records: Path) -> Iterator[Server]:
    """A server that keeps conversations in its process, with one place."""
    words = ("--max-sessions", "1", "--limit", f"header_s={CONNECT_S}", "--record", str(records))
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


async def ask(caller: Caller, text: str) -> dict[str, Any]:
    """Type something and wait until the answer was played; the response."""
    caller.send(typed(text), {"type": "response.create"})
    done: dict[str, Any] = (await caller.wait("response.done"))["response"]
    await caller.wait("output_audio_buffer.stopped", response_id=done["id"])
    return done


def test_a_call_goes_on_in_another_call_whose_forerunner_nobody_has_missed_yet(
    server: Server,
) -> None:
    lost = Caller(server)

    async def main() -> None:
        async with lost:
            first = lost.events[0]["session"]
            assert resume_of(lost)["seconds"] == 300.0
            await ask(lost, ASKED[0])
            # The only place is taken by the call that its client has given up.
            async with Caller(server, resume=token_of(lost)) as again:
                session = again.events[0]["session"]
                assert session["id"] != first["id"]
                assert session["mosstalk"]["echo_gate"] is False
                items = await history(again)
                assert [item["role"] for item in items] == ["user", "assistant"]
                assert words(items[0]) == ASKED[0]
                assert words(items[1])
                await lost.closed.wait()
                done = await ask(again, ASKED[1])
                assert done["usage"]["input_token_details"]["cached_tokens"] > 0

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_a_call_that_ends_in_the_middle_of_a_reply_keeps_what_was_played_of_it(
    server: Server, records: Path
) -> None:
    ids, tokens, whole_ms = list[str](), list[str](), list[int]()

    async def main() -> None:
        async with Caller(server) as caller:
            ids.append(caller.events[0]["session"]["id"])
            caller.send(typed(ASKED[0]), {"type": "response.create"})
            await caller.wait("output_audio_buffer.started")
            done = (await caller.wait("response.done"))["response"]
            assert "output_audio_buffer.stopped" not in caller.kinds(), "it is still being played"
            whole_ms.append(round(1000 * done["mosstalk"]["timings"]["audio_s"]))
            tokens.append(token_of(caller))
        async with Caller(server, resume=tokens[0]) as again:
            assert [item["role"] for item in await history(again)] == ["user", "assistant"]
            ids.append(again.events[0]["session"]["id"])

    run(main())
    rows = [rows_of(server, records, each) for each in ids]
    assert rows[0] == rows[1]
    assert not any(tokens[0] in path.read_text() for path in records.rglob("wire.jsonl"))
    (path,) = records.glob(f"*-{ids[0]}/session.jsonl")
    commands = [json.loads(line).get("command", {}) for line in path.read_text().splitlines()]
    (played_ms,) = [each["heard_ms"] for each in commands if each.get("type") == "Truncate"]
    ids_of = pocket().ids
    codes = [code for text, code in rows[0] if text == ids_of.modality_pad and code != ids_of.eosp]
    print(f"{played_ms} of {whole_ms[0]} ms were played, {len(codes)} codes of it are read")
    assert len(codes) == -(-played_ms // CODE_MS)
    assert len(codes) < whole_ms[0] // CODE_MS


def test_a_conversation_moves_between_a_websocket_and_a_call(server: Server) -> None:
    async def main() -> None:
        talker = await talk(server, ASKED[0])
        lose(talker)
        async with Caller(server, resume=token_of(talker)) as caller:
            assert len(await history(caller)) == 2
            await ask(caller, ASKED[1])
            token = token_of(caller)
        async with back(server, token) as again:
            assert len(await history(again)) == 4

    run(main())
    server.await_nothing_held()


def test_a_token_holds_until_its_call_has_come_about(server: Server) -> None:
    name = 'mosstalk_sessions_closed_total{reason="vanished"}'

    async def main() -> None:
        talker = await talk(server, ASKED[0])
        lose(talker)
        token = token_of(talker)
        wrong = await post(server, "no offer", **{"X-Mosstalk-Resume": token})
        assert wrong.status_code == 400
        before = server.metrics().get(name, 0)
        never = Caller(server, resume=token)
        answer = await post(server, await never.offer(), **{"X-Mosstalk-Resume": token})
        assert answer.status_code == 201
        await never.connection.close()
        server.await_metrics(lambda values: values.get(name, 0) > before)
        server.await_nothing_held()
        async with Caller(server, resume=token) as caller:
            assert len(await history(caller)) == 2
        used = await post(server, await Caller(server).offer(), **{"X-Mosstalk-Resume": token})
        assert (used.status_code, used.json()["error"]["code"]) == (400, "invalid_resume_token")

    run(main())
    server.await_nothing_held()
    assert not server.faults()
