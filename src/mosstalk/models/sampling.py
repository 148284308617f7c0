"""From raw logits to one token per channel: mask, repetition penalty, warpers, draw."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mosstalk.errors import CheckpointError
from mosstalk.numerics.rng import gumbel
from mosstalk.sampling_options import SamplingOptions

NEVER = float("-inf")
NOT_FINITE = (
    "the model's logits are not finite: its weights or config are damaged, or its arithmetic "
    "overflows; try --dtype float32"
)
"""What whoever asked for a reply is told."""


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
