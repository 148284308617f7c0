"""The session object of the protocol: what a client asks for, what it gets, and what is said of it.

A client's requests are kept as it sent them, one update merged into the other. What holds is made
of them afresh each time, so that what it asked for and did not get can always be told.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mosstalk.errors import OptionError
from mosstalk.server.limits import Limits
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.session_request import (
    SESSION_REQUEST,
    Inert,
    InputRequest,
    OutputRequest,
    SemanticVad,
    ServerVad,
    SessionRequest,
    Truncation,
)
from mosstalk.server.realtime.validation import AudioFormat, WireError, too_long, validate
from mosstalk.session.commands import (
    INSTRUCTIONS,
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
_WITHOUT_EFFECT = (
    "tracing", "prompt", "include", "reasoning", "parallel_tool_calls", "tool_choice",
)  # fmt: skip
_SPEED = 1.0
_TRANSCRIPTION = "transcription"
_LEAST_KEEP = 0.05
_THRESHOLDS = (0.01, 0.99)
MODALITIES: dict[ReplyMode, told.Modalities] = {
    ReplyMode.AUDIO: ["audio"],
    ReplyMode.TEXT: ["text"],
}
UNKNOWN_VOICE = "the voice is unknown: the default one speaks"


@dataclass(frozen=True)
class TranscriberInfo:
    """Who writes down what is said, beside the model; ``language`` is all it hears, None: any."""

    name: str
    language: str | None = None

    def hears(self, language: str | None) -> bool:
        """Whether it hears a language, ``en`` or ``en-US`` (ISO 639-1); None, for all one knows."""
        return None in (language, self.language) or code_of(language) == self.language


def code_of(language: str | None) -> str:
    """A language's code in lower case, without a region."""
    return re.split("[-_]", language or "")[0].lower()


@dataclass(frozen=True)
class TranscriptionConfig:
    """What the transcriber of a session is to write down: what the user says, what the model does.

    ``language`` is what the client says is spoken; None: it does not say.
    """

    user: bool = False
    assistant: bool = False
    language: str | None = None


@dataclass(frozen=True)
class ServedModel:
    """What a server has to offer; the same for all its connections but for ``asked_model``."""

    model: str
    voices: Sequence[str] = ("default",)
    defaults: SessionSettings = field(default_factory=SessionSettings)
    limits: Limits = field(default_factory=Limits)
    asked_model: str | None = None
    transcriber: TranscriberInfo | None = None

    def voice(self, asked: str | None) -> str:
        """The voice that is spoken with: the server's own if there is none of that name."""
        return asked if asked is not None and asked in self.voices else self.defaults.voice

    def knows_voice_of(self, request: OutputRequest) -> bool:
        """Whether the voice that is asked for, if any, is the one that is spoken with."""
        return request.voice_name in (None, self.voice(request.voice_name))


@dataclass(frozen=True)
class SessionConfig:
    """What holds: ``shown`` is the session as the client sees it, without its ids.

    ``asked`` is all that its updates have asked for, merged. ``only_transcribes``: what is said is
    written down and never answered; ``model_transcribes``: by the model, as no transcriber does.
    """

    asked: Mapping[str, Any]
    shown: told.Session | told.TranscriptionSession
    settings: SessionSettings
    input_format: AudioFormat
    output_format: AudioFormat
    transcription: TranscriptionConfig
    only_transcribes: bool = False
    model_transcribes: bool = False

    @property
    def warnings(self) -> list[str]:
        """One sentence each, of what was taken but has no effect."""
        return self.shown.mosstalk.warnings

    def updated(self, patch: dict[str, Any], served: ServedModel) -> "SessionConfig":
        """What holds after a ``session.update``, deep-merged.

        Raises:
            WireError: what is asked for cannot be served, or means nothing.
        """
        limits = served.limits
        if (size := len(json.dumps(patch.get("tools")))) > limits.tools_chars:
            raise too_long("session.tools", f"{limits.tools_chars} characters of JSON", size)
        asked = _merged(self.asked, patch)
        if self.only_transcribes and asked.get("type") != _TRANSCRIPTION:
            message = "This session transcribes: for a conversation connect anew, with no 'intent'."
            raise WireError("invalid_value", message, "session.type")
        if (size := len(json.dumps(asked))) > limits.kept_chars:
            raise too_long("session", f"{limits.kept_chars} characters, tools included", size)
        return session_config(asked, served)


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


def session_config(asked: dict[str, Any], served: ServedModel) -> SessionConfig:
    """What holds where a client has asked for this.

    Raises:
        WireError: it cannot be served, or means nothing.
    """
    request = validate(SESSION_REQUEST, asked, served.limits, "session")
    try:
        settings = _settings(request, served)
    except OptionError as error:
        raise WireError("invalid_value", str(error), "session") from error
    heard, spoken = request.audio.input, request.audio.output
    formats = heard.format or AudioFormat(), spoken.format or AudioFormat()
    transcription = _transcription(request, served)
    audio = told.Audio(
        input=told.AudioInput(
            format=formats[0],
            noise_reduction=heard.noise_reduction,
            transcription=_shown_transcription(request, served, transcription),
            turn_detection=_shown_vad(heard, settings),
        )
    )
    vendor = _vendor(request, served, settings, transcription)
    if request.type == _TRANSCRIPTION:
        only = told.TranscriptionSession(audio=audio, include=request.include, mosstalk=vendor)
        by_model = not (_is_off(heard) or transcription.user)
        return SessionConfig(asked, only, settings, *formats, transcription, True, by_model)
    audio.output = told.AudioOutput(format=formats[1], voice=settings.voice, speed=_SPEED)
    instructions = settings.instructions
    shown = told.Session(
        model=served.model,
        output_modalities=MODALITIES[settings.reply],
        instructions=INSTRUCTIONS[settings.reply] if instructions is None else instructions,
        max_output_tokens=settings.limits.rows or "inf",
        truncation=_shown_truncation(request.truncation, settings.context),
        audio=audio,
        mosstalk=vendor,
        **{name: getattr(request, name) for name in Inert.model_fields},
    )
    return SessionConfig(asked, shown, settings, *formats, transcription)


def _transcription(request: SessionRequest, served: ServedModel) -> TranscriptionConfig:
    """Both sides' words are written down where somebody hears the language; null turns it off."""
    heard, who = request.audio.input, served.transcriber
    language = (heard.transcription or {}).get("language")
    if who is None or not who.hears(language):
        return TranscriptionConfig()
    return TranscriptionConfig(not _is_off(heard), request.type != _TRANSCRIPTION, language)


def _is_off(heard: InputRequest) -> bool:
    """Whether the client wants nothing of the user's written down."""
    return heard.transcription is None and "transcription" in heard.model_fields_set


def _shown_transcription(
    request: SessionRequest, served: ServedModel, transcription: TranscriptionConfig
) -> dict[str, str] | None:
    """``transcription`` as it holds, with the names that the client has for it."""
    asked = request.audio.input.transcription
    if asked is not None or _is_off(request.audio.input):
        return asked
    if transcription.user and served.transcriber:
        return {"model": served.transcriber.name}
    return {"model": served.model} if request.type == _TRANSCRIPTION else None


def _settings(request: SessionRequest, served: ServedModel) -> SessionSettings:
    """What the session is told; raises OptionError for what it takes no part in."""
    heard, spoken, own = request.audio.input, request.audio.output, request.mosstalk
    defaults, vad = served.defaults, request.audio.input.turn_detection
    temperature = {} if request.temperature is None else {"temperature": request.temperature}
    changed: dict[str, Any] = {}
    if own.playback is not None:
        changed["playback"] = Playback(own.playback)
    if own.echo_gate is not None:
        changed["echo_gate"] = own.echo_gate
    if vad:
        changed["create_response"] = vad.create_response is not False
        changed["interrupt_response"] = vad.interrupt_response is not False
    if "turn_detection" in heard.model_fields_set:
        changed["turn_detection"] = _detection(vad, defaults.turn_detection or TurnDetection())
    settings = replace(
        defaults,
        input_rate=(heard.format or AudioFormat()).sample_rate,
        instructions=instructions_of(request.instructions) or defaults.instructions,
        reply=request.output_modalities or defaults.reply,
        voice=served.voice(spoken.voice_name),
        sampling=replace(
            defaults.sampling, **temperature | own.sampling.model_dump(exclude_none=True)
        ),
        limits=replace(defaults.limits, rows=request.max_output_tokens or defaults.limits.rows),
        context=_context(request.truncation, defaults.context),
        **changed,
    )
    if request.type != _TRANSCRIPTION:
        return settings
    return replace(
        settings, task="transcribe", reply=ReplyMode.TEXT, instructions=None, create_response=False,
        interrupt_response=False,
    )  # fmt: skip


def _detection(vad: ServerVad | SemanticVad | None, usual: TurnDetection) -> TurnDetection | None:
    """When a turn ends; None: the client says so.

    ``semantic_vad`` judges no words here: its eagerness chooses how long a silence is waited for.
    """
    if vad is None:
        return None
    if isinstance(vad, SemanticVad):
        return TurnDetection.for_eagerness(vad.eagerness)
    given = vad.model_dump(include=set(vars(usual)), exclude_none=True)
    if vad.threshold is not None:
        lowest, highest = _THRESHOLDS
        given["threshold"] = min(max(vad.threshold, lowest), highest)
    return replace(usual, **{"idle_timeout_ms": None} | given)


def _shown_vad(heard: InputRequest, settings: SessionSettings) -> ServerVad | SemanticVad | None:
    """``turn_detection`` as it holds."""
    if settings.turn_detection is None:
        return None
    flags: dict[str, Any] = {
        "create_response": settings.create_response,
        "interrupt_response": settings.interrupt_response,
    }
    if isinstance(heard.turn_detection, SemanticVad):
        return heard.turn_detection.model_copy(update=flags)
    return ServerVad(**vars(settings.turn_detection), **flags)


def _vendor(
    request: SessionRequest,
    served: ServedModel,
    settings: SessionSettings,
    transcription: TranscriptionConfig,
) -> told.SessionVendor:
    """What the protocol has no field for."""
    spoken, turns = request.audio.output, settings.turn_detection
    places = {
        "model": (request.model or served.asked_model, served.model),
        "audio.output.voice": (spoken.voice_name, settings.voice),
        "audio.output.speed": (spoken.speed, _SPEED),
    }
    waits = turns and isinstance(request.audio.input.turn_detection, SemanticVad)
    return told.SessionVendor(
        voices=list(served.voices),
        sampling=settings.sampling,
        playback=settings.playback.value,
        echo_gate=settings.echo_gate,
        asked={name: asked for name, (asked, got) in places.items() if asked not in (None, got)},
        warnings=_warnings(request, served, transcription),
        silence_duration_ms=turns.silence_duration_ms if turns and waits else None,
    )


def _warnings(
    request: SessionRequest, served: ServedModel, transcription: TranscriptionConfig
) -> list[str]:
    """What was taken and has no effect; counts and names of fields, nothing that was said."""
    heard, spoken = request.audio.input, request.audio.output
    names = [n for n in _WITHOUT_EFFECT if getattr(request, n) not in (None, False, "auto", [])]
    untranscribed = heard.transcription is not None and not transcription.user
    untranscribed = untranscribed and request.type != _TRANSCRIPTION
    deaf = served.transcriber and f"{served.transcriber.name} does not hear this language, so "
    found = {
        f"tools are kept, but this model calls none ({len(request.tools)})": request.tools,
        f"{deaf or ''}nothing is transcribed here: no transcription events will come": (
            untranscribed
        ),
        "noise_reduction is kept, but no noise is reduced": heard.noise_reduction,
        UNKNOWN_VOICE: not served.knows_voice_of(spoken),
        "speed is kept, but replies are spoken at their own": spoken.speed not in (None, _SPEED),
        f"kept, but without effect: {', '.join(names)}": names,
    }
    return [warning for warning, is_so in found.items() if is_so]


def instructions_of(asked: str | None) -> str | None:
    """Instructions, None for the model's own: as in the protocol, "" clears what was there."""
    return None if not asked or asked in INSTRUCTIONS.values() else asked


def _context(asked: Truncation | None, default: Context) -> Context:
    """What becomes of a conversation that is too long, by ``truncation``."""
    if asked is None:
        return default
    if asked.policy == "disabled":
        return replace(default, policy=ContextPolicy.REFUSE)
    ratio = asked.retention_ratio
    keep = default.keep if ratio is None else min(max(ratio, _LEAST_KEEP), default.full)
    return replace(default, policy=ContextPolicy.DROP, keep=keep)


def _shown_truncation(asked: Truncation | None, context: Context) -> Any:
    """``truncation`` as it holds."""
    if context.policy is ContextPolicy.REFUSE:
        return "disabled"
    if asked and asked.policy == "ratio":
        return {"type": "retention_ratio", "retention_ratio": context.keep}
    return "auto"
