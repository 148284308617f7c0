"""``mosstalk bench serve``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mosstalk.cli.common import reported

if TYPE_CHECKING:
    from mosstalk.bench.serve import Load
    from mosstalk.bench.serve_clients import Pcm
    from mosstalk.cli.measured_output import Outputs

_FORMAT = "mosstalk-serve-1"
_SENTENCES = 12

ServeOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- OPTIONS OF SERVE",
        help="What follows -- goes to the mosstalk serve that is started.",
        show_default=False,
    ),
]
Crowds: TypeAlias = Annotated[
    str, typer.Option("--at", metavar="N,N,...", help="How many conversations at a time.")
]
Turns: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Turns of each conversation, the first included.")
]
HeardS: TypeAlias = Annotated[
    float, typer.Option("--heard", metavar="S", min=0.2, help="Length of what a user says.")
]
SpokenS: TypeAlias = Annotated[
    float,
    typer.Option("--spoken", metavar="S", min=0.2, help="Longest answer that is asked for."),
]
PauseS: TypeAlias = Annotated[
    float, typer.Option("--pause", metavar="S", min=0.0, help="From an answer to the next turn.")
]
FrameMs: TypeAlias = Annotated[
    int, typer.Option(metavar="MS", min=10, max=1000, help="Length of a microphone's frame.")
]
HandsFree: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--hands-free", help="Let the server find where turns end. Default: clients commit."
    ),
]
Speech: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What users say: a sound file with speech, longer than a turn. Default: sentences "
        "that the small model reads aloud beforehand.",
    ),
]
Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ws://HOST:PORT/v1/realtime",
        help="Any server of the Realtime protocol that runs already. Default: one is started.",
    ),
]
ApiKey: TypeAlias = Annotated[
    str | None, typer.Option(help="A key for --url.", envvar="MOSSTALK_API_KEY", metavar="KEY")
]
MostMs: TypeAlias = Annotated[
    float,
    typer.Option(
        "--most-first-audio-ms",
        metavar="MS",
        help="The 95th percentile from the commit (hands-free: from the server's decision) to "
        "first audio that still counts as served.",
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Of phases, gains, noise and what is said.")
]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write every figure as json; - is stdout."),
]
HtmlFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write one page with the curve and the tables."),
]


def serve(
    options: ServeOptions = None,
    at: Crowds = "1,2,4",
    turns: Turns = 4,
    heard: HeardS = 4.0,
    spoken: SpokenS = 6.0,
    pause: PauseS = 0.5,
    frame_ms: FrameMs = 20,
    hands_free: HandsFree = False,
    speech: Speech = None,
    url: Url = None,
    api_key: ApiKey = None,
    most_first_audio_ms: MostMs = 400.0,
    seed: Seed = 0,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Measure how many conversations at a time a server bears.

    mosstalk bench serve --at 1,2,4

    mosstalk bench serve --at 32,64,128 --json crowd.json -- --model engine

    mosstalk bench serve --at 8 --hands-free --url ws://localhost:8000/v1/realtime

    Each conversation is a WebSocket of its own, in other processes, with
    sound at the pace of a microphone: 4 s that a user says, up to 6 s of
    answer, 0.5 s of pause. A crowd counts only if all of it is let in. Its
    users begin at random, spread evenly over a turn.

    Per crowd: time from the commit (with --hands-free: from the end of the
    last word, and from the server's decision) to first audio, which is there
    once 240 ms of sound have come, as much as a first hop of 5 codes gives;
    gaps between pieces of sound; turns in which a player without a buffer
    fell silent; refusals; how late the clients themselves were; and what the
    server spent meanwhile, if it has mosstalk's metrics. The first bound that
    broke is named.
    """
    with reported():
        from mosstalk.bench.serve import Bounds, Load
        from mosstalk.bench.serve_clients import Pattern
        from mosstalk.cli.measured_output import Outputs

        load = Load(
            _crowds(at),
            Pattern(heard, spoken, pause, frame_ms, hands_free),
            turns,
            seed,
            Bounds(most_first_audio_ms),
        )
        _run(load, url, api_key, options or [], _speech(speech), Outputs(json, html))


def _crowds(text: str) -> tuple[int, ...]:
    from mosstalk.errors import OptionError

    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise OptionError(f"--at takes numbers of conversations, such as 1,8,32, not {text!r}")
    return tuple(map(int, words))


def _speech(file: Path | None) -> "Pcm":
    """What users say, (n,) int16 at 24 kHz: a file, or held-out sentences by the small model."""
    import numpy as np

    from mosstalk.audio.sound import read_audio
    from mosstalk.bench.serve_clients import RATE
    from mosstalk.progress import status_line
    from mosstalk.session.sound import pcm_of

    if file is not None:
        return np.frombuffer(pcm_of(read_audio(file, RATE).samples), np.int16)
    from mosstalk.bench.sentences import read_sentences
    from mosstalk.offline.pipeline import Pipeline
    from mosstalk.offline.tasks import speak
    from mosstalk.prepared.default_models import default_model

    with status_line("reading sentences aloud, for the users to say"):
        pipeline = Pipeline.load(*default_model())
        gap = np.zeros(RATE // 2, np.float32)
        sounds = []
        for sentence in read_sentences()[:_SENTENCES]:
            sounds += [*speak(pipeline, sentence), gap]
    return np.frombuffer(pcm_of(np.concatenate(sounds)), np.int16)


def _run(
    load: "Load", url: str | None, key: str | None, options: list[str], speech: "Pcm", to: "Outputs"
) -> None:
    """Start a server unless there is one, measure, print, write.

    Raises:
        BenchError: the server did not start, or clients failed.
        OptionError: ``url`` is none of a WebSocket.
    """
    import os
    import platform
    from contextlib import ExitStack

    from mosstalk.bench.machine import commit
    from mosstalk.bench.serve import Target, measure, served
    from mosstalk.bench.serve_report import not_measured, page_of, tables_of, verdict
    from mosstalk.cli.measured_output import measured_document, print_found
    from mosstalk.errors import OptionError
    from mosstalk.progress import progress_bar, status_line

    if url and not url.startswith(("ws://", "wss://")):
        raise OptionError(f"--url takes a WebSocket, ws://HOST:PORT/v1/realtime, not {url}")
    to.require()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with to.text_for_people(), ExitStack() as stack:
        if url is None:
            with status_line("starting the server") as status:
                url = stack.enter_context(served(options, status.update))
        target = Target(url, headers)
        settings = target.facts() | {
            "serve options": " ".join(options) or "none",
            "clients on": f"{platform.machine()} CPU, {os.cpu_count()} cores",
            "clients' commit": commit(),
            "seed": str(load.seed),
        }
        with progress_bar() as tell:
            crowds = measure(target, load, speech, tell)
        print_found(settings, tables_of(crowds, load), not_measured(crowds))
        print(f"\n{verdict(crowds, load)}")
    document = measured_document(
        _FORMAT,
        settings,
        load=asdict(load),
        crowds=[crowd.as_values(load.bounds) for crowd in crowds],
        verdict=verdict(crowds, load),
        skipped=not_measured(crowds),
    )
    to.write(document, lambda: page_of(settings, crowds, load))
