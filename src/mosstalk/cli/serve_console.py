"""``mosstalk serve`` on the terminal: from options to a running server, and what is printed."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mosstalk.build.settings import as_built
from mosstalk.cli.common import one_of
from mosstalk.codec.sound_request import SoundRequest
from mosstalk.environment import api_keys
from mosstalk.errors import OptionError
from mosstalk.plan.fit import PLACES
from mosstalk.prepared.default_models import require_pair
from mosstalk.server.auth import ANY, host_name, is_loopback, read_keys
from mosstalk.server.front import Reports, ServeOptions, serve
from mosstalk.server.limits import Limits
from mosstalk.server.logs import LogStyle
from mosstalk.server.messages import BY_HAND, Facts, Failed, Loading, WorkerOptions
from mosstalk.server.transcriber import require_transcriber
from mosstalk.session.settings import Durations, ReplyLimits, Sampling, SessionSettings
from mosstalk.vad.turns import TurnDetection

_GIB = 1 << 30
_SAY_EVERY_S = 5.0
_USUAL_SESSIONS = 64
_LEVELS = ("debug", "info", "warning", "error")
_HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class ServeRequest:
    """The options of ``mosstalk serve``, by their names."""

    host: str
    port: int
    model: Path | None
    codec: Path | None
    model_name: str | None
    device: str
    dtype: str | None
    voice: str
    vocoder: str
    vocoder_dir: Path | None
    flow_context: float | None
    flow_steps: int | None
    codec_dtype: str | None
    codec_memory: int | None
    batch_invariant: bool
    embeddings: str | None
    graphs: bool
    vad: str
    echo_gate: bool
    max_sessions: int | None
    max_rows: int | None
    kv_gib: float | None
    system: str | None
    temperature: float | None
    seed: int | None
    script: str | None
    max_reply_s: float
    idle_s: float
    max_session_s: float
    api_key: list[str] | None
    api_keys_file: Path | None
    allow_origin: list[str] | None
    allowed_host: list[str] | None
    limit: list[str] | None
    drain_timeout: float
    watchdog: float
    record: Path | None
    transcriber: str | None
    log_format: str
    log_level: str
    print_config: bool


def run_serve(request: ServeRequest) -> int:
    """Serve as asked, or print what would be served; the exit code."""
    options = options_of(request)
    if request.print_config:
        print(json.dumps(shown(options), indent=1, default=str))
        return 0
    if not options.keys and not is_loopback(options.host):
        _say(
            "warning: no API key is set and other machines can connect, by an address or a name "
            "from --allowed-host; see --api-keys-file"
        )
    return serve(options, _reports(options))


def options_of(request: ServeRequest) -> ServeOptions:
    """What the options mean.

    Raises:
        ConfigError, OptionError: they mean nothing.
    """
    require_pair(request.model, request.codec)
    one_of("--vad", request.vad, "auto", "silero", "webrtc", BY_HAND)
    if request.embeddings:
        one_of("--embeddings", request.embeddings, *PLACES)
    one_of("--log-format", request.log_format, "text", "json")
    one_of("--log-level", request.log_level, *_LEVELS)
    if request.transcriber:
        require_transcriber(request.transcriber)
    for name in ("drain_timeout", "watchdog", "max_sessions"):
        value = getattr(request, name)
        if value is not None and value <= 0:
            raise OptionError(f"--{name.replace('_', '-')} must be above 0")
    log = LogStyle(request.log_format, request.log_level.upper())
    return ServeOptions(
        host=request.host,
        port=request.port,
        name=request.model_name,
        worker=_worker(request, log),
        limits=_limits(request.limit or []),
        defaults=_defaults(request),
        keys=_keys(request),
        origins=frozenset(origin.rstrip("/") for origin in request.allow_origin or ()),
        hosts=_hosts(request),
        drain_s=request.drain_timeout,
        watchdog_s=request.watchdog,
        record=request.record,
        transcriber=request.transcriber,
        log=log,
    )


def shown(options: ServeOptions) -> dict[str, Any]:
    """The options as a document; of keys only how many there are."""
    document = asdict(options)
    document["keys"] = len(options.keys)
    document["origins"] = sorted(options.origins)
    document["hosts"] = sorted(options.hosts)
    return document


def _worker(request: ServeRequest, log: LogStyle) -> WorkerOptions:
    voice = Path(request.voice)
    options = WorkerOptions(
        model=request.model,
        codec=request.codec,
        sound=SoundRequest(
            request.flow_context,
            request.flow_steps,
            request.codec_dtype,
            request.codec_memory,
            request.graphs,
            request.vocoder,
            request.vocoder_dir,
        ),
        device=request.device,
        dtype=request.dtype,
        memory_bytes=None if request.kv_gib is None else int(request.kv_gib * _GIB),
        detector=request.vad,
        voices={voice.stem: voice.resolve()} if voice.is_file() else {},
        log=log,
        batch_invariant=request.batch_invariant,
    )
    return as_built(
        options, request.max_sessions, request.max_rows, _USUAL_SESSIONS, request.embeddings
    )


def _defaults(request: ServeRequest) -> SessionSettings:
    voice = Path(request.voice)
    return SessionSettings(
        instructions=request.system,
        voice=voice.stem if voice.is_file() else request.voice,
        turn_detection=None if request.vad == BY_HAND else TurnDetection(),
        echo_gate=request.echo_gate,
        sampling=Sampling(temperature=request.temperature, seed=request.seed),
        limits=ReplyLimits(longest_s=request.max_reply_s),
        durations=Durations(idle_s=request.idle_s, longest_s=request.max_session_s),
        script=request.script,
    )


def _keys(request: ServeRequest) -> tuple[str, ...]:
    given = [key.strip() for key in request.api_key or ()]
    if not all(given):
        raise OptionError(
            "--api-key is empty, as a variable that is not set is; give a key, or leave the "
            "option out to let everybody in"
        )
    filed = read_keys(request.api_keys_file) if request.api_keys_file else []
    named = api_keys()
    if named == []:
        raise OptionError(
            "MOSSTALK_API_KEY is set and holds no key; give it one, or unset it to let everybody in"
        )
    return tuple(dict.fromkeys([*given, *filed, *(named or ())]))


def _hosts(request: ServeRequest) -> frozenset[str]:
    """The names in ``--allowed-host``, and the one to listen on, if it is one."""
    for name in request.allowed_host or ():
        if name != ANY and not _HOST_NAME.fullmatch(name):
            raise OptionError(
                f"--allowed-host {name}: give a name alone, as talk.example.org, or {ANY} for any"
            )
    names = {host_name(name) for name in (*(request.allowed_host or ()), request.host)}
    return frozenset(names - {""})


def _limits(given: list[str]) -> Limits:
    known: dict[str, Callable[[str], Any]] = {
        each.name: int if "int" in str(each.type) else float for each in fields(Limits)
    }
    chosen = {}
    for pair in given:
        name, _, value = pair.partition("=")
        try:
            chosen[name] = known[name](value)
        except (KeyError, ValueError):
            raise OptionError(
                f"--limit {pair}: give NAME=VALUE, NAME being one of {', '.join(known)}"
            ) from None
    return Limits(**chosen)


def _reports(options: ServeOptions) -> Reports:
    names: list[str] = []

    def listening(url: str) -> None:
        names.append(url)
        _say(f"listening on {url}; loading the models")

    def ready(facts: Facts) -> None:
        _say(f"ready: {facts.model} ({facts.weights_kind} weights) on {facts.device}")
        for line in _where(names[0], options):
            _say(line)

    def failed(failure: Failed) -> None:
        print(f"error: {' '.join(failure.message.split())}", file=sys.stderr, flush=True)

    return Reports(listening, _Progress(), ready, failed)


def _where(url: str, options: ServeOptions) -> list[str]:
    """Where to go, and what a browser asks for there."""
    port = url.rpartition(":")[2]
    here = f"http://localhost:{port}"
    lines = [
        f"talk in a browser   {here}/",
        f"Realtime clients    ws://localhost:{port}/v1/realtime",
    ]
    if is_loopback(options.host):
        return lines
    return [
        *lines,
        "From other machines a browser lends its microphone to https pages only: put a proxy with "
        "a certificate before this, or forward the port: ssh -L "
        f"{port}:localhost:{port} THIS-MACHINE",
    ]


class _Progress:
    """Says what is being loaded: a line for each part, and more if it takes long."""

    def __init__(self) -> None:
        self._last, self._said_s = "", 0.0

    def __call__(self, loading: Loading) -> None:
        now_s = time.monotonic()
        if loading.what != self._last:
            _say(f"{loading.what} ({loading.total} tensors)")
        elif now_s - self._said_s > _SAY_EVERY_S:
            _say(f"{loading.what}: {loading.done} of {loading.total} tensors")
        else:
            return
        self._last, self._said_s = loading.what, now_s


def _say(line: str) -> None:
    print(line, flush=True)
