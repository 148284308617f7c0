"""What a built folder is like here and now: its files, and whether its kernels serve."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mosstalk.checkpoints.inspect import inspect
from mosstalk.checkpoints.restartable import sha256
from mosstalk.config import LanguageModelConfig
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.errors import CheckpointError
from mosstalk.prepared.default_models import CODEC, ENGINE_FILE, MODEL, BuiltEngine
from mosstalk.prepared.machine import foreign, machine_of
from mosstalk.prepared.start import Kernels, kernels_in
from mosstalk.prepared.tiles import TILES_FILE, describe, tiles_for
from mosstalk.progress import Progress
from mosstalk.runtime.device import pick_device

_SOUND = {"cuda": "float16", "cpu": "float32"}
_KERNELS = {
    "attention": "kernels over blocks, scores never in memory: splits of keys for single rows, "
    "tiles of rows for prompts",
    "mlp": "fused: norm, gate, up and their activation in one kernel",
}
_HEARD = "speech tokenizer"
_GIB = 2**30


def architecture(config: LanguageModelConfig) -> dict[str, Any]:
    """Sizes of the language model, for people who know other engines."""
    return {
        "shared_layers": config.num_shared_layers,
        "text_layers": config.num_modality_layers,
        "audio_layers": config.num_modality_layers,
        "kv_layers": config.num_kv_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "text_ids": config.vocab_size,
        "audio_ids": config.audio_vocab_size,
        "context_rows": config.max_position_embeddings,
    }


def dtypes(folder: Path, device: torch.device) -> dict[str, str]:
    """Of every part of the model as stored, and of the codec as it is going to be run there."""
    found = dict[str, str]()
    for report in inspect(folder / MODEL, hashes=False):
        found |= {name: ", ".join(sorted(group.dtypes)) for name, group in report.groups.items()}
    for report in inspect(folder / CODEC, hashes=False):
        if _HEARD in report.groups:
            found[_HEARD] = "float32"
    return found | dict.fromkeys(("flow", "vocoder"), _SOUND[device.type])


def engine_facts(*, fast: bool) -> dict[str, str]:
    """What the engine does, in the words of other engines; ``fast``: by its kernels."""
    rows = EngineOptions.block_rows
    return {
        "kv": f"paged, always: blocks of {rows} rows in one pool for all layers, shared where "
        "rows begin alike",
        "input": "packed, always: rows of all conversations side by side, without padding",
        "attention": _KERNELS["attention"] if fast else "torch, over the blocks of each stretch",
        "mlp": _KERNELS["mlp"] if fast else "torch, one product after the other",
        "modes": "each conversation's own, in one batch; blocks and draws that no row needs wait",
    }


@dataclass(frozen=True)
class BuiltReport:
    """``foreign``: what of the machine is not as at the build; ``problems``: what is wrong."""

    engine: BuiltEngine
    kernels: Kernels
    foreign: list[str]
    problems: list[str]


def report_of(engine: BuiltEngine, *, hashes: bool, tell: Progress) -> BuiltReport:
    """Look at a built folder; ``hashes``: read every byte of model and codec."""
    here = machine_of(pick_device("auto"), str(engine.values["weights"]))
    kernels = kernels_in(engine.cache)
    strange = foreign(engine.values["machine"], here)
    if engine.values["kernels"]["count"] > kernels.count:
        lost = engine.values["kernels"]["count"] - kernels.count
        strange.append(f"{lost} compiled kernels are gone from {engine.cache.name}/")
    problems = _problems(engine, hashes=hashes, tell=tell) + _tile_problems(engine, here)
    return BuiltReport(engine, kernels, strange, problems)


def _tile_problems(engine: BuiltEngine, here: Mapping[str, Any]) -> list[str]:
    path = engine.folder / TILES_FILE
    if engine.values.get("tiles") and not path.is_file():
        return [f"{TILES_FILE} is missing: the package's tiles are used; build it again"]
    try:
        tiles_for(path, here)
    except CheckpointError as error:
        return [str(error)]
    return []


def _problems(engine: BuiltEngine, *, hashes: bool, tell: Progress) -> list[str]:
    found = []
    for part in (MODEL, CODEC):
        for name, digest in engine.values["files"][part].items():
            path = engine.folder / part / name
            if not path.is_file():
                found.append(f"{part}/{name} is missing: build it again")
            elif hashes and sha256(path, tell) != digest:
                found.append(
                    f"{part}/{name} is not the file that {ENGINE_FILE} was made of: build it again"
                )
    return found


def document_of(report: BuiltReport) -> dict[str, Any]:
    """What a built folder is, as json values."""
    values = {name: value for name, value in report.engine.values.items() if name != "files"}
    return values | {
        "folder": str(report.engine.folder),
        "kernels_now": vars(report.kernels),
        "foreign": report.foreign,
        "problems": report.problems,
    }


def lines_of(report: BuiltReport) -> list[tuple[str, str]]:
    """What a built folder is, for people: names and values; a line without a name is a title."""
    values = report.engine.values
    sizes, machine, settings = values["architecture"], values["machine"], values["settings"]
    layers = (
        f"{sizes['shared_layers']} shared + {sizes['text_layers']} text + "
        f"{sizes['audio_layers']} audio = {sizes['kv_layers']} KV layers"
    )
    heads = f"{sizes['query_heads']} of queries, {sizes['kv_heads']} of keys and values"
    on = machine["card"] or machine["device"]
    versions = f"torch {machine['torch']}, triton {machine['triton'] or '-'}"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [
        ("", f"{report.engine.folder}: {values['precision']}, {values['weights']} weights"),
        ("layers", layers),
        (
            "sizes",
            f"hidden {sizes['hidden_size']}, MLP {sizes['intermediate_size']}, heads {heads}",
        ),
        ("ids", f"{sizes['text_ids']} text, {sizes['audio_ids']} audio"),
        *values["dtypes"].items(),
        *values["engine"].items(),
        ("built for", f"{settings['max_sessions']} sessions, {settings['max_rows']} rows each"),
        ("text embeddings", f"in the {settings.get('embeddings', 'device')}'s memory"),
        ("plan", _plan_line(values["plan"])),
        ("verified on", f"{on}, {values['checked_in']}, {values['built']}, {versions}{driver}"),
        *((f"  {check['name']}", _check_line(check)) for check in values["checks"]),
        ("kernels", f"{report.kernels.count}, {report.kernels.bytes / 2**20:.1f} MiB"),
        ("tiles", describe(values.get("tiles"))),
    ]
    lines += [("foreign", f"{line}; what is compiled anew is kept") for line in report.foreign]
    lines += [("PROBLEM", line) for line in report.problems]
    return [
        *lines,
        ("", "  sound" if not report.problems else f"  {len(report.problems)} problems"),
    ]


def _plan_line(plan: dict[str, Any]) -> str:
    fits = "" if plan["rows"] is None else f", {plan['rows']:,} rows fit on that card"
    return f"{plan['needed_bytes'] / _GIB:.2f} GiB on a GPU{fits}"


def _check_line(check: dict[str, Any]) -> str:
    verdict = "" if check["passed"] else " FAILED"
    return f"{check['error']:.2e}, at most {check['bound']:.2e} {check['note']}{verdict}"
