"""What a client may ask of a session, and the fields that its items and responses have as well.

Null is the same as absent, and unknown fields are passed over: clients send what later versions of
the protocol have. Where a client may be wrong without harm, in what has no effect on replies, the
wrong part is left out instead of being refused; what is shown of it can be read back.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo
from pydantic_core import PydanticKnownError

from mosstalk.server.realtime.validation import (
    AudioFormat,
    ClientObject,
    Omitted,
    WireError,
    fault,
    number,
    unknown_value,
    whole,
)
from mosstalk.session.commands import ReplyMode

LONGEST_ID = 512
_MOST_OBJECTS = 1024
"""Longest list of objects that is looked through."""
_LONGEST_MS = 600_000
_T = TypeVar("_T")


def null_is(usual: Any) -> BeforeValidator:
    """Null is ``usual``."""
    return BeforeValidator(lambda value: usual if value is None else value)


def _text(value: str, info: ValidationInfo) -> str:
    assert info.context, "the limits"
    most = info.context.text_chars
    if len(value) > most:
        raise PydanticKnownError("string_too_long", {"max_length": most})
    return value


def typed(usual: str | None, **others: str) -> BeforeValidator:
    """The kind of an object: ``usual`` where it names none, and what ``others`` stand for."""

    def name(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        kind = usual if kind is None else others.get(kind, kind) if isinstance(kind, str) else kind
        return value if kind is None else value | {"type": kind}

    return BeforeValidator(name)


def _kept_if(kept: Any, usual: Any = None) -> BeforeValidator:
    """What ``kept`` makes of a value that has no effect here, ``usual`` where that is nothing."""
    return BeforeValidator(lambda value: kept(value) or usual)


def _strings(value: Any, *names: str) -> dict[str, str]:
    """Of an object those of its fields that are strings."""
    given = value if isinstance(value, dict) else {}
    return {name: given[name] for name in names if isinstance(given.get(name), str)}


def _one_of(name: str, *known: str) -> BeforeValidator:
    """An object with one field of which the values are known, or None."""
    return _kept_if(lambda value: (kept := _strings(value, name)).get(name) in known and kept)


Object = Annotated[_T, null_is({})]
Objects = Annotated[list[_T], Field(max_length=_MOST_OBJECTS), null_is([])]
Id = Annotated[str, Field(max_length=LONGEST_ID)]
Text = Annotated[str, AfterValidator(_text)]
Milliseconds = Annotated[int | None, whole(0, _LONGEST_MS)]
Number = Annotated[float | None, number()]
Share = Annotated[float | None, number(0, 1)]
Positive = Annotated[float | None, number(0)]


# Fields that sessions and responses share.


def _reply(value: Any) -> ReplyMode | None:
    """What replies are made of; sound wins where both are asked for."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or not set(map(str, value)) <= {"audio", "text"}:
        raise fault("['audio'] or ['text'].")
    return ReplyMode.AUDIO if "audio" in value else ReplyMode.TEXT


def named_voice(value: Any) -> Any:
    """A field's check: a voice's name as the object that may stand in its place."""
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, str):
        return {"id": value}
    raise PydanticKnownError("string_type")


def require_voice(name: str, voices: Sequence[str], path: str) -> None:
    """Raise WireError unless one of ``voices`` has the name that stands at ``path``; "" is none."""
    if not name:
        there = f"Missing required parameter: '{path}'. There are: {', '.join(voices)}."
        raise WireError("missing_required_parameter", there, path)
    if name not in voices:
        raise WireError("invalid_value", unknown_value(name, voices), path)


class Voice(ClientObject):
    """A voice by its name."""

    id: str | None = None


class OutputRequest(ClientObject):
    """``response.audio.output``."""

    format: AudioFormat | None = None
    voice: Annotated[Voice | None, BeforeValidator(named_voice)] = None

    @property
    def voice_name(self) -> str | None:
        """The voice that is asked for."""
        return self.voice.id if self.voice else None


Reply = Annotated[ReplyMode | None, BeforeValidator(_reply)]
Rows = Annotated[int | None, whole(1), BeforeValidator(lambda v: None if v == "inf" else v)]
"""The longest a reply may be; "inf" is no bound."""


# Fields that are kept and have no effect.

Texts = dict[str, str]
_LOGPROBS = "item.input_audio_transcription.logprobs"
_CHOSEN_BY = {"function": "name", "mcp": "server_label"}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict):
        chosen = _strings(value, "type", _CHOSEN_BY.get(str(value.get("type")), "type"))
        return chosen if len(chosen) == 2 else None
    return value if isinstance(value, str) and value in ("auto", "none", "required") else None


def _included(value: Any) -> Any:
    return ([_LOGPROBS] if _LOGPROBS in value else []) if isinstance(value, list) else None


def _prompt(value: Any) -> Any:
    kept = _strings(value, "id", "version")
    return kept if "id" in kept else None


def _tracing(value: Any) -> Any:
    return value if value == "auto" else _strings(value, "workflow_name", "group_id")


def _transcription(value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    kept = _strings(value, "model", "language", "prompt")
    match value.get("languages"):
        case [str(only)]:
            kept.setdefault("language", only)
    return kept


NoiseReduction = Annotated[Texts | None, _one_of("type", "near_field", "far_field")]
Transcription = Annotated[Texts | None, BeforeValidator(_transcription)]
"""Of several ``languages`` none is kept: nobody knows which one is spoken."""


class FunctionTool(ClientObject):
    """A function that a model could call."""

    type: Literal["function"]
    name: str
    description: Omitted[str] = None
    parameters: Any = None


class McpTool(ClientObject):
    """A server of functions."""

    type: Literal["mcp"]
    server_label: str
    server_url: Omitted[str] = None
    server_description: Omitted[str] = None


Tool = Annotated[FunctionTool | McpTool, Field(discriminator="type"), typed("function")]


class Inert(ClientObject):
    """Fields of a session that are shown as they were asked for, and do nothing."""

    tools: Objects[Tool] = Field(default_factory=list)
    tool_choice: Annotated[str | Texts, _kept_if(_tool_choice, "auto")] = "auto"
    tracing: Annotated[Literal["auto"] | Texts | None, _kept_if(_tracing)] = None
    prompt: Annotated[Texts | None, _kept_if(_prompt)] = None
    include: Annotated[list[str] | None, BeforeValidator(_included)] = None
    reasoning: Annotated[
        Omitted[Texts], _one_of("effort", "minimal", "low", "medium", "high", "xhigh")
    ] = None
    parallel_tool_calls: Annotated[
        Omitted[bool], BeforeValidator(lambda value: value if isinstance(value, bool) else None)
    ] = None


# Sessions.


def _truncation(value: Any) -> Any:
    if isinstance(value, dict):
        return {"policy": "ratio", "retention_ratio": value.get("retention_ratio")}
    return {"policy": value} if value in ("auto", "disabled") else None


class ServerVad(ClientObject):
    """Turns end with a silence. Without a value the server's own holds."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Share = None
    prefix_padding_ms: Milliseconds = None
    silence_duration_ms: Milliseconds = None
    idle_timeout_ms: Milliseconds = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class SemanticVad(ClientObject):
    """Turns end with their sense; no words are judged here, and eagerness is a silence."""

    type: Literal["semantic_vad"] = "semantic_vad"
    eagerness: Annotated[
        Literal["low", "medium", "high", "auto"],
        BeforeValidator(lambda value: "auto" if value in (None, "") else value),
    ] = "auto"
    create_response: bool | None = None
    interrupt_response: bool | None = None


Vad = Annotated[
    ServerVad | SemanticVad,
    Field(discriminator="type"),
    typed("server_vad", **{"": "server_vad"}),
]


class InputRequest(ClientObject):
    """``session.audio.input``."""

    turn_detection: Annotated[
        Vad | None, BeforeValidator(lambda value: None if value in (None, False) else value)
    ] = None
    format: AudioFormat | None = None
    noise_reduction: NoiseReduction = None
    transcription: Transcription = None


class SessionOutputRequest(OutputRequest):
    """``session.audio.output``."""

    speed: Number = None


class AudioRequest(ClientObject):
    """``session.audio``."""

    input: Object[InputRequest] = InputRequest()
    output: Object[SessionOutputRequest] = SessionOutputRequest()


class SamplingRequest(ClientObject):
    """How ids are drawn; None is as the server has it."""

    temperature: Positive = None
    top_k: Annotated[int | None, whole()] = None
    top_p: Share = None
    repetition_penalty: Positive = None
    seed: Annotated[int | None, whole(0, 2**53)] = None
    greedy: bool | None = None


class VendorRequest(ClientObject):
    """``session.mosstalk``."""

    echo_gate: bool | None = None
    playback: Literal["client", "session"] | None = None
    sampling: Object[SamplingRequest] = SamplingRequest()


class Truncation(ClientObject):
    """What becomes of a conversation that is too long."""

    policy: Literal["auto", "disabled", "ratio"]
    retention_ratio: Share = None


class SessionRequest(Inert):
    """All that a client's updates ask for, one merged into the other."""

    type: Literal["realtime", "transcription"] | None = None
    audio: Object[AudioRequest] = AudioRequest()
    output_modalities: Reply = None
    instructions: Text | None = None
    mosstalk: Object[VendorRequest] = VendorRequest()
    temperature: Positive = None
    max_output_tokens: Rows = None
    truncation: Annotated[Truncation | None, BeforeValidator(_truncation)] = None
    model: str | None = None


SESSION_REQUEST: TypeAdapter[SessionRequest] = TypeAdapter(SessionRequest)
