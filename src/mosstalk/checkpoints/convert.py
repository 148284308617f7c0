"""``mosstalk checkpoint convert``: one dtype, fused matrices, a manifest with hashes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosstalk.checkpoints.restartable import (
    INDEX,
    MANIFEST,
    RestartableFolder,
    require_space,
    restartable,
    save_tensors,
    sha256,
)
from mosstalk.config import LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.errors import CheckpointError, OptionError, OutputError
from mosstalk.files import read_json
from mosstalk.models.checkpoint import model_shapes
from mosstalk.models.codec_folder import (
    FLOW_BLOCK_CODES,
    STREAMING_FLOW,
    read_flow_config,
    read_hift_config,
)
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import FUSED, LAYOUT_KEY, FusedTensor, fused_tensors
from mosstalk.models.quantization import KEY as QUANTIZATION_KEY
from mosstalk.models.weights import (
    Store,
    check_inventory,
    fold_weight_norm,
    in_shards,
    open_pickled,
    open_sharded,
    shapes_of,
    shard_name,
)
from mosstalk.progress import Progress, no_progress, progress_bar

SHARD_GIB = 2.0
"""Largest shard written; with the tensors being read it bounds the memory conversion takes."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Converted:
    """What a conversion did, for its report."""

    out: Path
    tensors: int = 0
    written: int = 0
    resumed: int = 0
    peak_anonymous_bytes: int = 0


def convert(
    source: Path,
    out: Path,
    dtype: torch.dtype,
    tell: Progress = no_progress,
    shard_gib: float = SHARD_GIB,
) -> Converted:
    """Convert a model folder or a codec folder; see ``convert_model`` and ``convert_codec``."""
    values = read_json(source / "config.json")
    if LAYOUT_KEY in values:
        raise CheckpointError(f"{source}: is converted already; convert the published checkpoint")
    if QUANTIZATION_KEY in values:
        raise CheckpointError(
            f"{source}: is quantised; convert the checkpoint that it was made of, then quantise"
        )
    if "quantize_position" in values:
        return convert_codec(source, out, tell)
    return convert_model(source, out, dtype, tell, shard_gib)


def convert_model(
    source: Path,
    out: Path,
    dtype: torch.dtype,
    tell: Progress = no_progress,
    shard_gib: float = SHARD_GIB,
) -> Converted:
    """Write the language model in ``dtype`` with q, k, v and gate, up fused.

    All tensors are accounted for once each. One shard is in memory at a time. Killed, it
    goes on where it stopped; the bytes written do not depend on that.

    Raises:
        CheckpointError: the source is incomplete or damaged, changes meanwhile, or has
            values that overflow ``dtype`` (their number is told).
        OutputError: ``out`` exists, or the disk cannot take it.
    """
    config = LanguageModelConfig.from_folder(source)
    store, shapes = open_sharded(source), model_shapes(config)
    check_inventory(shapes, store, str(source))
    total = sum(map(prod, shapes.values())) * dtype.itemsize
    require_space(out, total)
    result, files = Converted(out, tensors=len(shapes)), _files_of(source)

    def bytes_of(tensor: FusedTensor) -> int:
        return sum(prod(shapes[name]) for name in tensor.sources) * dtype.itemsize

    shards = list(in_shards(fused_tensors(config), bytes_of, int(shard_gib * 2**30)))
    recipe = {"kind": "model", "dtype": _name(dtype), "layout": FUSED, "shard_gib": shard_gib}
    with restartable(out, files, recipe) as folder:
        result.resumed = len(folder.notes)
        weight_map = dict[str, str]()
        for number, shard in enumerate(shards, 1):
            name = shard_name(number, len(shards))
            weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
            told = partial(tell, f"shard {number} of {len(shards)}")
            folder.write(name, partial(_write_shard, shard, store, dtype, result, told))
        _refuse_overflow(folder, dtype)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        folder.write_json(INDEX, lambda: index)
        _write_model_config(folder, source, dtype)
        _write_manifest(folder, source, files, recipe | {"tensors": len(shapes)}, tell)
    result.written = _bytes_in(_files_of(out))
    return result


def _write_shard(
    shard: list[FusedTensor],
    store: Store,
    dtype: torch.dtype,
    result: Converted,
    told: Callable[[int, int], None],
    path: Path,
) -> dict[str, Any]:
    """Read, convert, fuse and save a shard; note how many values overflowed where."""
    fused, overflowed = dict[str, Tensor](), dict[str, int]()
    for done, tensor in enumerate(shard):
        told(done, len(shard))
        parts = [_read(store, name, dtype, overflowed) for name in tensor.sources]
        fused[tensor.name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        del parts
        result.peak_anonymous_bytes = max(result.peak_anonymous_bytes, anonymous_bytes())
    save_tensors(fused, path)
    return {"overflowed": overflowed}


def _read(store: Store, name: str, dtype: torch.dtype, overflowed: dict[str, int]) -> Tensor:
    value = store[name].load()
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{store[name].where}: {name} holds NaN or infinity")
    converted = value.to(dtype)
    lost = int((~torch.isfinite(converted)).sum())
    if lost:
        overflowed[name] = lost
    return converted


def _refuse_overflow(folder: RestartableFolder, dtype: torch.dtype) -> None:
    lost = {
        name: count
        for note in folder.notes.values()
        for name, count in note.get("overflowed", {}).items()
    }
    if lost:
        first = max(lost, key=lambda name: lost[name])
        raise CheckpointError(
            f"{sum(lost.values())} values in {len(lost)} tensors overflow {_name(dtype)} "
            f"(most in {first}: {lost[first]}); convert to bf16 or fp32"
        )


def _write_model_config(folder: RestartableFolder, source: Path, dtype: torch.dtype) -> None:
    values = read_json(source / "config.json") | {LAYOUT_KEY: FUSED, "torch_dtype": _name(dtype)}
    values.pop("dtype", None)
    folder.write_json("config.json", lambda: values)
    for path in sorted(source.glob("*.json")):
        if path.name not in ("config.json", INDEX, MANIFEST):
            folder.copy(path.name, path)


def convert_codec(source: Path, out: Path, tell: Progress = no_progress) -> Converted:
    """Write the codec with every ``.pt`` as safetensors beside configs that say its sizes.

    Tensors keep their names, values and precision; everything else is copied, but for
    ``flow/config.yaml``, which nothing may ever evaluate.

    Raises:
        CheckpointError, OutputError: as for ``convert_model``.
    """
    SpeechTokenizerConfig.from_folder(source)
    files = _files_of(source)
    require_space(out, _bytes_in(files))
    result = Converted(out)
    recipe = {"kind": "codec", "layout": "codec-1"}
    with restartable(out, files, recipe) as folder:
        result.resumed = len(folder.notes)
        for place, path in enumerate(files):
            name = path.relative_to(source).as_posix()
            tell(f"codec: {name}", place, len(files))
            if path.suffix == ".pt":
                store = _checked_part(source, path)
                result.tensors += len(store)
                folder.write(name.removesuffix(".pt") + ".safetensors", partial(_save, store))
            elif name not in ("flow/config.json", "flow/hift.json", "flow/config.yaml", MANIFEST):
                folder.copy(name, path)
            result.peak_anonymous_bytes = max(result.peak_anonymous_bytes, anonymous_bytes())
        flow, hift = read_flow_config(source, STREAMING_FLOW), read_hift_config(source)
        folder.write_json("flow/config.json", flow.to_dict)
        folder.write_json("flow/hift.json", hift.to_dict)
        _write_manifest(folder, source, files, recipe, tell)
    result.written = _bytes_in(_files_of(out))
    return result


def _checked_part(source: Path, path: Path) -> Store:
    """The tensors of a codec part, after comparing them with the part's config."""
    store, stem = open_pickled(path), path.stem
    with torch.device("meta"):
        if stem in FLOW_BLOCK_CODES:
            check_inventory(
                shapes_of(FlowDecoder(read_flow_config(source, stem))), store, str(path)
            )
        elif stem == "hift":
            vocoder = shapes_of(HiftVocoder(read_hift_config(source)))
            check_inventory(vocoder, fold_weight_norm(store), str(path))
        else:
            raise CheckpointError(f"{path}: is none of the codec's parts; move it elsewhere")
    return store


def _save(store: Store, path: Path) -> None:
    save_tensors({name: stored.load().contiguous() for name, stored in store.items()}, path)


def _write_manifest(
    folder: RestartableFolder,
    source: Path,
    files: list[Path],
    recipe: dict[str, Any],
    tell: Progress,
) -> None:
    """Say what was made of what: the same sources give the same bytes, so no dates in it."""
    from mosstalk import __version__

    def manifest() -> dict[str, Any]:
        return recipe | {
            "converted_by": f"mosstalk {__version__}",
            "sources": {
                path.relative_to(source).as_posix(): {
                    "bytes": path.stat().st_size,
                    "sha256": sha256(path, tell),
                }
                for path in files
            },
            "files": {
                name: {"sha256": sha256(folder.part / name, tell)} for name in sorted(folder.notes)
            },
        }

    folder.write_json(MANIFEST, manifest)


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _bytes_in(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process, mapped files apart; 0 where not told."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), "RssAnon: 0")
    return int(line.split()[1]) * 1024


def run_convert(source: Path, out: Path, dtype: str, shard_gib: float) -> None:
    """Convert a checkpoint and print what was done."""
    if dtype not in DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    if shard_gib <= 0:
        raise OptionError(f"--shard-gib must be above 0, not {shard_gib}")
    if not (source / "config.json").exists() and (source / "model" / "config.json").exists():
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{out}: cannot be made ({error.strerror or error})") from None
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
