"""The reference generation loop: one conversation, one row a step, the truth for engines.

A token of each channel is drawn from raw logits: mask, repetition penalty, warpers, draw.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event

import torch
from torch import Tensor

from mosstalk.conversation import (
    FinishReason,
    Mode,
    Reply,
    Row,
    SpecialIds,
    next_mode,
    start_mode,
)
from mosstalk.errors import CheckpointError, ContextLengthError
from mosstalk.models.language_model import KVCache, LanguageModel, Logits
from mosstalk.numerics.rng import gumbel
from mosstalk.reply_options import Limits, SamplingOptions, Script, StepRule

NEVER = float("-inf")
NOT_FINITE = (
    "the model's logits are not finite: its weights or config are damaged, or its arithmetic "
    "overflows; try --dtype float32"
)
"""The message of a reply that ends because its logits hold NaN, or no number above -inf."""


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty (Keskar et al. 2019) once to each token in ``seen``.

    ``logits`` (V,) float32; ``seen`` (n,) distinct tokens; negative logits are multiplied by
    ``penalty``, others divided.
    """
    chosen = logits[seen]
    scaled = torch.where(chosen < 0, chosen * penalty, chosen / penalty)
    return logits.index_put((seen,), scaled)


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then top-k (ties at the edge stay), then top-p (Holtzman et al. 2020).

    ``logits`` (..., V); what is cut becomes -inf. ``top_k`` 0 and ``top_p`` 1 are off. Of
    equal logits top-p keeps the lower tokens.
    """
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        edge = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < edge, NEVER)
    if top_p < 1:
        descending, order = logits.sort(dim=-1, descending=True, stable=True)
        at_most = descending.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
        cut = at_most <= 1 - top_p
        cut[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), NEVER)
    return logits


def draw(logits: Tensor, options: SamplingOptions, channel: int, step: int) -> int:
    """Draw a token from penalised ``logits`` (V,) as a pure function of (seed, channel, step).

    Greedy takes the largest, ties to the lowest token. Sampling adds Gumbel noise to what the
    warpers leave (the Gumbel-max trick), so no sum over the vocabulary orders the result.
    """
    if not bool(logits.max() > NEVER):
        raise CheckpointError(NOT_FINITE)
    if options.temperature == 0:
        return int(logits.argmax())
    warped = warp(logits, options.temperature, options.top_k, options.top_p)
    tokens = (warped > NEVER).nonzero()[:, 0]
    noisy = warped[tokens].double() + gumbel(options.seed, channel, step, tokens)
    return int(tokens[noisy.argmax()])


def forbid(logits: Tensor, tokens: Iterable[int]) -> Tensor:
    """Return ``logits`` (V,) with the given tokens at -inf."""
    banned = torch.tensor(sorted(tokens), dtype=torch.long, device=logits.device)
    return logits.index_fill(0, banned, NEVER)


PREFILL_CHUNK_ROWS = 512
_FREE = StepRule()


@dataclass(frozen=True)
class Step:
    """One generated row: ``index`` counts from 1 within the reply; logits are raw, float32."""

    index: int
    mode: Mode
    row: Row
    text_logits: Tensor
    audio_logits: Tensor


def require_room(rows: Sequence[Row], model: LanguageModel) -> None:
    """Raise ContextLengthError where ``rows`` leave no room for a reply in the model's context."""
    limit = model.config.max_position_embeddings
    if len(rows) >= limit:
        raise ContextLengthError(
            f"the conversation is {len(rows)} rows long and the model's context holds "
            f"{limit}: shorten the recording or text, or begin a new conversation"
        )


@dataclass
class Generation:
    """Generates one reply after ``rows``, of which ``cache`` already holds the first ones.

    Iterate over it for ``Step``s; ``reply`` grows along and has its finish reason at the
    end. ``cancel`` may be called from any thread and takes effect before the next step.
    """

    model: LanguageModel
    cache: KVCache
    rows: Sequence[Row]
    ids: SpecialIds
    options: SamplingOptions = field(default_factory=SamplingOptions)
    limits: Limits = field(default_factory=Limits)
    script: Script | None = None
    reply: Reply = field(default_factory=Reply)
    _cancelled: Event = field(default_factory=Event)

    def cancel(self) -> None:
        """End the reply before its next step, with finish reason ``cancelled``."""
        self._cancelled.set()

    def prefill(self) -> int:
        """Read the rows that the cache does not hold, but the last; return how many.

        The first step reads the last row. Raises ContextLengthError when the rows leave no
        room for a reply.
        """
        require_room(self.rows, self.model)
        pending = self.rows[self.cache.rows : -1]
        for start in range(0, len(pending), PREFILL_CHUNK_ROWS):
            self._forward(pending[start : start + PREFILL_CHUNK_ROWS])
            if self._cancelled.is_set():
                break
        return len(pending)

    def __iter__(self) -> Iterator[Step]:
        """Generate rows until the stop row, the length limit, or ``cancel``."""
        self.prefill()
        last = self.rows[-1]
        mode = next_mode(start_mode(last, self.ids), last, self.ids)
        rules = self.script.rules(mode, self.ids) if self.script else None
        seen = [{row[channel] for row in self.rows} for channel in (0, 1)]
        room = self.model.config.max_position_embeddings - len(self.rows)
        for index in range(1, min(self.limits.max_new_rows, room) + 1):
            if self._cancelled.is_set():
                break
            rule = rules[index - 1] if rules else _FREE
            step = self._step(index, mode, last, seen, rule)
            last = step.row
            self._record(step, seen)
            yield step
            if self.reply.finish_reason:
                return
            mode = next_mode(mode, last, self.ids)
        cancelled = self._cancelled.is_set()
        self.reply.finish_reason = FinishReason.CANCELLED if cancelled else FinishReason.LENGTH

    def _forward(self, rows: Sequence[Row]) -> Logits:
        grid = torch.tensor([list(rows)], device=self.model.device)
        with torch.inference_mode():
            return self.model(grid, self.cache, last_only=True)

    def _step(
        self, index: int, mode: Mode, last: Row, seen: list[set[int]], rule: StepRule
    ) -> Step:
        logits = self._forward([last])
        raw_text, raw_audio = logits.text[0, -1].float(), logits.audio[0, -1].float()
        audio = self._draw_audio(raw_audio, index, seen[1], rule)
        if mode is Mode.AUDIO:
            text = self.ids.modality_pad
        else:
            text = self._draw(raw_text, 0, index, seen[0], rule.text, rule.never_text)
        return Step(index, mode, (text, audio), raw_text, raw_audio)

    def _draw_audio(self, logits: Tensor, index: int, seen: set[int], rule: StepRule) -> int:
        """Draw a code or eosp; tokens above eosp are never produced, eosp not before its time."""
        never = set(rule.never_audio)
        if index < self.limits.min_new_rows:
            never.add(self.ids.eosp)
        allowed = logits.clone()
        allowed[self.ids.eosp + 1 :] = float("-inf")
        return self._draw(allowed, 1, index, seen, rule.audio, never)

    def _draw(
        self,
        logits: Tensor,
        channel: int,
        index: int,
        seen: set[int],
        forced: int | None,
        never: set[int] | frozenset[int],
    ) -> int:
        if forced is not None:
            return forced
        history = torch.tensor(sorted(seen), device=logits.device)
        allowed = forbid(logits, never) if never else logits
        penalised = penalise(allowed, history, self.options.repetition_penalty)
        return draw(penalised, self.options, channel, index)

    def _record(self, step: Step, seen: list[set[int]]) -> None:
        self.reply.rows.append(step.row)
        self.reply.modes.append(step.mode)
        for channel in (0, 1):
            seen[channel].add(step.row[channel])
        if step.row[0] in self.ids.stop:
            self.reply.finish_reason = FinishReason.STOP
