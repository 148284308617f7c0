"""Counter-based random numbers: every draw is a pure function of its coordinates.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Because
nothing is carried from one draw to the next, a draw that is skipped or put off shifts no
other, and a conversation draws the same alone and in company.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
Words = TypeVar("Words", Tensor, npt.NDArray[Any])
"""32-bit words held in int64."""


def _multiply(a: Words, b: int) -> tuple[Words, Words]:
    """High and low 32 bits of the product of 32-bit values held in int64."""
    product = a * b  # wraps to negative where the 64th bit is set, with all bits in place
    return (product >> 32) & _MASK, product & _MASK


def _rounds(words: Sequence[Words], seed: Words | int) -> Sequence[Words]:
    """All rounds, on tensors or on arrays."""
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(word + step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
    return words


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int | Tensor
) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32 random bits for four 32-bit counter words.

    The words broadcast against each other and against ``seed`` where that is a tensor; it is
    taken modulo 2^64.
    """
    words = torch.broadcast_tensors(*counter)
    if words[0].device.type != "cpu":
        return tuple(_rounds(words, seed))
    # NumPy begins an operation in a third of torch's time, and here are 160 of them.
    key = seed.numpy() if isinstance(seed, Tensor) else seed
    return tuple(map(torch.from_numpy, _rounds([word.numpy() for word in words], key)))


def uniform(bits: Tensor) -> Tensor:
    """Map 32 random bits to float64 in the open interval (0, 1)."""
    return (bits.double() + 0.5) * 2.0**-32


def gumbel(seed: int, channel: int, step: int, ids: Tensor) -> Tensor:
    """Gumbel noise, float64, for vocabulary ``ids``: a function of (seed, channel, step, id)."""
    word = torch.zeros_like(ids)
    bits = philox((ids, word + step, word + channel, word), seed)[0]
    return -torch.log(-torch.log(uniform(bits)))


def gumbel_rows(seeds: Tensor, channel: int, steps: Tensor, ids: Tensor) -> Tensor:
    """``gumbel`` of ``ids`` (R or 1, n), (R, n); ``seeds`` and ``steps`` (R,)."""
    word = torch.zeros_like(ids)
    bits = philox((ids, word + steps[:, None], word + channel, word), seeds[:, None])[0]
    return -torch.log(-torch.log(uniform(bits)))


def normal(seed: int | Tensor, stream: int, positions: Tensor, columns: int) -> Tensor:
    """Standard normal noise (*positions.shape, columns), float32, by Box-Muller.

    A value depends only on (seed, stream, position, column): noise cut into pieces at any
    place is the same noise. A tensor of seeds broadcasts against ``positions``.
    """
    groups = -(-columns // 4)
    group = torch.arange(groups, device=positions.device)
    place = positions[..., None]
    key = seed[..., None] if isinstance(seed, Tensor) else seed
    bits = philox((place & _MASK, place >> 32, group, torch.full_like(group, stream)), key)
    first, second, third, fourth = (uniform(word) for word in bits)
    pairs = []
    for radius_bits, angle_bits in ((first, second), (third, fourth)):
        radius = torch.sqrt(-2 * torch.log(radius_bits))
        angle = 2 * math.pi * angle_bits
        pairs += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(pairs, dim=-1).flatten(-2)[..., :columns].float()
