"""``mosstalk bench serve``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosstalk.cli import options as opt

if TYPE_CHECKING:
    from mosstalk.bench.serve import Load
    from mosstalk.bench.serve_clients import Pcm
    from mosstalk.cli.measured_output import Outputs

_FORMAT = "mosstalk-serve-1"
_SENTENCES = 12


@dataclass(frozen=True, eq=False, repr=False)
class BenchServe:
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

    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS OF SERVE",
            help="What follows -- goes to the mosstalk serve that is started.",
            show_default=False,
        ),
    ] = None
    at: Annotated[
        str, typer.Option("--at", metavar="N,N,...", help="How many conversations at a time.")
    ] = "1,2,4"
    turns: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Turns of each conversation, the first included."),
    ] = 4
    heard: Annotated[
        float, typer.Option("--heard", metavar="S", min=0.2, help="Length of what a user says.")
    ] = 4.0
    spoken: Annotated[
        float,
        typer.Option("--spoken", metavar="S", min=0.2, help="Longest answer that is asked for."),
    ] = 6.0
    pause: Annotated[
        float,
        typer.Option("--pause", metavar="S", min=0.0, help="From an answer to the next turn."),
    ] = 0.5
    frame_ms: Annotated[
        int, typer.Option(metavar="MS", min=10, max=1000, help="Length of a microphone's frame.")
    ] = 20
    hands_free: Annotated[
        bool,
        typer.Option(
            "--hands-free", help="Let the server find where turns end. Default: clients commit."
        ),
    ] = False
    speech: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What users say: a sound file with speech, longer than a turn. Default: sentences "
            "that the small model reads aloud beforehand.",
        ),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            metavar="ws://HOST:PORT/v1/realtime",
            help="Any server of the Realtime protocol that runs already. Default: one is started.",
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(help="A key for --url.", envvar="MOSSTALK_API_KEY", metavar="KEY")
    ] = None
    most_first_audio_ms: Annotated[
        float,
        typer.Option(
            "--most-first-audio-ms",
            metavar="MS",
            help="The 95th percentile from the commit (hands-free: from the server's decision) to "
            "first audio that still counts as served.",
        ),
    ] = 400.0
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of phases, gains, noise and what is said.")
    ] = 0
    json: opt.JsonFile = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write one page with the curve and the tables."
        ),
    ] = None

    def run(self) -> None:
        """Start a server unless there is one, measure, print and write."""
        from mosstalk.bench.serve import Bounds, Load
        from mosstalk.bench.serve_clients import Pattern
        from mosstalk.cli.measured_output import Outputs

        load = Load(
            _crowds(self.at),
            Pattern(self.heard, self.spoken, self.pause, self.frame_ms, self.hands_free),
            self.turns,
            self.seed,
            Bounds(self.most_first_audio_ms),
        )
        to = Outputs(self.json, self.html)
        _run(load, self.url, self.api_key, self.options or [], _speech(self.speech), to)


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
    from mosstalk.offline.pipeline import Pipeline
    from mosstalk.offline.tasks import speak
    from mosstalk.prepared.default_models import default_model
    from mosstalk.reporting.sentences import read_sentences

    with status_line("reading sentences aloud, for the users to say"):
        pipeline = Pipeline.load(*default_model(), device="cpu")
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

    from mosstalk.bench.serve import Target, measure, served
    from mosstalk.bench.serve_report import not_measured, page_of, tables_of, verdict
    from mosstalk.cli.measured_output import measured_document, print_found
    from mosstalk.errors import OptionError
    from mosstalk.prepared.machine import commit
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
