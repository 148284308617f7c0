"""Rows, modes and logits of greedy runs: what ``record_reference.py`` keeps of ``generate``."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from reference_codec import Recording


@contextmanager
def head_logits(model: Any) -> Iterator[dict[str, list[Any]]]:
    """Collect the last position's raw logits (ids,) of both heads at every call."""
    found: dict[str, list[Any]] = {"text": [], "audio": []}

    def keep(kind: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            found[kind].append(output.detach().flatten(0, -2)[-1].float().cpu())

        return hook

    with ExitStack() as hooks:
        for kind in found:
            head = getattr(model, f"{kind}_lm_head", None)
            if head is not None:
                hooks.callback(head.register_forward_hook(keep(kind)).remove)
        yield found


def new_rows(torch: Any, output: Any, prompt: Any) -> Any:
    """Generated rows (N, 2) alone, whether or not ``output`` begins with the prompt."""
    rows, length = output[0].cpu(), len(prompt)
    if len(rows) >= length and torch.equal(rows[:length], prompt):
        rows = rows[length:]
    return rows


def modes_of(prompt: Any, rows: Any, config: Any) -> list[int]:
    """Mode in which each row was drawn: 0 text, 1 audio."""
    pad, sosp, eosp = (
        int(getattr(config, f"{name}_token_id")) for name in ("modality_pad", "sosp", "eosp")
    )
    audio_pad = getattr(config, "audio_pad_token_id", None)
    text, audio = map(int, prompt[-1])
    mode = int(text == pad and audio != (512 if audio_pad is None else int(audio_pad)))
    modes = []
    for row in [(text, audio), *(tuple(map(int, row)) for row in rows[:-1])]:
        mode = 1 if row[0] == sosp else mode
        mode = 0 if mode and row[1] == eosp else mode
        modes.append(mode)
    return modes


def add_run(case: Recording, reference: Any, stem: str, prompt: Any, output: Any) -> None:
    """Rows, modes and the settings of one run; ``stem`` is its prompt and name."""
    rows = new_rows(reference.torch, output, prompt)
    modes = modes_of(prompt, rows, reference.model.config)
    pad = int(reference.model.config.modality_pad_token_id)
    if any(mode and int(row[0]) != pad for mode, row in zip(modes, rows, strict=True)):
        case.notes.append(f"{stem}: a row in audio mode is not modality_pad: modes are doubtful")
    case.tensors[f"{stem}.rows"] = rows.long()
    case.tensors[f"{stem}.modes"] = reference.torch.tensor(modes)
    name, run = stem.split(".")
    stopped = len(rows) > 0 and int(rows[-1][0]) in reference.stop_ids
    case.settings["runs"].append(
        {
            "prompt": name,
            "run": run,
            "finish_reason": "stop" if stopped else "length",
            "steps": len(rows),
            "transitions": sum(a != b for a, b in itertools.pairwise(modes)),
        }
    )


def add_logits(
    case: Recording, torch: Any, stem: str, logits: dict[str, list[Any]], limit: int
) -> None:
    """Raw logits (steps, ids) of both heads for the first ``limit`` rows of a run."""
    rows = len(case.tensors[f"{stem}.rows"])
    calls = {kind: len(steps) for kind, steps in logits.items()}
    if min(calls.values()) < rows:
        case.notes.append(f"{stem}: {calls} calls of the heads for {rows} rows: no logits kept")
        return
    for kind, steps in logits.items():
        # A prompt read in pieces calls the heads before the first row: steps count from the end.
        first = len(steps) - rows
        case.tensors[f"{stem}.{kind}_logits"] = torch.stack(steps[first : first + limit])
