"""``mosstalk verify``."""

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported


def verify(
    folders: opt.CaseFolders,
    device: opt.Device = "cpu",
    dtype: opt.CaseDtype = "float32",
) -> None:
    """Run golden cases and print each tensor's largest error beside its bound.

    mosstalk verify tests/goldens/* --device cuda

    Float32 bounds: 2e-4 + 1e-5 of the largest expected magnitude; waves
    1e-3; ids exactly. In bfloat16 and float16 the relative norm of the
    error is judged, ids are only compared.

    Exit code 1: something is out of bounds. 2: a folder cannot be read.
    """
    with reported():
        from mosstalk.device import pick_device, pick_dtype
        from mosstalk.verify.run import run_cases

        code = run_cases(folders, pick_device(device), pick_dtype(dtype))
        raise typer.Exit(code)
