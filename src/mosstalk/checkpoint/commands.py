"""``mosstalk checkpoint convert``: progress, and what there is to say."""

import time
from pathlib import Path

import torch

from mosstalk.checkpoint.convert import Converted, convert
from mosstalk.errors import CheckpointError, OptionError
from mosstalk.progress import progress_bar

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run_convert(source: Path, out: Path, dtype: str, shard_gib: float) -> None:
    """Convert a checkpoint and print what was done."""
    if dtype not in DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    if shard_gib <= 0:
        raise OptionError(f"--shard-gib must be above 0, not {shard_gib}")
    if not (source / "config.json").exists() and (source / "model" / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        for part in ("model", "codec"):
            if (source / part).is_dir():
                _convert_one(source / part, out / part, DTYPES[dtype], shard_gib)
        return
    _convert_one(source, out, DTYPES[dtype], shard_gib)


def _convert_one(source: Path, out: Path, dtype: torch.dtype, shard_gib: float) -> None:
    started = time.perf_counter()
    with progress_bar() as tell:
        result = convert(source, out, dtype, tell, shard_gib)
    _print_converted(source, result, time.perf_counter() - started)


def _print_converted(source: Path, result: Converted, seconds: float) -> None:
    rate = result.written / 2**30 / seconds
    resumed = f", {result.resumed} files kept from a run that was stopped" if result.resumed else ""
    print(
        f"{source} -> {result.out}: {result.tensors} tensors accounted for once each, "
        f"{result.written / 2**30:.2f} GiB in {seconds:.1f} s ({rate:.2f} GiB/s){resumed}"
    )
    print(
        f"  largest anonymous memory {result.peak_anonymous_bytes / 2**20:.0f} MiB "
        "(mapped files apart); no value overflowed"
    )
