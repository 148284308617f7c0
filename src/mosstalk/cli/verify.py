"""``mosstalk verify``: golden cases, each tensor's error beside its bound."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import argument, option
from mosstalk.verify import ComputePath


@dataclass(frozen=True, eq=False, repr=False)
class Verify(WritesDocument):
    """Run golden cases and print each tensor's largest error beside its bound.

    mosstalk verify tests/goldens/* --device cuda

    Float32 bounds: 2e-4 + 1e-5 of the largest expected magnitude; waves
    1e-3; ids exactly. In bfloat16 and float16 the relative norm of the
    error is judged, ids are only compared.

    Cases recorded from a real checkpoint hold no weights: they are read from
    the folder that the case names, or from --weights.

    --path fast runs language-model cases through the engine, each run alone
    and all of them in one batch, and codec cases through what serves people:
    replies that join and leave a batch, sound as it arrives.

    The document of --json has every comparison.

    Exit code 1: something is out of bounds. 2: a folder cannot be read.
    """

    folders: list[Path] = argument("Folders that hold a case.json.", metavar="DIR...")
    device: opt.Device = "cpu"
    dtype: str = option(
        "float32", f"Compute in {opt.DTYPES_HELP}.", autocompletion=opt.offered(*opt.DTYPES)
    )
    weights: Path | None = option(
        None,
        "Read every case's weights from this folder: a model's, a codec's, or one that "
        "holds model/ and codec/. Default: where the case has or names them.",
    )
    path: ComputePath = option(
        ComputePath.REFERENCE,
        "Which way of computing: the plain reference, or the engine that serves.",
    )

    def run(self) -> int:
        """Judge every case; the exit code."""
        from mosstalk.runtime.device import pick_device, pick_dtype
        from mosstalk.verify.run import judge_cases

        with self.printing():
            where = pick_device(self.device), pick_dtype(self.dtype)
            verdict = judge_cases(self.folders, *where, self.weights, path=self.path)
        self.deliver(verdict.as_dict())
        return verdict.exit_code
