"""Long events of a call: what is too long is shortened or refused, and the call goes on."""

import base64
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require_package, run
from server_rig import QUICK, Server, append, serving, typed
from webrtc_rig import Caller, post

EVENT_BYTES, MESSAGE_BYTES = 150_000, 2_000_000
LONG = "路漫漫其修远兮" * 4_500
"""31,500 characters, 94,500 bytes of UTF-8, twice as many with JSON's escapes."""


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that takes less than usual, so that less has to be sent."""
    limits = ("event_bytes", EVENT_BYTES), ("message_bytes", MESSAGE_BYTES)
    words = [word for name, value in limits for word in ("--limit", f"{name}={value}")]
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


def update(**session: Any) -> dict[str, Any]:
    """An event that changes a session."""
    return {"type": "session.update", "session": {"type": "realtime"} | session}


async def answers(caller: Caller) -> None:
    """The call goes on: a reply is made, once the session is one that the small model can read."""
    caller.send(update(instructions="Be brief.", tools=[]))
    caller.send(typed("Still there?"), {"type": "response.create"})
    assert (await caller.wait("response.done"))["response"]["status"] == "completed"


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_messages_up_to_the_announced_length_are_heard_and_longer_ones_refused(
    loss: float, server: Server
) -> None:
    caller = Caller(server, relayed=True)

    async def main() -> None:
        async with caller:
            caller.relay.loss = loss
            announced = re.findall(
                r"max-message-size:(\d+)", caller.connection.remoteDescription.sdp
            )
            assert announced == [str(EVENT_BYTES)]
            sound = append(bytes(105_000))
            assert 140_000 < len(json.dumps(sound)) <= EVENT_BYTES
            caller.send(sound, {"type": "input_audio_buffer.commit"})
            await caller.wait("input_audio_buffer.committed")
            caller.channel.transport._remote_max_message_size = 0  # a client that looks at nothing
            for size in (EVENT_BYTES + 1, 300_000, 1_000_000):
                caller.send("x" * size, {"type": "input_audio_buffer.clear"})
                error = (await caller.wait("error"))["error"]
                assert error["code"] == "string_above_max_length"
                assert str(EVENT_BYTES) in error["message"]
                await caller.wait("input_audio_buffer.cleared")
            await answers(caller)

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_a_message_without_end_ends_the_call(server: Server) -> None:
    caller = Caller(server)
    closed = 'mosstalk_sessions_closed_total{reason="too_big"}'
    before = server.metrics().get(closed, 0)

    async def main() -> None:
        async with caller:
            caller.channel.transport._remote_max_message_size = 0
            caller.send("x" * (MESSAGE_BYTES + 500_000))
            await caller.closed.wait()

    run(main())
    server.await_metrics(lambda values: values.get(closed, 0) == before + 1)
    server.await_nothing_held()
    assert not server.faults()


@pytest.mark.parametrize("takes", [65_536, ""])
def test_an_event_is_shortened_to_what_the_client_takes(server: Server, takes: Any) -> None:
    caller = Caller(server, takes=takes)

    async def main() -> None:
        async with caller:
            caller.send(update(instructions=LONG))
            updated = await caller.wait("session.updated")
            assert updated["mosstalk"]["shortened"] == {"session.instructions": len(LONG)}
            said = updated["session"]["instructions"]
            assert said.endswith("…")
            assert LONG.startswith(said[:-1])
            size = len(json.dumps(updated, ensure_ascii=False).encode())
            assert 65_536 - 1_000 < size <= 65_536, "no shorter than it must be"
            await answers(caller)

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_a_browser_takes_the_longest_instructions_whole(server: Server) -> None:
    caller = Caller(server, takes=100_000)  # a browser takes 262,144 bytes

    async def main() -> None:
        async with caller:
            caller.send(update(instructions=LONG))
            updated = await caller.wait("session.updated")
            assert updated["session"]["instructions"] == LONG
            assert "mosstalk" not in updated

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_an_event_that_cannot_be_shortened_is_named_in_an_error(server: Server) -> None:
    tools = [
        {"type": "function", "name": f"tool_{n}", "description": "It does something.",
         "parameters": {"type": "object", "properties": {}}}
        for n in range(700)
    ]  # fmt: skip
    caller = Caller(server, takes=65_536)

    async def main() -> None:
        async with caller:
            caller.send(update(tools=tools))
            error = (await caller.wait("error"))["error"]
            assert error["code"] == "event_too_long"
            assert "'session.updated'" in error["message"]
            assert "65536" in error["message"]
            await answers(caller)

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_a_client_that_takes_next_to_nothing_is_refused(server: Server) -> None:
    async def main() -> None:
        for size in (1, 4095, -1):
            answer = await post(server, await Caller(server, takes=size).offer())
            assert answer.status_code == 400
            assert "max-message-size" in answer.json()["error"]["message"]

    run(main())
    server.await_nothing_held()
    assert not server.faults()


# Without a connection.


def at(event: Any, path: str) -> str:
    """What stands at a path in an event."""
    for key in path.split("."):
        event = event[int(key) if key.isdigit() else key]
    assert isinstance(event, str)
    return event


def test_whatever_an_event_holds_it_fits_and_says_what_it_had() -> None:
    from mosstalk.server.data_channel import LEAST_BYTES, fitted

    dice = random.Random(0)
    signs = 'a"\\\n\u0001é路😀'

    def text() -> str:
        return "".join(dice.choices(signs, k=dice.choice((0, 5, 199, 300, 20_000))))

    for _ in range(150):
        item = {"id": "item_1", "content": [{"text": text(), "transcript": text()} for _ in "ab"]}
        event = {"event_id": "event_1", "type": "x.y", "item": item, "instructions": text()}
        if dice.random() < 0.3:
            event["mosstalk"] = {"warnings": ["something"]}
        most = dice.choice((LEAST_BYTES, 10_000, 65_536, 10**6, 0))
        whole = json.dumps(event)
        sent = fitted(whole, most)
        assert not most or len(sent.encode()) <= most
        told = json.loads(sent)
        shortened = told.get("mosstalk", {}).pop("shortened", {})
        if not shortened:
            assert told == event
        for path, size in shortened.items():
            before, after = at(event, path), at(told, path)
            assert len(before) == size > len(after)
            assert before.startswith(after[:-1])


def test_sound_is_left_out_before_words_are() -> None:
    from mosstalk.server.data_channel import fitted

    audio = base64.b64encode(bytes(60_000)).decode()
    item = {"content": [{"type": "input_audio", "audio": audio, "transcript": "w" * 5_000}]}
    event = {"event_id": "event_1", "type": "conversation.item.retrieved", "item": item}
    told = json.loads(fitted(json.dumps(event), 65_536))
    assert told["item"]["content"][0] == item["content"][0] | {"audio": ""}
    assert told["mosstalk"]["shortened"] == {"item.content.0.audio": len(audio)}
