"""``mosstalk checkpoint inspect``: what a folder holds, and what is wrong with it, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosstalk.checkpoints.restartable import sha256
from mosstalk.config import WEIGHTS_KIND_KEY, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.errors import CheckpointError, MosstalkError
from mosstalk.files import read_json
from mosstalk.models.checkpoint import model_shapes, open_published
from mosstalk.models.codec_folder import (
    STREAMING_FLOW,
    flow_names,
    open_part,
    read_flow_config,
    read_hift_config,
)
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import LAYOUT_KEY
from mosstalk.models.quantization import KEY as QUANTIZATION_KEY
from mosstalk.models.quantization import Quantization, own_dtypes, wrong_dtypes
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import X_VECTOR_FILE, list_voices
from mosstalk.models.weights import (
    Store,
    fold_weight_norm,
    open_safetensors,
    open_sharded,
    shapes_of,
)
from mosstalk.progress import Progress, no_progress

REPORTS_FILE = "rank0.safetensors"
"""What the source reports' converter for TensorRT-LLM wrote."""
_SHOWN_HASH = 16
_PARTS = {
    "model.shared_block.": "shared block",
    "model.text_block.": "text block",
    "model.audio_block.": "audio block",
    "model.embed_tokens.": "text embedding",
    "model.audio_embed.": "audio embedding",
    "model.text_norm.": "final norms",
    "model.audio_norm.": "final norms",
    "text_lm_head.": "text head",
    "audio_lm_head.": "audio head",
}


@dataclass
class Group:
    """Tensors that belong together: how many, parameters, bytes, dtypes."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)

    def add(self, shape: tuple[int, ...], dtype: str) -> None:
        """Count one tensor."""
        elements = prod(shape)
        self.tensors += 1
        self.parameters += elements
        self.bytes += elements * getattr(torch, dtype).itemsize
        self.dtypes.add(dtype)


@dataclass
class CheckpointReport:
    """What was found in one folder; ``problems`` is empty for a sound checkpoint."""

    folder: Path
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> Group:
        """All groups together."""
        groups = self.groups.values()
        return Group(
            sum(group.tensors for group in groups),
            sum(group.parameters for group in groups),
            sum(group.bytes for group in groups),
            {dtype for group in groups for dtype in group.dtypes},
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as json values."""
        groups = {
            name: vars(group) | {"dtypes": sorted(group.dtypes)}
            for name, group in self.groups.items()
        }
        return vars(self) | {"folder": str(self.folder), "groups": groups}


def inspect(
    folder: Path, *, hashes: bool = True, tell: Progress = no_progress
) -> list[CheckpointReport]:
    """Look into a model or codec folder, or one that holds both as ``model`` and ``codec``.

    Raises:
        CheckpointError: the folder is no checkpoint of either kind.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    both = [
        folder / name for name in ("model", "codec") if (folder / name / "config.json").exists()
    ]
    if both and not (folder / "config.json").exists():
        return [report for part in both for report in inspect(part, hashes=hashes, tell=tell)]
    if (folder / REPORTS_FILE).exists():
        report = _inspect_reports(folder)
    elif "quantize_position" in read_json(folder / "config.json"):
        report = _inspect_codec(folder)
    else:
        report = _inspect_model(folder)
    _add_files(report, hashes, tell)
    return [report]


def _inspect_model(folder: Path) -> CheckpointReport:
    config = LanguageModelConfig.from_folder(folder)
    layout = config.extra.get(LAYOUT_KEY, "published")
    record = Quantization.of(config, str(folder / "config.json"))
    report = CheckpointReport(folder, "language model")
    report.facts = {
        "layers": f"{config.num_shared_layers} shared + {config.num_modality_layers} text + "
        f"{config.num_modality_layers} audio = {config.num_kv_layers} KV layers",
        "layout": layout,
        "quantization": record.describe() if record else "none",
        "weights": config.weights_kind,
        "hidden size": config.hidden_size,
        "context rows": config.max_position_embeddings,
        "other keys": {
            k: v for k, v in config.extra.items() if k not in (LAYOUT_KEY, QUANTIZATION_KEY)
        },
    }
    shapes = model_shapes(config)
    try:
        store = open_published(folder, config)
    except MosstalkError as error:
        report.problems.append(str(error))
        return report
    report.groups = _grouped(store, _model_part)
    report.problems += differences(shapes, store)
    report.problems += wrong_dtypes(store, own_dtypes(config, record))
    return report


def _model_part(name: str) -> str:
    return next((part for stem, part in _PARTS.items() if name.startswith(stem)), "unexpected")


def _grouped(store: Store, part_of: Callable[[str], str]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for name, stored in store.items():
        groups.setdefault(part_of(name), Group()).add(stored.shape, stored.dtype)
    return groups


def differences(
    expected: Mapping[str, tuple[int, ...]],
    store: Store,
    unused: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """Every tensor that is missing, unexpected or misshapen, one line each."""
    lines = [
        f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in store
    ]
    for name, stored in store.items():
        if name not in expected:
            if not unused(name):
                lines.append(f"unexpected: {name} {list(stored.shape)}")
        elif stored.shape != expected[name]:
            lines.append(
                f"misshapen: {name} is {list(stored.shape)}, must be {list(expected[name])}"
            )
    return lines


def _inspect_codec(folder: Path) -> CheckpointReport:
    report = CheckpointReport(folder, "codec")
    config = SpeechTokenizerConfig.from_folder(folder)
    x_vector = folder / "flow" / X_VECTOR_FILE
    report.facts = {
        "codes": config.quantize_vocab_size,
        "voices": list_voices(folder / "voices") or "none: make one with mosstalk voice create",
        "x-vector model": "there"
        if x_vector.exists()
        else f"flow/{X_VECTOR_FILE} is missing: voices cannot be made",
        "flows": flow_names(config),
        "weights": str(config.extra.get(WEIGHTS_KIND_KEY, "unlabelled")),
    }
    with torch.device("meta"):
        tokenizer = SpeechTokenizer(config)
        hift = HiftVocoder(read_hift_config(folder))
        flow = FlowDecoder(read_flow_config(folder, STREAMING_FLOW))
    _add_part(report, "speech tokenizer", tokenizer, lambda: open_sharded(folder), tokenizer.unused)
    for name in flow_names(config):
        _add_part(report, name, flow, partial(open_part, folder / "flow", name))
    _add_part(report, "hift", hift, lambda: open_part(folder / "flow", "hift"), fold=True)
    return report


def _add_part(
    report: CheckpointReport,
    name: str,
    module: nn.Module,
    open_store: Callable[[], Store],
    unused: Callable[[str], bool] = lambda _: False,
    *,
    fold: bool = False,
) -> None:
    try:
        store = open_store()
    except MosstalkError as error:
        report.problems.append(str(error))
        return
    report.groups |= _grouped(store, lambda _: name)
    found = differences(shapes_of(module), fold_weight_norm(store) if fold else store, unused)
    report.problems += [f"{name}: {line}" for line in found]


def _inspect_reports(folder: Path) -> CheckpointReport:
    """The source reports' TensorRT-LLM checkpoint, which cannot be run as it is."""
    store = open_safetensors(folder / REPORTS_FILE)
    report = CheckpointReport(folder, "TensorRT-LLM checkpoint of the source reports")
    report.groups = _grouped(store, lambda _: REPORTS_FILE)
    layers = {name.rpartition(".attention.")[0] for name in store if ".attention." in name}
    norms = [
        name
        for name in store
        if "q_norm" in name or "k_norm" in name or ("layernorm" in name and ".attention." in name)
    ]
    lost = 2 * len(layers) - len(norms)
    invented = sum(name.endswith("attention.qkv.bias") for name in store)
    report.facts = {"layers": len(layers), "invented zero QKV biases": invented}
    if lost > 0:
        report.problems.append(
            f"{lost} q/k norms are missing ({len(layers)} layers with one q_norm and one k_norm "
            "each): the converter that wrote this file dropped them, and without them every "
            "output is wrong. They cannot be restored from here: take the published safetensors "
            "and run: mosstalk checkpoint convert DIR OUT"
        )
    return report


def _add_files(report: CheckpointReport, hashes: bool, tell: Progress) -> None:
    for path in sorted(report.folder.rglob("*")):
        if path.is_file():
            facts: dict[str, Any] = {"bytes": path.stat().st_size}
            if hashes:
                facts["sha256"] = sha256(path, tell)
            report.files[path.relative_to(report.folder).as_posix()] = facts


def text_of(report: CheckpointReport) -> str:
    """What a checkpoint holds, for people."""
    lines = [f"{report.folder}: {report.kind}"]
    lines += [f"  {name:<18} {value}" for name, value in report.facts.items()]
    lines += [
        f"  {name:<18} {group.tensors:5} tensors {group.parameters:14,} parameters"
        f" {group.bytes / 2**20:10.1f} MiB  {', '.join(sorted(group.dtypes))}"
        for name, group in [*report.groups.items(), ("total", report.total)]
    ]
    lines += [
        f"  {name:<40} {facts['bytes']:14,} bytes  {str(facts.get('sha256', ''))[:_SHOWN_HASH]}"
        for name, facts in report.files.items()
    ]
    lines += [f"  PROBLEM {problem}" for problem in report.problems]
    lines.append(f"  {len(report.problems)} problems" if report.problems else "  sound")
    return "\n".join(lines) + "\n"
