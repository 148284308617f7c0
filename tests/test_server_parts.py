"""The server's parts by themselves."""

import asyncio
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT, run
from server_rig import full_pipe

from mosstalk.environment import read_keys
from mosstalk.errors import EngineFullError, MosstalkError, OptionError, SessionError, VoiceError
from mosstalk.runtime.busy import BusyPart
from mosstalk.server.admission import ServeOptions, ServerContext
from mosstalk.server.cors import Hosts, Origins, is_loopback
from mosstalk.server.engine_client import EngineClient, SessionProxy, WorkerState
from mosstalk.server.ipc import (
    BY_HAND,
    Channel,
    Open,
    Refused,
    SessionCommand,
    WorkerInfo,
    WorkerOptions,
)
from mosstalk.server.keys import EphemeralKeys, Grant, Keys
from mosstalk.server.limits import (
    ClientBudget,
    Limits,
    SendQueue,
    TokenBucket,
    TooSlowError,
    limits_of,
)
from mosstalk.server.logs import BoundedStream, JsonLines, LogLimiter, TextLines
from mosstalk.server.observers import Metrics, SessionMetrics
from mosstalk.server.realtime.responses import ResponseConfig
from mosstalk.server.realtime.server_events import (
    Error,
    ErrorBody,
    InputCleared,
    ResponseEvent,
    StatusDetails,
)
from mosstalk.server.realtime.validation import AudioFormat
from mosstalk.server.speech import SpeechReply, speech_request
from mosstalk.session.commands import (
    Close,
    Command,
    Commit,
    CreateAudio,
    CreateText,
    Push,
    ReplyMode,
    SessionSettings,
    UpdateSettings,
)
from mosstalk.session.events import (
    Closed,
    ErrorRaised,
    Event,
    ResponseDone,
    ResponseStatus,
    SessionOpened,
    SettingsUpdated,
    SpeechStarted,
    SpeechStopped,
    Timings,
    Usage,
)

QUICK = Limits(unsent_s=1.0, unsent_bytes=100)
READY = WorkerInfo("pocket", "m", "cpu", "float32", ("default",), None, 2048, 10, 16, 0.1)


@pytest.mark.parametrize("module", ["mosstalk.cli", "mosstalk.server.worker"])
def test_the_models_of_events_are_the_fronts_alone(module: str) -> None:
    probe = f"import sys, {module}; print('pydantic' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_the_front_needs_no_torch() -> None:
    probe = (
        "import sys; from mosstalk.cli.serve import Serve; Serve().options(); "
        "print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def test_a_bucket_lets_bursts_through_and_then_its_rate() -> None:
    bucket = TokenBucket(10.0, 2.0, 0.0)
    assert [bucket.wait_s(1, 0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.wait_s(1, 0.0) == pytest.approx(0.1)
    assert bucket.wait_s(1, 0.1) == pytest.approx(0.1)
    assert bucket.wait_s(5, 1000.0) == 0.0
    assert bucket.wait_s(40, 1000.0) == pytest.approx(2.5)


def test_messages_cost_their_client_what_is_read_answered_and_computed_for_them() -> None:
    limits = Limits(messages_per_s=10, bytes_per_s=1000, processor_share=0.5, burst_s=1)
    budget = ClientBudget(limits, 0.0)
    budget.cost(400)
    budget.cost(600, processor_s=0.5)
    assert budget.wait_s(0.0) == 0
    budget.cost(2000)
    assert budget.wait_s(0.0) == pytest.approx(2.0)
    budget.cost(processor_s=2.0)
    assert budget.wait_s(2.0) == pytest.approx(3.0)
    assert [budget.wait_s(100.0) for _ in range(11)] == [0] * 10 + [pytest.approx(0.1)]


@pytest.mark.parametrize("name", [each.name for each in fields(Limits)])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        Limits(**{name: 0})


def test_a_limit_that_no_number_exceeds_is_refused() -> None:
    with pytest.raises(OptionError, match="unsent_s must be above 0, not nan"):
        limits_of(["unsent_s=nan"])
    assert limits_of(["unsent_s=inf"]).unsent_s == float("inf")


def test_an_outbox_counts_what_waits_and_never_makes_anybody_wait() -> None:
    async def main() -> None:
        queue = SendQueue(QUICK)
        queue.put("a", 0.6)
        queue.put("b", 0.4)
        with pytest.raises(TooSlowError, match="2 s"):
            queue.put("c", 0.6)
        queue = SendQueue(QUICK)
        queue.put("a", 0.6)
        assert await queue.get() == "a"
        assert queue.unsent_s == 0
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put("b", 1.0)
        assert await waiting == "b"
        queue.put("c" * 100)
        with pytest.raises(TooSlowError, match="101 bytes"):
            queue.put("d")
        queue.end()
        assert [await queue.get(), await queue.get()] == ["c" * 100, None]

    run(main())


def test_an_outbox_has_no_room_while_answers_wait_and_sound_is_no_answer() -> None:
    async def main() -> None:
        queue = SendQueue(Limits(unsent_answers_bytes=3))
        queue.put("sound", 1.0)
        await queue.room()
        queue.put("text")
        waiting = asyncio.create_task(queue.room())
        assert await queue.get() == "sound"
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await queue.get() == "text"
        await waiting
        queue.put("more")
        waiting = asyncio.create_task(queue.room())
        await asyncio.sleep(0)
        queue.drop()  # the client has gone
        await waiting

    run(main())


def test_keys_are_compared_whole_and_named_by_number() -> None:
    keys = Keys(["one", "two"])
    assert keys.name_of({"authorization": "bearer two"}) == "key-2"
    for wrong in ("", "Bearer", "Bearer tw", "Bearer twoo", "Basic two"):
        assert keys.name_of({"authorization": wrong}) is None
    assert keys.name_of({}, ["realtime", "openai-insecure-api-key.one"]) == "key-1"
    assert Keys([]).name_of({}) == "anyone"


def test_origins_are_the_servers_own_or_those_that_were_named() -> None:
    own = Origins()
    assert own.admits({"host": "a.org:1"})
    assert own.admits({"host": "a.org:1", "origin": "https://a.org:1"})
    assert not own.admits({"host": "a.org:1", "origin": "https://a.org"})
    assert not own.admits({"host": "a.org", "origin": "null"})
    assert not own.admits({"host": "a.org", "origin": "http://["})
    assert Origins(frozenset({"*"})).admits({"host": "a", "origin": "null"})
    assert Origins(frozenset({"https://b.org"})).admits(
        {"host": "a.org", "origin": "https://b.org"}
    )
    loopback = ("127.0.0.9", "localhost", "::1", "0.0.0.0", "127.example.org")
    assert [is_loopback(host) for host in loopback] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("localhost:1", True), ("LocalHost.", True), ("127.0.0.1", True), ("[::1]:1", True),
        ("[fe80::1]", True), ("10.0.0.1:8000", True), ("talk.example.org:1", True), ("", True),
        ("localhost.example.org", False), ("10.0.0.1.example.org", False), ("example.org", False),
        ("[::1", False), (":1", False), ("sub.talk.example.org", False), ("1", False),
    ],
)  # fmt: skip
def test_a_server_without_keys_has_the_names_that_nobody_else_can_point_at_it(
    host: str, admitted: bool
) -> None:
    named = frozenset({"talk.example.org"})
    assert Hosts(named).admits({"host": host}) == admitted
    assert Hosts(named, checked=False).admits({"host": host})
    assert Hosts(frozenset({"*"})).admits({"host": host})
    assert Hosts().admits({})


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a\nb\n", ["a", "b"]),
        ("\ufeffa\r\n  b  \r\n", ["a", "b"]),
        ("   # a\n\t# b\n#c\n d#e \n\n", ["d#e"]),
        ("\ufeff# a\nb", ["b"]),
    ],
)
def test_keys_in_a_file_are_its_lines_without_comments_spaces_and_byte_order_mark(
    text: str, keys: list[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    assert read_keys(tmp_path / "keys") == keys


@pytest.mark.parametrize("text", ["", "\n", "\ufeff", "  # a\n"])
def test_a_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match="holds no key; write one a line"):
        read_keys(tmp_path / "keys")


def test_an_ephemeral_key_gives_what_it_was_made_for_until_it_expires() -> None:
    keys, grant = (
        EphemeralKeys(b"secret"),
        Grant("key-2", {"instructions": "Höflich.", "tools": []}),
    )
    key = keys.make(grant, 1000)
    assert re.fullmatch(r"ek_[\w-]+", key, re.ASCII), "a page shows it as a subprotocol"
    assert keys.grant_of(key, 999.9) == grant
    assert keys.grant_of(key, 1000.0) is None
    assert EphemeralKeys(b"secret").grant_of(key, 0) == grant, "in every process of a server"
    assert EphemeralKeys(b"another").grant_of(key, 0) is None


def test_an_ephemeral_key_that_was_altered_anywhere_gives_nothing() -> None:
    keys = EphemeralKeys(b"secret")
    key = keys.make(Grant("key-1"), 1000)
    for place in range(len("ek_"), len(key)):
        for sign in ("A", "b", "0", "-", "=", "ä", "\udcff"):
            if sign != key[place]:
                assert keys.grant_of(key[:place] + sign + key[place + 1 :], 0) is None
        assert keys.grant_of(key[:place], 0) is None
    for more in ("=", "A", "\n"):
        assert keys.grant_of(key + more, 0) is None


def test_no_api_key_looks_like_one_that_the_server_makes() -> None:
    with pytest.raises(OptionError, match="begins with ek_"):
        Keys(["one", "ek_two"])


def test_an_empty_key_lets_nobody_in() -> None:
    with pytest.raises(OptionError, match="an API key is empty"):
        Keys(["one", " "])
    assert Keys(["one"]).name_of({"authorization": "Bearer "}) is None


def test_lines_that_strangers_cause_are_some_a_minute_and_then_a_count() -> None:
    limiter = LogLimiter(most=2, per_s=60.0)
    assert [limiter.take("a", 0.0) for _ in range(5)] == [0, 0, None, None, None]
    assert limiter.take("b", 1.0) == 0
    assert limiter.take("a", 59.9) is None
    assert [limiter.take("a", 60.0), limiter.take("a", 60.0), limiter.take("a", 60.0)] == [
        4,
        0,
        None,
    ]


def test_output_that_nobody_reads_is_kept_up_to_a_limit_and_the_rest_counted() -> None:
    reading, writing = full_pipe()
    line = "x" * 99 + "\n"
    stream = BoundedStream(writing, most=100 * len(line))
    stream.lost_line = lambda lost: f"{lost} lost"
    for _ in range(3000):
        stream.write(line)
    assert not stream.drain(0.05)
    with os.fdopen(reading) as pipe:
        told = (read for read in pipe if read.strip())
        assert [next(told) for _ in range(100)] == [line] * 100
        assert next(told) == "2900 lost\n"
        print("one", "more", file=stream)
        assert next(told) == "one more\n"
        assert stream.drain(5.0)
    stream.write(line)  # its reader is gone
    assert stream.drain(5.0)
    os.close(writing)


def test_errors_cross_the_link_as_they_are() -> None:
    for error in (
        EngineFullError("full", 5.0),
        SessionError("bad_value", "no"),
        VoiceError("unknown"),
        MosstalkError("base"),
    ):
        again = pickle.loads(pickle.dumps(Refused.of(1, error))).raised()
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_messages_cross_a_wire_whole_and_in_order() -> None:
    async def main() -> None:
        here, there = [await Channel.over(end) for end in socket.socketpair()]
        large = SessionCommand(1, Push(bytes(3 << 20)))

        async def send() -> None:
            for number in range(5):
                await here.send(Open(number, SessionSettings()))
                await here.send(large)
            here.close()

        sending = asyncio.create_task(send())
        got = [message async for message in there]
        await sending
        assert [m.number for m in got if isinstance(m, Open)] == list(range(5))
        pushed = [m.command for m in got if isinstance(m, SessionCommand)]
        assert all(isinstance(p, Push) and p.pcm == bytes(3 << 20) for p in pushed)
        there.post(Open(1, SessionSettings()))  # into a broken link it is lost
        await there.send(Open(1, SessionSettings()))

    run(main())


def test_a_session_far_away_counts_what_it_has_not_done_and_ends_if_the_worker_does() -> None:
    async def main() -> None:
        here, there = [await Channel.over(end) for end in socket.socketpair()]
        session = SessionProxy(7, SessionSettings(), here)
        session.tell(Push(bytes(2 * 24_000)))
        session.tell(CreateAudio(bytes(2 * 8_000), rate=8_000))
        session.tell(CreateText("user", "Hello."))
        assert (session.unheard_s, session.undone) == (2.0, 3)
        assert session.has_room(2.0, 3)
        assert not session.has_room(2.0, 2)
        assert not session.has_room(1.9, 3)
        waiting = asyncio.create_task(session.room(0.5, 2))
        await asyncio.sleep(0)
        session.acknowledged(2)
        await waiting
        assert (session.unheard_s, session.undone) == (0.0, 1)
        session.acknowledged(3)
        assert session.undone == 0
        session.on_event(SessionOpened("sess", SessionSettings(), clock=8_000))
        session.lost("gone")
        session.lost("gone twice")
        events = [event async for event in session]
        assert [type(e) for e in events] == [SessionOpened, ErrorRaised, Closed]
        assert [event async for event in session] == []
        session.tell(Close())  # it is over: nothing is sent
        here.close()
        told = [message async for message in there]
        assert [type(message.command) for message in told] == [Push, CreateAudio, CreateText]

    run(main())


def test_a_refusal_for_a_client_that_has_just_gone_ends_no_worker() -> None:
    async def main() -> None:
        engine = EngineClient(WorkerOptions())
        here, there = socket.socketpair()
        await engine.attach(here)
        engine._on_message(READY)
        opening = asyncio.create_task(engine.open(SessionSettings()))
        await asyncio.sleep(0)
        opening.cancel()
        engine._on_message(Refused.of(0, EngineFullError("full", 5.0)))
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert engine.state is WorkerState.READY
        await engine.stop()
        there.close()

    run(main())


def test_a_worker_that_says_it_is_ready_has_told_its_figures_after_the_warm_up() -> None:
    async def main() -> None:
        engine = EngineClient(WorkerOptions(device="cpu", detector=BY_HAND, sessions=2))
        await engine.start()
        try:
            done, _ = await asyncio.wait(
                (engine.ready, engine.dead), timeout=60, return_when=asyncio.FIRST_COMPLETED
            )
            assert done == {engine.ready}
            heartbeat = engine.heartbeat
            assert heartbeat
            assert heartbeat.blocks
            assert (heartbeat.sessions, heartbeat.replies, heartbeat.waiting) == (0, 0, 0)
        finally:
            await engine.stop()

    run(main())


def test_who_goes_before_a_session_is_opened_has_ended_none() -> None:
    async def main() -> None:
        context = ServerContext(ServeOptions())
        here, there = socket.socketpair()
        await context.engine.attach(here)
        context.engine._on_message(READY)
        worker = await Channel.over(there)

        async def receive() -> dict[str, str]:
            message = await anext(aiter(worker))
            assert isinstance(message, Open)
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise AssertionError(f"{message} for a client that has gone")

        body = b'{"model": "m", "input": "Hello.", "voice": "default"}'
        reply = SpeechReply(context, "anyone", speech_request(body, context))
        await reply({"type": "http"}, receive, send)
        metrics = context.metrics.text().decode()
        assert 'mosstalk_sessions_closed_total{reason="vanished"} 0.0' in metrics
        await context.engine.stop()
        worker.close()

    run(main())


FRAME_BYTES = 960
"""20 ms at 24 kHz."""
FRAMES = [Push(bytes([number]) * FRAME_BYTES, 24_000) for number in range(12)]


async def told(settings: SessionSettings, *steps: Command | Event) -> list[Command]:
    """What a session is sent of commands, between which it tells events."""
    here, there = [await Channel.over(end) for end in socket.socketpair()]
    session = SessionProxy(7, settings, here)
    for step in steps:
        if isinstance(step, Event):
            session.on_event(step)
        else:
            session.tell(step)
    here.close()
    found = [message.command async for message in there]
    there.close()
    return found


def frames_in(commands: Sequence[Command]) -> list[int]:
    """How many frames each push has."""
    pushes = [each for each in commands if isinstance(each, Push)]
    return [len(bytes(push.pcm)) // FRAME_BYTES for push in pushes]


def sound_in(commands: Sequence[Command]) -> bytes:
    """The sound of all pushes."""
    return b"".join(bytes(each.pcm) for each in commands if isinstance(each, Push))


def test_by_hand_frames_travel_together_and_before_whatever_follows_them() -> None:
    by_hand = SessionSettings(turn_detection=None)

    async def main() -> None:
        ten, two, commit = await told(by_hand, *FRAMES, Commit())
        assert isinstance(ten, Push)
        assert ten.pcm == sound_in(FRAMES[:10])
        assert isinstance(two, Push)
        assert two.pcm == sound_in(FRAMES[10:])
        assert isinstance(commit, Commit)

        slow = Push(bytes(FRAME_BYTES), 8_000)
        rates = [
            each.rate
            for each in await told(by_hand, FRAMES[0], slow, Commit())
            if isinstance(each, Push)
        ]
        assert rates == [24_000, 8_000]

        hands_free = SettingsUpdated(SessionSettings(), clock=0)
        assert frames_in(await told(by_hand, *FRAMES[:2], hands_free, *FRAMES[2:5])) == [3, 2]

    run(main())


def test_hands_free_frames_travel_in_pairs_unless_somebody_speaks() -> None:
    started, stopped = SpeechStarted("item_1", 0), SpeechStopped("item_1", 1, 1, 1)

    async def main() -> None:
        steps: list[Command | Event] = [*FRAMES[:3], started, *FRAMES[3:6], stopped, *FRAMES[6:]]
        found = await told(SessionSettings(), *steps)
        assert frames_in(found) == [2, 1, 1, 1, 1, 2, 2, 2]
        assert sound_in(found) == sound_in(FRAMES)
        long = Push(bytes(5 * FRAME_BYTES), 24_000)
        assert frames_in(await told(SessionSettings(), long, FRAMES[0], Commit())) == [5, 1]

    run(main())


def test_hands_free_a_last_frame_goes_by_itself() -> None:
    async def main() -> None:
        here, there = [await Channel.over(end) for end in socket.socketpair()]
        session = SessionProxy(7, SessionSettings(), here)
        session.tell(FRAMES[0])
        assert session.undone == 0
        message = await anext(aiter(there))
        assert message.command == FRAMES[0]
        assert (session.unheard_s, session.undone) == (0.02, 1)
        here.close()
        there.close()

    run(main())


def test_whoever_waits_for_room_is_not_kept_waiting_by_sound_that_was_not_sent() -> None:
    async def main() -> None:
        here, there = [await Channel.over(end) for end in socket.socketpair()]
        session = SessionProxy(7, SessionSettings(turn_detection=None), here)
        session.tell(Push(bytes(960), 24_000))
        assert (session.unheard_s, session.undone) == (0.02, 0)
        waiting = asyncio.create_task(session.room(0.01, 0))
        message = await anext(aiter(there))
        assert isinstance(message.command, Push)
        assert (session.unheard_s, session.undone) == (0.02, 1)
        session.acknowledged(1)
        await waiting
        here.close()
        there.close()

    run(main())


def test_sound_counts_at_the_rate_that_was_granted_not_at_one_that_was_asked_for() -> None:
    async def main() -> None:
        here, there = [await Channel.over(end) for end in socket.socketpair()]
        session = SessionProxy(7, SessionSettings(), here)
        slow = SessionSettings(input_rate=8_000)
        session.tell(UpdateSettings(slow))
        session.tell(Push(bytes(2 * 24_000)))
        assert session.unheard_s == 1.0
        session.on_event(SettingsUpdated(slow, clock=0))
        session.tell(Push(bytes(2 * 24_000)))
        session.tell(Push(bytes(2 * 24_000), rate=24_000))
        assert session.unheard_s == 1.0 + 3.0 + 1.0
        here.close()
        there.close()

    run(main())


def test_the_wait_for_first_audio_is_that_of_conversations_alone() -> None:
    metrics = Metrics()
    timings = Timings(commit_to_first_audio_ms=300.0, real_time_factor=0.5)
    for response_id, in_conversation in (("resp_1", True), ("resp_2", False)):
        status = ResponseStatus.COMPLETED
        metrics.on_response(
            ResponseDone(response_id, status, None, (), Usage(), timings, in_conversation)
        )
    text = metrics.text().decode()
    assert "mosstalk_commit_to_first_audio_seconds_count 1.0" in text
    assert "mosstalk_response_real_time_factor_count 2.0" in text


def test_what_a_client_does_wrong_is_counted_each_time_and_logged_some_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    session_metrics = SessionMetrics(metrics, SessionSettings(), "anyone")
    for _ in range(100):
        error = Error(error=ErrorBody(code="invalid_json", message="no json"))
        session_metrics.on_message("server", "", error)
        session_metrics.on_message("server", "", InputCleared())
    config = ResponseConfig(AudioFormat(), "default", "inf")
    response = config.response("resp_1", ReplyMode.AUDIO, None, "failed")
    session_metrics.on_message("server", "", ResponseEvent(type="response.done", response=response))
    full = {"type": "rate_limit_error", "code": "rate_limit_exceeded", "message": "full"}
    response.status_details = StatusDetails(type="failed", error=full)
    session_metrics.on_message("server", "", ResponseEvent(type="response.done", response=response))
    text = metrics.text().decode()
    assert 'mosstalk_errors_total{code="invalid_json"} 100.0' in text
    assert 'mosstalk_errors_total{code="rate_limit_exceeded"} 1.0' in text
    assert len(caplog.records) == 51


def test_log_lines_have_fields_and_tracebacks() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "said %s", ("so",), None)
    record.session, record.figures = "sess_1", {"ms": 1.23456, "n": 2}
    line = json.loads(JsonLines("front").format(record))
    assert (line["message"], line["session"], line["process"]) == ("said so", "sess_1", "front")
    assert "said so  session=sess_1 figures=ms:1.23,n:2" in TextLines("front").format(record)
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonLines("front").format(record))["traceback"]
    assert "ValueError: why" in TextLines("front").format(record)


def test_every_metric_is_named_after_the_program_and_explained() -> None:
    lines = Metrics().text().decode().splitlines()
    helps = [line for line in lines if line.startswith("# HELP mosstalk_")]
    assert len(helps) > 25
    assert all(len(line.split(" ", 3)[3]) > 10 for line in helps)


def test_every_metric_and_every_part_of_the_worker_is_in_the_docs() -> None:
    docs = (ROOT / "docs" / "server.md").read_text()
    told = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in Metrics().registry.collect()
        if family.name.startswith("mosstalk_")
    }
    named = {name.removeprefix("mosstalk_") for name in told} | set(BusyPart)
    assert {name for name in named if not re.search(rf"`{name}[`{{]", docs)} == set()
