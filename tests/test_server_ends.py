"""What ends a session or the server while an answer is being made, over real sockets."""

import asyncio
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import attackers
import httpx
import pytest
from conftest import run
from server_rig import QUICK, Server, Talker, full_pipe, serving, typed
from typer.testing import CliRunner

from mosstalk.cli import app
from mosstalk.server.app import VERSION

CODES = 100
LONG = (*QUICK, "--script", f"speech:{CODES}")
"""Every answer lasts 8 s, unless its codes go round in a circle."""
WHOLE = ("completed", "incomplete")
SOME = 25
"""As many rows as show that an answer is made."""
ANSWER = {"type": "response.create"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes the worker go wrong."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(cache_folder: Path, faults: Path) -> Iterator[Server]:
    """A server whose answers are long and whose patience is short."""
    words = (*LONG, "--limit", "unsent_s=4", "--limit", "stalled_s=20")
    with serving(*words, cache=cache_folder, env={"MOSSTALK_FAULTS": str(faults)}) as running:
        yield running


async def begin(talker: Talker) -> None:
    """Have an answer under way."""
    await talker.send(typed("Good morning."), ANSWER)
    await talker.wait("response.output_audio.delta")


def test_a_client_that_stops_reading_is_sent_away_and_nobody_else_waits(server: Server) -> None:
    def narrow() -> socket.socket:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        raw.connect((host, int(port)))
        raw.setblocking(False)
        return raw

    async def main() -> None:
        async with Talker(server) as neighbour:
            deaf = Talker(server, sock=narrow(), max_queue=1)
            await deaf.__aenter__()
            await deaf.send(typed("Good morning."), ANSWER)
            done = await neighbour.ask("Good morning.", max_output_tokens=SOME)
            assert done["status"] in WHOLE
            assert "error" not in neighbour.kinds()
            slow = 'mosstalk_sessions_closed_total{reason="slow"}'
            await asyncio.to_thread(server.await_metrics, lambda m: m.get(slow) == 1)
            code, reason = await deaf.closed()  # it reads again
            assert code == 1008
            assert "too slow" in reason

    run(main())
    server.await_nothing_held()


def test_a_server_that_runs_out_of_descriptors_says_what_to_raise(server: Server) -> None:
    front, files = server.process.pid, resource.RLIMIT_NOFILE
    before, hard = resource.prlimit(front, files)
    most = len(list(Path(f"/proc/{front}/fd").iterdir())) + 30
    resource.prlimit(front, files, (most, hard))
    try:
        with ExitStack() as idle:
            for _ in range(100):
                idle.enter_context(attackers.raw(server.socket))
            answered, end_s = False, time.monotonic() + 20
            while not answered and time.monotonic() < end_s:  # once the idle ones are closed
                with suppress(httpx.TransportError):
                    answered = server.get("/health").status_code == 200
            assert answered
    finally:
        resource.prlimit(front, files, (before, hard))
    server.await_metrics(lambda _: any("ulimit -n" in str(line) for line in server.logs))


def test_a_reply_that_is_not_finite_ends_alone(server: Server, faults: Path) -> None:
    async def main() -> None:
        async with Talker(server) as neighbour, Talker(server) as talker:
            await begin(talker)
            (faults / "poison").touch()
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "failed"
            for each in (neighbour, talker):
                done = await each.ask("Good morning.", max_output_tokens=SOME)
                assert done["status"] in WHOLE
            assert "error" not in neighbour.kinds()

    run(main())
    server.await_nothing_held()
    counted = server.metrics()['mosstalk_responses_total{reason="error",status="failed"}']
    assert counted == 1


def test_sigterm_lets_a_running_answer_finish_and_nobody_new_in(server: Server) -> None:
    """The last of the server that the tests above share: it ends it."""

    async def main() -> None:
        async with Talker(server) as idle, Talker(server) as talker:
            await begin(talker)
            server.signal(signal.SIGTERM)
            assert await idle.closed() == (1012, "the server ends; connect again")
            assert server.get("/ready").status_code == 503
            assert server.get("/health").status_code == 200
            assert server.metrics()["mosstalk_draining"] == 1
            with pytest.raises(Exception, match="HTTP 503"):
                await Talker(server).__aenter__()
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "completed"
            assert len(talker.pcm()) == CODES * 1920 * 2
            assert (await talker.closed())[0] == 1012

    server.await_nothing_held()
    run(main())
    assert server.wait() == 0
    reasons = [line["reason"] for line in server.logged("session closed")]
    assert reasons[-2:] == ["drain", "drain"]


# Slow: two more servers, to be cut short; the one above shows what is told to clients.
@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_an_answer_that_takes_longer_than_the_drain_is_cut_and_so_is_all_at_a_second_signal(
    again: bool, cache_folder: Path
) -> None:
    async def main(server: Server) -> None:
        async with Talker(server) as talker:
            await begin(talker)
            server.signal(signal.SIGTERM)
            if again:  # two signals at the same time are one
                await asyncio.to_thread(server.await_metrics, lambda m: m["mosstalk_draining"] == 1)
                server.signal(signal.SIGTERM)
                await talker.closed()
                return
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "cancelled"
            assert (await talker.closed())[0] == 1012

    drain = () if again else ("--drain-timeout", "0.2")
    with serving(*LONG, *drain, cache=cache_folder) as server:
        run(main(server))
        assert server.wait(10) == (128 + signal.SIGTERM if again else 0)


# Slow: a step that raises, and one that never ends, end the worker as a killed one ends.
@pytest.mark.parametrize(
    "how",
    ["killed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("step", "stuck"))],
)
def test_a_worker_that_dies_is_told_to_all_and_ends_the_server_with_70(
    how: str, cache_folder: Path, tmp_path: Path
) -> None:
    async def main(server: Server) -> None:
        async with Talker(server) as idle, Talker(server) as talker:
            await begin(talker)
            if how == "killed":
                os.kill(server.worker_id, signal.SIGKILL)
            else:
                (tmp_path / how).touch()
            for each in (idle, talker):
                code, reason = await each.closed()
                assert code == 1011
                assert "engine" in reason
                (error,) = (e["error"] for e in each.events if e["type"] == "error")
                assert error["code"] == "server_error"
            assert server.get("/health").status_code == 503
            assert server.metrics()["mosstalk_worker_up"] == 0

    env = {"MOSSTALK_FAULTS": str(tmp_path)}
    with serving(*LONG, "--watchdog", "8", cache=cache_folder, env=env) as server:
        run(main(server))
        assert server.wait() == 70
        reasons = [line["reason"] for line in server.logged("session closed")]
        assert reasons == ["engine", "engine"]


@pytest.mark.parametrize(
    "doing",
    [
        "starting",
        # Slow: between the two others.
        pytest.param("loading", marks=pytest.mark.slow),
        "computing",
        # Slow: its step never ends, as if a kernel hung.
        pytest.param("stuck", marks=pytest.mark.slow),
    ],
)
def test_a_worker_whose_front_is_killed_is_gone_within_2_s(
    doing: str, cache_folder: Path, tmp_path: Path
) -> None:
    server = Server(*LONG, cache=cache_folder, env={"MOSSTALK_FAULTS": str(tmp_path)})

    async def kill_while_it_computes() -> None:
        async with Talker(server.ready()) as talker:
            await begin(talker)
            if doing == "stuck":
                (tmp_path / "stuck").touch()
                late = "mosstalk_engine_silent_seconds"
                await asyncio.to_thread(server.await_metrics, lambda m: m[late] > 0.5)
            server.signal(signal.SIGKILL)

    try:
        worker = os.pidfd_open(server.worker_id)
        if doing in ("computing", "stuck"):
            run(kill_while_it_computes())
        else:
            if doing == "loading":
                server.await_line(r"tensors\)$")
            server.signal(signal.SIGKILL)
        killed_s = time.monotonic()
        assert select.select([worker], [], [], 15)[0], "it outlives its front"
        assert time.monotonic() - killed_s < 2
        os.close(worker)
    finally:
        server.stop()


# Slow: nobody ever reads; the server below serves unread as well, and is read when it ends.
@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["signal", "step"])
def test_a_server_whose_output_nobody_reads_serves_and_ends(
    ends_by: str, cache_folder: Path, tmp_path: Path
) -> None:
    out, err = full_pipe(), full_pipe()
    server = Server(
        *LONG, cache=cache_folder, env={"MOSSTALK_FAULTS": str(tmp_path)}, output=(out[1], err[1])
    )

    async def main() -> None:
        async with Talker(server) as talker:
            assert (await talker.ask("Good morning."))["status"] in WHOLE
            if ends_by == "step":
                await begin(talker)
                (tmp_path / "step").touch()
                assert (await talker.closed())[0] == 1011

    try:
        server.await_ready()
        run(main())
        if ends_by == "signal":
            server.signal(signal.SIGTERM)
        assert server.wait(15) == (70 if ends_by == "step" else 0)
    finally:
        server.stop()
        for descriptor in (*out, *err):
            os.close(descriptor)


def test_what_was_logged_while_nobody_read_is_there_for_whoever_reads_again(
    cache_folder: Path,
) -> None:
    async def come_and_go(server: Server) -> None:
        async with Talker(server):
            pass

    reading, writing = full_pipe()
    out = os.open(os.devnull, os.O_WRONLY)
    server = Server(*QUICK, cache=cache_folder, output=(out, writing))
    os.close(writing)  # the server's is the only one now
    try:
        server.await_ready()
        run(come_and_go(server))
        server.await_nothing_held()
        server.signal(signal.SIGTERM)
        with os.fdopen(reading) as pipe:
            lines = [line for line in pipe if line.strip()]
        assert server.wait() == 0
        messages = [json.loads(line)["message"] for line in lines]
        assert [m for m in messages if m.startswith("session")] == [
            "session opened",
            "session closed",
        ]
        assert any(message.startswith("draining") for message in messages)
    finally:
        server.stop()
        os.close(out)


def test_while_the_models_are_loaded_nobody_is_let_in(cache_folder: Path) -> None:
    server = Server(*QUICK, cache=cache_folder)
    try:
        assert server.get("/ready").json()["error"]["code"] == "loading"
        told = {"status": "ok", "worker": "loading", "version": VERSION}
        assert server.get("/health").json() == told
        with pytest.raises(Exception, match="HTTP 503"):
            run(Talker(server).__aenter__())  # type: ignore[arg-type]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.stop()


def test_what_cannot_be_served_is_said_in_one_line(cache_folder: Path, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        result = CliRunner().invoke(app, ["serve", *words])
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        return line

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "something listens there" in said("--port", str(taken.getsockname()[1]))
    assert "NAME=VALUE" in said("--limit", "unsent=3")
    assert "must be above 0" in said("--limit", "unsent_s=0")
    for option in ("--max-reply-s", "--idle-s", "--kv-gib"):
        assert f"{option} must be above 0, not -1.0" in said(option, "-1", "--print-config")
    assert "cannot be read" in said("--api-keys-file", str(tmp_path / "none"))
    for name in ("", "https://talk.example.org", "talk.example.org:80", "*.example.org", "a b"):
        assert "give a name alone" in said("--allowed-host", name, "--print-config")
    assert "together" in said("--model", "nowhere")
    nowhere = Server("--model", "nowhere", "--codec", "nowhere", cache=cache_folder)
    assert nowhere.wait() == 2
    assert any("nowhere" in line.get("text", "") for line in nowhere.logs)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (("--api-key", ""), None, "--api-key is empty"),
        (("--api-key", "good", "--api-key", "  "), None, "--api-key is empty"),
        ((), "", "MOSSTALK_API_KEY is set and holds no key"),
        ((), " , ", "MOSSTALK_API_KEY is set and holds no key"),
        (("--api-key", "good"), "", "MOSSTALK_API_KEY is set and holds no key"),
        (("--api-keys-file", ""), None, "cannot be read as a file of keys"),
        (("--api-keys-file", "blank"), None, "blank: holds no key"),
    ],
)
def test_a_key_that_was_forgotten_opens_no_server(
    words: tuple[str, ...],
    env: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank").write_text("\ufeff\n   # the key of the telephone\n", encoding="utf-8")
    if env is not None:
        monkeypatch.setenv("MOSSTALK_API_KEY", env)
    # It ends before it serves; --print-config ends it where it would serve after all.
    result = CliRunner().invoke(app, ["serve", "--print-config", *words])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert message in line


def test_the_config_is_printed_without_its_keys() -> None:
    words = [
        *("serve", "--print-config", "--api-key", "secret", "--limit", "unsent_s=3"),
        "--no-echo-gate",
    ]
    printed = CliRunner().invoke(app, words).stdout
    config = json.loads(printed)
    assert config["keys"] == 1
    assert config["limits"]["unsent_s"] == 3
    assert not config["defaults"]["echo_gate"]
    assert "secret" not in printed
