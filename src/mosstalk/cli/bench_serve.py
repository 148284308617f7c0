"""``mosstalk bench serve``."""

import os
import platform
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli.command import WritesPage, measured_document, numbers, print_found
from mosstalk.cli.options import argument, option
from mosstalk.diagnostics.served import server_parts
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.bench.serve import Crowd, Load
    from mosstalk.bench.serve_clients import Pcm

_SENTENCES = 12


@dataclass(frozen=True, eq=False, repr=False)
class BenchServe(WritesPage):
    """Measure how many conversations at a time a server bears.

    mosstalk bench serve --at 1,2,4

    mosstalk bench serve --at 32,64,128 --json crowd.json -- --model engine

    mosstalk bench serve --at 32 --read-at-once 32 -- --model engine

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

    options: list[str] | None = argument(
        "What follows -- goes to the mosstalk serve that is started.",
        metavar="-- OPTIONS OF SERVE",
        show_default=False,
        default=None,
    )
    at: str = option("1,2,4", "How many conversations at a time.", metavar="N,N,...")
    turns: int = option(4, "Turns of each conversation, the first included.", metavar="N", min=1)
    heard: float = option(4.0, "Length of what a user says.", metavar="S", min=0.2)
    spoken: float = option(
        6.0,
        "Longest answer that is asked for; what a model writes first takes 0.08 s of it a token.",
        metavar="S",
        min=0.2,
    )
    pause: float = option(0.5, "From an answer to the next turn.", metavar="S", min=0.0)
    frame_ms: int = option(20, "Length of a microphone's frame.", metavar="MS", min=10, max=1000)
    hands_free: bool = option(
        False, "Let the server find where turns end. Default: clients commit."
    )
    history: int = option(
        0,
        "Words typed into each conversation before its first turn, about a token each: what a "
        "long conversation costs.",
        metavar="WORDS",
        min=0,
    )
    read_at_once: int = option(
        0,
        "Measure each crowd twice: alone, and while the server reads so many texts at a time aloud "
        "(/v1/audio/speech). Each takes a place of --max-sessions, and keeps it for a moment.",
        metavar="N",
        min=0,
    )
    speech: Path | None = option(
        None,
        "What users say: a sound file with speech, longer than a turn. Default: sentences "
        "that the small model reads aloud beforehand.",
        metavar="FILE",
    )
    url: str | None = option(
        None,
        "Any server of the Realtime protocol that runs already. Default: one is started.",
        metavar="ws://HOST:PORT/v1/realtime",
    )
    api_key: str | None = option(None, "A key for --url.", envvar="MOSSTALK_API_KEY", metavar="KEY")
    most_first_audio_ms: float = option(
        400.0,
        "The 95th percentile from the commit (hands-free: from the server's decision) to "
        "first audio that still counts as served.",
        metavar="MS",
    )
    seed: int = option(0, "Of phases, gains, noise and what is said.", metavar="N")

    def __post_init__(self) -> None:
        """Refuse what can be refused before anything heavy is imported."""
        if self.url and server_parts(self.url, "ws", "wss") is None:
            raise OptionError(
                f"--url takes a WebSocket, ws://HOST:PORT/v1/realtime, not {self.url}"
            )

    def run(self) -> None:
        """Start a server unless there is one, measure, print and write.

        Raises:
            BenchError: the server did not start, or clients failed.
            OptionError: ``at`` holds no numbers.
        """
        from mosstalk.bench.documents import SERVE
        from mosstalk.bench.serve import Bounds, Load
        from mosstalk.bench.serve_clients import Pattern
        from mosstalk.bench.serve_report import not_measured, page_of, tables_of, verdict
        from mosstalk.reporting.sentences import read_sentences

        load = Load(
            tuple(numbers("--at", self.at)),
            Pattern(
                self.heard, self.spoken, self.pause, self.frame_ms, self.hands_free, self.history
            ),
            self.turns,
            self.seed,
            Bounds(self.most_first_audio_ms),
            self.read_at_once,
            tuple(read_sentences()) if self.read_at_once else (),
        )
        with self.printing():
            settings, crowds = self._measured(load)
            print_found(settings, tables_of(crowds, load), not_measured(crowds))
            print(f"\n{verdict(crowds, load)}")
        document = measured_document(
            SERVE,
            settings,
            load=asdict(load),
            crowds=[crowd.as_values(load.bounds) for crowd in crowds],
            verdict=verdict(crowds, load),
            skipped=not_measured(crowds),
        )
        self.deliver_both(document, lambda: page_of(settings, crowds, load))

    def _measured(self, load: "Load") -> "tuple[dict[str, str], list[Crowd]]":
        """The settings, and what each crowd met, at ``url`` or at a server of our own."""
        from mosstalk.bench.serve import Target, measure, served
        from mosstalk.prepared.machine import commit
        from mosstalk.progress import progress_bar, status_line

        speech, options = _speech(self.speech), self.options or []
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with ExitStack() as stack:
            url = self.url
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
                return settings, measure(target, load, speech, tell)


def _speech(file: Path | None) -> "Pcm":
    """What users say, (n,) int16 at 24 kHz: a file, or held-out sentences by the small model."""
    import numpy as np

    from mosstalk.audio.sound import read_audio
    from mosstalk.bench.serve_clients import RATE
    from mosstalk.progress import status_line
    from mosstalk.session.sound import pcm_of

    if file is not None:
        return np.frombuffer(pcm_of(read_audio(file, RATE).samples), np.int16)
    from mosstalk.offline.pipeline import Pipeline, speak
    from mosstalk.prepared.default_models import default_model
    from mosstalk.reporting.sentences import read_sentences

    with status_line("reading sentences aloud, for the users to say"):
        pipeline = Pipeline.load(*default_model(), device="cpu")
        gap = np.zeros(RATE // 2, np.float32)
        sounds = []
        for sentence in read_sentences()[:_SENTENCES]:
            sounds += [*speak(pipeline, sentence), gap]
    return np.frombuffer(pcm_of(np.concatenate(sounds)), np.int16)
