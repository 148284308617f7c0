"""How far logits lie from those of float32: the engine's, and plain torch's in the same precision.

All get the same rows and the same weights, of which the float32 reference has an exact copy, taken
before they are quantised.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.models.language_model import LanguageModel, Logits
from mosstalk.reporting.tables import Table
from mosstalk.synthesis.weights import random_rows

_ONE_BY_ONE = 16
"""Rows at the end that the engine reads one by one, as it does when it replies."""


@dataclass(frozen=True)
class Reference:
    """``rows`` of a conversation, their logits in float32, and plain torch's in ``kind``."""

    rows: list[Row]
    truth: Logits
    plain: Logits
    kind: str


@torch.inference_mode()
def reference_of(model: LanguageModel, ids: SpecialIds, rows: int) -> Reference:
    """Before the model's weights are packed or quantised."""
    given = random_rows(model, ids, Mode.AUDIO, 1, rows)[0]
    truth = _plain(copy.deepcopy(model).float(), given)
    return Reference(given, truth, _plain(model, given), str(model.dtype).removeprefix("torch."))


@torch.inference_mode()
def error_table(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, against: Reference, kind: str
) -> tuple[Table, list[dict[str, float | str]]]:
    """A row for each head and way of computing; the model is in ``kind`` by now."""
    ways = {f"plain torch, {against.kind}": against.plain}
    if kind != against.kind:
        ways[f"plain torch, {kind}"] = _plain(model, against.rows)
    ways[f"the engine, {kind}"] = _engine(model, ids, options, against.rows)
    figures = [
        _errors(getattr(logits, head), getattr(against.truth, head)) | {"head": head, "by": by}
        for head in Logits._fields
        for by, logits in ways.items()
    ]
    cells = tuple(
        (
            f"{row['head']} head, {row['by']}",
            f"{row['rms']:.2e}",
            f"{row['max']:.3f}",
            f"{100 * float(row['top1']):.1f}",
        )
        for row in figures
    )
    note = (
        f"{len(against.rows)} rows, the last {_ONE_BY_ONE} of them read one by one by the engine. "
        "rms: of the error over that of the float32 logits about their mean; max: largest error; "
        "top-1: share of rows whose largest logit is float32's."
    )
    table = Table("Logits against float32", note, ("", "rms", "max", "top-1 %"), cells)
    return table, figures


def _plain(model: LanguageModel, rows: list[Row]) -> Logits:
    logits = model(torch.tensor([rows], device=model.device), model.new_cache())
    return Logits(*(part[0].float() for part in logits))


def _engine(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, rows: list[Row]
) -> Logits:
    core = EngineCore(model, ids, options)
    alone = min(_ONE_BY_ONE, len(rows) - 1)
    sequence = core.open(rows[: len(rows) - alone])
    assert sequence.make_room(len(rows))
    found = [_kept(core.runner.logits(sequence))]
    for row in rows[len(rows) - alone :]:
        sequence.rows.append(row)
        found.append(_kept(core.runner.logits(sequence)))
    core.close(sequence)
    return Logits(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _kept(logits: Logits) -> Logits:
    """A copy: what is computed next may lie in the same place."""
    return Logits(logits.text.clone(), logits.audio.clone())


def _errors(found: Tensor, truth: Tensor) -> dict[str, float | str]:
    apart = found - truth
    centred = truth - truth.mean(dim=1, keepdim=True)
    agree = found.argmax(dim=1) == truth.argmax(dim=1)
    return {
        "rms": float(apart.square().mean().sqrt() / centred.square().mean().sqrt()),
        "max": float(apart.abs().max()),
        "top1": float(agree.float().mean()),
    }
