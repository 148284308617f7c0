"""Draws in plain torch: what the kernels must give, and the path for rows that they do not take."""

import torch
from torch import Tensor

from mosstalk.numerics.rng import gumbel_rows
from mosstalk.ops.sampling_parts import ENDED, FREE, NOT_DRAWN, DrawSettings, DrawState

_NEVER = float("-inf")


def sample_reference(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    ids: Tensor,
    bad: Tensor,
    *,
    channel: int,
    last_id: int | None = None,
    masked: bool = False,
) -> None:
    """``sample`` in plain torch, for any top-k; nothing waits for the device."""
    last_id = logits.shape[1] - 1 if last_id is None else last_id
    values = penalised(logits, state.seen, settings, last_id)
    warped = _warped(values / safely(settings.temperature)[:, None], settings)
    noise = gumbel_rows(settings.seeds, channel, settings.steps, logits.shape[1])
    noisy = torch.where(warped > _NEVER, warped.double() + noise, _NEVER)
    drawn = torch.where(settings.temperature == 0, values.argmax(dim=1), noisy.argmax(dim=1))
    drawn = torch.where(settings.forced == FREE, drawn, settings.forced)
    drawing = _drawing(state, settings.slots, channel, masked)
    damaged = drawing & ~logits.isfinite().all(dim=1)
    valid = drawing & ~damaged
    somebody = settings.slots >= 0
    bad.copy_(torch.where(somebody, damaged, bad))
    ids.copy_(torch.where(valid, drawn, torch.where(somebody, NOT_DRAWN, ids)))
    _remember(state, settings.slots, drawn, valid, channel)


def safely(temperature: Tensor) -> Tensor:
    """What to divide logits by: 1 for greedy rows."""
    return torch.where(temperature == 0, 1.0, temperature)


def penalised(logits: Tensor, seen: Tensor, settings: DrawSettings, last_id: int) -> Tensor:
    """Logits (R, V) in float32 after mask and repetition penalty."""
    values = logits.float()
    beyond = torch.arange(values.shape[1], device=values.device) > last_id
    values = values.masked_fill(beyond, _NEVER)
    padded = torch.cat([values, values.new_zeros(values.shape[0], 1)], dim=1)
    places = torch.where(settings.never == FREE, values.shape[1], settings.never)
    values = padded.scatter(1, places, _NEVER)[:, :-1]
    penalty = settings.penalty[:, None]
    changed = torch.where(values < 0, values * penalty, values / penalty)
    return torch.where(seen[settings.slots.clamp(min=0)], changed, values)


def _warped(values: Tensor, settings: DrawSettings) -> Tensor:
    """Top-k with its ties, then top-p, which of equal values keeps the lower ids: (R, V).

    Sums are float64, rounded to float32, as the kernel's are.
    """
    width = values.shape[1]
    descending, order = values.sort(dim=1, descending=True, stable=True)
    last = torch.where(settings.top_k == 0, width, settings.top_k).clamp(max=width) - 1
    edge = descending.gather(1, last[:, None])
    descending = descending.masked_fill(descending < edge, _NEVER)
    mass = (descending - descending[:, :1]).double().exp().float()
    share = mass / mass.double().sum(dim=1, keepdim=True).float()
    at_most = share.double().flip(1).cumsum(dim=1).flip(1).float()
    cut = (at_most <= settings.tail[:, None]) & (settings.tail > 0)[:, None]
    cut[:, 0] = False
    return torch.empty_like(values).scatter(1, order, descending.masked_fill(cut, _NEVER))


def _drawing(state: DrawState, slots: Tensor, channel: int, masked: bool) -> Tensor:
    """Which rows (R,) draw from this channel."""
    if state.mode is None:
        return slots >= 0
    mode = state.mode[slots.clamp(min=0)]
    return (slots >= 0) & ((mode == channel) if masked else (mode != ENDED))


def _remember(state: DrawState, slots: Tensor, ids: Tensor, valid: Tensor, channel: int) -> None:
    """Write the ids of ``valid`` rows; all others write what the first such row writes, if any."""
    some = valid.any()
    rows = torch.arange(len(ids), device=ids.device)
    source = torch.where(valid, rows, valid.int().argmax())
    slots, ids = slots[source].clamp(min=0), ids[source]
    state.seen.index_put_((slots, ids), some | state.seen[slots, ids])
    if state.latest is not None:
        latest = state.latest[:, channel]
        latest.index_put_((slots,), torch.where(some, ids, latest[slots]))
