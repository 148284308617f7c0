"""Calls by WebRTC: a real server, and aiortc's client, which talks as a browser would."""

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import av
import httpx
import numpy as np
import numpy.typing as npt
import pytest
from conftest import require_package, run
from openai import OpenAI
from realtime_rig import _GA
from server_rig import (
    BY_HAND,
    QUICK,
    RATE,
    Server,
    Talker,
    append,
    question,
    serving,
    silence,
    typed,
)
from webrtc_rig import CALLS, WIRE_RATE, Caller, Microphone, post

from mosstalk.server.call_playback import FRAME, Playback
from mosstalk.session.events import AudioDelta

KEY = "a-key-for-tests"
LONG = ("--temperature", "0", "--seed", "0", "--script", "speech:350")
"""Replies of 28 s, which are under way when somebody interrupts them."""
ASKED = "What is the capital of France?"
AUDIBLE = 200
"""Where int16 sound begins to be heard."""
AHEAD_S = 0.4
"""What the client's jitter buffer and a busy machine may lie between what is sent and heard."""


def onset(sound: npt.NDArray[np.int16]) -> int:
    """How many samples are quiet before the first that is not; all of them if none is."""
    loud = np.flatnonzero(np.abs(sound.astype(int)) > AUDIBLE)
    return int(loud[0]) if len(loud) else len(sound)


def loud_s(caller: Caller) -> float:
    """Seconds of what came in which there was speech."""
    frames = (np.abs(samples.astype(int)).max() for _, _, samples in caller.heard)
    return 0.02 * sum(loudest > 300 for loudest in frames)


@asynccontextmanager
async def microphone_of(talker: Talker) -> AsyncIterator[None]:
    """A WebSocket's client sends a quiet microphone's sound all the time, as a call's does."""
    microphone, quiet = Microphone(), append(bytes(2 * FRAME))

    async def listen() -> None:
        while True:
            await microphone.recv()
            await talker.send(quiet)

    listening = asyncio.create_task(listen())
    try:
        yield
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")
    require_package("silero_vad", "vad")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server for one client at a time, hands-free."""
    words = ("--temperature", "0", "--seed", "0", "--max-sessions", "1")
    with serving(*words, "--limit", "header_s=2", cache=cache_folder) as running:
        yield running


def test_a_question_is_heard_and_answered_in_sound_and_events(server: Server) -> None:
    caller = Caller(server)
    late_before_s = server.metrics()["mosstalk_underrun_seconds_total"]

    async def main() -> None:
        async with caller:
            caller.microphone.push(question() + silence(1.0))
            await caller.wait("response.done")
            await caller.wait("output_audio_buffer.stopped")
            # Opus leaves a last bit standing where nothing sounds any more.
            await caller.hears(lambda: np.abs(caller.heard[-1][2][-100:]).max() <= 1)

    run(main())
    server.await_nothing_held()
    for event in caller.events:
        _GA.validate_python(event)
    kinds = caller.kinds()
    assert "response.output_audio.delta" not in kinds
    order = [
        "session.created", "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed", "response.created", "response.content_part.added",
        "response.output_audio_transcript.delta", "output_audio_buffer.started", "response.done",
        "output_audio_buffer.stopped",
    ]  # fmt: skip
    assert [kind for kind in dict.fromkeys(kinds) if kind in order] == order
    done = next(event for event in caller.events if event["type"] == "response.done")["response"]
    started, stopped = (
        next(event for event in caller.events if event["type"] == f"output_audio_buffer.{change}")
        for change in ("started", "stopped")
    )
    assert started["response_id"] == stopped["response_id"] == done["id"]
    said_s = done["mosstalk"]["timings"]["audio_s"]
    took_s = caller.time_s("output_audio_buffer.stopped") - caller.time_s(
        "output_audio_buffer.started"
    )
    # A busy machine makes its sound later than it is due, which the server counts.
    late_s = server.metrics()["mosstalk_underrun_seconds_total"] - late_before_s
    assert said_s - 0.1 < took_s < said_s + late_s + 1.0, "it is sent at the pace of hearing"
    assert done["output"][0]["content"][0]["transcript"]
    assert 0.3 * said_s < loud_s(caller) < said_s + 0.1
    places = [place for _, place, _ in caller.heard]
    assert set(np.diff(places)) == {WIRE_RATE // 50}, "silence is sent between replies too"
    assert server.metrics()['mosstalk_sessions_closed_total{reason="client"}'] >= 1
    assert not server.faults()


def test_speech_stops_a_reply_and_the_server_cuts_it_at_what_was_played(
    cache_folder: Path,
) -> None:
    with serving(*LONG, cache=cache_folder) as server:
        caller = Caller(server)

        async def main() -> None:
            async with caller:
                caller.send(typed("Tell me a story."), {"type": "response.create"})
                await caller.wait("output_audio_buffer.started")
                # Not so much time: a busy machine's sound is late.
                await caller.hears(lambda: loud_s(caller) > 1.0)
                caller.microphone.push(question() + silence(0.5))
                cleared = await caller.wait("output_audio_buffer.cleared")
                at_s = time.monotonic()
                await caller.wait("conversation.item.truncated")
                await caller.hears(lambda: caller.heard[-1][0] > at_s + AHEAD_S)
                assert not np.any(np.abs(caller.heard[-1][2].astype(int)) > 50)
                assert cleared["response_id"]
                await caller.wait("output_audio_buffer.started")  # it answers what was said
                caller.send({"type": "response.cancel"}, {"type": "output_audio_buffer.clear"})
                await caller.wait("output_audio_buffer.cleared")
                await caller.wait("conversation.item.truncated")

        run(main())
        cut = next(e for e in caller.events if e["type"] == "conversation.item.truncated")
        played_s = caller.time_s("output_audio_buffer.cleared")
        played_s -= caller.time_s("output_audio_buffer.started")
        assert 1.0 < cut["audio_end_ms"] / 1000 < played_s + 0.1
        assert cut["mosstalk"]["by_server"] is True
        ended = next(event for event in caller.events if event["type"] == "response.done")
        assert ended["response"]["status_details"]["reason"] == "turn_detected"
        assert "error" not in caller.kinds()
        server.await_nothing_held()
        assert not server.faults()


def test_a_call_is_hung_up_by_its_client_or_by_whoever_has_its_key(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

    async def main() -> None:
        caller = Caller(server)
        answer = await asyncio.to_thread(
            client.realtime.calls.with_raw_response.create,
            sdp=await caller.offer(),
            session={"type": "realtime", "instructions": "Answer in one short sentence."},
        )
        assert answer.http_response.status_code == 201
        await caller.answered(answer.http_response)  # type: ignore[arg-type]
        created = await caller.wait("session.created")
        assert created["session"]["instructions"] == "Answer in one short sentence."
        call_id = caller.location.rpartition("/")[2]
        assert caller.location == f"{CALLS}/{call_id}"
        assert call_id.startswith("rtc_")
        other = await post(server, await Caller(server).offer())
        assert other.status_code == 503
        assert other.json()["error"]["code"] == "full"
        await asyncio.to_thread(client.realtime.calls.hangup, call_id)
        await caller.closed.wait()
        again = httpx.post(f"{server.url}{caller.location}/hangup")
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "call_not_found"

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_an_offer_whose_client_never_comes_leaves_its_place(server: Server) -> None:
    vanished = 'mosstalk_sessions_closed_total{reason="vanished"}'
    before = server.metrics().get(vanished, 0)

    async def main() -> None:
        caller = Caller(server)
        answer = await post(server, await caller.offer())
        assert answer.status_code == 201
        await caller.connection.close()

    run(main())
    server.await_metrics(lambda values: values.get(vanished, 0) > before)
    server.await_nothing_held()
    assert not server.faults()


@pytest.mark.slow  # ICE asks six times in 30 s whether a client is still there
def test_a_client_that_vanishes_leaves_nothing_behind(server: Server) -> None:
    async def main() -> None:
        async with Caller(server) as caller:
            ice = caller.connection.getTransceivers()[0].sender.transport.transport
            for protocol in ice._connection._protocols:
                protocol.transport.close()  # as of a machine that has gone: nothing is said
            begun_s = time.monotonic()
            await asyncio.to_thread(server.await_nothing_held)
            print(f"its place was free after {time.monotonic() - begun_s:.0f} s")

    run(main())
    closed = server.metrics()
    assert closed['mosstalk_sessions_closed_total{reason="vanished"}'] >= 1
    assert not server.faults()


def test_what_is_no_offer_is_refused_with_the_reason(server: Server) -> None:
    async def main() -> None:
        good = await Caller(server).offer()
        form = "multipart/form-data; boundary=b"

        def part(name: str, content: str) -> str:
            return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{content}\r\n'

        media = good[good.index("m=") :]
        wrong: list[tuple[str | bytes, str, str]] = [
            ("", "application/sdp", "one audio track"),
            ("v=0", "application/sdp", "one audio track"),
            ("v=0\r\nm=", "application/sdp", "no session description"),
            (b"\xff\xfe", "application/sdp", "no UTF-8"),
            (good + "a=x\r\n" * 20_000, "application/sdp", "at most 65536 characters"),
            ("x" * 300_000, "application/sdp", "longer than"),
            (good, "text/plain", "send the offer as application/sdp"),
            (good.replace("m=audio", "m=video"), "application/sdp", "one audio track"),
            (good + media, "application/sdp", "one audio track"),
            (good.replace("a=sendrecv", "a=sendonly"), "application/sdp", "sendrecv or recvonly"),
            (good.replace("opus", "speex"), "application/sdp", "no Opus"),
            (good.replace("a=ice-pwd:", "a=ice-pwd:%"), "application/sdp", "a=ice-pwd"),
            (good.replace("a=fingerprint", "a=finger"), "application/sdp", "a=fingerprint"),
            (part("session", "{}") + "--b--", form, "'sdp'"),
            (part("sdp", good) + part("session", "{") + "--b--", form, "no valid JSON"),
            (part("sdp", good) + part("session", '{"audio": 1}') + "--b--", form, "session.audio"),
            (part("sdp", good), form, "not whole"),
        ]
        for content, kind, reason in wrong:
            answer = await post(server, content, kind)
            assert answer.status_code == (413 if len(content) > 250_000 else 400), answer.text
            error = answer.json()["error"]
            assert reason in error["message"], error
            assert error["type"] == "invalid_request_error"
        dice = random.Random(0)
        for _ in range(100):  # whatever is forged, an answer comes, and no fault
            lines = good.splitlines(keepends=True)
            for _ in range(3):
                place = dice.randrange(len(lines))
                cut = dice.randrange(len(lines[place]))
                lines[place] = lines[place][:cut] + dice.choice(["", "\r\n", "9" * 30, "a=:/ "])
            answer = await post(server, "".join(lines))
            assert answer.status_code in (201, 400, 503), answer.text

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_addresses_of_an_offer_are_not_dialled_and_a_flood_of_them_is_harmless(
    server: Server,
) -> None:
    async def main() -> None:
        caller = Caller(server)
        offer = await caller.offer()
        candidate = "a=candidate:1 1 udp 1 198.51.100.{} {} typ host\r\n"
        many = "".join(candidate.format(n % 250, 1000 + n) for n in range(500))
        place = offer.index("a=ice-ufrag")
        answer = await post(server, offer[:place] + many + offer[place:])
        await caller.answered(answer)
        await caller.wait("session.created")
        assert "198.51.100" not in answer.text
        assert " typ host" in answer.text
        assert "srflx" not in answer.text
        await caller.connection.close()

    run(main())
    server.await_nothing_held()
    assert not server.faults()


def test_keys_are_asked_for_and_an_ephemeral_one_brings_its_settings(cache_folder: Path) -> None:
    words = ("--api-key", KEY, "--allow-origin", "https://a.example", *QUICK)
    with serving(*words, cache=cache_folder) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        server.headers = headers
        session = {"type": "realtime", "instructions": "Be brief."}
        made = httpx.post(
            f"{server.url}/v1/realtime/client_secrets", json={"session": session}, headers=headers
        ).json()

        async def main() -> None:
            for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer ek_no"}):
                answer = await post(server, "v=0", **wrong)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "key"
            foreign = await post(server, "v=0", **headers, Origin="https://b.example")
            assert foreign.status_code == 403
            async with Caller(server, key=made["value"]) as caller:
                session = caller.events[0]["session"]
                assert session["instructions"] == "Be brief."
                assert session["mosstalk"]["echo_gate"] is False
                hangup = f"{server.url}{caller.location}/hangup"
                assert httpx.post(hangup).status_code == 401
                assert httpx.post(hangup, headers=headers).status_code == 200
                await caller.closed.wait()
            page = await post(
                server, await Caller(server).offer(), **headers, Origin="https://a.example"
            )
            assert page.headers["access-control-allow-origin"] == "https://a.example"
            assert page.headers["access-control-expose-headers"] == "Location"
            call_id = page.headers["location"]
            assert httpx.post(f"{server.url}{call_id}/hangup", headers=headers).status_code == 200

        run(main())
        server.await_nothing_held()
        assert not server.faults()


@pytest.mark.alone
def test_the_first_sound_comes_as_soon_as_over_a_websocket(cache_folder: Path) -> None:
    with serving(*QUICK, cache=cache_folder) as server:

        async def over_websocket() -> float:
            async with Talker(server) as talker, microphone_of(talker):
                await talker.send(BY_HAND, typed(ASKED))
                await talker.wait("conversation.item.done")
                begun_s, played_s = time.monotonic(), 0.0
                await talker.send({"type": "response.create"})
                while True:
                    delta = (await talker.wait("response.output_audio.delta"))["delta"]
                    played_s = max(played_s, time.monotonic())
                    sound = np.frombuffer(base64.b64decode(delta), "<i2")
                    if (quiet := onset(sound)) < len(sound):
                        break
                    played_s += quiet / RATE
                await talker.wait("response.done")
                return played_s + quiet / RATE - begun_s

        async def over_webrtc() -> float:
            async with Caller(server) as caller:
                caller.send(typed(ASKED))
                await caller.wait("conversation.item.done")
                begun_s = time.monotonic()
                caller.send({"type": "response.create"})
                await caller.wait("output_audio_buffer.stopped")
                decoder = av.CodecContext.create("libopus", "r")
                decoder.layout, decoder.format = "mono", "s16"
                for at_s, packet in caller.packets:
                    (frame,) = decoder.decode(av.Packet(packet.payload))
                    sound = frame.to_ndarray()[0]
                    if at_s > begun_s and (quiet := onset(sound)) < len(sound):
                        return at_s + quiet / WIRE_RATE - begun_s
                raise AssertionError("there was no sound")

        sockets, calls = list[float](), list[float]()

        async def main() -> None:
            for _ in range(7):
                sockets.append(await over_websocket())
                calls.append(await over_webrtc())

        run(main())
        more_ms = 1000 * float(np.median(calls) - np.median(sockets))
        # A machine that takes a second to its first sound takes longer for packets, too.
        most_ms = max(40.0, 150 * float(np.median(sockets)))
        print(
            f"first sound: {1000 * np.median(sockets):.0f} ms over a WebSocket, "
            f"{1000 * np.median(calls):.0f} ms by WebRTC, {more_ms:+.0f} ms (at most {most_ms:.0f})"
        )
        assert more_ms <= most_ms


# What is played, without a connection.


def test_replies_are_played_one_after_the_other_and_what_is_cleared_is_told() -> None:
    changes = list[tuple[str, str]]()
    playback = Playback(10.0)
    playback.on_change = lambda *change: changes.append(change)
    sound = np.arange(1, 2 * FRAME, dtype="<i2").tobytes()

    def push(response: str) -> None:
        playback.push(AudioDelta(response, f"item of {response}", 0, sound))

    push("a")
    push("b")
    first = playback.frame()
    assert first == sound[: 2 * FRAME]
    assert not any(playback.frame()), "half a frame waits for the rest of it"
    playback.finish("a")
    assert playback.frame() == sound[2 * FRAME :].ljust(2 * FRAME, b"\0")
    assert playback.frame() == sound[: 2 * FRAME]
    assert changes == [("started", "a"), ("stopped", "a"), ("started", "b")]
    (cleared,) = playback.clear()
    assert (cleared.response_id, cleared.sent_ms) == ("b", 20)
    push("b")  # made before it was known to be cleared
    assert not playback.is_playing
    playback.finish("b")
    assert not any(playback.frame())
    assert json.dumps(changes).count("stopped") == 1


@pytest.mark.alone
def test_a_reply_does_not_wait_for_the_next_packet_and_timestamps_keep_to_the_clock() -> None:
    from mosstalk.server.call_sound import ReplyTrack

    playback = Playback(10.0)
    sound = np.full(5 * FRAME, 3000, "<i2").tobytes()
    sent = list[tuple[float, int]]()

    async def main() -> None:
        track = ReplyTrack(playback.frame, lambda: playback.is_playing)
        playback.on_sound = track.hurry

        async def send() -> None:
            while True:
                packet = await track.recv()
                sent.append((time.monotonic(), packet.pts or 0))

        async def packets(count: int) -> None:
            while len(sent) < count:
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        await packets(3)
        await asyncio.sleep(0.005)  # of the 20 ms to the next packet
        pushed_s = time.monotonic()
        playback.push(AudioDelta("a", "item of a", 0, sound))
        await packets(4)
        assert sent[3][0] - pushed_s < 0.008, "the next packet was not due yet"
        playback.finish("a")
        await packets(30)
        sending.cancel()

    began_s = time.monotonic()  # no packet is due before: its clock starts with the first
    run(main())
    stamps = [stamp for _, stamp in sent]
    assert stamps == list(range(0, 30 * 960, 960)), "48 kHz, whatever the sound's own rate"
    late_s = [at_s - began_s - stamp / 48_000 for at_s, stamp in sent]
    assert min(late_s) > -0.0201, "20 ms early at most"
    assert min(late_s[12:]) > -0.0001, "after a reply none is early, as before it"
