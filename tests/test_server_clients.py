"""Clients that do everything wrong, over real sockets: nobody else hears of it."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select

import attackers
import pytest
from conftest import run
from server_rig import (
    BY_HAND,
    QUICK,
    Server,
    Talker,
    append,
    question,
    serving,
    silence,
    typed,
)
from server_soak import soak
from websockets.exceptions import ConnectionClosed, InvalidStatus

LIMITS = (
    "--limit", "stalled_s=1", "--limit", "unsent_s=4", "--limit", "text_chars=2000",
    "--limit", "header_s=1", "--limit", "message_s=3", "--limit", "connections=30",
)  # fmt: skip
MIB = 1 << 20
COMMIT = {"type": "input_audio_buffer.commit"}
ANSWER = {"type": "response.create"}


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with narrow limits."""
    with serving(*QUICK, *LIMITS, "--max-sessions", "4", cache=cache_folder) as running:
        yield running


def test_a_spoken_turn_is_answered_and_counted(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send(COMMIT, ANSWER)
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "completed"
            assert len(talker.pcm()) / 2 / 24_000 == done["mosstalk"]["timings"]["audio_s"]

    before = server.metrics()
    run(main())
    server.await_nothing_held()
    after = server.metrics()

    def grew(name: str) -> float:
        return after[f"mosstalk_{name}"] - before.get(f"mosstalk_{name}", 0.0)

    assert grew("commit_to_first_audio_seconds_count") == 1
    assert grew('responses_total{reason="none",status="completed"}') == 1
    assert grew('sessions_closed_total{reason="client"}') == 1
    assert grew("sessions_opened_total") == 1
    assert grew('rows_total{kind="input_audio"}') == 37
    assert grew("engine_step_seconds_count") > 20
    assert grew("audio_in_seconds_total") == pytest.approx(len(question()) / 2 / 24_000)
    assert grew("audio_out_seconds_total") > 1
    assert grew('messages_total{direction="in"}') > 25

    def busy(kind: str, *parts: str) -> float:
        return sum(grew(f'{kind}_seconds_total{{part="{part}"}}') for part in parts)

    for part in ("step", "edit", "hop", "push", "session"):
        assert 0 < busy("busy_cpu", part) < 1.01 * busy("busy", part) + 0.01, part
    assert busy("busy", "step", "prefill", "mixed") >= grew("engine_step_seconds_sum")
    assert busy("busy", "prefill", "mixed") > 0
    assert busy("busy", "detect") == 0  # push to talk
    assert batches(before, after) == [pytest.approx(1.0)] * 2  # a lone reply


def batches(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """How many replies a step and a hop held meanwhile."""

    def grew(kind: str, part: str) -> float:
        name = f'mosstalk_busy_{kind}_total{{part="{part}"}}'
        return after[name] - before[name]

    return [grew("items", part) / grew("runs", part) for part in ("step", "hop")]


def test_a_small_crowds_replies_share_steps_and_hops(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as one, Talker(server) as another, Talker(server) as third:
            await asyncio.gather(*(talker.ask("Good morning.") for talker in (one, another, third)))

    before = server.metrics()
    run(main())
    server.await_nothing_held()
    steps, hops = batches(before, server.metrics())
    print(f"replies a step: {steps:.2f}, a hop: {hops:.2f}")
    assert 1 < steps <= 3
    assert 1 <= hops <= 3


def test_what_is_said_wrong_is_told_and_changes_nothing(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            first = await talker.ask("Good morning.")
            await talker.send(BY_HAND)
            reply_id = first["output"][0]["id"]
            for message, code in (
                ("{", "invalid_json"),
                ("[1]", "invalid_json"),
                (b"\xff\xfe", "invalid_json"),
                ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_value"),
                (append(b"odd"), "invalid_value"),
                (append(bytes(20 * MIB)), "string_above_max_length"),
                (typed("a" * 2001), "string_above_max_length"),
                (COMMIT, "input_audio_buffer_commit_empty"),
                ({"type": "response.cancel"}, "response_cancel_not_active"),
            ):
                await talker.send(message)
                assert (await talker.error())["code"] == code
            await talker.send({"type": "no.such.event", "event_id": "mine"})
            assert (await talker.error())["event_id"] == "mine"
            cut = {"type": "conversation.item.truncate", "item_id": reply_id, "content_index": 0}
            await talker.send({**cut, "audio_end_ms": 10**9})
            cut_ms = (await talker.wait("conversation.item.truncated"))["audio_end_ms"]
            assert cut_ms == len(talker.pcm()) // 48
            await talker.send(typed("Go on."), ANSWER, ANSWER)
            assert (await talker.error())["code"] == "conversation_already_has_active_response"
            assert (await talker.wait("response.done"))["response"]["status"] == "completed"

    before = server.metrics()
    run(main())
    server.await_nothing_held()
    after = server.metrics()
    for code, count in (
        ("invalid_json", 3),
        ("string_above_max_length", 2),
        ("conversation_already_has_active_response", 1),
    ):
        name = f'mosstalk_errors_total{{code="{code}"}}'
        assert after[name] == before.get(name, 0) + count


def test_replies_begun_before_their_turn_ended_are_counted(cache_folder: Path) -> None:
    detection = {"type": "server_vad", "silence_duration_ms": 1500, "create_response": True}
    settings = {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
    begun = "mosstalk_replies_running"
    used, dropped = (
        f'mosstalk_replies_begun_early{{outcome="{outcome}"}}' for outcome in ("used", "dropped")
    )
    quick = ("--temperature", "0", "--seed", "0", "--script", "speech:300")

    async def main(here: Server) -> None:
        async with Talker(here) as talker:
            await talker.send({"type": "session.update", "session": settings})
            await talker.say(silence(0.5) + question() + silence(0.4))
            await asyncio.to_thread(here.await_metrics, lambda now: now[begun] == 1)
            # Without the quiet at its end: that comes once the engine has no reply any more.
            await talker.say(question()[: -len(silence(0.25))])
            ended = lambda now: (now[dropped], now[begun]) == (1, 0)  # noqa: E731
            await asyncio.to_thread(here.await_metrics, ended)
            await talker.say(silence(0.4))
            await asyncio.to_thread(here.await_metrics, lambda now: now[begun] == 1)
            assert "response.created" not in talker.kinds()
            await talker.say(silence(1.5))
            await talker.wait("response.created")
            await asyncio.to_thread(here.await_metrics, lambda now: now[used] == 1)

    with serving(*quick, cache=cache_folder) as here:
        here.await_nothing_held()  # of the reply that it begins with
        run(main(here))
        assert here.metrics()[dropped] == 1
        here.await_nothing_held()


def test_a_message_longer_than_any_may_be_ends_its_connection(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as neighbour, Talker(server) as talker:
            with suppress(ConnectionClosed, ConnectionResetError):  # closed before all is sent
                await talker.send(" " * (33 * MIB))
            assert (await talker.closed())[0] == 1009
            assert (await neighbour.ask("Good morning."))["status"] == "completed"

    run(main())
    closed = 'mosstalk_sessions_closed_total{reason="too_big"}'
    server.await_metrics(lambda metrics: metrics.get(closed) == 1)


def test_a_client_that_vanishes_in_the_middle_of_a_word_leaves_nothing(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as neighbour:
            vanishing = Talker(server)
            await vanishing.__aenter__()
            await vanishing.send(BY_HAND)
            await vanishing.say(question()[:40_000])
            await vanishing.send(COMMIT, ANSWER)
            await vanishing.wait("response.output_audio.delta")
            await vanishing.say(question()[:40_000])
            reset = struct.pack("ii", 1, 0)  # to the server it is as if the cable were cut
            raw = vanishing.socket.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            vanishing.socket.transport.abort()
            assert (await neighbour.ask("Good morning."))["status"] == "completed"

    run(main())
    closed = 'mosstalk_sessions_closed_total{reason="vanished"}'
    server.await_metrics(lambda metrics: metrics.get(closed) == 1)
    server.await_nothing_held()


def test_a_client_that_sends_a_whole_file_at_once_is_read_as_fast_as_it_is_heard(
    server: Server,
) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            await talker.say(bytes(2 * 24_000 * 45), piece_ms=1000)
            await talker.send({"type": "input_audio_buffer.clear"})
            await talker.wait("input_audio_buffer.cleared")
            assert (await talker.ask("Good morning."))["status"] == "completed"

    before = server.metrics()["mosstalk_throttled_total"]
    run(main())
    assert server.metrics()["mosstalk_throttled_total"] > before


def test_a_client_that_sends_too_much_at_once_is_answered_in_order(server: Server) -> None:
    count = 4_000

    async def main() -> None:
        async with Talker(server) as talker:
            look = {"type": "conversation.item.retrieve", "item_id": "none"}
            asked = [look | {"event_id": f"asked_{number}"} for number in range(count)]
            sending = asyncio.create_task(talker.send(*asked))
            for each in asked:
                assert (await talker.error())["event_id"] == each["event_id"]
            await sending

    before = server.metrics()["mosstalk_throttled_total"]
    run(main())
    assert server.metrics()["mosstalk_throttled_total"] > before


def test_requests_must_arrive_in_time_and_their_heads_be_short(server: Server) -> None:
    head = b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\n"
    upgrade = (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent, status in (
        (b"", b""),  # nothing, and half a request, until the time is up
        (head, b""),
        (whole + head, b"HTTP/1.1 200"),
        (head + b"Cookie: " + b"a" * 20_000, b"HTTP/1.1 400"),
        (head + upgrade + b"Cookie: " + b"a" * 10_000 + b"\r\n\r\n", b"HTTP/1.1 431"),
    ):
        with attackers.raw(server.socket) as connection:
            connection.sendall(sent)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            assert answer.startswith(status), answer
            assert bool(answer) == bool(status)


def test_connections_that_ask_for_nothing_make_room_for_those_that_do(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            with ExitStack() as idle:
                silent = [idle.enter_context(attackers.raw(server.socket)) for _ in range(40)]
                assert silent[0].recv(1) == b""  # the oldest had to go
                health = await asyncio.to_thread(server.get, "/health")
                assert health.status_code == 200
                assert (await talker.ask("Good morning."))["status"] == "completed"

    run(main())
    (line,) = [each for each in server.logs if "may be" in each.get("message", "")]
    assert "--limit connections=" in line["message"]


def test_a_client_that_sends_next_to_nothing_too_often_is_sent_away(server: Server) -> None:
    ping, crumb = attackers.frame(b"", attackers.PING), attackers.CONTINUED
    for flood in (ping * 300, attackers.frame(b"a", crumb, final=False) * 300):
        with attackers.websocket(server.socket) as connection:
            connection.sendall(ping * 100)  # those are answered
            pongs = b""
            while pongs.count(b"\x8a\x00") < 100:
                pongs += connection.recv(4096)
            connection.sendall(attackers.frame(b"a", final=False) + flood)
            rest = b""
            while piece := connection.recv(4096):
                rest += piece
            assert b"\x03\xf0too many" in rest, rest  # 1008
    server.await_nothing_held()
    assert server.metrics()['mosstalk_sessions_closed_total{reason="flood"}'] == 2


def test_large_messages_wait_for_one_another_and_not_for_ever(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            with ExitStack() as stack:
                holders = [stack.enter_context(attackers.websocket(server.socket)) for _ in "12"]
                for holder in holders:  # they never finish theirs, so a third has to wait
                    holder.sendall(attackers.header(attackers.TEXT, 2 * MIB) + bytes(MIB))
                sound = append(bytes(MIB))["audio"]
                await talker.send(f'{{"audio": "{sound}", "type": "input_audio_buffer.append"}}')
                await talker.send({"type": "input_audio_buffer.clear"})
                await talker.wait("input_audio_buffer.cleared")
                rest = b""
                while b"\x03\xf0a message was not whole after 3 s" not in rest:
                    assert holders, rest
                    for holder in select(holders, [], [], 30)[0]:  # either may be the one
                        piece = holder.recv(65536)
                        rest += piece  # pings come first where the machine is slow
                        if not piece:
                            holders.remove(holder)

    before = server.metrics()["mosstalk_audio_in_seconds_total"]
    run(main())
    server.await_nothing_held()
    assert server.metrics()["mosstalk_audio_in_seconds_total"] - before > 20


def test_a_slow_line_may_take_its_time_while_nobody_waits_for_its_place(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            message = json.dumps(append(bytes(MIB)))
            size = len(message) // 20
            pieces = [message[at : at + size] for at in range(0, len(message), size)]

            async def slowly() -> AsyncIterator[str]:
                for piece in pieces:
                    yield piece
                    await asyncio.sleep(0.2)  # the line's speed: 4 s in all, where 3 are allowed

            await talker.socket.send(slowly())
            await talker.send({"type": "input_audio_buffer.clear"})
            await talker.wait("input_audio_buffer.cleared")

    before = server.metrics()["mosstalk_audio_in_seconds_total"]
    run(main())
    server.await_nothing_held()
    assert server.metrics()["mosstalk_audio_in_seconds_total"] - before > 20


def test_more_sessions_than_there_may_be_are_refused_at_once_with_when_to_come_back(
    server: Server,
) -> None:
    async def main() -> None:
        async with Talker(server), Talker(server), Talker(server), Talker(server) as last:
            with pytest.raises(InvalidStatus) as refused:
                await Talker(server).__aenter__()
            response = refused.value.response
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "5"
            assert json.loads(response.body)["error"]["code"] == "full"
            page = Talker(server, origin=server.url)  # pages cannot see an HTTP status
            socket = await page._dialling
            error = json.loads(await socket.recv())["error"]
            assert error["code"] == "full"
            assert error["retry_after_s"] == 5
            await socket.wait_closed()
            assert socket.close_code == 1013
            assert (await last.ask("Good morning."))["status"] == "completed"

    run(main())
    server.await_nothing_held()
    assert server.metrics()['mosstalk_refusals_total{reason="full"}'] == 2


def test_nothing_that_was_said_is_in_the_logs(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.ask("My secret is a green parrot.")

    run(main())
    server.await_nothing_held()
    server.await_metrics(lambda _: bool(server.logged("session closed")))
    assert "parrot" not in json.dumps(server.logs)
    done = server.logged("response done")[-1]
    assert done["session"].startswith("sess_")
    assert done["response"].startswith("resp_")
    assert done["figures"]["commit_to_first_audio_ms"] > 0


@pytest.mark.slow  # half a minute of clients; each of their ways is a test of its own
def test_talking_interrupting_and_vanishing_for_a_while_leaves_nothing(server: Server) -> None:
    state = asyncio.run(soak(server, 0.1, 3, hands_free=False))
    assert state.errors == []
    assert sum(state.done.values()) >= 3
    held = ("MiB", "descriptors", "threads")
    of_both = {f"{process}, {each}" for process in ("front", "worker") for each in held}
    assert state.slopes().keys() == of_both | {"blocks"}
    server.await_nothing_held()
