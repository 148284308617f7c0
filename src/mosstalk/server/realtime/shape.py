"""The two shapes of the protocol: what is built here is GA, and made beta at the door.

A connection speaks one of them from its first to its last event. Of what comes in, the names of
both are understood: they exclude one another.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from mosstalk.server.realtime.audio import format_of
from mosstalk.server.realtime.reading import Fields

_BETA_SUBPROTOCOL = "openai-beta.realtime-v1"


class Shape(StrEnum):
    """Which names and which session object a connection has."""

    GA = "ga"
    BETA = "beta"

    @classmethod
    def asked_for(cls, openai_beta: str | None, subprotocols: Iterable[str] = ()) -> "Shape":
        """The shape for a header ``OpenAI-Beta``, and for a browser's subprotocols."""
        wanted = "realtime=v1" in (openai_beta or "") or _BETA_SUBPROTOCOL in subprotocols
        return cls.BETA if wanted else cls.GA


_BETA_TYPES = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
_NOT_IN_BETA = ("conversation.item.done", "input_audio_buffer.timeout_triggered")
_ONLY_IN_BETA = ("conversation.created",)
_CONTENT = {"output_text": "text", "output_audio": "audio"}
_GA_CONTENT = {beta: ga for ga, beta in _CONTENT.items()}
_FLAT = {
    "modalities": ("output_modalities",),
    "max_response_output_tokens": ("max_output_tokens",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_format": ("audio", "input", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
}
"""Where what the beta has at the top stands in GA."""
_NOT_IN_FLAT = (
    "type", "audio", "output_modalities", "max_output_tokens", "truncation", "prompt", "include",
    "reasoning", "parallel_tool_calls",
)  # fmt: skip


def from_client(event: Fields) -> Fields:
    """A client's event in GA's shape, whichever it had."""
    value = dict(event.value)
    for name in ("session", "response"):
        if isinstance(value.get(name), dict):
            value[name] = _nested(value[name])
    if isinstance(value.get("item"), dict):
        value["item"] = _with_content(value["item"], _ga_content)
    return Fields(value)


def to_client(event: dict[str, Any], shape: Shape) -> dict[str, Any] | None:
    """A server's event in a client's shape; None if that shape has none of it."""
    kind = event["type"]
    if shape is Shape.GA:
        return None if kind in _ONLY_IN_BETA else event
    if kind in _NOT_IN_BETA:
        return None
    beta = event | {"type": _BETA_TYPES.get(kind, kind)}
    if "session" in beta:
        beta["session"] = _flat_session(beta["session"])
    if "response" in beta:
        beta["response"] = _flat_response(beta["response"])
    if "item" in beta:
        beta["item"] = _beta_item(beta["item"])
    return beta


def _ga_content(item: Mapping[str, Any]) -> Mapping[str, str]:
    """In the beta "text" of a user stood for "input_text", too."""
    if item.get("role") in ("user", "system"):
        return {"text": "input_text", "audio": "input_audio"}
    return _GA_CONTENT


def _with_content(item: dict[str, Any], names: Any) -> dict[str, Any]:
    """An item of which the kinds of content are renamed."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    known = names(item) if callable(names) else names
    renamed = [
        each | {"type": known.get(each.get("type"), each.get("type"))}
        if isinstance(each, dict) and isinstance(each.get("type"), str)
        else each
        for each in content
    ]
    return item | {"content": renamed}


def _beta_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as the beta has it, which had no pictures."""
    shown = _with_content(item, _CONTENT)
    if "content" in shown:
        shown["content"] = [part for part in shown["content"] if part["type"] != "input_image"]
    return shown


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """An object of a session or response, with what stood at its top where GA has it."""
    nested = {name: value for name, value in flat.items() if name not in _FLAT}
    for name, path in _FLAT.items():
        if name in flat:
            _place(nested, path, flat[name])
    if isinstance(nested.get("input"), list):
        nested["input"] = [
            _with_content(each, _ga_content) if isinstance(each, dict) else each
            for each in nested["input"]
        ]
    return nested


def _place(nested: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put a value there unless there is one; what is in the way is left to be refused."""
    *parents, name = path
    for parent in parents:
        inner = nested.get(parent)
        if inner is not None and not isinstance(inner, dict):
            return
        nested[parent] = dict(inner or {})
        nested = nested[parent]
    nested.setdefault(name, value)


def _modalities(ga: list[str]) -> list[str]:
    return ["text", "audio"] if "audio" in ga else ["text"]


def _flat_session(session: Mapping[str, Any]) -> dict[str, Any]:
    """A session as the beta has it."""
    heard, spoken = session["audio"]["input"], session["audio"]["output"]
    kept = {name: value for name, value in session.items() if name not in _NOT_IN_FLAT}
    detection = dict(heard["turn_detection"] or {})
    detection.pop("idle_timeout_ms", None)
    return kept | {
        "modalities": _modalities(session["output_modalities"]),
        "voice": spoken["voice"],
        "speed": spoken["speed"],
        "input_audio_format": _name_of(heard),
        "output_audio_format": _name_of(spoken),
        "input_audio_transcription": heard["transcription"],
        "input_audio_noise_reduction": heard["noise_reduction"],
        "turn_detection": detection or None,
        "temperature": session["mosstalk"]["sampling"]["temperature"],
        "max_response_output_tokens": session["max_output_tokens"],
    }


def _flat_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response as the beta has it."""
    moved = ("audio", "output_modalities", "output")
    flat = {name: value for name, value in response.items() if name not in moved}
    flat["output"] = [_beta_item(item) for item in response["output"]]
    flat["modalities"] = _modalities(response["output_modalities"])
    if "audio" in response:
        spoken = response["audio"]["output"]
        flat |= {"voice": spoken["voice"], "output_audio_format": _name_of(spoken)}
    return flat


def _name_of(sound: Mapping[str, Any]) -> str:
    found = format_of(Fields(dict(sound)), "format")
    assert found is not None, "every session has formats"
    return found.beta_name
