"""``mosstalk checkpoint``: commands that read and write checkpoint folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.checkpoint_quantize import Quantize
from mosstalk.cli.command import WritesDocument, add_command
from mosstalk.cli.options import argument, option

if TYPE_CHECKING:
    from mosstalk.progress import Progress

Found: TypeAlias = tuple[dict[str, Any] | list[dict[str, Any]], str, bool]
"""A document, its text for people, and whether there are problems."""


@dataclass(frozen=True, eq=False, repr=False)
class Synthesize:
    """Write random weights in the published layout: model, codec, voice and tokenizer.

    mosstalk checkpoint synthesize random --size tiny,hidden_size=256

    What such a model says is noise. It serves to measure speed, memory and
    exactness on real shapes. A full one takes 20 GiB, codec included.
    """

    out: Path = argument("A new folder; gets OUT/model and OUT/codec.", metavar="OUT")
    size: list[str] | None = option(
        None,
        "tiny, full, or KEY=VALUE; repeat or join with commas, e.g. "
        "tiny,hidden_size=256,flow.input_size=96. Default: tiny.",
        autocompletion=opt.offered("tiny", "full"),
    )
    seed: int = option(0, "Same seed and sizes, same weights.")
    dtype: str = option(
        "bfloat16",
        "Of the language model: bfloat16, float16 or float32.",
        autocompletion=opt.offered("bfloat16", "float16", "float32"),
    )
    tokenizer: Path | None = option(None, "A tokenizer.json to use instead of a byte-level one.")

    def run(self) -> None:
        """Write it, and print what it is."""
        from mosstalk.synthesis.write import run_synthesize

        run_synthesize(self.out, self.size or ["tiny"], self.seed, self.dtype, self.tokenizer)


@dataclass(frozen=True, eq=False, repr=False)
class Inspect(WritesDocument):
    """Say what a checkpoint holds, and name what is missing or does not fit.

    mosstalk checkpoint inspect MOSS-Speech

    Of a folder that mosstalk build made: what it was checked on, and whether
    its kernels serve here.

    Exit code 1: it has problems. 2: it is no checkpoint at all.
    """

    folder: Path = argument(
        "A model folder, a codec folder, one that holds model/ and codec/, one that "
        "mosstalk build made; or pocket or synthetic.",
        metavar="DIR",
        autocompletion=opt.offered_models,
    )
    hashes: bool | None = option(
        None, "Read every byte for SHA-256 sums. Default: yes, but of a built folder no."
    )

    def run(self) -> int:
        """Print what the folder holds; 1 when something is wrong with it.

        Raises:
            CheckpointError: it is a built folder of another version.
        """
        from mosstalk.prepared.folder import ENGINE_FILE
        from mosstalk.progress import progress_bar

        with self.printing(), progress_bar() as tell:
            if (self.folder / ENGINE_FILE).exists():
                document, text, problems = self._built(tell)
            else:
                document, text, problems = self._checkpoint(tell)
        self.deliver(document, text)
        return int(problems)

    def _checkpoint(self, tell: "Progress") -> "Found":
        from mosstalk.checkpoints.inspect import inspect, text_of
        from mosstalk.prepared.default_models import NAMES, chosen_model

        folder = self.folder
        if str(folder) in NAMES and not folder.exists():
            folder = chosen_model(folder, None)[0].parent
        reports = inspect(folder, hashes=self.hashes is not False, progress=tell)
        document = [report.as_dict() for report in reports]
        problems = any(report.problems for report in reports)
        return document, "".join(map(text_of, reports)), problems

    def _built(self, tell: "Progress") -> "Found":
        from mosstalk.build.report import document_of, lines_of, report_of
        from mosstalk.prepared.folder import BuiltEngine

        engine = BuiltEngine.read(self.folder)
        report = report_of(engine, hashes=bool(self.hashes), tell=tell)
        lines = (f"  {name:<18} {value}" if name else value for name, value in lines_of(report))
        return document_of(report), "\n".join(lines) + "\n", bool(report.problems)


@dataclass(frozen=True, eq=False, repr=False)
class Convert:
    """Write a checkpoint in one dtype, matrices fused, with a manifest of hashes.

    mosstalk checkpoint convert MOSS-Speech converted --dtype bf16

    The language model's q, k, v and gate, up become one matrix each; the
    codec's .pt files become safetensors beside configs that say their sizes.
    One shard is in memory at a time. Killed, it goes on where it stopped.
    """

    folder: Path = argument(
        "A model folder, a codec folder, or one that holds model/ and codec/.", metavar="DIR"
    )
    out: Path = argument("A new folder for the converted checkpoint.", metavar="OUT")
    dtype: str = option(
        "bf16",
        "bf16, fp16 or fp32, of the language model; the codec keeps its own.",
        autocompletion=opt.offered("bf16", "fp16", "fp32"),
    )
    shard_gib: float = option(2.0, "Largest file written, in GiB; memory taken grows with it.")

    def run(self) -> None:
        """Write it, and print what was done."""
        from mosstalk.checkpoints.convert import run_convert

        run_convert(self.folder, self.out, self.dtype, self.shard_gib)


app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)
add_command(app, "synthesize", Synthesize)
add_command(app, "inspect", Inspect)
add_command(app, "convert", Convert)
add_command(app, "quantize", Quantize)
