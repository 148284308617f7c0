"""``mosstalk verify``: golden cases, each tensor's error beside its bound."""

from dataclasses import dataclass

import typer

from mosstalk.cli import options as opt
from mosstalk.verify import ComputePath


@dataclass(frozen=True, eq=False, repr=False)
class Verify:
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

    With --json one document on stdout has every comparison; the text goes
    to stderr.

    Exit code 1: something is out of bounds. 2: a folder cannot be read.
    """

    folders: opt.CaseFolders
    device: opt.Device = "cpu"
    dtype: opt.CaseDtype = "float32"
    weights: opt.CaseWeights = None
    path: opt.VerifiedPath = ComputePath.REFERENCE
    json: opt.AsJson = False

    def run(self) -> int:
        """Judge every case; the exit code."""
        from mosstalk.files import as_text, human_text_on_stderr
        from mosstalk.runtime.device import pick_device, pick_dtype
        from mosstalk.verify.run import judge_cases

        with human_text_on_stderr(self.json):
            where = pick_device(self.device), pick_dtype(self.dtype)
            verdict = judge_cases(self.folders, *where, self.weights, path=self.path)
        if self.json:
            typer.echo(as_text(verdict.as_dict()), nl=False)
        return verdict.exit_code
