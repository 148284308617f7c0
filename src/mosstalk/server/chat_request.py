"""What ``POST /v1/chat/completions`` may be asked for: the fields of OpenAI's API, each of which is
served, taken without effect, or refused."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from mosstalk.server.admission import ServerContext
from mosstalk.server.realtime.session_request import (
    Id,
    Objects,
    Reply,
    Rows,
    Share,
    Text,
    Voice,
    named_voice,
    require_voice,
)
from mosstalk.server.realtime.validation import (
    ClientObject,
    WireError,
    fault,
    number,
    validate,
    whole,
)
from mosstalk.server.uploads import json_fields
from mosstalk.session.commands import ReplyMode

STREAMED = "pcm16"
"""The one format of sound that can be streamed."""
SOUND = "data"
"""What the field is called that holds sound."""
_MOST_MESSAGES = 1024


def _alone(*usual: Any, why: str) -> BeforeValidator:
    """A field that may be left out, null or of these values; anything else is refused."""

    def check(value: Any) -> None:
        if value is not None and value not in usual:
            raise fault(why, "unsupported_value")

    return BeforeValidator(check)


def _as_parts(value: Any) -> Any:
    """Content as a list of parts."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [] if value is None else value


class TextPart(ClientObject):
    """Text of a message."""

    type: Literal["text"]
    text: Text


class RefusalPart(ClientObject):
    """What an assistant said in place of a reply."""

    type: Literal["refusal"]
    refusal: Text


class InputAudio(ClientObject):
    """A sound file as base64. What it really is, its first bytes say."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(ClientObject):
    """Sound of the user's."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | RefusalPart | AudioPart, Field(discriminator="type")]


class SpokenReply(ClientObject):
    """An earlier reply of the server's, by its id."""

    id: Id


class ChatMessage(ClientObject):
    """What one role says. Of calls of tools and their results nothing is read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Objects[Part], BeforeValidator(_as_parts)] = Field(default_factory=list)
    audio: SpokenReply | None = None


class AudioOutput(ClientObject):
    """How the reply is spoken."""

    format: Literal["wav", "mp3", "flac", "opus", "pcm16"]
    voice: Annotated[Voice | None, BeforeValidator(named_voice)] = None


class StreamOptions(ClientObject):
    """What a stream has beside the reply."""

    include_usage: bool | None = None


_NO_TOOLS = "'auto' or 'none': this model calls no tools."


class ChatRequest(ClientObject):
    """What is asked for. The fields of type ``Any`` are taken and have no effect."""

    model: str
    messages: Annotated[list[ChatMessage], Field(max_length=_MOST_MESSAGES)]
    modalities: Reply = None
    audio: AudioOutput | None = None
    max_completion_tokens: Rows = None
    max_tokens: Rows = None
    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Share = None
    seed: Annotated[int | None, whole(0, 2**53)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[None, _alone(1, why="1: each request gets one reply.")] = None
    response_format: Annotated[
        None, _alone({"type": "text"}, why="text: this model promises no JSON.")
    ] = None
    logprobs: Annotated[None, _alone(False, why="probabilities are not told.")] = None
    top_logprobs: Annotated[None, _alone(0, why="probabilities are not told.")] = None
    logit_bias: Annotated[None, _alone({}, why="the odds of words cannot be chosen.")] = None
    stop: Annotated[None, _alone([], "", why="a reply ends by itself alone.")] = None
    tool_choice: Annotated[None, _alone("auto", "none", why=_NO_TOOLS)] = None
    function_call: Annotated[None, _alone("auto", "none", why=_NO_TOOLS)] = None
    web_search_options: Annotated[None, _alone(why="nothing is searched for here.")] = None
    moderation: Annotated[None, _alone(why="nothing is moderated here.")] = None

    tools: Any = None
    functions: Any = None
    parallel_tool_calls: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: Any = None
    store: Any = None
    metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    @property
    def is_spoken(self) -> bool:
        """Whether the reply is to be spoken."""
        return self.modalities is ReplyMode.AUDIO


_REQUEST = TypeAdapter(ChatRequest)


def chat_request(body: bytes, context: ServerContext) -> ChatRequest:
    """The request in a body.

    Raises:
        WireError: it is none, or asks for what there is not.
    """
    limits, voices = context.limits, context.engine.ready.result().voices
    asked = validate(_REQUEST, json_fields(body, limits, ChatRequest, SOUND), limits)
    if asked.stream_options and not asked.stream:
        message = "'stream_options' goes with 'stream' alone."
        raise WireError("invalid_value", message, "stream_options")
    if not asked.is_spoken:
        return asked
    if asked.audio is None:
        raise WireError("missing_required_parameter", "Missing required parameter: 'audio'.",
                        "audio")  # fmt: skip
    require_voice((asked.audio.voice and asked.audio.voice.id) or "", voices, "audio.voice")
    if asked.stream and asked.audio.format != STREAMED:
        message = f"'{asked.audio.format}' cannot be streamed: with 'stream' ask for '{STREAMED}'."
        raise WireError("unsupported_value", message, "audio.format")
    return asked
