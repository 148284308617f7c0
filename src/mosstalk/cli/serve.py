"""``mosstalk serve``: from options to a running server."""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import fail
from mosstalk.cli.options import option
from mosstalk.environment import install_command
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.server.admission import ServeOptions
    from mosstalk.server.certificate import Tls
    from mosstalk.server.front import Reports
    from mosstalk.server.ipc import Failed, Loading, WorkerInfo, WorkerOptions
    from mosstalk.server.keys import TwilioAccount
    from mosstalk.server.logs import LogStyle
    from mosstalk.session.commands import SessionSettings

_GIB = 1 << 30
_SAY_EVERY_S = 5.0
_USUAL_SESSIONS = 64
_PACKAGES = ("fastapi", "prometheus_client", "pydantic", "uvicorn", "websockets")
_ABOVE_0 = ("drain_timeout", "watchdog", "max_sessions", "record_days", "kv_gib", "max_reply_s",
            "idle_s", "max_session_s")  # fmt: skip
_HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, eq=False, repr=False)
class Serve:
    """Serve conversations over the OpenAI Realtime protocol, and a page to talk to.

    mosstalk serve --port 8000

    Exit code 0: ended by a signal, running replies finished. 2: wrong input.
    70: the engine died; start it again. 130 or 143: a second signal.
    """

    host: str = option("127.0.0.1", "Where to listen; 0.0.0.0 lets other machines in.")
    port: int = option(8000, "Which port; 0 takes a free one.")
    model: opt.Model = None
    codec: opt.Codec = None
    model_name: str | None = option(
        None, "What clients see as the model. Default: the folder's name."
    )
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    voice: str = option(
        "default",
        "The voice of sessions that ask for none: one of the codec's, or a file.",
        autocompletion=opt.offered_voices,
    )
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None
    flow_context: opt.FlowContext = None
    flow_steps: opt.FlowSteps = None
    codec_dtype: opt.SoundDtype = None
    codec_memory: opt.CodecMemory = None
    batch_invariant: opt.BatchInvariant = False
    embeddings: str | None = option(
        None,
        f"{opt.EMBEDDINGS_HELP} Default: as the --model folder was built, else device.",
        metavar="device|host",
    )
    graphs: opt.Graphs = True
    vad: str = option(
        "auto", "Who finds speech; none: push to talk.", metavar="auto|silero|webrtc|none"
    )
    ear_processes: int | None = option(
        None,
        "Processes that find speech beside the one with the models; 0: it does that too. "
        "Default: on a GPU one for 64 sessions, with 4 processors for each; on a CPU 0.",
        min=0,
    )
    front_processes: int | None = option(
        None,
        "Processes that speak with clients beside the one that lets them in; 0: it does that "
        "too. Default: above 96 sessions one for each 96, with 4 processors for each, else 0. "
        "With TLS always 0.",
        min=0,
    )
    echo_gate: bool = option(
        True,
        "Tell the assistant's own voice, come back through the microphone, from the "
        "user's. Off where none comes back: headsets, telephones, clients that cancel "
        "echo themselves. A session can choose otherwise (session.mosstalk.echo_gate).",
    )
    max_sessions: int | None = option(
        None,
        "Sessions at a time; more are refused at once. Default: those that the --model "
        "folder was built for, else 64.",
    )
    max_rows: int | None = option(
        None,
        "Rows of the longest conversation that must fit, 12.5 a second of both sides. "
        "Default: those that the --model folder was built for, else the model's context.",
        min=1,
    )
    kv_gib: float | None = option(
        None, "Memory for K and V. Default: what a GPU has left; on a CPU 0.25."
    )
    system: str | None = option(None, "Instructions of sessions that bring none; '' for none.")
    temperature: float | None = option(None, "Of sessions that choose none; 0 is greedy.")
    seed: int | None = option(None, "Same seed, same answers. Default: another one each time.")
    script: opt.ReplyScript = None
    max_reply_s: float = option(60.0, "Longest spoken reply in seconds.")
    idle_s: float = option(300.0, "A session in which nothing happens for so long ends.")
    max_session_s: float = option(3600.0, "Longest session in seconds.")
    api_key: list[str] | None = option(
        None,
        "A key that clients must show; may be repeated. Better in a file, or in "
        "MOSSTALK_API_KEY: others on this machine can read a command line. An empty one is "
        "refused.",
    )
    api_keys_file: Path | None = option(None, "A file of keys, one a line; # begins a comment.")
    allow_origin: list[str] | None = option(
        None, "Another page that may connect, e.g. https://example.org; * for any."
    )
    allowed_host: list[str] | None = option(
        None,
        "Without keys, another name under which clients reach this server, e.g. "
        "talk.example.org; * for any. localhost and addresses need none.",
    )
    twilio_auth_token: str | None = option(
        None,
        "Take telephone calls over Twilio Media Streams that this token of your account signs, at "
        "/v1/telephony/twilio. Better in MOSSTALK_TWILIO_AUTH_TOKEN: others on this machine can "
        "read a command line. Default: no calls are taken.",
        metavar="TOKEN",
    )
    public_url: str | None = option(
        None,
        "Where Twilio reaches this server, e.g. https://talk.example.org, if a proxy is in "
        "between. Its name needs no --allowed-host. Default: the name that a request carries.",
        metavar="URL",
    )
    webrtc_address: list[str] | None = option(
        None,
        "An address that leads to this machine's UDP ports, as the public one of a cloud; calls by "
        "WebRTC are told it beside the machine's own. A name is looked up at the start. May be "
        "repeated.",
        metavar="HOST",
    )
    webrtc_ports: str | None = option(
        None,
        "UDP ports for calls by WebRTC, one each, e.g. 40000-40100, for a firewall or docker -p. "
        "Default: any that the system gives.",
        metavar="FIRST-LAST",
    )
    tls_cert: Path | None = option(
        None,
        "Serve https and wss with this certificate in PEM, followed by those that vouch for it. "
        "The names in it need no --allowed-host.",
    )
    tls_key: Path | None = option(None, "The certificate's key in PEM, not encrypted.")
    tls_self_signed: bool = option(
        False,
        "Serve https and wss with a certificate that is made here for this machine's names and "
        "addresses, and kept. Browsers warn of it once.",
    )
    limit: list[str] | None = option(
        None,
        "A limit on connections, e.g. unsent_s=30 or per_key=4; may be repeated. "
        "--print-config shows them all.",
        metavar="NAME=VALUE",
    )
    drain_timeout: float = option(30.0, "Seconds that running replies get after SIGTERM.")
    watchdog: float = option(30.0, "Seconds without a sign of life after which the engine is dead.")
    record: Path | None = option(
        None,
        "Keep both sides' sound, all events and rows of every session in a folder of its "
        "own there, for mosstalk replay. Tell the people who talk.",
        metavar="DIR",
    )
    record_days: float | None = option(
        None, "Delete recordings to which nothing was added for so many days. Default: keep them."
    )
    store: str | None = option(
        None,
        "Where conversations are kept that clients may resume: memory, none, or the URL of a Redis "
        "or Valkey that servers share. A URL with a password is better in MOSSTALK_STORE. Default: "
        "memory.",
        metavar="memory|none|redis://HOST",
    )
    resume_s: float = option(300.0, "How long after its end a connection can be resumed.")
    transcriber: str = option(
        "auto",
        "Who writes down what is said, beside the talk: whisper-tiny (English), a folder with a "
        "Whisper of CTranslate2, or none. auto: whisper-tiny where the extra transcribe is "
        "installed and at most 96 sessions talk. What a model writes and then speaks needs nobody.",
        metavar="auto|NAME|none",
        autocompletion=opt.offered("auto", "whisper-tiny", "none"),
    )
    log_format: str = option("text", "How log lines are written.", metavar="text|json")
    log_level: str = option("info", "The least that is logged.", metavar="debug|info|warning|error")
    print_config: bool = option(False, "Print what would be served as json, and end.")

    def run(self) -> int:
        """Serve as asked, or print what would be served; the exit code."""
        require_server("a server")
        from mosstalk.server.cors import is_loopback
        from mosstalk.server.front import serve

        options = self.options()
        if self.print_config:
            sets = {"origins": sorted(options.origins), "hosts": sorted(options.hosts)}
            # Of keys only how many there are.
            document = asdict(options) | sets | {"keys": len(options.keys)}
            document["twilio"] = options.twilio and {"public_url": options.twilio.public_url}
            del document["secret"]
            if options.store:  # its address may hold a password
                document["store"]["url"] = options.store.url.partition(":")[0]
            print(json.dumps(document, indent=1, default=str))
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
        from mosstalk.environment import store_url
        from mosstalk.prepared.default_models import require_pair
        from mosstalk.server.admission import ServeOptions
        from mosstalk.server.call_network import call_network
        from mosstalk.server.captions import transcriber_of
        from mosstalk.server.certificate import tls_of
        from mosstalk.server.front_process import SESSIONS
        from mosstalk.server.limits import limits_of
        from mosstalk.server.logs import LogStyle
        from mosstalk.server.store import MEMORY, store_options

        require_pair(self.model, self.codec)
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        log, hosts = LogStyle(self.log_format, self.log_level.upper()), self._hosts()
        tls = tls_of(self.tls_cert, self.tls_key, self.tls_self_signed, hosts)
        if tls and self.front_processes:
            raise OptionError(
                "with TLS one process speaks with all clients: leave out --front-processes, or "
                "put a proxy with the certificate before a server without TLS"
            )
        worker = self._worker(log)
        crowd = worker.sessions > SESSIONS
        transcriber, untranscribed = transcriber_of(self.transcriber, crowd=crowd)
        return ServeOptions(
            host=self.host,
            port=self.port,
            name=self.model_name,
            worker=worker,
            limits=limits_of(self.limit or []),
            defaults=self._defaults(),
            keys=self._keys(),
            origins=frozenset(origin.rstrip("/") for origin in self.allow_origin or ()),
            hosts=hosts | tls.host_names if tls else hosts,
            drain_s=self.drain_timeout,
            watchdog_s=self.watchdog,
            record=self.record,
            record_days=self.record_days,
            transcriber=transcriber,
            untranscribed=untranscribed,
            front_processes=0 if tls else self.front_processes,
            tls=tls,
            store=store_options(self.store or store_url() or MEMORY, self.resume_s),
            twilio=self._twilio(),
            call_network=call_network(self.webrtc_address or (), self.webrtc_ports),
            log=log,
        )

    @property
    def _voice_name(self) -> str:
        """What sessions call the voice: of a file its name without the ending."""
        voice = Path(self.voice)
        return voice.stem if voice.is_file() else self.voice

    def _worker(self, log: "LogStyle") -> "WorkerOptions":
        from mosstalk.reply_options import SoundRequest
        from mosstalk.server.ipc import WorkerOptions, as_built

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
            ear_processes=self.ear_processes,
            voices={voice.stem: voice.resolve()} if voice.is_file() else {},
            voice=self._voice_name,
            log=log,
            batch_invariant=self.batch_invariant,
        )
        return as_built(options, self.max_sessions, self.max_rows, _USUAL_SESSIONS, self.embeddings)

    def _defaults(self) -> "SessionSettings":
        from mosstalk.server.ipc import BY_HAND
        from mosstalk.session.commands import Durations, ReplyLimits, Sampling, SessionSettings
        from mosstalk.vad.turns import TurnDetection

        return SessionSettings(
            instructions=self.system,
            voice=self._voice_name,
            turn_detection=None if self.vad == BY_HAND else TurnDetection(),
            echo_gate=self.echo_gate,
            sampling=Sampling(temperature=self.temperature, seed=self.seed),
            limits=ReplyLimits(longest_s=self.max_reply_s),
            durations=Durations(idle_s=self.idle_s, longest_s=self.max_session_s),
            script=self.script,
        )

    def _keys(self) -> tuple[str, ...]:
        from mosstalk.environment import api_keys, read_keys

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

    def _twilio(self) -> "TwilioAccount | None":
        from mosstalk.environment import twilio_auth_token
        from mosstalk.server.keys import TwilioAccount

        given = self.twilio_auth_token
        token = twilio_auth_token() if given is None else given
        if token is None:
            if self.public_url is not None:
                raise OptionError(
                    "--public-url is for calls, and none are taken: set MOSSTALK_TWILIO_AUTH_TOKEN"
                )
            return None
        if self.vad == "none":
            raise OptionError("calls are hands-free: leave out --vad none, or the Twilio token")
        return TwilioAccount(token, self.public_url)

    def _hosts(self) -> frozenset[str]:
        """The names in ``--allowed-host`` and ``--public-url``, and the one to listen on."""
        from mosstalk.server.cors import ANY, host_name

        for name in self.allowed_host or ():
            if name != ANY and not _HOST_NAME.fullmatch(name):
                raise OptionError(
                    f"--allowed-host {name}: give a name alone, as talk.example.org, or {ANY} "
                    "for any"
                )
        public = (self.public_url or "").partition("://")[2].partition("/")[0]
        names = {host_name(name) for name in (*(self.allowed_host or ()), self.host, public)}
        return frozenset(names - {""})


def require_server(what: str) -> None:
    """End with exit code 2 and a hint where the extra that ``what`` needs is not installed."""
    if sys.platform == "win32":
        fail(f"{what} needs Linux or macOS; on Windows run it in WSL")
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        fail(
            f"{what} needs the extra server, of which {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; run: {install_command('server')}"
        )


def _reports(options: "ServeOptions") -> "Reports":
    """What is said of a server as it starts: of what takes long, a line now and then."""
    from mosstalk.server.cors import is_loopback
    from mosstalk.server.front import Reports

    page, part, said_s = "", "", 0.0

    def listening(url: str) -> None:
        nonlocal page
        host = options.tls.host if options.tls else "localhost"
        page = f"{url.partition(':')[0]}://{host}:{url.rpartition(':')[2]}"
        _say(f"listening on {url}; loading the models")

    def loading(state: "Loading") -> None:
        nonlocal part, said_s
        if state.what != part:
            _say(f"{state.what} ({state.total} tensors)")
        elif time.monotonic() - said_s > _SAY_EVERY_S:
            _say(f"{state.what}: {state.done} of {state.total} tensors")
        else:
            return
        part, said_s = state.what, time.monotonic()

    def ready(facts: "WorkerInfo") -> None:
        _say(f"ready: {facts.model} ({facts.weights_kind} weights) on {facts.device}")
        _say(f"talk in a browser   {page}/")
        _say(f"Realtime clients    {page.replace('http', 'ws', 1)}/v1/realtime")
        if not is_loopback(options.host):
            _say_to_others(page.rpartition(":")[2], options.tls)

    def failed(failure: "Failed") -> None:
        print(f"error: {' '.join(failure.message.split())}", file=sys.stderr, flush=True)

    return Reports(listening, loading, ready, failed)


def _say_to_others(port: str, tls: "Tls | None") -> None:
    """How people at other machines reach the page with a microphone."""
    from mosstalk.server.certificate import own_addresses

    if tls is None:
        _say(
            "From other machines a browser lends its microphone to https pages only: add "
            "--tls-self-signed or a certificate (--tls-cert), or forward the port: ssh -L "
            f"{port}:localhost:{port} THIS-MACHINE"
        )
    elif tls.self_signed:
        for address in own_addresses():
            _say(f"from other machines https://{address}:{port}/")
        _say(f"Their browsers warn once that nobody vouches for the certificate {tls.certificate}.")


def _say(line: str) -> None:
    print(line, flush=True)
