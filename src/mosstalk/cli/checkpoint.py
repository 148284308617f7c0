"""``mosstalk checkpoint``: commands that read and write checkpoint folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.checkpoint_quantize import Quantize
from mosstalk.cli.command import add_command


@dataclass(frozen=True, eq=False, repr=False)
class Synthesize:
    """Write random weights in the published layout: model, codec, voice and tokenizer.

    mosstalk checkpoint synthesize random --size tiny,hidden_size=256

    What such a model says is noise. It serves to measure speed, memory and
    exactness on real shapes. A full one takes 20 GiB, codec included.
    """

    out: opt.NewFolder
    size: opt.Size = None
    seed: opt.WeightsSeed = 0
    dtype: opt.WeightsDtype = "bfloat16"
    tokenizer: opt.TokenizerFile = None

    def run(self) -> None:
        """Write it, and print what it is."""
        from mosstalk.synthesis.write import run_synthesize

        run_synthesize(self.out, self.size or ["tiny"], self.seed, self.dtype, self.tokenizer)


@dataclass(frozen=True, eq=False, repr=False)
class Inspect:
    """Say what a checkpoint holds, and name what is missing or does not fit.

    mosstalk checkpoint inspect MOSS-Speech

    Of a folder that mosstalk build made: what it was checked on, and whether
    its kernels serve here.

    Exit code 1: it has problems. 2: it is no checkpoint at all.
    """

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A model folder, a codec folder, one that holds model/ and codec/, one that "
            "mosstalk build made; or pocket or synthetic.",
        ),
    ]
    hashes: Annotated[
        bool | None,
        typer.Option(
            "--hashes/--no-hashes",
            help="Read every byte for SHA-256 sums. Default: yes, but of a built folder no.",
        ),
    ] = None
    json: opt.AsJson = False

    def run(self) -> int:
        """Print what the folder holds; 1 when something is wrong with it."""
        from mosstalk.prepared.default_models import NAMES, chosen_model
        from mosstalk.prepared.folder import ENGINE_FILE

        if (self.folder / ENGINE_FILE).exists():
            return self._inspect_built()
        from mosstalk.checkpoints.inspect import run_inspect

        folder = self.folder
        if str(folder) in NAMES and not folder.exists():
            model, _ = chosen_model(folder, None)
            folder = model.parent
        return run_inspect(folder, hashes=self.hashes is not False, as_json=self.json)

    def _inspect_built(self) -> int:
        """Print what a built folder is.

        Raises:
            CheckpointError: it is of another version.
        """
        from mosstalk.build.report import document_of, lines_of, report_of
        from mosstalk.files import as_text
        from mosstalk.prepared.folder import BuiltEngine
        from mosstalk.progress import progress_bar

        with progress_bar() as tell:
            engine = BuiltEngine.read(self.folder)
            report = report_of(engine, hashes=bool(self.hashes), tell=tell)
        if self.json:
            print(as_text(document_of(report)), end="")
        else:
            for name, value in lines_of(report):
                print(f"  {name:<18} {value}" if name else value)
        return 1 if report.problems else 0


@dataclass(frozen=True, eq=False, repr=False)
class Convert:
    """Write a checkpoint in one dtype, matrices fused, with a manifest of hashes.

    mosstalk checkpoint convert MOSS-Speech converted --dtype bf16

    The language model's q, k, v and gate, up become one matrix each; the
    codec's .pt files become safetensors beside configs that say their sizes.
    One shard is in memory at a time. Killed, it goes on where it stopped.
    """

    folder: opt.CheckpointFolder
    out: opt.ConvertedFolder
    dtype: opt.ConvertDtype = "bf16"
    shard_gib: opt.ShardGib = 2.0

    def run(self) -> None:
        """Write it, and print what was done."""
        from mosstalk.checkpoints.convert import run_convert

        run_convert(self.folder, self.out, self.dtype, self.shard_gib)


app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)
add_command(app, "synthesize", Synthesize)
add_command(app, "inspect", Inspect)
add_command(app, "convert", Convert)
add_command(app, "quantize", Quantize)
