"""What a report measures: golden cases, one scripted turn, and hashes of config files.

Apart from ``report`` because it needs every package that the main job needs, and a report is
wanted most where one of them is broken.
"""

from pathlib import Path
from typing import Any

import torch

from mosstalk.checkpoints.restartable import sha256
from mosstalk.config import LanguageModelConfig
from mosstalk.diagnostics.figures import answer_figures, model_facts
from mosstalk.diagnostics.report import SCRIPT, Wanted
from mosstalk.errors import ConfigError, MosstalkError
from mosstalk.offline.pipeline import Pipeline
from mosstalk.prepared.default_models import chosen_model
from mosstalk.reply_options import Script
from mosstalk.runtime.device import pick_device, pick_dtype
from mosstalk.verify.run import judge_cases

QUESTION = "hello"
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".txt", ".jinja")
_NO_CASES = "no golden cases were given and none are shipped: name folders with --cases"
_FAULTS = (MosstalkError, RuntimeError, MemoryError)


def measured(wanted: Wanted) -> dict[str, Any]:
    """Verdict, turn and config files as json values; faults are part of them.

    Raises:
        DeviceError: the device or dtype does not exist here.
    """
    device = pick_device(wanted.device)
    dtype = pick_dtype(wanted.dtype) if wanted.dtype else torch.float32
    document: dict[str, Any] = {"verify": _verdict(wanted.cases, device, dtype)}
    try:
        folders = chosen_model(wanted.model, wanted.codec)
    except MosstalkError as error:
        turn = {"error": _one_line(error), "weights": "unknown"}
        return document | {"turn": turn, "config_files": {}}
    roles = zip(("model", "codec"), folders, strict=True)
    return document | {
        "turn": _turn(folders, device, dtype),
        "config_files": {role: config_files(folder) for role, folder in roles},
    }


def _verdict(cases: tuple[Path, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    if not cases:
        return {"skipped": _NO_CASES}
    try:
        return judge_cases(cases, device, dtype, say=lambda _: None).as_dict()
    except _FAULTS as error:
        return {"error": _one_line(error)}


def _turn(folders: tuple[Path, Path], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Figures of one scripted answer to a word of our own; what it says is left out."""
    asked = {"script": f"{SCRIPT}: mode changes and length forced"}
    try:
        pipeline = Pipeline.load(*folders, device=device, dtype=dtype)
        chat = pipeline.chat()
        chat.read(QUESTION)
        answer = chat.answer(script=Script.parse(SCRIPT))
        hops = sum(1 for _ in answer)
    except _FAULTS as error:
        return asked | {"error": _one_line(error), "weights": _weights_kind(folders[0])}
    return asked | model_facts(pipeline) | {"sounds": hops} | answer_figures(answer)


def _weights_kind(folder: Path) -> str:
    try:
        return LanguageModelConfig.from_folder(folder).weights_kind
    except ConfigError:
        return "unknown"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def config_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every small readable file below a checkpoint folder; no weights."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _CONFIG_SUFFIXES
    }
