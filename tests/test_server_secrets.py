"""Ephemeral keys for pages, and what pages of an allowed origin may ask over HTTP."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import run
from openai import AuthenticationError, BadRequestError, OpenAI
from openai.types.realtime import ClientSecretCreateResponse
from server_rig import QUICK, Server, Talker, ask, serving
from test_server_doors import let_in, refused

KEY, OTHER = "alpha-key", "beta-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
ELSEWHERE = "https://app.example.org"
PATH = "/v1/realtime/client_secrets"
UP = "mosstalk_front_processes"


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with two keys of two connections each, and two processes that speak with clients."""
    words = ("--api-key", KEY, "--api-key", OTHER, "--limit", "per_key=2")
    more = ("--allow-origin", ELSEWHERE, "--front-processes", "2", "--limit", "header_s=2")
    with serving(*QUICK, *words, *more, cache=cache_folder) as running:
        running.headers = BEARER
        running.await_metrics(lambda values: values[UP] == 2)
        yield running


@pytest.fixture(scope="module")
def keyless(cache_folder: Path) -> Iterator[Server]:
    """A server that needs no keys."""
    with serving(*QUICK, cache=cache_folder) as running:
        yield running


def posted(server: Server, body: Any = None, **headers: str) -> httpx.Response:
    """The answer to a request for an ephemeral key."""
    return ask("POST", f"{server.url}{PATH}", json=body or {}, headers=server.headers | headers)


def secret(server: Server, **body: Any) -> str:
    """An ephemeral key."""
    answer = posted(server, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["value"])


def test_processes_with_a_memory_each_promise_nothing_to_who_comes_back(server: Server) -> None:
    talker = let_in(server, **bearer(KEY))
    assert "resume" not in talker.events[0]["session"]["mosstalk"]
    assert any("give them a --store" in str(line) for line in server.logs)
    assert refused(server, model="any&resume=resume_x", **bearer(KEY)) == (
        400, "invalid_resume_token"
    )  # fmt: skip


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


def protocols(key: str) -> dict[str, Any]:
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{key}"]}


def test_openais_client_makes_a_key_that_holds_as_long_as_asked(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        for asked, seconds in (({}, 600), ({"seconds": 10}, 10), ({"seconds": 7200}, 7200)):
            after: Any = {"anchor": "created_at", **asked}
            before_s = int(time.time())
            made = client.realtime.client_secrets.create(
                expires_after=after, session={"type": "realtime", "instructions": "Be brief."}
            )
            assert made.value.startswith("ek_")
            assert before_s + seconds <= made.expires_at <= time.time() + seconds
            assert made.session.type == "realtime"
            assert made.session.instructions == "Be brief."


def test_the_answer_is_as_openais_types_have_it(server: Server) -> None:
    answer = posted(server, {"session": {"output_modalities": ["text"], "tools": []}})
    assert answer.headers["cache-control"] == "no-store"
    parsed = ClientSecretCreateResponse.model_validate_json(answer.text, strict=True)
    assert parsed.session.model_dump()["output_modalities"] == ["text"]
    assert parsed.session.model_dump()["id"].startswith("sess_")


@pytest.mark.parametrize("shown", [bearer, protocols])
def test_a_session_begins_with_what_its_key_was_made_for(server: Server, shown: Any) -> None:
    session = {
        "type": "realtime",
        "instructions": "Du bist höflich.",
        "output_modalities": ["text"],
        "max_output_tokens": 7,
        "audio": {"input": {"turn_detection": None}},
    }
    key = secret(server, session=session)
    for _ in range(2):  # it may be used until it expires
        told = let_in(server, **shown(key)).events[0]["session"]
        assert told["instructions"] == "Du bist höflich."
        assert told["output_modalities"] == ["text"]
        assert told["max_output_tokens"] == 7
        assert told["audio"]["input"]["turn_detection"] is None
    opened = server.logged("session opened")[-1]
    assert opened["client"] == "key-1", "its maker's"
    assert opened["process"].startswith("front-")


def test_the_model_is_told_what_the_key_was_made_for(server: Server) -> None:
    key = secret(server, session={"output_modalities": ["text"], "max_output_tokens": 3})

    async def main() -> None:
        async with Talker(server, **bearer(key)) as talker:
            done = await talker.ask("Good morning.")
            assert done["status"] == "incomplete"
            assert done["output"][0]["content"][0]["type"] == "output_text"

    run(main())
    server.await_nothing_held()


def test_its_connections_count_as_its_makers(server: Server) -> None:
    async def main() -> None:
        async with Talker(server, **bearer(KEY)), Talker(server, **bearer(secret(server))):
            with pytest.raises(Exception, match="HTTP 429"):
                await Talker(server, **bearer(secret(server))).__aenter__()
            async with Talker(server, **bearer(OTHER)):
                pass

    run(main())
    server.await_nothing_held()


def test_a_key_that_was_altered_is_of_no_use(server: Server, keyless: Server) -> None:
    key = secret(server)
    altered = key[:-1] + ("A" if key[-1] != "A" else "B")
    for wrong in (altered, "ek_", "ek_forged", secret(keyless)):
        assert refused(server, **bearer(wrong)) == (401, "key")
        assert refused(server, **protocols(wrong)) == (401, "key")
    assert refused(keyless, **bearer(key)) == (401, "key"), "another server's"
    let_in(keyless, **bearer("any"))
    let_in(keyless, **bearer(secret(keyless)))


def test_only_who_has_an_api_key_makes_one_and_only_for_conversations(server: Server) -> None:
    key = secret(server)
    for shown in ({"Authorization": f"Bearer {key}"}, {"Authorization": "Bearer no"}):
        assert posted(server, **shown).status_code == 401
        assert server.get("/v1/models", headers=shown).status_code == 401
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
        pytest.raises(AuthenticationError) as refusal,
    ):
        client.realtime.client_secrets.create()
    assert refusal.value.code == "key"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"expires_after": {"seconds": 9}}, "invalid_value", "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "invalid_value", "expires_after.seconds"),
        ({"expires_after": {"seconds": "60"}}, "invalid_type", "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "invalid_value", "expires_after.anchor"),
        ({"session": {"type": "telephony"}}, "invalid_value", "session.type"),
        ({"session": {"instructions": 1}}, "invalid_type", "session.instructions"),
        ({"session": {"instructions": "x" * 40_000}}, "string_above_max_length",
         "session.instructions"),
        ({"session": {"audio": {"output": {"format": {"type": "mp3"}}}}}, "invalid_value",
         "session.audio.output.format.type"),
        ({"session": 3}, "invalid_type", "session"),
    ],
)  # fmt: skip
def test_what_is_asked_wrong_is_refused_as_in_a_session(
    server: Server, body: dict[str, Any], code: str, param: str
) -> None:
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(BadRequestError) as refusal,
    ):
        client.realtime.client_secrets.create(**body)
    assert (refusal.value.code, refusal.value.param) == (code, param)
    assert refusal.value.type == "invalid_request_error"


def test_settings_that_no_request_could_carry_are_refused(server: Server) -> None:
    long = "".join(f"{n:x}" for n in range(4000))
    answer = posted(server, {"session": {"instructions": long}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session")
    assert "characters of the key" in answer.json()["error"]["message"]
    fitting = secret(server, session={"instructions": long[:5000]})
    assert let_in(server, **protocols(fitting)).events[0]["session"]["instructions"] == long[:5000]


def test_a_body_is_bounded_in_bytes_and_time_and_has_to_be_an_object(server: Server) -> None:
    def status(content: bytes) -> int:
        return ask("POST", f"{server.url}{PATH}", content=content, headers=BEARER).status_code

    assert status(b"") == 200
    assert status(b"{}") == 200
    for wrong in (
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"session": {"instructions": "\\ud800"}}',
    ):
        assert status(wrong) == 400, wrong[:20]
    assert status(b" " * (1 << 20)) == 413
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20) as slow:
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert not server.faults()


# Pages elsewhere.


def test_a_page_of_an_allowed_origin_may_ask_and_read_the_answer(server: Server) -> None:
    asked = {
        "Origin": ELSEWHERE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for path in (PATH, "/v1/models", "/health"):
        before = ask("OPTIONS", f"{server.url}{path}", headers=asked)
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == ELSEWHERE
        methods = before.headers["access-control-allow-methods"].split(", ")
        assert {"GET", "POST", "DELETE"} <= set(methods), "a conversation is deleted by DELETE"
        allowed = before.headers["access-control-allow-headers"]
        assert allowed == "authorization,content-type"
    for answer in (
        posted(server, Origin=ELSEWHERE),
        posted(server, Origin=ELSEWHERE, Authorization="Bearer no"),
        server.get("/v1/models", headers=BEARER | {"Origin": ELSEWHERE}),
        server.get("/none", headers={"Origin": ELSEWHERE}),
    ):
        assert answer.headers["access-control-allow-origin"] == ELSEWHERE
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
    key = str(posted(server, Origin=ELSEWHERE).json()["value"])
    let_in(server, origin=ELSEWHERE, **protocols(key))


@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{ELSEWHERE}.evil.example"])
def test_a_page_of_another_origin_may_neither_post_nor_read(
    server: Server, keyless: Server, origin: str
) -> None:
    for asked in (server, keyless):
        answer = posted(asked, Origin=origin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin")
        assert "access-control-allow-origin" not in answer.headers
        wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        before = ask("OPTIONS", f"{asked.url}{PATH}", headers=wanted)
        assert before.status_code == 403
        read = asked.get("/v1/models", headers=asked.headers | {"Origin": origin})
        assert "access-control-allow-origin" not in read.headers


def test_the_servers_own_page_may_post(keyless: Server) -> None:
    assert posted(keyless, Origin=keyless.url).status_code == 200


def test_another_method_is_told_which_one_is_taken(keyless: Server) -> None:
    answer = keyless.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert f"{PATH} takes POST, not GET" in json.loads(answer.text)["error"]["message"]
