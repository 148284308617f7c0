"""The session object: what is asked for is served, aliased or kept, and it is always said which."""

from dataclasses import replace
from typing import Any

import pytest
from realtime_rig import Caller, Wire, caller

from mosstalk.session.commands import ContextPolicy, ReplyMode, SessionSettings, UpdateSettings
from mosstalk.session.events import ErrorCode, ErrorRaised, SettingsUpdated
from mosstalk.vad.turns import TurnDetection

LIVEKIT = {
    "type": "realtime",
    "model": "gpt-realtime",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "noise_reduction": None,
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {
                "type": "semantic_vad",
                "create_response": True,
                "eagerness": "medium",
                "interrupt_response": True,
            },
        },
        "output": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "speed": 1.0,
            "voice": "marin",
        },
    },
    "max_output_tokens": "inf",
    "tool_choice": "auto",
    "tracing": None,
}
"""What LiveKit sends first."""


def update(client: Caller, **session: Any) -> Wire:
    """The session as it is after an update that the session confirms."""
    assert client.send("session.update", session=session) == []
    (command,) = client.commands[-1:]
    assert isinstance(command, UpdateSettings)
    confirmed = SettingsUpdated(command.settings, command.command_id, clock=0)
    (event,) = client.hear(confirmed)
    assert event["type"] == "session.updated"
    session_object: Wire = event["session"]
    return session_object


def settings(client: Caller) -> SessionSettings:
    """What the session was last told."""
    return next(c.settings for c in reversed(client.commands) if isinstance(c, UpdateSettings))


def refused(client: Caller, **session: Any) -> Wire:
    """The error that an update meets with."""
    before = len(client.commands)
    (event,) = client.send("session.update", event_id="mine", session=session)
    assert len(client.commands) == before
    assert event["type"] == "error"
    assert event["error"]["event_id"] == "mine"
    error: Wire = event["error"]
    return error


def test_the_first_event_shows_all_that_holds() -> None:
    client = caller(asked_model="gpt-realtime-2.1")
    (created,) = client.events
    session = created["session"]
    assert session["id"] == "sess_1"
    assert session["model"] == "moss"
    assert session["expires_at"] == 1000 + 3600
    assert session["instructions"].startswith("You are a helpful voice assistant")
    assert session["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500
    assert session["audio"]["output"]["voice"] == "default"
    assert session["mosstalk"]["asked"] == {"model": "gpt-realtime-2.1"}
    assert session["mosstalk"]["voices"] == ["default", "alto"]


def test_what_livekit_sends_first_is_taken_and_said_to_be_otherwise() -> None:
    client = caller()
    session = update(client, **LIVEKIT)
    assert session["model"] == "moss"
    assert session["audio"]["output"]["voice"] == "default"
    assert session["audio"]["input"]["transcription"] == {"model": "gpt-4o-mini-transcribe"}
    own = session["mosstalk"]
    assert own["asked"] == {"model": "gpt-realtime", "audio.output.voice": "marin"}
    assert own["silence_duration_ms"] == 700
    assert len(own["warnings"]) == 2  # the voice, and that nothing is transcribed
    assert client.notes == own["warnings"]
    update(client, **LIVEKIT)
    assert client.notes == own["warnings"], "what was said once is not said again"


def test_updates_are_merged_deeply() -> None:
    client = caller()
    update(client, instructions="Be brief.", audio={"output": {"voice": "alto"}})
    session = update(client, audio={"input": {"turn_detection": {"threshold": 0.7}}})
    session = update(client, audio={"input": {"turn_detection": {"silence_duration_ms": 300}}})
    assert session["instructions"] == "Be brief."
    assert session["audio"]["output"]["voice"] == "alto"
    assert settings(client).turn_detection == TurnDetection(0.7, silence_duration_ms=300)
    assert settings(client).instructions == "Be brief."
    cleared = update(client, instructions="", audio={"output": {"voice": None}})
    assert settings(client).instructions is None
    assert cleared["audio"]["output"]["voice"] == "default"


def test_another_kind_of_turn_detection_starts_afresh() -> None:
    client = caller()
    update(client, audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}})
    for eagerness, silence_ms in (("low", 1200), ("medium", 700), ("high", 400), ("auto", 700)):
        detection = {"type": "semantic_vad", "eagerness": eagerness}
        session = update(client, audio={"input": {"turn_detection": detection}})
        assert settings(client).turn_detection == TurnDetection(silence_duration_ms=silence_ms)
        assert session["audio"]["input"]["turn_detection"]["eagerness"] == eagerness
        assert session["mosstalk"]["silence_duration_ms"] == silence_ms
    for off in (None, False):
        session = update(client, audio={"input": {"turn_detection": off}})
        assert session["audio"]["input"]["turn_detection"] is None
        assert settings(client).turn_detection is None
    slow = {"type": "server_vad", "create_response": False, "idle_timeout_ms": 5000}
    update(client, audio={"input": {"turn_detection": slow}})
    assert settings(client).turn_detection == TurnDetection(idle_timeout_ms=5000)
    assert not settings(client).create_response
    assert settings(client).interrupt_response


def test_the_servers_own_defaults_hold_until_somebody_says_otherwise() -> None:
    own = SessionSettings(turn_detection=None, voice="alto", instructions="Answer in Latin.")
    client = caller(defaults=own)
    assert client.protocol.settings == own
    session = update(client, output_modalities=["text"])
    assert settings(client) == replace(own, reply=ReplyMode.TEXT)
    assert session["audio"]["input"]["turn_detection"] is None
    assert session["instructions"] == "Answer in Latin."


def test_everything_may_be_null() -> None:
    client = caller()
    names = "output_modalities instructions max_output_tokens tools tool_choice tracing prompt"
    nulls = dict.fromkeys(f"{names} truncation include model reasoning".split())
    sound = dict.fromkeys(("format", "noise_reduction", "transcription"))
    before = client.protocol.settings
    session = update(client, **nulls, audio={"input": sound, "output": dict.fromkeys(("voice",))})
    assert settings(client) == before
    assert session["tools"] == []
    update(client, audio={"input": None, "output": None})
    update(client, audio=None, mosstalk=None)
    assert settings(client) == before


def test_tools_and_what_else_has_no_effect_are_kept_and_named() -> None:
    client = caller()
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    session = update(
        client,
        tools=[tool],
        tool_choice="required",
        tracing={"workflow_name": "w"},
        prompt={"id": "p"},
        include=["item.input_audio_transcription.logprobs"],
        audio={
            "input": {"noise_reduction": {"type": "near_field"}},
            "output": {"speed": 1.25},
        },
    )
    assert session["tools"] == [tool]
    assert session["tool_choice"] == "required"
    assert session["audio"]["output"]["speed"] == 1.0
    own = session["mosstalk"]
    assert own["asked"] == {"audio.output.speed": 1.25}
    said = " ".join(own["warnings"])
    for name in (
        "tools",
        "noise_reduction",
        "speed",
        "tracing",
        "prompt",
        "include",
        "tool_choice",
    ):
        assert name in said
    assert client.notes == own["warnings"]
    assert "weather" not in "".join(client.notes)
    assert "warnings" in update(client, tools=[])["mosstalk"]


def test_lengths_truncation_and_sampling_reach_the_session() -> None:
    client = caller()
    update(client, max_output_tokens=100, truncation="disabled")
    assert settings(client).limits.rows == 100
    assert settings(client).context.policy is ContextPolicy.REFUSE
    ratio = {"type": "retention_ratio", "retention_ratio": 0.6}
    session = update(client, max_output_tokens="inf", truncation=ratio)
    assert settings(client).limits.rows is None
    assert settings(client).context.keep == 0.6
    assert session["truncation"] == ratio
    own: Wire = {"sampling": {"temperature": 0.5, "top_k": 20, "top_p": None, "seed": 3}}
    session = update(client, mosstalk=own | {"playback": "session", "echo_gate": False, "more": 1})
    assert session["mosstalk"]["sampling"]["temperature"] == 0.5
    assert settings(client).sampling.seed == 3
    assert settings(client).playback == "session"
    assert not settings(client).echo_gate
    assert not session["mosstalk"]["echo_gate"]
    session = update(client, mosstalk={"sampling": {"temperature": None, "greedy": True}})
    assert settings(client).sampling.temperature is None
    assert settings(client).sampling.top_k == 20
    assert settings(client).sampling.greedy


@pytest.mark.parametrize(
    ("asked", "rate"),
    [
        ({"type": "audio/pcm", "rate": 24000}, 24_000),
        ({"type": "audio/pcm"}, 24_000),
        ({"type": "audio/pcm", "rate": 16000}, 16_000),
        ({"type": "audio/pcmu"}, 8000),
        ("g711_alaw", 8000),
    ],
)
def test_sound_may_come_and_go_in_every_format(asked: Any, rate: int) -> None:
    client = caller()
    # The types of the API know PCM at 24 kHz alone: who asks for another rate is shown it.
    client.send("session.update", session={"audio": {"input": {"format": asked}}})
    assert settings(client).input_rate == rate


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"type": "translation"}, "invalid_value", "session.type"),
        ({"output_modalities": ["video"]}, "invalid_value", "session.output_modalities"),
        ({"output_modalities": []}, "invalid_value", "session.output_modalities"),
        ({"instructions": 3}, "invalid_type", "session.instructions"),
        ({"instructions": "x" * 32_769}, "string_above_max_length", "session.instructions"),
        ({"max_output_tokens": 0}, "invalid_value", "session.max_output_tokens"),
        ({"max_output_tokens": "many"}, "invalid_type", "session.max_output_tokens"),
        ({"tools": [3]}, "invalid_type", "session.tools[0]"),
        ({"tools": [{"description": "x" * 300_000}]}, "string_above_max_length", "session.tools"),
        ({"audio": []}, "invalid_type", "session.audio"),
        (
            {"audio": {"input": {"format": {"type": "audio/mp3"}}}},
            "invalid_value",
            "session.audio.input.format.type",
        ),
        (
            {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 44100}}}},
            "invalid_value",
            "session.audio.output.format.rate",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "telepathy"}}}},
            "invalid_value",
            "session.audio.input.turn_detection.type",
        ),
        (
            {"audio": {"input": {"turn_detection": {"threshold": 2}}}},
            "invalid_value",
            "session.audio.input.turn_detection.threshold",
        ),
        (
            {"audio": {"input": {"turn_detection": {"silence_duration_ms": -1}}}},
            "invalid_value",
            "session.audio.input.turn_detection.silence_duration_ms",
        ),
        (
            {"mosstalk": {"sampling": {"top_p": "x"}}},
            "invalid_type",
            "session.mosstalk.sampling.top_p",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_whole_and_by_name(
    session: Wire, code: str, param: str
) -> None:
    client = caller()
    error = refused(client, **session)
    assert (error["code"], error["param"]) == (code, param)
    assert update(client, instructions="Still here.")["instructions"] == "Still here."


def test_an_update_that_the_session_refuses_leaves_what_was() -> None:
    client = caller()
    update(client, instructions="One.")
    client.send(
        "session.update",
        event_id="e7",
        session={"instructions": "Two.", "audio": {"input": {"format": {"type": "audio/pcmu"}}}},
    )
    command_id = client.commands[-1].command_id
    refusal = ErrorRaised(
        ErrorCode.WRONG_RATE, "sound was pushed", "UpdateSettings", command_id, clock=0
    )
    (event,) = client.hear(refusal)
    assert event["error"]["event_id"] == "e7"
    assert event["error"]["param"] == "session.audio.input.format"
    session = update(client, output_modalities=["text"])
    assert session["instructions"] == "One."
    assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
