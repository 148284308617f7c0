"""How much a client's event may bring, told before it costs more than it may."""

import base64
import json

from realtime_rig import Wire, caller, obeyed

from mosstalk.server.limits import Limits


def error_of(events: list[Wire]) -> Wire:
    """The one error among events."""
    (event,) = events
    assert event["type"] == "error"
    error: Wire = event["error"]
    return error


def test_a_message_without_sound_is_refused_unparsed_beyond_its_limit() -> None:
    client, mib = caller(), 1 << 20
    sound = base64.b64encode(bytes(4 * mib)).decode()
    append = f'{{"audio" :\n"{sound}", "type": "input_audio_buffer.append"}}'
    parts = [{"type": "input_audio", "audio": sound}, {"type": "input_audio", "audio": sound}]
    spoken = json.dumps({"item": {"type": "message", "content": parts, "role": "user"},
                         "type": "conversation.item.create"})  # fmt: skip
    for message in (append, append.encode(), spoken, spoken.encode()):
        assert client.raw(message) == []
    kinds = [type(command).__name__ for command in client.commands]
    assert kinds == ["Push", "Push", "CreateAudio", "CreateAudio"]
    long = "a" * mib
    for message in (
        f'{{"type": "session.update", "session": {{"instructions": "{long}"}}}}',
        f'{{"type": "input_audio_buffer.append", "audio": "", "note": "{long}"}}',
        f'{{"audio": "{sound}", "note": "{long}", "type": "input_audio_buffer.append"}}',
        f'{{"note": "\\"audio\\": \\"{long}\\"", "type": "input_audio_buffer.append"}}',
        '{"audio": "' + sound,
        "[" * (2 * mib),
        '"audio":""' * mib,
    ):
        for raw in (message, message.encode()):
            error = error_of(client.raw(raw))
            assert (error["code"], error["param"]) == ("string_above_max_length", "message")
    assert len(client.commands) == len(kinds)


def test_tools_instructions_and_lists_have_a_longest() -> None:
    client = caller(limits=Limits(tools_chars=1000, text_chars=100))
    tool = {"type": "function", "name": "f", "description": "d" * 200}
    for session, path, code in (
        ({"tools": [tool] * 5}, "session.tools", "string_above_max_length"),
        ({"instructions": "i" * 101}, "session.instructions", "string_above_max_length"),
        ({"tools": [{}] * 1025}, "session.tools", "string_above_max_length"),
    ):
        error = error_of(client.send("session.update", session=session))
        assert (error["code"], error["param"]) == (code, path)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text"}] * 1025}
    error = error_of(client.send("conversation.item.create", item=item))
    assert (error["code"], error["param"]) == ("array_above_max_length", "item.content")
    assert client.commands == []
    assert client.send("session.update", session={"tools": [tool] * 3}) == []


def test_a_session_is_updated_a_few_times_before_it_has_to_answer() -> None:
    client = caller()
    for _ in range(4):
        client.send("session.update", session={})
    assert not client.protocol.waits
    client.send("session.update", session={})
    assert client.protocol.waits
    client.hear(*obeyed(client.commands[0]))
    assert not client.protocol.waits
