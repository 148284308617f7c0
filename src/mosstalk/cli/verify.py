"""``mosstalk verify``."""

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported
from mosstalk.verify.paths import ComputePath


def verify(
    folders: opt.CaseFolders,
    device: opt.Device = "cpu",
    dtype: opt.CaseDtype = "float32",
    weights: opt.CaseWeights = None,
    path: opt.VerifiedPath = ComputePath.REFERENCE,
    json: opt.AsJson = False,
) -> None:
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
    with reported():
        from mosstalk.files import as_text, human_text_on_stderr
        from mosstalk.runtime.device import pick_device, pick_dtype
        from mosstalk.verify.run import judge_cases

        with human_text_on_stderr(json):
            where = pick_device(device), pick_dtype(dtype)
            verdict = judge_cases(folders, *where, weights, path=path)
        if json:
            typer.echo(as_text(verdict.as_dict()), nl=False)
        raise typer.Exit(verdict.exit_code)
