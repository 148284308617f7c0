"""``mosstalk serve``: from options to a running server, and what is printed meanwhile."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import one_of, require_server
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.server.front import Reports, ServeOptions
    from mosstalk.server.ipc import Failed, Loading, WorkerInfo, WorkerOptions
    from mosstalk.server.limits import Limits
    from mosstalk.server.logs import LogStyle
    from mosstalk.session.settings import SessionSettings

_GIB = 1 << 30
_SAY_EVERY_S = 5.0
_USUAL_SESSIONS = 64
_LEVELS = ("debug", "info", "warning", "error")
_HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, eq=False, repr=False)
class Serve:
    """Serve conversations over the OpenAI Realtime protocol, and a page to talk to.

    mosstalk serve --port 8000

    Exit code 0: ended by a signal, running replies finished. 2: wrong input.
    70: the engine died; start it again. 130 or 143: a second signal.
    """

    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Which port; 0 takes a free one.")] = 8000
    model: opt.Model = None
    codec: opt.Codec = None
    model_name: Annotated[
        str | None, typer.Option(help="What clients see as the model. Default: the folder's name.")
    ] = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    voice: Annotated[
        str,
        typer.Option(
            help="The voice of sessions that ask for none: one of the codec's, or a file."
        ),
    ] = "default"
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None
    flow_context: opt.FlowContext = None
    flow_steps: opt.FlowSteps = None
    codec_dtype: opt.SoundDtype = None
    codec_memory: opt.CodecMemory = None
    batch_invariant: opt.BatchInvariant = False
    embeddings: Annotated[
        str | None,
        typer.Option(
            metavar="device|host",
            help=f"{opt.EMBEDDINGS_HELP} Default: as the --model folder was built, else device.",
        ),
    ] = None
    graphs: opt.Graphs = True
    vad: Annotated[
        str,
        typer.Option(
            "--vad", help="Who finds speech: auto, silero, webrtc, or none (push to talk)."
        ),
    ] = "auto"
    echo_gate: Annotated[
        bool,
        typer.Option(
            "--echo-gate/--no-echo-gate",
            help="Tell the assistant's own voice, come back through the microphone, from the "
            "user's. Off where none comes back: headsets, telephones, clients that cancel "
            "echo themselves. A session can choose otherwise (session.mosstalk.echo_gate).",
        ),
    ] = True
    max_sessions: Annotated[
        int | None,
        typer.Option(
            help="Sessions at a time; more are refused at once. Default: those that the --model "
            "folder was built for, else 64."
        ),
    ] = None
    max_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of the longest conversation that must fit, 12.5 a second of both sides. "
            "Default: those that the --model folder was built for, else the model's context.",
            min=1,
        ),
    ] = None
    kv_gib: Annotated[
        float | None,
        typer.Option(help="Memory for K and V. Default: what a GPU has left; on a CPU 0.25."),
    ] = None
    system: Annotated[
        str | None, typer.Option(help="Instructions of sessions that bring none; '' for none.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Of sessions that choose none; 0 takes the likeliest id.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same answers. Default: another one each time.")
    ] = None
    script: opt.ReplyScript = None
    max_reply_s: Annotated[float, typer.Option(help="Longest spoken reply in seconds.")] = 60.0
    idle_s: Annotated[
        float, typer.Option(help="A session in which nothing happens for so long ends.")
    ] = 300.0
    max_session_s: Annotated[float, typer.Option(help="Longest session in seconds.")] = 3600.0
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must show; may be repeated. Better in a file, or in "
            "MOSSTALK_API_KEY: others on this machine can read a command line. An empty one is "
            "refused."
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line; # begins a comment.")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Another page that may connect, e.g. https://example.org; * for any."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Without keys, another name under which clients reach this server, e.g. "
            "talk.example.org; * for any. localhost and addresses need none."
        ),
    ] = None
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="A limit on connections, e.g. unsent_s=30 or per_key=4; may be repeated. "
            "--print-config shows them all.",
        ),
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running replies get after SIGTERM.")
    ] = 30.0
    watchdog: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which the engine is dead.")
    ] = 30.0
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            help="Keep both sides' sound, all events and rows of every session in a folder of its "
            "own there, for mosstalk replay. Tell the people who talk.",
        ),
    ] = None
    transcriber: Annotated[
        str | None,
        typer.Option(
            "--transcriber",
            metavar="NAME",
            help="Write down both sides' speech, beside the talk: whisper-tiny (English), or a "
            "folder with a Whisper of CTranslate2. Default: transcripts stay empty.",
        ),
    ] = None
    log_format: Annotated[str, typer.Option(help="Log lines as text or json.")] = "text"
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what would be served as json, and end.")
    ] = False

    def run(self) -> int:
        """Serve as asked, or print what would be served; the exit code."""
        require_server()
        from mosstalk.server.auth import is_loopback
        from mosstalk.server.front import serve

        options = self.options()
        if self.print_config:
            print(json.dumps(shown(options), indent=1, default=str))
            return 0
        if not options.keys and not is_loopback(options.host):
            _say(
                "warning: no API key is set and other machines can connect, by an address or a "
                "name from --allowed-host; see --api-keys-file"
            )
        return serve(options, _reports(options))

    def options(self) -> "ServeOptions":
        """What the options mean.

        Raises:
            ConfigError, OptionError: they mean nothing.
        """
        from mosstalk.prepared.default_models import require_pair
        from mosstalk.server.front import ServeOptions
        from mosstalk.server.logs import LogStyle
        from mosstalk.server.transcriber import require_transcriber

        require_pair(self.model, self.codec)
        self._check_words()
        if self.transcriber:
            require_transcriber(self.transcriber)
        for name in ("drain_timeout", "watchdog", "max_sessions"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OptionError(f"--{name.replace('_', '-')} must be above 0")
        log = LogStyle(self.log_format, self.log_level.upper())
        return ServeOptions(
            host=self.host,
            port=self.port,
            name=self.model_name,
            worker=self._worker(log),
            limits=_limits(self.limit or []),
            defaults=self._defaults(),
            keys=self._keys(),
            origins=frozenset(origin.rstrip("/") for origin in self.allow_origin or ()),
            hosts=self._hosts(),
            drain_s=self.drain_timeout,
            watchdog_s=self.watchdog,
            record=self.record,
            transcriber=self.transcriber,
            log=log,
        )

    def _check_words(self) -> None:
        from mosstalk.plan.fit import PLACES
        from mosstalk.server.ipc import BY_HAND

        one_of("--vad", self.vad, "auto", "silero", "webrtc", BY_HAND)
        if self.embeddings:
            one_of("--embeddings", self.embeddings, *PLACES)
        one_of("--log-format", self.log_format, "text", "json")
        one_of("--log-level", self.log_level, *_LEVELS)

    def _worker(self, log: "LogStyle") -> "WorkerOptions":
        from mosstalk.codec.sound_request import SoundRequest
        from mosstalk.prepared.start import as_built
        from mosstalk.server.ipc import WorkerOptions

        voice = Path(self.voice)
        options = WorkerOptions(
            model=self.model,
            codec=self.codec,
            sound=SoundRequest(
                self.flow_context,
                self.flow_steps,
                self.codec_dtype,
                self.codec_memory,
                self.graphs,
                self.vocoder,
                self.vocoder_dir,
            ),
            device=self.device,
            dtype=self.dtype,
            memory_bytes=None if self.kv_gib is None else int(self.kv_gib * _GIB),
            detector=self.vad,
            voices={voice.stem: voice.resolve()} if voice.is_file() else {},
            log=log,
            batch_invariant=self.batch_invariant,
        )
        return as_built(options, self.max_sessions, self.max_rows, _USUAL_SESSIONS, self.embeddings)

    def _defaults(self) -> "SessionSettings":
        from mosstalk.server.ipc import BY_HAND
        from mosstalk.session.settings import Durations, ReplyLimits, Sampling, SessionSettings
        from mosstalk.vad.turns import TurnDetection

        voice = Path(self.voice)
        return SessionSettings(
            instructions=self.system,
            voice=voice.stem if voice.is_file() else self.voice,
            turn_detection=None if self.vad == BY_HAND else TurnDetection(),
            echo_gate=self.echo_gate,
            sampling=Sampling(temperature=self.temperature, seed=self.seed),
            limits=ReplyLimits(longest_s=self.max_reply_s),
            durations=Durations(idle_s=self.idle_s, longest_s=self.max_session_s),
            script=self.script,
        )

    def _keys(self) -> tuple[str, ...]:
        from mosstalk.environment import api_keys
        from mosstalk.server.auth import read_keys

        given = [key.strip() for key in self.api_key or ()]
        if not all(given):
            raise OptionError(
                "--api-key is empty, as a variable that is not set is; give a key, or leave the "
                "option out to let everybody in"
            )
        filed = read_keys(self.api_keys_file) if self.api_keys_file else []
        named = api_keys()
        if named == []:
            raise OptionError(
                "MOSSTALK_API_KEY is set and holds no key; give it one, or unset it to let "
                "everybody in"
            )
        return tuple(dict.fromkeys([*given, *filed, *(named or ())]))

    def _hosts(self) -> frozenset[str]:
        """The names in ``--allowed-host``, and the one to listen on, if it is one."""
        from mosstalk.server.auth import ANY, host_name

        for name in self.allowed_host or ():
            if name != ANY and not _HOST_NAME.fullmatch(name):
                raise OptionError(
                    f"--allowed-host {name}: give a name alone, as talk.example.org, or {ANY} "
                    "for any"
                )
        names = {host_name(name) for name in (*(self.allowed_host or ()), self.host)}
        return frozenset(names - {""})


def shown(options: "ServeOptions") -> dict[str, Any]:
    """The options as a document; of keys only how many there are."""
    document = asdict(options)
    document["keys"] = len(options.keys)
    document["origins"] = sorted(options.origins)
    document["hosts"] = sorted(options.hosts)
    return document


def _limits(given: list[str]) -> "Limits":
    from mosstalk.server.limits import Limits

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


def _reports(options: "ServeOptions") -> "Reports":
    from mosstalk.server.front import Reports

    names: list[str] = []

    def listening(url: str) -> None:
        names.append(url)
        _say(f"listening on {url}; loading the models")

    def ready(facts: "WorkerInfo") -> None:
        _say(f"ready: {facts.model} ({facts.weights_kind} weights) on {facts.device}")
        for line in _where(names[0], options):
            _say(line)

    def failed(failure: "Failed") -> None:
        print(f"error: {' '.join(failure.message.split())}", file=sys.stderr, flush=True)

    return Reports(listening, _Progress(), ready, failed)


def _where(url: str, options: "ServeOptions") -> list[str]:
    """Where to go, and what a browser asks for there."""
    from mosstalk.server.auth import is_loopback

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

    def __call__(self, loading: "Loading") -> None:
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
