"""A start against what there is: what a folder was built for, and whether all of it fits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.engine.kv_store import bytes_per_row
from mosstalk.errors import DeviceError
from mosstalk.models.quantization import Quantization
from mosstalk.plan.fit import BLOCK_ROWS, Plan, Wish, advice, plan_of
from mosstalk.plan.sizes import Configs
from mosstalk.prepared.folder import built_engine
from mosstalk.prepared.start import configs_of
from mosstalk.server.ipc import WorkerOptions

_GIB = 2**30
_VOICES_S = 3.0
"""The shortest voices that are of use: what is refused before anything is read cannot fit."""
_SERVED = {
    "--precision fp8": "an FP8 checkpoint (mosstalk build --precision fp8)",
    "--voices-s": "a smaller --codec-memory",
}
"""A plan's settings by what a start has in their place."""


def as_built(
    options: WorkerOptions,
    sessions: int | None,
    rows: int | None,
    usual_sessions: int,
    embeddings: str | None = None,
) -> WorkerOptions:
    """``options`` with these; what is None is taken from a built folder.

    So is the decoder's memory on a GPU. Of another folder there are ``usual_sessions``, the
    longest conversation is the model's context, and embeddings are on the device.
    """
    built = built_engine(options.model)
    if built is None:
        return replace(
            options, sessions=sessions or usual_sessions, context_rows=rows,
            embeddings=embeddings or "device",
        )  # fmt: skip
    sound = options.sound
    if sound.memory_mib is None and (sessions or built.sessions) == built.sessions:
        sound = replace(sound, memory_mib=built.flow_memory_mib)
    return replace(
        options,
        sessions=sessions or built.sessions,
        context_rows=rows or built.rows,
        sound=sound,
        embeddings=embeddings or built.embeddings,
    )


def require_room(
    options: WorkerOptions,
    model: Path,
    codec: Path,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Refuse what cannot fit whatever is measured later, before any weights are read.

    Raises:
        DeviceError: ``memory_bytes`` does not hold one conversation, or what is certain (weights,
            one conversation, sound of all sessions) is more than a GPU has free.
    """
    config = LanguageModelConfig.from_folder(model)
    rows = options.context_rows or config.max_position_embeddings
    if options.memory_bytes is not None:
        _require_budget(options.memory_bytes, rows, bytes_per_row(config, dtype or torch.bfloat16))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        refusal = room_refusal(options, configs_of(model, codec), free)
        if refusal:
            raise DeviceError(refusal)


def room_refusal(options: WorkerOptions, configs: Configs, free_bytes: int) -> str | None:
    """Why a start in ``free_bytes`` of a GPU cannot work, with settings to change; None if it can.

    What cannot be computed (graphs, rooms of libraries) counts as nothing here.
    """
    plan = _certain(options, configs, free_bytes)
    if plan.fits:
        return None
    return (
        f"{free_bytes / _GIB:.1f} GiB of the GPU are free, and weights, one conversation of "
        f"{plan.wish.rows} rows and the sound of {plan.wish.sessions} sessions take "
        f"{plan.needed_bytes / _GIB:.1f} GiB at least: change {_choices(plan)}"
    )


@contextmanager
def settings_named(
    options: WorkerOptions, model: Path, codec: Path, device: torch.device
) -> Iterator[None]:
    """Turn a start that ran out of memory into a refusal that names settings.

    Raises:
        DeviceError: it did not fit.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceError(
            f"the GPU's {total / _GIB:.1f} GiB are used up while starting: change "
            f"{_choices(_certain(options, configs_of(model, codec), free))}"
        ) from None
    except DeviceError as error:
        if "one conversation" not in str(error):
            raise
        raise DeviceError(
            f"{error}. Settings: a smaller --max-rows, --max-sessions or --codec-memory"
            + ("" if options.memory_bytes is None else ", a larger --kv-gib")
        ) from None


def _require_budget(memory_bytes: int, rows: int, row_bytes: int) -> None:
    held = memory_bytes // row_bytes
    if held < rows:
        needed = -(-rows // BLOCK_ROWS) * BLOCK_ROWS * row_bytes / _GIB
        raise DeviceError(
            f"--kv-gib {memory_bytes / _GIB:.4g} holds {held} rows of {row_bytes / 1024:,.1f} KiB, "
            f"and one conversation may have {rows}: give --kv-gib {_up(needed)}"
            + (f", or --max-rows {held}" if held else "")
        )


def _up(gib: float) -> str:
    """Rounded up, so that what is advised is enough."""
    return f"{gib * 1.005 + 0.0005:.3f}"


def _certain(options: WorkerOptions, configs: Configs, free_bytes: int) -> Plan:
    """Without what nobody can compute: graphs, rooms of libraries, a margin."""
    precision = "fp8" if Quantization.of(configs.model) else "bf16"
    rows = options.context_rows or configs.model.max_position_embeddings
    wish = Wish(free_bytes, precision, options.sessions, rows, _VOICES_S, options.embeddings)
    plan = plan_of(configs, wish)
    return Plan(plan.wish, replace(plan.costs, rooms=(), margin=0.0))


def _choices(plan: Plan) -> str:
    words = []
    for choice in advice(plan):
        known = next((said for said in _SERVED if choice.startswith(said)), None)
        words.append(_SERVED[known] if known else choice)
    return "; or ".join(words)
