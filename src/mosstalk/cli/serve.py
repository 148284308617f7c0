"""``mosstalk serve``."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import fail, reported

_PACKAGES = ("fastapi", "prometheus_client", "uvicorn", "websockets")

Host: TypeAlias = Annotated[
    str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")
]
Port: TypeAlias = Annotated[int, typer.Option(help="Which port; 0 takes a free one.")]
ModelName: TypeAlias = Annotated[
    str | None, typer.Option(help="What clients see as the model. Default: the folder's name.")
]
DefaultVoice: TypeAlias = Annotated[
    str,
    typer.Option(help="The voice of sessions that ask for none: one of the codec's, or a file."),
]
MaxSessions: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Sessions at a time; more are refused at once. Default: those that the --model folder "
        "was built for, else 64."
    ),
]
MaxRows: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Rows of the longest conversation that must fit, 12.5 a second of both sides. "
        "Default: those that the --model folder was built for, else the model's context.",
        min=1,
    ),
]
Embeddings: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="device|host",
        help=f"{opt.EMBEDDINGS_HELP} Default: as the --model folder was built, else device.",
    ),
]
KvGib: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Memory for K and V. Default: what a GPU has left; on a CPU 0.25."),
]
DetectorName: TypeAlias = Annotated[
    str,
    typer.Option("--vad", help="Who finds speech: auto, silero, webrtc, or none (push to talk)."),
]
EchoGate: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--echo-gate/--no-echo-gate",
        help="Tell the assistant's own voice, come back through the microphone, from the user's. "
        "Off where none comes back: headsets, telephones, clients that cancel echo themselves. "
        "A session can choose otherwise (session.mosstalk.echo_gate).",
    ),
]
DefaultSystem: TypeAlias = Annotated[
    str | None, typer.Option(help="Instructions of sessions that bring none; '' for none.")
]
DefaultTemperature: TypeAlias = Annotated[
    float | None, typer.Option(help="Of sessions that choose none; 0 takes the likeliest id.")
]
DefaultSeed: TypeAlias = Annotated[
    int | None, typer.Option(help="Same seed, same answers. Default: another one each time.")
]
MaxReplyS: TypeAlias = Annotated[float, typer.Option(help="Longest spoken reply in seconds.")]
IdleS: TypeAlias = Annotated[
    float, typer.Option(help="A session in which nothing happens for so long ends.")
]
MaxSessionS: TypeAlias = Annotated[float, typer.Option(help="Longest session in seconds.")]
ApiKey: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="A key that clients must show; may be repeated. Better in a file, or in "
        "MOSSTALK_API_KEY: others on this machine can read a command line. An empty one is "
        "refused."
    ),
]
ApiKeysFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A file of keys, one a line; # begins a comment.")
]
AllowOrigin: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Another page that may connect, e.g. https://example.org; * for any."),
]
AllowedHost: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Without keys, another name under which clients reach this server, e.g. "
        "talk.example.org; * for any. localhost and addresses need none."
    ),
]
LimitValues: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit on connections, e.g. unsent_s=30 or per_key=4; may be repeated. "
        "--print-config shows them all.",
    ),
]
DrainTimeout: TypeAlias = Annotated[
    float, typer.Option(help="Seconds that running replies get after SIGTERM.")
]
Watchdog: TypeAlias = Annotated[
    float, typer.Option(help="Seconds without a sign of life after which the engine is dead.")
]
RecordFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="DIR",
        help="Keep both sides' sound, all events and rows of every session in a folder of its own "
        "there, for mosstalk replay. Tell the people who talk.",
    ),
]
TranscriberName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--transcriber",
        metavar="NAME",
        help="Write down both sides' speech, beside the talk: whisper-tiny (English), or a folder "
        "with a Whisper of CTranslate2. Default: transcripts stay empty.",
    ),
]
LogFormat: TypeAlias = Annotated[str, typer.Option(help="Log lines as text or json.")]
LogLevel: TypeAlias = Annotated[str, typer.Option(help="debug, info, warning or error.")]
PrintConfig: TypeAlias = Annotated[
    bool, typer.Option("--print-config", help="Print what would be served as json, and end.")
]


def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: opt.Model = None,
    codec: opt.Codec = None,
    model_name: ModelName = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    voice: DefaultVoice = "default",
    vocoder: opt.Vocoder = "hift",
    vocoder_dir: opt.VocoderDir = None,
    flow_context: opt.FlowContext = None,
    flow_steps: opt.FlowSteps = None,
    codec_dtype: opt.SoundDtype = None,
    codec_memory: opt.CodecMemory = None,
    batch_invariant: opt.BatchInvariant = False,
    embeddings: Embeddings = None,
    graphs: opt.Graphs = True,
    vad: DetectorName = "auto",
    echo_gate: EchoGate = True,
    max_sessions: MaxSessions = None,
    max_rows: MaxRows = None,
    kv_gib: KvGib = None,
    system: DefaultSystem = None,
    temperature: DefaultTemperature = None,
    seed: DefaultSeed = None,
    script: opt.ReplyScript = None,
    max_reply_s: MaxReplyS = 60.0,
    idle_s: IdleS = 300.0,
    max_session_s: MaxSessionS = 3600.0,
    api_key: ApiKey = None,
    api_keys_file: ApiKeysFile = None,
    allow_origin: AllowOrigin = None,
    allowed_host: AllowedHost = None,
    limit: LimitValues = None,
    drain_timeout: DrainTimeout = 30.0,
    watchdog: Watchdog = 30.0,
    record: RecordFolder = None,
    transcriber: TranscriberName = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    print_config: PrintConfig = False,
) -> None:
    """Serve conversations over the OpenAI Realtime protocol, and a page to talk to.

    mosstalk serve --port 8000

    Exit code 0: ended by a signal, running replies finished. 2: wrong input.
    70: the engine died; start it again. 130 or 143: a second signal.
    """
    given = locals()  # every option by its name
    with reported():
        _require_packages()
        from mosstalk.cli.serve_console import ServeRequest, run_serve

        raise typer.Exit(run_serve(ServeRequest(**given)))


def _require_packages() -> None:
    import sys
    from importlib.util import find_spec

    if sys.platform == "win32":
        fail("a server needs Linux or macOS; on Windows run it in WSL")
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        fail(f"a server needs {', '.join(missing)}; run: pip install 'mosstalk[server]'")
