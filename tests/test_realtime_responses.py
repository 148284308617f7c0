"""Responses: the order of their events, what was asked of them, and how they end."""

import base64
from dataclasses import replace

import pytest
from realtime_rig import Caller, Wire, b64, caller, obeyed, response, tone

from mosstalk.server.realtime.protocol import Transcript
from mosstalk.session.commands import CancelResponse, CreateResponse, Message, ReplyMode, Sound
from mosstalk.session.events import (
    AudioDelta,
    ErrorCode,
    ErrorRaised,
    IdleTimeout,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    Reason,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    SpeechStarted,
    SpeechStopped,
    Timings,
    Usage,
)

CALL = {"type": "function_call_output", "call_id": "c", "output": "unread"}
SPOKEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
    "rate_limits.updated",
]
WRITTEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
    "rate_limits.updated",
]


def asked(client: Caller, **more: object) -> CreateResponse:
    """The command that a ``response.create`` leads to."""
    assert client.send("response.create", response=more) == []
    command = client.commands[-1]
    assert isinstance(command, CreateResponse)
    return command


def kinds(events: list[Wire]) -> list[str]:
    """Their types."""
    return [event["type"] for event in events]


@pytest.mark.parametrize("reply", ReplyMode)
def test_events_come_in_the_order_that_clients_wait_for(reply: ReplyMode) -> None:
    client = caller()
    spoken = reply is ReplyMode.AUDIO
    command = asked(client, output_modalities=[str(reply)])
    assert command.reply is reply
    events = client.hear(*response(command, text="" if spoken else "Yes."))
    wanted = SPOKEN if spoken else WRITTEN
    assert kinds(events) == wanted
    for event in events[1:-2]:
        if event["type"].startswith("response."):
            assert event["response_id"] == "resp_1"
            assert event["output_index"] == 0
            assert event.get("item_id", "item_r") == "item_r"
            whole = "output_item" in event["type"]
            assert ("content_index" in event) is not whole
    (content,) = events[-2]["response"]["output"][0]["content"]
    assert content["type"] == ("output_audio" if spoken else "output_text")
    assert content == ({"type": "output_audio", "transcript": None} if spoken else content)


def test_a_response_costs_what_it_read_and_made() -> None:
    client = caller()
    done = client.hear(*response(asked(client)))[-2]["response"]
    assert done["usage"] == {
        "total_tokens": 13,
        "input_tokens": 7,
        "output_tokens": 6,
        "input_token_details": {"text_tokens": 3, "audio_tokens": 4, "cached_tokens": 2},
        "output_token_details": {"text_tokens": 1, "audio_tokens": 5},
    }
    assert set(done["mosstalk"]["timings"]) == set(vars(Timings()))


def test_what_is_asked_of_a_response_reaches_the_session_and_comes_back() -> None:
    client = caller()
    command = asked(
        client,
        instructions="In one word.",
        output_modalities=["text"],
        audio={"output": {"voice": "alto", "format": {"type": "audio/pcmu"}}},
        max_output_tokens=40,
        metadata={"client_event_id": "q", "n": 3},
        tools=[{"type": "function", "name": "weather"}],
        tool_choice="none",
    )
    assert command.instructions == "In one word."
    assert command.reply is ReplyMode.TEXT
    assert command.voice == "alto"
    assert command.max_rows == 40
    created = client.hear(*response(command))[0]["response"]
    assert created["metadata"] == {"client_event_id": "q", "n": "3"}
    assert created["output_modalities"] == ["text"]
    assert created["max_output_tokens"] == 40
    assert created["audio"]["output"] == {"format": {"type": "audio/pcmu"}, "voice": "alto"}
    assert "tools" in created["mosstalk"]["warnings"][0]
    assert client.notes == created["mosstalk"]["warnings"]
    unknown = asked(client, audio={"output": {"voice": {"id": "marin"}}})
    assert unknown.voice == "default"


@pytest.mark.parametrize("conversation", ["none", "auto", None])
def test_a_response_reads_the_items_it_is_given_which_nobody_sees(conversation: str | None) -> None:
    client = caller()
    client.send("conversation.item.create", item={"id": "a", **_message("Known.")})
    client.hear(*obeyed(client.commands[-1]))
    client.send("conversation.item.create", item={"id": "unread", **CALL})
    seen = len(client.events)
    heard = {"type": "input_audio", "audio": b64(tone(0.3))}
    client.send(
        "response.create",
        event_id="e",
        response={
            "conversation": conversation,
            "input": [
                {"type": "item_reference", "id": "a"},
                {"type": "item_reference", "id": "unread"},
                _message("New."),
                {"type": "message", "role": "user", "content": [heard]},
                CALL,
            ],
        },
    )
    ask = client.commands[-1]
    assert isinstance(ask, CreateResponse)
    assert len(client.commands) == 2, "no item is made of what it reads"
    assert ask.input is not None
    reference, text, sound = ask.input
    assert reference == "a"
    assert isinstance(text, Message)
    assert (text.role, text.parts) == ("user", ("New.",))
    assert isinstance(sound, Message)
    assert isinstance(sound.parts[0], Sound)
    assert (len(sound.parts[0].pcm), sound.parts[0].rate) == (14_400, 24_000)
    assert ask.in_conversation is (conversation != "none")
    client.hear(*response(ask, text=""))
    apart = [kind for kind in SPOKEN if not kind.startswith("conversation.")]
    assert kinds(client.events[seen:]) == (SPOKEN if ask.in_conversation else apart)
    created = client.all("response.created")[0]["response"]
    assert (created["conversation_id"] is None) is not ask.in_conversation
    (warning,) = created["mosstalk"]["warnings"]
    assert "2 items" in warning


def test_a_response_to_nothing_and_one_to_the_conversation_are_told_apart() -> None:
    client = caller()
    assert asked(client, input=[]).input == ()
    assert asked(client).input is None
    assert asked(client, input=None).input is None


def test_what_a_response_is_given_and_cannot_be_heard_is_refused_by_name() -> None:
    client = caller()
    client.send("response.create", event_id="e", response={"input": [_message("New.")]})
    (command,) = client.commands
    refusal = ErrorRaised(ErrorCode.BAD_ITEM, "no", "CreateResponse", command.command_id, clock=0)
    client.hear(refusal)
    (error,) = client.all("error")
    assert (error["error"]["event_id"], error["error"]["param"]) == ("e", "response.input")


def test_text_beside_sound_is_a_part_of_its_own_and_no_transcript() -> None:
    client = caller()
    events = client.hear(*response(asked(client), text="Hm."))
    assert events[-2]["response"]["output"][0]["content"] == [
        {"type": "output_audio", "transcript": None},
        {"type": "output_text", "text": "Hm."},
    ]
    parts = [e for e in events if e["type"] == "response.content_part.added"]
    assert [(e["content_index"], e["part"]["type"]) for e in parts] == [(0, "audio"), (1, "text")]


def test_a_transcript_of_a_reply_that_is_being_made_comes_with_it() -> None:
    client = caller()
    started, added, delta, *rest = response(asked(client), text="")
    client.hear(started, added, delta)
    (event,) = client.take(client.protocol.from_transcript(Transcript("item_r", "Yes, I do.")))
    assert event["type"] == "response.output_audio_transcript.delta"
    events = client.hear(*rest)
    assert events[1]["transcript"] == "Yes, I do."
    assert events[-2]["response"]["output"][0]["content"][0]["transcript"] == "Yes, I do."


def test_a_telephone_is_answered_in_its_own_format() -> None:
    client = caller()
    session = {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}
    client.send("session.update", session=session)
    client.hear(*obeyed(client.commands[-1]))
    started, added, delta, *rest = response(asked(client), text="")
    assert isinstance(delta, AudioDelta)
    client.hear(started, added, replace(delta, pcm=bytes(48_000)), *rest)
    assert client.sound("resp_1") == b"\xff" * 8000
    for event in client.all("response.output_audio.delta"):
        assert base64.b64decode(event["delta"], validate=True)


ENDS = [
    (ResponseStatus.CANCELLED, Reason.TURN_DETECTED, "turn_detected"),
    (ResponseStatus.CANCELLED, Reason.CLIENT_CANCELLED, "client_cancelled"),
    (ResponseStatus.CANCELLED, Reason.SESSION_CLOSED, "client_cancelled"),
    (ResponseStatus.INCOMPLETE, Reason.MAX_LENGTH, "max_output_tokens"),
    (ResponseStatus.INCOMPLETE, Reason.CONTEXT, "max_output_tokens"),
    (ResponseStatus.INCOMPLETE, Reason.REPETITION, "max_output_tokens"),
    (ResponseStatus.FAILED, Reason.ERROR, None),
]


@pytest.mark.parametrize(("status", "reason", "wire"), ENDS)
def test_ends_have_the_reasons_that_clients_know_and_the_true_one_beside(
    status: ResponseStatus, reason: Reason, wire: str | None
) -> None:
    client = caller()
    item = Item("item_r", "assistant", status=ItemStatus.IN_PROGRESS, response_id="resp_1")
    cut = replace(item, audio_ms=80, status=ItemStatus.INCOMPLETE)
    events = client.hear(
        ResponseStarted("resp_1", ReplyMode.AUDIO, True, clock=0),
        ItemAdded(item, None, clock=0),
        ItemDone(cut, None, clock=0),
        ResponseDone("resp_1", status, reason, (cut,), Usage(), Timings(), True, "oh", clock=0),
    )
    done = events[-2]["response"]
    assert done["status"] == status
    assert done["status_details"]["type"] == status
    assert done["status_details"].get("reason") == wire
    assert done["mosstalk"]["reason"] == reason
    assert done["output"][0]["status"] == "incomplete"
    assert ("error" in done["status_details"]) is (status is ResponseStatus.FAILED)
    assert {reason for _, reason, _ in ENDS} == set(Reason)


def test_cancelling_names_a_response_or_the_conversations_own() -> None:
    client = caller()
    client.send("response.cancel", response_id="resp_7")
    client.send("response.cancel")
    first, second = client.commands
    assert isinstance(first, CancelResponse)
    assert isinstance(second, CancelResponse)
    assert (first.response_id, second.response_id) == ("resp_7", None)
    assert client.send("output_audio_buffer.clear") == [], "nothing was ever sent"
    client.hear(*response(asked(client)))
    (cleared,) = client.send("output_audio_buffer.clear")
    assert (cleared["type"], cleared["response_id"]) == ("output_audio_buffer.cleared", "resp_1")


def test_turns_that_a_detector_finds_are_told_in_milliseconds() -> None:
    client = caller()
    started, stopped, idle = client.hear(
        SpeechStarted("item_1", 16_000, clock=20_000),
        SpeechStopped("item_1", 48_000, 40_000, 8000, clock=48_000),
        IdleTimeout("item_2", 60_000, 160_000, clock=160_000),
    )
    assert (started["audio_start_ms"], started["item_id"]) == (1000, "item_1")
    assert (stopped["audio_end_ms"], stopped["item_id"]) == (3000, "item_1")
    assert stopped["mosstalk"] == {"speech_end_ms": 2500, "vad_wait_ms": 500}
    assert (idle["audio_start_ms"], idle["audio_end_ms"]) == (3750, 10_000)


def _message(text: str) -> Wire:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
