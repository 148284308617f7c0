"""What clients get wrong: an error with the right code, and the connection stays."""

import base64
import json
from typing import Any

import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from realtime_rig import Caller, Wire, b64, caller, obeyed, tone

from mosstalk.server.limits import Limits
from mosstalk.session.commands import CancelResponse, CreateText, Push, Truncate
from mosstalk.session.events import (
    Closed,
    ErrorCode,
    ErrorRaised,
    Item,
    ItemAdded,
    ItemDone,
    ItemTruncated,
)

CLIENT_EVENTS = (
    "session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "output_audio_buffer.clear",
    "conversation.item.create",
    "conversation.item.retrieve",
    "conversation.item.truncate",
    "conversation.item.delete",
    "response.create",
    "response.cancel",
)
HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}


def error_of(events: list[Wire]) -> Wire:
    """The one error among events."""
    (event,) = events
    assert event["type"] == "error"
    error: Wire = event["error"]
    return error


def require_alive(client: Caller) -> None:
    """Check that the next event is served as if nothing had happened."""
    before = len(client.commands)
    client.send("conversation.item.create", item=HELLO)
    assert isinstance(client.commands[before], CreateText)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "hello",
        "[]",
        "3",
        "null",
        '{"type": "response.create"} trailing',
        '{"type": "session.update", "session": {"temperature": NaN}}',
        '{"type": "session.update", "session": {"instructions": "\\ud83d"}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
        b"\x80abc",
    ],
    ids=lambda message: repr(message[:30]),
)
def test_what_is_no_json_object_is_refused(message: str | bytes) -> None:
    client = caller()
    assert error_of(client.raw(message))["code"] == "invalid_json"
    require_alive(client)


def test_a_message_of_bytes_is_as_good_as_one_of_text() -> None:
    client = caller()
    client.raw(json.dumps({"type": "input_audio_buffer.clear"}).encode())
    client.raw('{"type": "session.update", "session": {"instructions": "\\ud83d\\ude00"}}')
    assert len(client.commands) == 2


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ({}, "missing_required_parameter", "type"),
        ({"type": None}, "missing_required_parameter", "type"),
        ({"type": 3}, "invalid_type", "type"),
        ({"type": "input_audio_buffer.magic"}, "invalid_value", "type"),
        ({"type": "session.update"}, "missing_required_parameter", "session"),
        ({"type": "session.update", "session": 1}, "invalid_type", "session"),
        ({"type": "input_audio_buffer.append"}, "missing_required_parameter", "audio"),
        ({"type": "input_audio_buffer.append", "audio": 5}, "invalid_type", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "?!"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "abc"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "é"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_value", "audio"),
        ({"type": "conversation.item.create"}, "missing_required_parameter", "item"),
        ({"type": "conversation.item.retrieve"}, "missing_required_parameter", "item_id"),
        ({"type": "conversation.item.delete"}, "missing_required_parameter", "item_id"),
        ({"type": "conversation.item.truncate"}, "missing_required_parameter", "item_id"),
        (
            {"type": "conversation.item.truncate", "item_id": "i", "audio_end_ms": 10**400},
            "invalid_value",
            "audio_end_ms",
        ),
        (
            {"type": "conversation.item.retrieve", "item_id": "nobody"},
            "item_retrieve_invalid_item_id",
            "item_id",
        ),
        (
            {"type": "response.create", "response": {"input": {}}},
            "invalid_type",
            "response.input",
        ),
        ({"type": "response.create", "response": []}, "invalid_type", "response"),
        (
            {"type": "response.create", "response": {"input": [{}] * 65}},
            "array_above_max_length",
            "response.input",
        ),
        (
            {"type": "response.create", "response": {"metadata": {"a": "x" * 3000}}},
            "invalid_value",
            "response.metadata",
        ),
        (
            {
                "type": "response.create",
                "response": {
                    "conversation": "none",
                    "input": [{"type": "item_reference", "id": "nobody"}],
                },
            },
            "invalid_item_id",
            "response.input[0].id",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_what_cannot_be_served_is_refused_by_name(event: Wire, code: str, param: str) -> None:
    client = caller()
    error = error_of(client.raw(json.dumps(event | {"event_id": "mine"})))
    assert (error["code"], error["param"], error["event_id"]) == (code, param, "mine")
    assert error["type"] == "invalid_request_error"
    assert not client.commands
    require_alive(client)


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"type": "thought"}, "invalid_value"),
        ({"role": "robot", "content": []}, "invalid_value"),
        ({"role": "user", "content": [{"type": "smell"}]}, "invalid_value"),
        ({"role": "user", "content": [{}]}, "missing_required_parameter"),
        ({"role": "user", "content": "Hello"}, "invalid_type"),
        ({"role": "user", "content": [{"type": "input_audio", "audio": "A"}]}, "invalid_value"),
        (
            {"role": "system", "content": [{"type": "input_audio", "audio": "AAAAAAAA"}]},
            "invalid_value",
        ),
        ({"id": "x" * 600, **HELLO}, "string_above_max_length"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x" * 40_000}]},
            "string_above_max_length",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "x" * 40_000},
            "string_above_max_length",
        ),
        ({"type": "function_call_output", "output": "x"}, "missing_required_parameter"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_items_that_are_none_are_refused(item: Wire, code: str) -> None:
    client = caller()
    assert error_of(client.send("conversation.item.create", item=item))["code"] == code
    assert not client.commands
    require_alive(client)


def test_sound_and_messages_beyond_their_limits_are_refused() -> None:
    client = caller()
    mib = 1 << 20
    sound = base64.b64encode(bytes(15 * mib)).decode()
    assert client.send("input_audio_buffer.append", audio=sound) == []
    (push,) = client.commands
    assert isinstance(push, Push)
    assert len(push.pcm) == 15 * mib
    more = base64.b64encode(bytes(15 * mib + 2)).decode()
    for length in (more, base64.b64encode(bytes(20 * mib)).decode()):
        error = error_of(client.send("input_audio_buffer.append", audio=length, event_id="e"))
        assert (error["code"], error["param"]) == ("string_above_max_length", "audio")
        assert error["event_id"] == "e"
    small = caller(limits=Limits(message_bytes=100))
    error = error_of(small.send("input_audio_buffer.append", audio="A" * 100))
    assert (error["code"], error["param"]) == ("string_above_max_length", "message")


def test_no_sound_at_all_is_no_error() -> None:
    client = caller()
    assert client.send("input_audio_buffer.append", audio="") == []
    assert client.commands == []


REFUSED = [
    ("input_audio_buffer.commit", {}, ErrorCode.COMMIT_EMPTY, "input_audio_buffer_commit_empty"),
    ("response.create", {}, ErrorCode.RESPONSE_ACTIVE, "conversation_already_has_active_response"),
    ("response.cancel", {}, ErrorCode.RESPONSE_NOT_ACTIVE, "response_cancel_not_active"),
    (
        "conversation.item.create",
        {"item": HELLO},
        ErrorCode.DUPLICATE_ITEM,
        "item_create_duplicate_item_id",
    ),
    (
        "conversation.item.create",
        {"item": HELLO, "previous_item_id": "nobody"},
        ErrorCode.UNKNOWN_ITEM,
        "item_create_invalid_previous_item_id",
    ),
    (
        "conversation.item.delete",
        {"item_id": "nobody"},
        ErrorCode.UNKNOWN_ITEM,
        "item_delete_invalid_item_id",
    ),
    (
        "conversation.item.truncate",
        {"item_id": "nobody", "content_index": 0, "audio_end_ms": 3},
        ErrorCode.UNKNOWN_ITEM,
        "item_truncate_invalid_item_id",
    ),
    ("input_audio_buffer.append", {"audio": b64(tone(0.1))}, ErrorCode.TURN_TOO_LONG,
     "input_audio_buffer_full"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "code", "wire"), REFUSED)
def test_what_the_session_refuses_has_the_code_that_clients_know(
    kind: str, more: Wire, code: ErrorCode, wire: str
) -> None:
    client = caller()
    assert client.send(kind, event_id="mine:1", **more) == []
    (command,) = client.commands
    refusal = ErrorRaised(code, "no", type(command).__name__, command.command_id, clock=0)
    error = error_of(client.hear(refusal))
    assert (error["code"], error["event_id"]) == (wire, "mine:1")
    if code is ErrorCode.RESPONSE_NOT_ACTIVE:
        assert error["message"].startswith("Cancellation failed")


@pytest.mark.parametrize("code", [ErrorCode.CONTEXT_FULL, ErrorCode.ENGINE_FULL])
def test_a_response_for_which_there_is_no_room_fails_instead_of_being_an_error(
    code: ErrorCode,
) -> None:
    client = caller()
    client.send("response.create", event_id="e", response={"metadata": {"client_event_id": "q"}})
    command_id = client.commands[0].command_id
    refusal = ErrorRaised(code, "no room", "CreateResponse", command_id, 5.0, clock=0)
    created, done = client.hear(refusal)
    assert created["type"] == "response.created"
    assert created["response"]["metadata"] == {"client_event_id": "q"}
    assert done["type"] == "response.done"
    assert done["response"]["id"] == created["response"]["id"]
    assert done["response"]["status"] == "failed"
    assert done["response"]["status_details"]["error"]["message"] == "no room"
    assert done["response"]["mosstalk"]["retry_after_s"] == 5.0
    unasked, _ = client.hear(ErrorRaised(code, "no room", clock=0))
    assert unasked["type"] == "response.created"


def test_every_error_of_a_session_has_a_code_on_the_wire() -> None:
    client = caller()
    for code in ErrorCode:
        assert client.hear(ErrorRaised(code, "so it is", "Push", clock=0))[0]["error"]["code"]
        assert client.hear(ErrorRaised(code, "so it is", fatal=True, clock=0))


def test_a_session_that_ends_by_itself_says_why() -> None:
    for reason in ("idle", "longest"):
        (event,) = caller().hear(Closed(reason, clock=0))
        assert event["error"]["code"] == "session_expired"
    assert caller().hear(Closed("client", clock=0)) == []


def test_a_truncate_past_the_end_is_clamped() -> None:
    client = caller()
    item = Item("item_1", "assistant", audio_ms=900, response_id=None)
    client.hear(ItemAdded(item, None, clock=0), ItemDone(item, None, clock=0))
    client.send("conversation.item.truncate", item_id="item_1", content_index=0, audio_end_ms=5000)
    (command,) = client.commands
    assert command == Truncate("item_1", 5000, command_id=command.command_id)
    (event,) = client.hear(ItemTruncated("item_1", 900, 12, False, command.command_id, clock=0))
    assert event["type"] == "conversation.item.truncated"
    assert event["audio_end_ms"] == 900


def test_ids_of_events_may_be_anything_short() -> None:
    client = caller()
    for event_id in ("a:b:c", "", "ä" * 100, "0" * 512):
        client.send("response.cancel", event_id=event_id)
        command = client.commands[-1]
        assert isinstance(command, CancelResponse)
        code = ErrorCode.RESPONSE_NOT_ACTIVE
        refusal = ErrorRaised(code, "no", "CancelResponse", command.command_id, clock=0)
        assert error_of(client.hear(refusal))["event_id"] == (event_id or None)
    error = error_of(client.send("response.cancel", event_id="0" * 513))
    assert (error["code"], error["event_id"]) == ("string_above_max_length", None)
    assert error_of(client.send("response.cancel", event_id=3))["code"] == "invalid_type"


KEYS = [
    "type", "id", "item", "session", "response", "audio", "input", "output", "content", "text",
    "role", "turn_detection", "format", "voice", "threshold", "mosstalk", "sampling", "tools",
    "input_audio_format", "metadata", "tool_choice", "tracing", "prompt", "include", "truncation",
    "transcription", "noise_reduction", "reasoning", "name", "call_id", "arguments", "eagerness",
    "conversation", "max_output_tokens", "output_modalities", "instructions", "speed",
]  # fmt: skip
WORDS = [
    "audio", "text", "user", "message", "input_text", "input_audio", "output_text", "AAAA", "auto",
    "none", "server_vad", "semantic_vad", "function", "function_call", "function_call_output",
    "assistant", "audio/pcmu", "pcm16", "inf", "near_field", "retention_ratio", "default",
]  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=20) | st.sampled_from(WORDS)
JSON: st.SearchStrategy[Any] = st.recursive(
    PLAIN | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=16,
)
FIELDS = st.sampled_from([*KEYS, "item_id", "previous_item_id", "audio_end_ms", "content_index"])


@examples(400)
@given(
    kind=st.sampled_from(CLIENT_EVENTS),
    more=st.dictionaries(FIELDS, JSON, max_size=4),
    inner=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
)
def test_whatever_comes_is_served_or_refused_and_every_event_parses(
    kind: str, more: Wire, inner: Wire
) -> None:
    client = caller()
    for name in ("session", "item", "response"):
        more.setdefault(name, inner)
    client.raw(json.dumps(more | {"type": kind}))
    for command in list(client.commands):
        client.hear(*obeyed(command))
    require_alive(client)


def test_numbers_without_end_are_refused() -> None:
    client = caller()
    message = '{"type": "conversation.item.truncate", "item_id": "i", "audio_end_ms": 1e999}'
    assert error_of(client.raw(message))["param"] == "audio_end_ms"
    assert not client.commands
