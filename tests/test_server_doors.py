"""Who is let in: keys, origins, limits a key; and what is given to browsers."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attackers
import pytest
from conftest import run
from server_rig import QUICK, Server, Talker, serving
from websockets.exceptions import InvalidStatus

KEYS = ("alpha-key", "beta-key", "env-key")
BEARER = {"Authorization": "Bearer beta-key"}
ELSEWHERE = "https://app.example.org"


@pytest.fixture(scope="module")
def server(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three keys from three places, and a page elsewhere that may connect."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# who\nbeta-key\n\n")
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
    assert refused(server, subprotocols=["realtime", "openai-insecure-api-key.nope"])[0] == 401
    for key in KEYS:
        talker = let_in(server, additional_headers={"Authorization": f"Bearer {key}"})
        assert talker.events[0]["session"]["model"] == "house-model"
    protocols = ["realtime", "openai-insecure-api-key.alpha-key"]
    assert let_in(server, subprotocols=protocols).socket.subprotocol == "realtime"
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    for path in ("/metrics", "/v1/models", "/v1/models/house-model"):
        answer = server.get(path, headers={})
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert server.get(path).status_code == 200
    assert server.get("/v1/models/other").status_code == 404
    assert server.metrics()['mosstalk_refusals_total{reason="key"}'] == 4 + 3


def test_pages_of_other_origins_are_not_let_in(server: Server) -> None:
    key = {"additional_headers": BEARER}
    assert refused(server, origin="https://evil.example", **key) == (403, "origin")
    assert refused(server, origin="null", **key) == (403, "origin")
    host = server.url.removeprefix("http://")
    let_in(server, origin=f"http://{host}", **key)
    let_in(server, origin=ELSEWHERE, **key)
    rebound = f"attacker.example:{host.split(':')[1]}"
    with attackers.raw(server.socket) as connection:  # a page of the name that leads here
        headers = BEARER | {"Origin": f"http://{rebound}"}
        connection.sendall(attackers.upgrade(f"ws://{rebound}/v1/realtime", headers))
        assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")


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
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg"}
    for name in named:
        answer = server.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(types[Path(name).suffix])
        assert answer.headers["x-content-type-options"] == "nosniff"
    inline = re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page.text)
    assert inline is None, inline
    for path in ("/../settings.py", "/%2e%2e/app.py", "/..%2fapp.py", "/nothing.js", "/app.py"):
        assert server.get(path).status_code == 404
