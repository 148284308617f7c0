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
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.audio import PCM, AudioFormat
from mosstalk.server.realtime.session_request import (
    SESSION_REQUEST,
    SemanticVad,
    ServerVad,
    SessionInput,
    SessionRequest,
    Truncation,
)
from mosstalk.server.realtime.validation import WireError, WireLimits, too_long, validated
from mosstalk.session.settings import (
    Context,
    ContextPolicy,
    Playback,
    ReplyMode,
    SessionSettings,
)
from mosstalk.vad.turns import TurnDetection

_WHOLE = (
    "format", "noise_reduction", "prompt", "reasoning", "tool_choice", "tracing", "truncation",
    "voice",
)  # fmt: skip
"""Objects of which the parts belong together: a new one takes the old one's place."""
_INERT = ("tracing", "prompt", "include", "reasoning", "parallel_tool_calls", "tool_choice")
"""Fields that ask for something that nobody does."""
_LEAST_KEEP = 0.05
_THRESHOLDS = (0.01, 0.99)
_PROMPTS = {ReplyMode.AUDIO: SYSTEM_PROMPTS["speech"], ReplyMode.TEXT: SYSTEM_PROMPTS["text"]}
MODALITIES: dict[ReplyMode, shown.Modalities] = {
    ReplyMode.AUDIO: ["audio"],
    ReplyMode.TEXT: ["text"],
}


@dataclass(frozen=True)
class ServedModel:
    """What a server has to offer; the same for all its connections but for ``asked_model``."""

    model: str
    voices: tuple[str, ...]
    defaults: SessionSettings
    limits: WireLimits
    asked_model: str | None = None
    transcribes: bool = False

    def voice(self, request: str | None) -> str:
        """The voice that is spoken with: the server's own if there is none of that name."""
        return request if request is not None and request in self.voices else self.defaults.voice


@dataclass(frozen=True)
class EffectiveSession:
    """What holds: ``body`` is the session as the client sees it, without its ids.

    ``warnings`` say, one sentence each, what was taken but has no effect.
    """

    wishes: Mapping[str, Any]
    body: shown.Session
    settings: SessionSettings
    input_format: AudioFormat
    output_format: AudioFormat

    @property
    def warnings(self) -> list[str]:
        """One sentence each, of what was taken but has no effect."""
        return self.body.mosstalk.warnings


def opened(served: ServedModel) -> EffectiveSession:
    """The session before the client has said anything."""
    return _made({}, served)


def updated(
    session: EffectiveSession, patch: dict[str, Any], served: ServedModel
) -> EffectiveSession:
    """The session after a ``session.update``, deep-merged.

    Raises:
        WireError: what is asked for cannot be served, or means nothing.
    """
    if (size := len(json.dumps(patch.get("tools")))) > served.limits.tools_chars:
        raise too_long(
            "session.tools", f"{served.limits.tools_chars} characters of JSON", str(size)
        )
    wishes, most = _merged(session.wishes, patch), served.limits.kept_chars
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


def _made(wishes: dict[str, Any], served: ServedModel) -> EffectiveSession:
    """What holds of these wishes."""
    request, defaults = (
        validated(SESSION_REQUEST, wishes, served.limits, "session"),
        served.defaults,
    )
    heard, spoken = request.audio.input, request.audio.output
    input_format = heard.format.audio if heard.format else AudioFormat()
    output_format = spoken.format.audio if spoken.format else AudioFormat()
    turns = _turn_taking(heard, defaults)
    try:
        settings = replace(
            defaults,
            input_rate=input_format.rate,
            instructions=instructions_of(request.instructions) or defaults.instructions,
            reply=request.output_modalities or defaults.reply,
            voice=served.voice(spoken.voice_name),
            turn_detection=turns.detection,
            create_response=turns.create_response,
            interrupt_response=turns.interrupt_response,
            sampling=replace(defaults.sampling, **_sampling(request)),
            limits=replace(defaults.limits, rows=request.max_output_tokens or defaults.limits.rows),
            context=_context(request.truncation, defaults.context),
            **_vendor_settings(request),
        )
    except OptionError as error:
        raise WireError("invalid_value", str(error), "session") from error
    audio = shown.SessionAudioObject(
        input=shown.SessionInputObject(
            format=shown_format(input_format),
            noise_reduction=heard.noise_reduction,
            transcription=heard.transcription,
            turn_detection=turns.shown,
        ),
        output=shown.OutputObject(
            format=shown_format(output_format), voice=settings.voice, speed=1.0
        ),
    )
    body = _body(request, audio, served, settings)
    return EffectiveSession(wishes, body, settings, input_format, output_format)


def _body(
    request: SessionRequest,
    audio: shown.SessionAudioObject,
    served: ServedModel,
    settings: SessionSettings,
) -> shown.Session:
    """The session as it is shown."""
    instructions = settings.instructions
    return shown.Session(
        model=served.model,
        output_modalities=MODALITIES[settings.reply],
        instructions=_PROMPTS[settings.reply] if instructions is None else instructions,
        max_output_tokens=settings.limits.rows or "inf",
        truncation=_truncation(request.truncation, settings.context),
        tools=request.tools,
        tool_choice=request.tool_choice,
        tracing=request.tracing,
        prompt=request.prompt,
        include=request.include,
        reasoning=request.reasoning,
        parallel_tool_calls=request.parallel_tool_calls,
        audio=audio,
        mosstalk=_vendor(request, audio, served, settings),
    )


def _vendor(
    request: SessionRequest,
    audio: shown.SessionAudioObject,
    served: ServedModel,
    settings: SessionSettings,
) -> shown.SessionVendor:
    """What the protocol has no field for."""
    spoken, turns = request.audio.output, audio.input.turn_detection
    wanted = {
        "model": request.model or served.asked_model,
        "audio.output.voice": spoken.voice_name,
        "audio.output.speed": spoken.speed,
    }
    given = {
        "model": served.model,
        "audio.output.voice": settings.voice,
        "audio.output.speed": 1.0,
    }
    waits = isinstance(turns, SemanticVad) and settings.turn_detection
    return shown.SessionVendor(
        voices=list(served.voices),
        sampling=settings.sampling,
        playback=settings.playback.value,
        echo_gate=settings.echo_gate,
        asked={name: value for name, value in wanted.items() if value not in (None, given[name])},
        warnings=_warnings(request, served),
        silence_duration_ms=waits.silence_duration_ms if waits else None,
    )


def _warnings(request: SessionRequest, served: ServedModel) -> list[str]:
    """What was taken and has no effect; counts and names of fields, nothing that was said."""
    heard, spoken = request.audio.input, request.audio.output
    warnings = []
    if request.tools:
        warnings.append(f"tools are kept, but this model calls none ({len(request.tools)})")
    if heard.transcription and not served.transcribes:
        warnings.append("nothing is transcribed here: no transcription events will come")
    if heard.noise_reduction:
        warnings.append("noise_reduction is kept, but no noise is reduced")
    voice = spoken.voice_name
    if voice is not None and served.voice(voice) != voice:
        warnings.append("the voice is unknown: the default one speaks")
    if spoken.speed not in (None, 1.0):
        warnings.append("speed is kept, but replies are spoken at their own")
    inert = [name for name in _INERT if getattr(request, name) not in (None, False, "auto", [])]
    if inert:
        warnings.append(f"kept, but without effect: {', '.join(inert)}")
    return warnings


def shown_format(sound: AudioFormat) -> shown.FormatObject:
    """A format as a session has it."""
    return shown.FormatObject(type=sound.kind, rate=sound.rate if sound.kind == PCM else None)


def instructions_of(request: str | None) -> str | None:
    """Instructions, None for the model's own: as in the protocol, "" clears what was there."""
    return None if not request or request in SYSTEM_PROMPTS.values() else request


def _sampling(request: SessionRequest) -> dict[str, Any]:
    """How ids are drawn, by the vendor's object; the session's own temperature is older than it."""
    default_config = {} if request.temperature is None else {"temperature": request.temperature}
    return default_config | request.mosstalk.sampling.model_dump(exclude_none=True)


def _vendor_settings(request: SessionRequest) -> dict[str, Any]:
    own, given = request.mosstalk, dict[str, Any]()
    if own.playback is not None:
        given["playback"] = Playback(own.playback)
    if own.echo_gate is not None:
        given["echo_gate"] = own.echo_gate
    return given


def _context(request: Truncation | None, default: Context) -> Context:
    """What becomes of a conversation that is too long, by ``truncation``."""
    if request is None:
        return default
    if request.policy == "disabled":
        return replace(default, policy=ContextPolicy.REFUSE)
    ratio = request.retention_ratio
    keep = default.keep if ratio is None else min(max(ratio, _LEAST_KEEP), default.full)
    return replace(default, policy=ContextPolicy.DROP, keep=keep)


def _truncation(request: Truncation | None, context: Context) -> Any:
    """The same as the session shows it."""
    if context.policy is ContextPolicy.REFUSE:
        return "disabled"
    if request and request.policy == "ratio":
        return shown.Retention(retention_ratio=context.keep)
    return "auto"


@dataclass(frozen=True)
class _TurnTaking:
    """Who ends a user's turn. ``detection`` None: the client commits."""

    detection: TurnDetection | None
    create_response: bool
    interrupt_response: bool
    shown: ServerVad | SemanticVad | None = None


def _turn_taking(request: SessionInput, defaults: SessionSettings) -> _TurnTaking:
    """What a session's ``turn_detection`` asks for, and the server's own if it is not there.

    ``semantic_vad`` judges no words here: its eagerness chooses how long a silence is waited for.
    """
    flags, vad = (defaults.create_response, defaults.interrupt_response), request.turn_detection
    if "turn_detection" not in request.model_fields_set:
        detection = defaults.turn_detection
    elif vad is None:
        detection = None
    else:
        flags = (vad.create_response is not False, vad.interrupt_response is not False)
        if isinstance(vad, SemanticVad):
            detection = TurnDetection.for_eagerness(vad.eagerness)
        else:
            detection = _silence(vad, defaults.turn_detection or TurnDetection())
    if detection is None:
        return _TurnTaking(None, *flags)
    told: dict[str, Any] = {"create_response": flags[0], "interrupt_response": flags[1]}
    if isinstance(vad, SemanticVad):
        return _TurnTaking(detection, *flags, vad.model_copy(update=told))
    return _TurnTaking(detection, *flags, ServerVad(**vars(detection), **told))


def _silence(vad: ServerVad, default_config: TurnDetection) -> TurnDetection:
    lowest, highest = _THRESHOLDS
    threshold, padding = vad.threshold, vad.prefix_padding_ms
    silence = vad.silence_duration_ms
    return TurnDetection(
        default_config.threshold if threshold is None else min(max(threshold, lowest), highest),
        default_config.prefix_padding_ms if padding is None else padding,
        default_config.silence_duration_ms if silence is None else silence,
        vad.idle_timeout_ms,
    )
