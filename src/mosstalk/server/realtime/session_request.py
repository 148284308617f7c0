"""What a client may ask of a session, and the fields that its items and responses have as well.

Null is the same as absent, and unknown fields are passed over: clients send what later versions of
the protocol have. Where a client may be wrong without harm, in what has no effect on replies, the
wrong part is left out instead of being refused; what is shown of it can be read back.
"""

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo
from pydantic_core import PydanticKnownError

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.realtime.audio import OTHER_NAMES, PCM, AudioFormat
from mosstalk.server.realtime.g711 import RATE as TELEPHONE_RATE
from mosstalk.server.realtime.validation import (
    LARGEST,
    ClientObject,
    WireLimits,
    fault,
    in_range,
    unknown_fault,
    whole_in_range,
)
from mosstalk.session.settings import INPUT_RATES, ReplyMode

LONGEST_ID = 512
_MOST_OBJECTS = 1024
"""Longest list of objects that is looked through."""
_LONGEST_MS = 600_000
_T = TypeVar("_T")


def _empty_for_null(value: Any) -> Any:
    return {} if value is None else value


def _at_most(count: int) -> AfterValidator:
    def check(value: str) -> str:
        return _no_longer(value, count)

    return AfterValidator(check)


def _text(value: str, info: ValidationInfo) -> str:
    limits = cast(WireLimits, info.context)
    return _no_longer(value, limits.text_chars)


def _no_longer(value: str, most: int) -> str:
    if len(value) > most:
        message = f"at most {most} characters, not {len(value)}."
        raise fault("string_above_max_length", message)
    return value


def number(low: float = -LARGEST, high: float = LARGEST) -> BeforeValidator:
    """A number from ``low`` to ``high``."""
    return BeforeValidator(lambda value: in_range(value, low, high))


def _whole(low: float = 0, high: float = LARGEST) -> BeforeValidator:
    return BeforeValidator(lambda value: whole_in_range(value, low, high))


def listed(most: int, unit: str) -> BeforeValidator:
    """A list of at most so many; ``unit`` is what they are called in the error."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            raise fault("array_above_max_length", f"at most {most} {unit}, not {len(value)}.")
        return value

    return BeforeValidator(check)


def typed(default_config: str | None, **others: str) -> BeforeValidator:
    """The kind of an object: ``usual`` where it names none, and what ``others`` stand for."""

    def name(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind is None and default_config is not None:
            return value | {"type": default_config}
        if isinstance(kind, str) and kind in others:
            return value | {"type": others[kind]}
        return value

    return BeforeValidator(name)


Object = Annotated[_T, BeforeValidator(_empty_for_null)]
Objects = Annotated[
    list[_T],
    listed(_MOST_OBJECTS, "elements"),
    BeforeValidator(lambda value: [] if value is None else value),
]
Id = Annotated[str, _at_most(LONGEST_ID)]
Text = Annotated[str, AfterValidator(_text)]
Milliseconds = Annotated[int | None, _whole(0, _LONGEST_MS)]


# Fields that sessions and responses share.


def _reply(value: Any) -> Any:
    """What replies are made of; sound wins where both are asked for."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or not set(map(str, value)) <= {"audio", "text"}:
        raise fault("invalid_value", "['audio'] or ['text'].")
    return ReplyMode.AUDIO if "audio" in value else ReplyMode.TEXT


def _voice(value: Any) -> Any:
    if isinstance(value, str):
        return {"id": value}
    if value is None or isinstance(value, dict):
        return value
    raise PydanticKnownError("string_type")


def _format(value: Any) -> Any:
    value = {"type": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is None or isinstance(kind, str):
        kind = OTHER_NAMES.get(kind or PCM, kind or PCM)
    return value | {"type": kind}


def _rate(value: Any, info: ValidationInfo) -> Any:
    """Samples a second; only of PCM are they looked at."""
    rate = whole_in_range(value) if info.data.get("type") == PCM else None
    if rate and rate not in INPUT_RATES:
        raise unknown_fault(str(rate), [str(each) for each in INPUT_RATES])
    return rate or None


class Format(ClientObject):
    """A session's ``format`` of sound, by either of its names."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Annotated[int | None, BeforeValidator(_rate)] = None

    @property
    def audio(self) -> AudioFormat:
        """What it stands for."""
        default_config = OUTPUT_RATE if self.type == PCM else TELEPHONE_RATE
        return AudioFormat(self.type, self.rate or default_config)


class Voice(ClientObject):
    """A voice by its name."""

    id: str | None = None


Formatted = Annotated[Format | None, BeforeValidator(_format)]
Named = Annotated[Voice | None, BeforeValidator(_voice)]
Reply = Annotated[ReplyMode | None, BeforeValidator(_reply)]
Rows = Annotated[
    int | None,
    _whole(1),
    BeforeValidator(lambda value: None if value == "inf" else value),
]
"""The longest a reply may be; "inf" is no bound."""


# Fields that are kept and have no effect.

Texts = dict[str, str]
_NAMES = {"function": "name", "mcp": "server_label"}


def _texts(value: Any, *names: str) -> Texts | None:
    """Of an object those fields that are strings; None if it is no object, or none is there."""
    if not isinstance(value, dict):
        return None
    return {name: value[name] for name in names if isinstance(value.get(name), str)} or None


def _one_of(name: str, *known: str) -> BeforeValidator:
    """An object with one field of which the values are known, or None."""

    def keep(value: Any) -> Any:
        chosen = value.get(name) if isinstance(value, dict) else None
        return {name: chosen} if isinstance(chosen, str) and chosen in known else None

    return BeforeValidator(keep)


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict):
        name = _NAMES.get(str(value.get("type")))
        if name and isinstance(value.get(name), str):
            return {"type": value["type"], name: value[name]}
    return value if isinstance(value, str) and value in ("auto", "none", "required") else "auto"


def _included(value: Any) -> Any:
    known = "item.input_audio_transcription.logprobs"
    return ([known] if known in value else []) if isinstance(value, list) else None


def _prompt(value: Any) -> Any:
    kept = _texts(value, "id", "version")
    return kept if kept and "id" in kept else None


def _tracing(value: Any) -> Any:
    return value if value == "auto" else _texts(value, "workflow_name", "group_id")


NoiseReduction = Annotated[Texts | None, _one_of("type", "near_field", "far_field")]
Transcription = Annotated[
    Texts | None, BeforeValidator(lambda value: _texts(value, "model", "language", "prompt"))
]
Reasoning = Annotated[Texts | None, _one_of("effort", "minimal", "low", "medium", "high", "xhigh")]
Prompt = Annotated[Texts | None, BeforeValidator(_prompt)]
Tracing = Annotated[Literal["auto"] | Texts | None, BeforeValidator(_tracing)]
ToolChoice = Annotated[str | Texts, BeforeValidator(_tool_choice)]
Include = Annotated[list[str] | None, BeforeValidator(_included)]
Flag = Annotated[bool | None, BeforeValidator(lambda v: v if isinstance(v, bool) else None)]


def _absent(value: Any) -> bool:
    return value is None


class FunctionTool(ClientObject):
    """A function that a model could call."""

    type: Literal["function"]
    name: str
    description: str | None = Field(default=None, exclude_if=_absent)
    parameters: Any = None


class McpTool(ClientObject):
    """A server of functions."""

    type: Literal["mcp"]
    server_label: str
    server_url: str | None = Field(default=None, exclude_if=_absent)
    server_description: str | None = Field(default=None, exclude_if=_absent)


Tool = Annotated[FunctionTool | McpTool, Field(discriminator="type"), typed("function")]


# Sessions.


def _realtime(value: str) -> str:
    if value != "realtime":
        raise fault("invalid_value", "only sessions of type 'realtime' are served.")
    return value


def _truncation(value: Any) -> Any:
    if isinstance(value, dict):
        return {"policy": "ratio", "retention_ratio": value.get("retention_ratio")}
    return {"policy": value} if value in ("auto", "disabled") else None


def _eagerness(value: Any) -> Any:
    known = ("low", "medium", "high", "auto")
    if isinstance(value, str) and value and value not in known:
        raise fault("invalid_value", f"one of {', '.join(known)}.")
    return "auto" if value in (None, "") else value


class ServerVad(ClientObject):
    """Turns end with a silence. Without a value the server's own holds."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float | None, number(0, 1)] = None
    prefix_padding_ms: Milliseconds = None
    silence_duration_ms: Milliseconds = None
    idle_timeout_ms: Milliseconds = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class SemanticVad(ClientObject):
    """Turns end with their sense; no words are judged here, and eagerness is a silence."""

    type: Literal["semantic_vad"] = "semantic_vad"
    eagerness: Annotated[Literal["low", "medium", "high", "auto"], BeforeValidator(_eagerness)] = (
        "auto"
    )
    create_response: bool | None = None
    interrupt_response: bool | None = None


TurnDetection = Annotated[
    Annotated[
        ServerVad | SemanticVad,
        Field(discriminator="type"),
        typed("server_vad", **{"": "server_vad"}),
    ]
    | None,
    BeforeValidator(lambda value: None if value in (None, False) else value),
]


class SessionInput(ClientObject):
    """``session.audio.input``."""

    turn_detection: TurnDetection = None
    format: Formatted = None
    noise_reduction: NoiseReduction = None
    transcription: Transcription = None


class ResponseOutput(ClientObject):
    """``response.audio.output``."""

    format: Formatted = None
    voice: Named = None

    @property
    def voice_name(self) -> str | None:
        """The voice that is asked for."""
        return self.voice.id if self.voice else None


class SessionOutput(ResponseOutput):
    """``session.audio.output``."""

    speed: Annotated[float | None, number()] = None


class SessionAudio(ClientObject):
    """``session.audio``."""

    input: Object[SessionInput] = SessionInput()
    output: Object[SessionOutput] = SessionOutput()


class SamplingRequest(ClientObject):
    """How ids are drawn; None is as the server has it."""

    temperature: Annotated[float | None, number(0)] = None
    top_k: Annotated[int | None, _whole()] = None
    top_p: Annotated[float | None, number(0, 1)] = None
    repetition_penalty: Annotated[float | None, number(0)] = None
    seed: Annotated[int | None, _whole(0, 2**53)] = None
    greedy: bool | None = None


class VendorRequest(ClientObject):
    """``session.mosstalk``."""

    echo_gate: bool | None = None
    playback: Literal["client", "session"] | None = None
    sampling: Object[SamplingRequest] = SamplingRequest()


class Truncation(ClientObject):
    """What becomes of a conversation that is too long."""

    policy: Literal["auto", "disabled", "ratio"]
    retention_ratio: Annotated[float | None, number(0, 1)] = None


class SessionRequest(ClientObject):
    """All that a client's updates ask for, one merged into the other."""

    type: Annotated[str, AfterValidator(_realtime)] | None = None
    audio: Object[SessionAudio] = SessionAudio()
    output_modalities: Reply = None
    instructions: Text | None = None
    mosstalk: Object[VendorRequest] = VendorRequest()
    temperature: Annotated[float | None, number(0)] = None
    max_output_tokens: Rows = None
    truncation: Annotated[Truncation | None, BeforeValidator(_truncation)] = None
    tools: Objects[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    tracing: Tracing = None
    prompt: Prompt = None
    include: Include = None
    reasoning: Reasoning = None
    parallel_tool_calls: Flag = None
    model: str | None = None


SESSION_REQUEST: TypeAdapter[SessionRequest] = TypeAdapter(SessionRequest)
