"""Whatever comes over the wire is served or refused by name, and the next one is served."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require_package, run
from fuzz_rig import FORM, Fuzzer, Sent
from realtime_rig import Wire, caller, judge, obeyed
from server_rig import Server, Talker, serving
from test_realtime_refusals import error_of, require_alive

from mosstalk.server.replay import read_recording

BURST = 20
"""Messages that are sent without listening for an answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps recordings."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(cache_folder: Path, folder: Path) -> Iterator[Server]:
    """A server that finds turns by itself, answers shortly and records."""
    require_package("silero_vad", "vad")
    words = ("--temperature", "0", "--seed", "0", "--max-reply-s", "1", "--record", str(folder))
    with serving(*words, cache=cache_folder) as running:
        yield running


# Slow: a server of their own; ``test_realtime_refusals`` sends whatever comes without a socket.
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(1, 400), (2, 200)])
def test_any_events_in_any_order_are_served_or_refused_by_name(
    server: Server, folder: Path, seed: int, count: int
) -> None:
    fuzz(server, folder, seed, count)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed < 101 else pytest.mark.faults)
        for seed in range(100, 112)
    ],
)
def test_thousands_of_events_in_any_order_are_too(server: Server, folder: Path, seed: int) -> None:
    fuzz(server, folder, seed, 1000)


def fuzz(server: Server, folder: Path, seed: int, count: int) -> None:
    """Send what a seed makes and check all that is answered, then that nothing is left behind."""
    print(f"seed {seed}: {count} messages")
    fuzzer, said = Fuzzer(seed), list[Sent]()
    events = list[Wire]()

    async def main() -> None:
        async with Talker(server) as talker:
            for place in range(0, count, BURST):
                for _ in range(BURST):
                    said.append(fuzzer.next())
                    await talker.send(said[-1].message)
                await _until_answered(talker, f"sync{place}")
            response = {"conversation": "none", "input": [], "metadata": {"the": "last"}}
            await talker.send({"type": "response.create", "response": response})
            while (await talker.wait("response.done"))["response"]["metadata"] != {"the": "last"}:
                pass
            events.extend(talker.events)

    run(main())
    for event in events:
        judge(event)
    _require_right_errors(said, [event["error"] for event in events if event["type"] == "error"])
    server.await_nothing_held()
    assert server.faults() == []
    _require_recorded(server, folder, events[0]["session"]["id"], count)


async def _until_answered(talker: Talker, event_id: str) -> None:
    """Listen until all that was sent has been heard: events are taken in their order."""
    nobody = {"type": "conversation.item.retrieve", "item_id": "nobody", "event_id": event_id}
    await talker.send(nobody)
    async with asyncio.timeout(60):
        while (await talker.error())["event_id"] != event_id:
            pass


def _require_right_errors(said: list[Sent], errors: list[Wire]) -> None:
    """Check that errors name events that were sent, and that what is wrong met with its own."""
    by_id = {sent.event_id: sent for sent in said if sent.event_id}
    told: dict[str, list[Wire]] = {}
    for error in errors:
        assert error["code"]
        assert error["message"]
        assert error["code"] != "server_error", error
        event_id = error["event_id"]
        if event_id is not None and not event_id.startswith("sync"):
            told.setdefault(event_id, []).append(error)
            sent = by_id[event_id]
            assert not sent.legal or error["code"] not in FORM, (sent, error)
    for sent in by_id.values():
        if sent.code:
            (error,) = told.get(sent.event_id or "", [{}])
            assert (error.get("code"), error.get("param")) == (sent.code, sent.param), (sent, error)
    broken = [sent for sent in said if sent.event_id is None]
    unnamed = [error for error in errors if error["event_id"] is None]
    assert len([error for error in unnamed if error["code"] == "invalid_json"]) == len(broken)


def _require_recorded(server: Server, folder: Path, session_id: str, count: int) -> None:
    """Check that the recording is whole."""
    server.await_folder(folder)
    (kept,) = folder.glob(f"*{session_id}")
    lines = (kept / "wire.jsonl").read_text("utf-8").split("\n")[:-1]
    assert sum(json.loads(line)["from"] == "client" for line in lines) > count
    assert read_recording(kept).closed == "client"
    metrics = server.metrics()
    assert metrics["mosstalk_recordings_cut_total"] == 0
    assert metrics["mosstalk_recorder_up"] == 1


@pytest.mark.parametrize(
    "message",
    [
        {"type": "response.cancel", "metadata": "\ud800"},
        {"type": "response.cancel", "\udfff": 1},
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(message: Wire) -> None:
    client = caller()
    error = error_of(client.raw(json.dumps(message | {"event_id": "mine"})))
    assert (error["code"], error["event_id"]) == ("invalid_json", "mine")
    error = error_of(client.send("response.cancel", event_id="\ud800"))
    assert (error["code"], error["event_id"]) == ("invalid_json", None)
    raw = json.dumps(message | {"event_id": "mine"}, ensure_ascii=False)
    for encoding in ("utf-8", "utf-16-le"):  # which the parser would take for what they are
        error = error_of(client.raw(raw.encode(encoding, "surrogatepass")))
        assert error["code"] == "invalid_json"
    assert not client.commands
    require_alive(client)


def test_what_is_nested_deeply_is_refused_and_goes_no_further() -> None:
    client = caller()
    for depth in (65, 400, 900):
        deep = "1"
        for _ in range(depth):
            deep = '{"audio": ' + deep + "}"
        for _ in range(2):  # what is sent twice is merged, level by level
            message = f'{{"type": "session.update", "event_id": "mine", "session": {deep}}}'
            error = error_of(client.raw(message))
            assert (error["code"], error["event_id"]) == ("invalid_json", "mine")
            assert "deep" in error["message"]
    parameters: Wire = {}
    for _ in range(50):
        parameters = {"items": parameters}
    tool = {"type": "function", "name": "deep", "parameters": parameters}
    assert client.send("session.update", session={"tools": [tool]}) == []
    require_alive(client)


def test_numbers_that_json_cannot_answer_with_do_not_come_back() -> None:
    client = caller()
    tool = '{"type": "function", "name": "f", "parameters": {"most": 1e999, "least": -1e999}}'
    client.raw('{"type": "session.update", "session": {"tools": [' + tool + "]}}")
    (event,) = client.hear(*obeyed(client.commands[-1]))
    assert json.loads(json.dumps(event, allow_nan=False)) == event
