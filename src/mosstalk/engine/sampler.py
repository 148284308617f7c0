"""Draws, penalties, modes and the stop test of many replies at once, on the device.

The arithmetic is ``mosstalk.models.generation``'s, row by row; draw k of channel c is a pure
function of (seed, c, k). Letters: R rows, V tokens of the channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Mode, SpecialIds
from mosstalk.engine.request import Request
from mosstalk.errors import EngineInputError
from mosstalk.models.generation import NEVER
from mosstalk.numerics.rng import gumbel_rows
from mosstalk.ops.launch import runs
from mosstalk.ops.sampling import ModeTokens, sample, update_modes
from mosstalk.ops.sampling_parts import (
    AUDIO,
    ENDED,
    FREE,
    HELD,
    NOT_DRAWN,
    TEXT,
    DrawSettings,
    DrawState,
    few,
    penalised,
    safely,
)
from mosstalk.reply_options import StepRule
from mosstalk.runtime.device_inputs import DeviceInputs, Field

# What the device keeps for each running reply, by its slot.


@dataclass(frozen=True)
class Slots:
    """State of replies that a step changes without the host.

    ``seen`` of each channel (slots, V) bool: tokens that its penalty counts. ``latest`` (slots, 2)
    int64: the row drawn last. ``mode`` (slots,) int8: TEXT, AUDIO or ENDED, what comes after
    that row. ``halts`` (n,) int64: text tokens after which nothing can be drawn before the host has
    seen them: those that end a reply, and modality_pad, whose row depends on a put-off draw.
    """

    seen: tuple[Tensor, Tensor]
    latest: Tensor
    mode: Tensor
    halts: Tensor

    @classmethod
    def allocate(
        cls, config: LanguageModelConfig, ids: SpecialIds, slots: int, device: torch.device
    ) -> "Slots":
        """State of ``slots`` replies that have not begun."""
        text, audio = (
            torch.zeros((slots, size), dtype=torch.bool, device=device)
            for size in (config.vocab_size, config.audio_vocab_size)
        )
        halts = sorted({*ids.stop, ids.modality_pad})
        return cls(
            (text, audio),
            torch.zeros((slots, 2), dtype=torch.int64, device=device),
            torch.full((slots,), ENDED, dtype=torch.int8, device=device),
            torch.tensor(halts, device=device),
        )

    def settle(self, at: Tensor, channel: int, drawn: Tensor, bad: Tensor, ids: SpecialIds) -> None:
        """Note that ``drawn`` (R,) of ``channel`` completed the rows of slots ``at`` (R,).

        The slots are in that mode, and ``latest`` has what was drawn. A row of text has its
        audio draw put off: it gets audio_pad, and after sosp its slot is in AUDIO until that
        draw is made up and says otherwise. Where ``drawn`` is negative nothing was drawn and
        nothing changes, but that a ``bad`` one, (R, 2) by channel, has ended.
        """
        text = DrawState(self.seen[TEXT], self.latest, self.mode)
        whole = torch.where((drawn < 0) & ~bad[:, channel], -1, at)
        special = ModeTokens(ids.sosp, ids.eosp, ids.modality_pad, ids.audio_pad)
        update_modes(text, whole, bad, self.halts, special, deferred=True)


_FURTHER_SPECIALS = 6
"""More tokens than those that stop a reply: sosp, eosp, the pads, and room."""
_MOST_TOKENS = 1 << 32
"""More than any vocabulary: a larger top_k is none."""


@dataclass
class Draw:
    """One draw to make: whose, which step of the reply, and what the script says of it.

    ``place`` is the sequence's row that it makes, in ``mode``. A ``late`` one follows a row that
    the host had not seen when it was launched; it is ``missed`` if that row changed the mode.
    """

    request: Request
    step: int
    rule: StepRule
    place: int
    mode: Mode
    late: bool = False
    missed: bool = False


class DrawInputs:
    """The settings of up to ``slots`` draws at a time, on ``device``."""

    def __init__(self, slots: int, ids: SpecialIds, device: torch.device) -> None:
        self._ids = ids
        one, each = (slots,), "draws"
        fields = {
            name: Field(one, "int64", each)
            for name in ("slots", "steps", "seeds", "forced", "top_k")
        }
        fields |= {name: Field(one, "float32", each) for name in ("temperature", "tail", "penalty")}
        # A rule forbids special ids; those that stop a reply are several.
        width = len(ids.stop) + _FURTHER_SPECIALS
        fields["never"] = Field((slots, width), "int64", each, padding=FREE)
        fields["late"] = Field(one, "bool", each)
        self._inputs = DeviceInputs(fields, device)

    def fill(self, draws: list[Draw], channel: int, step: int) -> dict[str, Tensor]:
        """What ``draws`` of ``channel`` read, by name: (R,), and ``never`` (R, n).

        It stands there until the next call.

        Raises:
            EngineInputError: one is not what it must be.
        """
        nevers = [_never(draw, channel, self._ids) for draw in draws]
        width, room = max(map(len, nevers)), self._inputs.fields["never"].shape[1]
        if width > room:
            raise EngineInputError(f"input 'never' has {width} ids a draw, must be at most {room}")
        never = np.full((len(draws), room), FREE)
        for line, tokens in zip(never, nevers, strict=True):
            line[: len(tokens)] = sorted(tokens)
        values = draw_values(draws, channel) | {"never": never}
        self._inputs.fill(values, made_for=step, step=step)
        found = {name: tensor[: len(draws)] for name, tensor in self._inputs.tensors.items()}
        return found | {"never": found["never"][:, :width]}


def draw_values(draws: list[Draw], channel: int) -> dict[str, NDArray[Any]]:
    """What each draw is made by, (R,) by name, but for the tokens that it must not draw."""
    options = [draw.request.options for draw in draws]
    whole = {
        "slots": [draw.request.slot for draw in draws],
        "steps": [draw.step for draw in draws],
        "seeds": [_signed(o.seed) for o in options],
        "forced": [_forced(draw.rule, channel) for draw in draws],
        "top_k": [min(o.top_k, _MOST_TOKENS) for o in options],
    }
    real = {
        "temperature": [o.temperature for o in options],
        "tail": [1 - o.top_p for o in options],
        "penalty": [o.repetition_penalty for o in options],
    }
    arrays: dict[str, NDArray[Any]] = {
        name: np.array(values, np.int64) for name, values in whole.items()
    }
    arrays |= {name: np.array(values, np.float32) for name, values in real.items()}
    return arrays | {"late": np.array([draw.late for draw in draws], np.bool_)}


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as the int64 with the same bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low


def _forced(rule: StepRule, channel: int) -> int:
    forced = rule.text if channel == TEXT else rule.audio
    return FREE if forced is None else forced


def _never(draw: Draw, channel: int, ids: SpecialIds) -> set[int]:
    if channel == TEXT:
        return set(draw.rule.never_text)
    early = draw.step < draw.request.limits.min_new_rows
    return {*draw.rule.never_audio, *([ids.eosp] if early else [])}


def few_tokens(draws: list[Draw]) -> bool:
    """Whether the kernels can make these draws: each greedy, or of a small top-k."""
    options = (draw.request.options for draw in draws)
    return all(few(each.temperature, each.top_k) for each in options)


@dataclass(frozen=True)
class Drawn:
    """``tokens`` (R,) int64 and ``bad`` (R,): whether a row's logits were not finite."""

    tokens: Tensor
    bad: Tensor


def draw_rows(
    logits: Tensor,
    slots: Slots,
    inputs: Mapping[str, Tensor],
    channel: int,
    ids: SpecialIds,
    *,
    masked: bool,
    completes: bool,
    greedy_only: bool = False,
    few_only: bool = False,
) -> Drawn:
    """Draw a token for each row of raw ``logits`` (R, V), in the model's dtype; remember it.

    Late rows, which there are if ``masked``, draw nothing where their slot's mode is not
    ``channel``: their token is NOT_DRAWN, and nothing of the slot changes. ``completes`` says that
    the drawn token makes its slot's row complete, which then settles the slot's mode. A slot may
    have one row. ``few_only``: ``few_tokens`` holds, so that kernels can draw where there are any.
    Nothing waits for the device.
    """
    at, late = inputs["slots"], inputs["late"]
    settings = DrawSettings(**{name: inputs[name] for name in DrawSettings.__annotations__})
    state = DrawState(slots.seen[channel])
    if completes:
        # What the host knows of its slots is set; the rest is what the row before left.
        slots.mode[at] = torch.where(late, slots.mode[at], channel).to(slots.mode.dtype)
        state = DrawState(slots.seen[channel], slots.latest, slots.mode)
    last_token = ids.eosp if channel == AUDIO else None
    bad = torch.zeros((len(at), 2), dtype=torch.bool, device=at.device)
    if few_only and runs(logits):
        chosen = torch.empty_like(at)
        sample(
            logits, state, settings, chosen, bad[:, channel],
            channel=channel, last_token=last_token, masked=masked and completes,
        )  # fmt: skip
    else:
        few_only = few_only and not logits.is_cuda
        drawn = draw(
            logits, state.seen, settings, channel,
            last_token=last_token, greedy_only=greedy_only, few_only=few_only,
        )  # fmt: skip
        active = ~late | (slots.mode[at] == channel)
        chosen = torch.where(active, drawn.tokens, NOT_DRAWN)
        bad[:, channel] = drawn.bad & active
        state.seen[at, drawn.tokens] |= active
        if state.latest is not None:
            latest = state.latest[:, channel]
            latest[at] = torch.where(active, drawn.tokens, latest[at])
    if completes:
        slots.settle(at, channel, chosen, bad, ids)
    return Drawn(chosen, bad[:, channel])


def draw(
    logits: Tensor,
    seen: Tensor,
    settings: DrawSettings,
    channel: int,
    *,
    last_token: int | None = None,
    greedy_only: bool = False,
    few_only: bool = False,
) -> Drawn:
    """Draw a token for each row of ``logits`` (R, V), raw.

    ``seen`` (slots, V) bool is the history that the penalty reads; ``last_token`` the largest token
    that may be drawn; ``greedy_only`` says that no row is sampled, which saves sorting and
    noise. ``few_only`` says that ``few_tokens`` holds, and that the host may look at numbers: then
    the best tokens alone are sorted and get noise. Else nothing waits for the device.
    """
    bad = ~logits.isfinite().all(dim=1)
    last_token = logits.shape[1] - 1 if last_token is None else last_token
    logits = penalised(logits, seen, settings, last_token)
    tokens = logits.argmax(dim=1)
    if not greedy_only:
        found = _sampled_of_few(logits, settings, channel) if few_only else None
        drawn = _sampled(logits, settings, channel) if found is None else found
        tokens = torch.where(settings.temperature == 0, tokens, drawn)
    forced = settings.forced
    return Drawn(torch.where(forced == FREE, tokens, forced), bad)


def _sampled(logits: Tensor, settings: DrawSettings, channel: int) -> Tensor:
    """A token for each row by the Gumbel-max trick, from penalised ``logits`` (R, V)."""
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    return _largest_sum(logits, ids, settings, channel)


def _sampled_of_few(logits: Tensor, settings: DrawSettings, channel: int) -> Tensor | None:
    """``_sampled`` where each top-k is among the ``HELD`` best; None if that is not certain.

    It is not if the last of them ties with the last that a row's top-k keeps.
    """
    if logits.shape[1] <= HELD:
        return None
    held = logits.topk(HELD, dim=1)
    divided = held.values / safely(settings.temperature)[:, None]
    last_kept = divided.gather(1, (settings.top_k[:, None] - 1).clamp(0, HELD - 1))
    if not (last_kept > divided[:, -1:])[settings.temperature > 0].all():
        return None
    ids = held.indices.sort(dim=1).values
    place = _largest_sum(logits.gather(1, ids), ids, settings, channel)
    return ids.gather(1, place[:, None])[:, 0]


def _largest_sum(logits: Tensor, ids: Tensor, settings: DrawSettings, channel: int) -> Tensor:
    """Of each row the column (R,) of the largest sum of ``logits`` (R, n), warped, and noise.

    ``ids`` (R or 1, n) are the columns' tokens, ascending.
    """
    warped = warp_rows(logits, settings.temperature, settings.top_k, settings.tail)
    kept = warped > NEVER
    if not kept.is_cuda and kept.sum() == len(kept):  # one a row: no noise decides anything
        return warped.argmax(dim=1)
    noise = gumbel_rows(settings.seeds, channel, settings.steps, ids)
    return torch.where(kept, warped.double() + noise, NEVER).argmax(dim=1)


def warp_rows(logits: Tensor, temperature: Tensor, top_k: Tensor, tail: Tensor) -> Tensor:
    """``generation.warp`` with settings (R,) of its own for every row of ``logits`` (R, V).

    ``tail`` is 1 - top_p, taken in double precision and rounded once, as the reference does.
    """
    logits = logits / safely(temperature)[:, None]
    descending, order = logits.sort(dim=1, descending=True, stable=True)
    width = logits.shape[1]
    edge = descending.gather(
        1, (torch.where(top_k == 0, width, top_k)[:, None] - 1).clamp(0, width - 1)
    )
    descending = descending.masked_fill(descending < edge, NEVER)
    at_most = descending.softmax(dim=1).flip(1).cumsum(dim=1).flip(1)
    cut = (at_most <= tail[:, None]) & (tail > 0)[:, None]
    cut[:, 0] = False
    kept = descending.masked_fill(cut, NEVER)
    return torch.empty_like(logits).scatter(1, order, kept)
