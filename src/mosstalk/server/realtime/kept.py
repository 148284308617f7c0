"""What a session keeps for its client without acting on it, cleaned: clients parse it strictly.

What is here has no effect on replies. What no client could read back is left out.
"""

from collections.abc import Mapping
from typing import Any

from mosstalk.server.realtime.reading import Fields

_CHOICES = ("auto", "none", "required")
_INCLUDED = ("item.input_audio_transcription.logprobs",)
_NOISE = ("near_field", "far_field")
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh")
_MCP_TEXTS = ("server_label", "server_url", "server_description")
_NAMES = {"function": "name", "mcp": "server_label"}


def kept(fields: Fields) -> dict[str, Any]:
    """The fields of a session that are kept as they came.

    Raises:
        WireError: a tool is none.
    """
    value = fields.value
    tracing, include = value.get("tracing"), value.get("include")
    shown: dict[str, Any] = {
        "tools": [_tool(tool) for tool in fields.objects("tools")],
        "tool_choice": _tool_choice(value.get("tool_choice")),
        "tracing": "auto" if tracing == "auto" else _texts(tracing, "workflow_name", "group_id"),
        "prompt": _prompt(value.get("prompt")),
        "include": [each for each in _INCLUDED if each in include]
        if isinstance(include, list)
        else None,
    }
    if reasoning := _one_of(value.get("reasoning"), "effort", _EFFORTS):
        shown["reasoning"] = reasoning
    if isinstance(value.get("parallel_tool_calls"), bool):
        shown["parallel_tool_calls"] = value["parallel_tool_calls"]
    return shown


def kept_of_input(heard: Fields) -> dict[str, Any]:
    """The same for a session's ``audio.input``."""
    return {
        "noise_reduction": _one_of(heard.value.get("noise_reduction"), "type", _NOISE),
        "transcription": _texts(heard.value.get("transcription"), "model", "language", "prompt"),
    }


def inert(shown: Mapping[str, Any]) -> list[str]:
    """Names of kept fields that ask for something that nobody does."""
    names = ("tracing", "prompt", "include", "reasoning", "parallel_tool_calls", "tool_choice")
    return [name for name in names if shown.get(name) not in (None, False, "auto", [])]


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.choice("type", _NAMES) or "function"
    if kind == "mcp":
        tool.required("server_label")
        return {"type": kind} | {
            name: text for name in _MCP_TEXTS if (text := tool.text(name)) is not None
        }
    shown = {"type": kind, "name": tool.required("name")}
    if (description := tool.text("description")) is not None:
        shown["description"] = description
    return shown | {"parameters": tool.value.get("parameters")}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict):
        name = _NAMES.get(str(value.get("type")))
        if name and isinstance(value.get(name), str):
            return {"type": value["type"], name: value[name]}
    return value if isinstance(value, str) and value in _CHOICES else "auto"


def _prompt(value: Any) -> dict[str, Any] | None:
    shown = _texts(value, "id", "version")
    return shown if shown and "id" in shown else None


def _texts(value: Any, *names: str) -> dict[str, Any] | None:
    """Of an object those fields that are strings; None if it is no object, or an empty one."""
    if not isinstance(value, dict):
        return None
    return {name: value[name] for name in names if isinstance(value.get(name), str)} or None


def _one_of(value: Any, name: str, known: tuple[str, ...]) -> dict[str, str] | None:
    """An object with one field of which the values are known."""
    chosen = value.get(name) if isinstance(value, dict) else None
    return {name: chosen} if isinstance(chosen, str) and chosen in known else None
