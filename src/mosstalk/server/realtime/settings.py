"""The session object of the protocol: what a client wishes, what it gets, and what is said of it.

A client's wishes are kept as it sent them, one update merged into the other. What holds is made
of them afresh each time, so that what it asked for and did not get can always be told.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mosstalk.conversation import SYSTEM_PROMPTS
from mosstalk.errors import OptionError
from mosstalk.server.realtime.audio import AudioFormat, format_of
from mosstalk.server.realtime.errors import VENDOR, WireError
from mosstalk.server.realtime.kept import inert, kept, kept_of_input
from mosstalk.server.realtime.reading import Fields, WireLimits, too_long
from mosstalk.server.realtime.turn_detection import SEMANTIC, shown_as, turn_taking_of
from mosstalk.session.settings import (
    Context,
    ContextPolicy,
    Playback,
    ReplyMode,
    Sampling,
    SessionSettings,
)

_WHOLE = (
    "format", "noise_reduction", "prompt", "reasoning", "tool_choice", "tracing", "truncation",
    "voice",
)  # fmt: skip
"""Objects of which the parts belong together: a new one takes the old one's place."""
_LEAST_KEEP = 0.05
_PROMPTS = {ReplyMode.AUDIO: SYSTEM_PROMPTS["speech"], ReplyMode.TEXT: SYSTEM_PROMPTS["text"]}
MODALITIES = {ReplyMode.AUDIO: ["audio"], ReplyMode.TEXT: ["text"]}


@dataclass(frozen=True)
class Served:
    """What a server has to offer; the same for all its connections but for ``asked_model``."""

    model: str
    voices: tuple[str, ...]
    defaults: SessionSettings
    limits: WireLimits
    asked_model: str | None = None
    transcribes: bool = False

    def voice(self, asked: str | None) -> str:
        """The voice that is spoken with: the server's own if there is none of that name."""
        return asked if asked is not None and asked in self.voices else self.defaults.voice


@dataclass(frozen=True)
class WireSession:
    """What holds: ``body`` is the session as the client sees it, without its ids.

    ``warnings`` say, one sentence each, what was taken but has no effect.
    """

    wishes: Mapping[str, Any]
    body: Mapping[str, Any]
    settings: SessionSettings
    input_format: AudioFormat
    output_format: AudioFormat
    warnings: tuple[str, ...]


def opened(served: Served) -> WireSession:
    """The session before the client has said anything."""
    return _made({}, served)


def updated(session: WireSession, patch: Fields, served: Served) -> WireSession:
    """The session after a ``session.update``, deep-merged.

    Raises:
        WireError: what is asked for cannot be served, or means nothing.
    """
    if patch.text("type") not in (None, "realtime"):
        message = f"Invalid '{patch.path('type')}': only sessions of type 'realtime' are served."
        raise WireError("invalid_value", message, patch.path("type"))
    if (size := len(json.dumps(patch.value.get("tools")))) > served.limits.tools_chars:
        raise too_long(
            patch.path("tools"), f"{served.limits.tools_chars} characters of JSON", str(size)
        )
    wishes, most = _merged(session.wishes, patch.value), served.limits.kept_chars
    if (size := len(json.dumps(wishes))) > most:
        raise too_long("session", f"{most} characters, tools included", str(size))
    return _made(wishes, served)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = value
        if isinstance(before, dict) and isinstance(value, dict) and name not in _WHOLE:
            kind = before.get("type")
            if value.get("type", kind) == kind:
                merged[name] = _merged(before, value)
    return merged


def _made(wishes: dict[str, Any], served: Served) -> WireSession:
    """What holds of these wishes."""
    fields = Fields(wishes, "session")
    audio = fields.object("audio")
    heard, spoken, own = audio.object("input"), audio.object("output"), fields.object(VENDOR)
    defaults = served.defaults
    usual = shown_as(defaults.turn_detection, defaults.create_response, defaults.interrupt_response)
    turns = turn_taking_of(heard, usual)
    input_format = format_of(heard, "format") or AudioFormat()
    output_format = format_of(spoken, "format") or AudioFormat()
    reply = reply_of(fields, "output_modalities") or defaults.reply
    echo_gate = own.flag("echo_gate")
    try:
        settings = replace(
            defaults,
            input_rate=input_format.rate,
            instructions=instructions_of(fields, served.limits) or defaults.instructions,
            reply=reply,
            voice=served.voice(voice_of(spoken)),
            turn_detection=turns.detection,
            create_response=turns.create_response,
            interrupt_response=turns.interrupt_response,
            echo_gate=defaults.echo_gate if echo_gate is None else echo_gate,
            playback=Playback(own.choice("playback", list(Playback)) or defaults.playback),
            sampling=_sampling(fields, own.object("sampling"), defaults.sampling),
            limits=replace(
                defaults.limits,
                rows=rows_of(fields, "max_output_tokens") or defaults.limits.rows,
            ),
            context=_context(fields, defaults.context),
        )
    except OptionError as error:
        raise WireError("invalid_value", str(error), "session") from error
    body = _body(fields, served, settings)
    body["audio"] = {
        "input": {
            "format": input_format.wire,
            **kept_of_input(heard),
            "turn_detection": turns.wire,
        },
        "output": {"format": output_format.wire, "voice": settings.voice, "speed": 1.0},
    }
    warnings = _warnings(fields, body, served)
    body[VENDOR] = _vendor(fields, body, served, settings, warnings)
    return WireSession(wishes, body, settings, input_format, output_format, tuple(warnings))


def _body(fields: Fields, served: Served, settings: SessionSettings) -> dict[str, Any]:
    """All but the sound."""
    instructions = settings.instructions
    return {
        "type": "realtime",
        "object": "realtime.session",
        "model": served.model,
        "output_modalities": MODALITIES[settings.reply],
        "instructions": _PROMPTS[settings.reply] if instructions is None else instructions,
        "max_output_tokens": settings.limits.rows or "inf",
        "truncation": _truncation(fields, settings.context),
        **kept(fields),
    }


def _warnings(fields: Fields, body: Mapping[str, Any], served: Served) -> list[str]:
    """What was taken and has no effect; counts and names of fields, nothing that was said."""
    audio = fields.object("audio")
    spoken = audio.object("output")
    warnings = []
    if body["tools"]:
        warnings.append(f"tools are kept, but this model calls none ({len(body['tools'])})")
    if body["audio"]["input"]["transcription"] and not served.transcribes:
        warnings.append("nothing is transcribed here: no transcription events will come")
    if body["audio"]["input"]["noise_reduction"]:
        warnings.append("noise_reduction is kept, but no noise is reduced")
    voice = voice_of(spoken)
    if voice is not None and served.voice(voice) != voice:
        warnings.append("the voice is unknown: the default one speaks")
    if spoken.number("speed") not in (None, 1.0):
        warnings.append("speed is kept, but replies are spoken at their own")
    if without_effect := inert(body):
        warnings.append(f"kept, but without effect: {', '.join(without_effect)}")
    return warnings


def _vendor(
    fields: Fields,
    body: Mapping[str, Any],
    served: Served,
    settings: SessionSettings,
    warnings: list[str],
) -> dict[str, Any]:
    """What the protocol has no field for."""
    spoken = fields.object("audio").object("output")
    asked = {
        "model": fields.text("model") or served.asked_model,
        "audio.output.voice": voice_of(spoken),
        "audio.output.speed": spoken.number("speed"),
    }
    given = {
        "model": served.model,
        "audio.output.voice": settings.voice,
        "audio.output.speed": 1.0,
    }
    vendor: dict[str, Any] = {
        "voices": list(served.voices),
        "sampling": vars(settings.sampling),
        "playback": str(settings.playback),
        "echo_gate": settings.echo_gate,
        "asked": {name: value for name, value in asked.items() if value not in (None, given[name])},
        "warnings": warnings,
    }
    turns = body["audio"]["input"]["turn_detection"]
    if turns and turns["type"] == SEMANTIC and settings.turn_detection:
        vendor["silence_duration_ms"] = settings.turn_detection.silence_duration_ms
    return vendor


def instructions_of(fields: Fields, limits: WireLimits) -> str | None:
    """Instructions, None for the model's own: as in the protocol, "" clears what was there."""
    text = fields.text("instructions", limits.text_chars)
    return None if not text or text in SYSTEM_PROMPTS.values() else text


def reply_of(fields: Fields, name: str) -> ReplyMode | None:
    """What replies are made of; sound wins where both are asked for.

    Raises:
        WireError: neither text nor audio.
    """
    value = fields.value.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not set(map(str, value)) <= {"audio", "text"}:
        raise WireError(
            "invalid_value",
            f"Invalid '{fields.path(name)}': ['audio'] or ['text'].",
            fields.path(name),
        )
    return ReplyMode.AUDIO if "audio" in value else ReplyMode.TEXT


def voice_of(spoken: Fields) -> str | None:
    """The name of a voice, which may be in an object."""
    value = spoken.value.get("voice")
    return spoken.object("voice").text("id") if isinstance(value, dict) else spoken.text("voice")


def rows_of(fields: Fields, name: str) -> int | None:
    """The longest a reply may be; None without a bound.

    Raises:
        WireError: neither "inf" nor a whole number above 0.
    """
    return None if fields.value.get(name) == "inf" else fields.whole(name, 1)


def _sampling(fields: Fields, own: Fields, default: Sampling) -> Sampling:
    """How ids are drawn, by the vendor's object; the session's own temperature is older than it."""
    temperature = own.number("temperature", 0)
    if temperature is None:
        temperature = fields.number("temperature", 0)
    greedy = own.flag("greedy")
    asked = {
        "temperature": temperature,
        "top_k": own.whole("top_k", 0),
        "top_p": own.number("top_p", 0, 1),
        "repetition_penalty": own.number("repetition_penalty", 0),
        "seed": own.whole("seed", 0, 2**53),
        "greedy": greedy,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(default, **given)  # type: ignore[arg-type]  # each is of its field's type


def _context(fields: Fields, default: Context) -> Context:
    """What becomes of a conversation that is too long, by ``truncation``."""
    value = fields.value.get("truncation")
    if value == "disabled":
        return replace(default, policy=ContextPolicy.REFUSE)
    if value == "auto":
        return replace(default, policy=ContextPolicy.DROP)
    if not isinstance(value, dict):
        return default
    ratio = fields.object("truncation").number("retention_ratio", 0.0, 1.0)
    keep = default.keep if ratio is None else min(max(ratio, _LEAST_KEEP), default.full)
    return replace(default, policy=ContextPolicy.DROP, keep=keep)


def _truncation(fields: Fields, context: Context) -> Any:
    """The same as the session shows it."""
    if context.policy is ContextPolicy.REFUSE:
        return "disabled"
    if isinstance(fields.value.get("truncation"), dict):
        return {"type": "retention_ratio", "retention_ratio": context.keep}
    return "auto"
