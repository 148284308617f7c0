"""Who is let in: keys, origins, limits a key; and what is given to browsers."""

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import run
from server_rig import QUICK, Server, Talker, ask, serving
from test_server_room import HANDSHAKE, status
from websockets import Origin
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as dial

KEYS = ("alpha-key", "beta-key", "env-key")
BEARER = {"Authorization": "Bearer beta-key"}
ELSEWHERE = "https://app.example.org"


@pytest.fixture(scope="module")
def server(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three keys from three places, and a page elsewhere that may connect."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\ufeffbeta-key\n   # nobody\n#\n\n", encoding="utf-8")
    words = (
        "--api-key", "alpha-key", "--api-keys-file", str(file), "--allow-origin", ELSEWHERE,
        "--limit", "per_key=1", "--model-name", "house-model", "--limit", "ping_s=1",
        "--limit", "pong_s=1",
    )  # fmt: skip
    with serving(
        *QUICK, *words, cache=cache_folder, env={"MOSSTALK_API_KEY": "env-key"}
    ) as running:
        running.headers = BEARER
        yield running


@pytest.fixture(scope="module")
def keyless(cache_folder: Path) -> Iterator[Server]:
    """A server without keys that other machines can reach, by addresses and one name."""
    words = ("--host", "0.0.0.0", "--allowed-host", "talk.example.org")
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


def refused(server: Server, **more: Any) -> tuple[int, str]:
    """Status and code of the refusal of a connection."""

    async def main() -> None:
        async with Talker(server, **more):
            pass

    with pytest.raises(InvalidStatus) as refusal:
        run(main())
    response = refusal.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def let_in(server: Server, **more: Any) -> Talker:
    """A client that was let in, and has gone again."""
    talker = Talker(server, **more)

    async def main() -> None:
        async with talker:
            pass

    run(main())
    server.await_nothing_held()
    return talker


def test_only_those_with_a_key_are_let_in(server: Server) -> None:
    assert refused(server) == (401, "key")
    assert refused(server, additional_headers={"Authorization": "Bearer nope"}) == (401, "key")
    assert refused(server, additional_headers={"Authorization": "beta-key"}) == (401, "key")
    assert refused(server, additional_headers={"Authorization": "Bearer # nobody"}) == (401, "key")
    assert refused(server, subprotocols=["realtime", "openai-insecure-api-key.nope"])[0] == 401
    for key in KEYS:
        talker = let_in(server, additional_headers={"Authorization": f"Bearer {key}"})
        assert talker.events[0]["session"]["model"] == "house-model"
    protocols = ["realtime", "openai-insecure-api-key.alpha-key"]
    assert let_in(server, subprotocols=protocols).socket.subprotocol == "realtime"
    assert server.get("/health").status_code == 200
    ready = server.get("/ready")
    assert ready.status_code == 200
    assert "CPU" in ready.json()["worker"]["device_name"]
    for path in ("/metrics", "/v1/models", "/v1/models/house-model"):
        answer = server.get(path, headers={})
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert server.get(path).status_code == 200
    assert server.get("/v1/models/other").status_code == 404
    assert server.metrics()['mosstalk_refusals_total{reason="key"}'] == 5 + 3


def test_pages_of_other_origins_are_not_let_in(server: Server) -> None:
    key = {"additional_headers": BEARER}
    assert refused(server, origin="https://evil.example", **key) == (403, "origin")
    assert refused(server, origin="null", **key) == (403, "origin")
    host = server.url.removeprefix("http://")
    let_in(server, origin=f"http://{host}", **key)
    let_in(server, origin=ELSEWHERE, **key)


def test_a_refused_origin_is_logged_with_the_option_that_admits_it_and_floods_no_log(
    server: Server,
) -> None:
    def logged(origin: str) -> list[dict[str, Any]]:
        option = f"--allow-origin {origin}"
        return [line for line in server.logs if option in line.get("message", "")]

    key = {"additional_headers": BEARER}
    strange = "https://talk.example.net"
    assert refused(server, origin=strange, **key) == (403, "origin")
    server.await_log(lambda: len(logged(strange)) == 1)
    assert logged(strange)[0]["level"] == "warning"
    assert logged(strange)[0]["reason"] == "origin"
    before = server.metrics()['mosstalk_refusals_total{reason="origin"}']
    for number in range(30):
        assert refused(server, origin=f"https://{number}.flood.example", **key)[0] == 403
    assert server.metrics()['mosstalk_refusals_total{reason="origin"}'] == before + 30
    lines = [line for line in server.logs if line.get("reason") == "origin"]
    assert len(lines) <= 10
    assert not [line for line in server.logs if "text" in line or line["level"] == "error"]


def test_without_keys_only_names_that_nobody_else_can_point_here_are_served(
    keyless: Server,
) -> None:
    port = keyless.url.rpartition(":")[2]

    def status(host: str, path: str = "/v1/models") -> int:
        return keyless.get(path, headers={"Host": host}).status_code

    rebound = f"attacker.example:{port}"
    assert {status(rebound, path) for path in ("/", "/health", "/metrics", "/none")} == {403}
    error = keyless.get("/health", headers={"Host": rebound}).json()["error"]
    assert error["code"] == "host"
    assert "--allowed-host attacker.example" in error["message"]
    assert status("localhost.attacker.example") == 403
    assert status("127.0.0.1.attacker.example") == 403
    for own in ("localhost", f"LOCALHOST:{port}", "10.1.2.3", f"[::1]:{port}", "talk.example.org"):
        assert status(own) == 200, own

    def dialled(host: str) -> tuple[int, str]:
        """The answer to a page of ``http://HOST:PORT`` that connects to where it came from."""
        url, origin = f"ws://{host}:{port}/v1/realtime", Origin(f"http://{host}:{port}")
        place = socket.create_connection(("127.0.0.1", int(port)))
        try:
            with place, dial(url, origin=origin, sock=place) as talk:
                return 101, json.loads(talk.recv())["type"]
        except InvalidStatus as refusal:
            body = refusal.response.body or b""
            return refusal.response.status_code, json.loads(body)["error"]["code"]

    assert dialled("attacker.example") == (403, "host")
    assert dialled("talk.example.org") == (101, "session.created")
    assert dialled("127.0.0.1") == (101, "session.created")
    keyless.await_log(
        lambda: any("--allowed-host attacker.example" in line["message"] for line in keyless.logs)
    )
    keyless.await_nothing_held()


PATHS = ("/v1/models", "/v1/models/any", "/health", "/ready", "/metrics", "/v1/realtime", "/")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_unknown_paths_and_methods_are_answered_as_openai_does_with_what_is_served(
    keyless: Server, method: str
) -> None:
    def asked(path: str) -> httpx.Response:
        return ask(method, f"{keyless.url}{path}")

    def check(answer: httpx.Response, status: int, code: str) -> None:
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        if method == "HEAD":
            return
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        for served in (
            "/v1/realtime",
            "/v1/audio/speech",
            "/v1/audio/transcriptions",
            "/v1/chat/completions",
            "/v1/models",
            "/health",
            "/ready",
            "/metrics",
        ):
            assert served in error["message"]

    strange = ("/v1/completions", "/health/", "/v1/realtime/call", "/none.js", "/%ff/..%2f")
    for path in strange:
        check(asked(path), 404, "unknown_url")
    if method in ("GET", "HEAD"):
        check(asked("/v1/realtime"), 426, "upgrade_required")
        return
    for path in (*PATHS, "/page.js"):
        answer = asked(path)
        check(answer, 405, "method_not_supported")
        assert answer.headers["allow"] == "GET, HEAD"


def test_a_websocket_at_another_path_is_told_where_it_is(keyless: Server) -> None:
    base = keyless.url.replace("http", "ws", 1)
    for path in ("/", "/health", "/v1/realtime/", "/socket"):
        with pytest.raises(InvalidStatus) as refusal:
            dial(f"{base}{path}")
        response = refusal.value.response
        assert response.status_code == 404
        error = json.loads(response.body or b"")["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert error["code"] == "unknown_url"
        assert (
            f"no WebSocket {path} here; served are WebSockets at /v1/realtime" in error["message"]
        )
        assert response.headers["x-content-type-options"] == "nosniff"


def test_every_answer_forbids_browsers_to_guess_its_type(server: Server, keyless: Server) -> None:
    page = keyless.get("/")
    tag = {"If-None-Match": page.headers["etag"]}
    answers = [
        page,
        *(keyless.get(path) for path in PATHS),
        keyless.get("/", headers=tag),
        keyless.get("/", headers={"Host": "attacker.example"}),
        server.get("/v1/models", headers={}),
        ask("POST", f"{keyless.url}/health"),
    ]
    assert {answer.status_code for answer in answers} == {200, 304, 401, 403, 404, 405, 426}
    for answer in answers:
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], answer
    with pytest.raises(InvalidStatus) as refusal:
        dial(server.socket)
    assert refusal.value.response.headers["x-content-type-options"] == "nosniff"


def test_one_key_has_so_many_connections_and_no_more(server: Server) -> None:
    async def main() -> None:
        async with Talker(server, additional_headers=BEARER):
            with pytest.raises(InvalidStatus, match="HTTP 429"):
                await Talker(server, additional_headers=BEARER).__aenter__()
            other = {"Authorization": "Bearer alpha-key"}
            async with Talker(server, additional_headers=other):
                pass

    run(main())
    server.await_nothing_held()


def test_a_client_that_answers_no_ping_is_noticed(server: Server) -> None:
    async def main() -> None:
        silent = Talker(server, additional_headers=BEARER)
        await silent.__aenter__()
        silent.socket.transport.pause_reading()  # its machine is there, it is not
        gone = 'mosstalk_sessions_closed_total{reason="vanished"}'
        await asyncio.to_thread(server.await_metrics, lambda metrics: metrics.get(gone) == 1)

    run(main())
    server.await_nothing_held()


def test_the_page_comes_with_its_types_and_a_policy_that_permits_it(server: Server) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["permissions-policy"] == "microphone=(self)"
    again = server.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    named = re.findall(r'(?:src|href)="/?([\w.-]+)"', page.text)
    assert any(name.endswith(".js") for name in named)
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg", ".ico": "image/"}
    for name in named:
        answer = server.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(types[Path(name).suffix])
        assert answer.headers["x-content-type-options"] == "nosniff"
    inline = re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page.text)
    assert inline is None, inline
    for path in ("/../environment.py", "/%2e%2e/app.py", "/..%2fapp.py", "/nothing.js", "/app.py"):
        assert server.get(path).status_code == 404


def test_handshakes_under_way_when_the_server_ends_are_told_to_come_again(
    keyless: Server,
) -> None:
    """The last of this server: it ends it."""
    keyless.await_nothing_held()
    host, port = keyless.url.removeprefix("http://").split(":")
    os.kill(keyless.worker_id, signal.SIGSTOP)  # so that no session is opened before the signal
    waiting = [socket.create_connection((host, int(port)), 20) for _ in range(20)]
    try:
        for raw in waiting:
            raw.sendall(HANDSHAKE.encode())
        keyless.get("/health")  # came later than they did, and has been answered
        keyless.signal(signal.SIGTERM)
        keyless.await_log(
            lambda: any("draining" in str(line.get("message")) for line in keyless.logs)
        )
        with socket.create_connection((host, int(port)), 20) as late:
            late.sendall(HANDSHAKE.encode())
            assert status(late) in (503, 0)
        os.kill(keyless.worker_id, signal.SIGCONT)
        statuses = Counter(map(status, waiting))
    finally:
        os.kill(keyless.worker_id, signal.SIGCONT)
        for raw in waiting:
            raw.close()
    print(f"20 handshakes during SIGTERM: {dict(statuses)}")
    assert statuses == {503: 20}
    assert keyless.wait(20) == 0
