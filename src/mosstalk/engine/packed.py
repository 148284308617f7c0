"""Rows of many sequences side by side, without padding, through a stack of layers.

Letters: N packed rows, R sequences with one row each, L their longest context, H query heads,
G key/value heads, D head_dim, C hidden_size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.engine.sequence import Sequence
from mosstalk.engine.store import KVStore
from mosstalk.model.network import Attention, Block, DecoderLayer, rotary_tables, rotate

MOST_PLACES = 1 << 16
"""Places whose K and V one attention of single rows reads, padding included."""


@dataclass(frozen=True)
class Stretch:
    """Rows ``start`` .. ``end`` - 1 of a sequence, which see every row before them."""

    sequence: Sequence
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def places(self, first: int = 0) -> list[int]:
        """Places in the store of rows ``first`` .. ``end`` - 1."""
        size, table = self.sequence.pool.rows, self.sequence.table
        return [table[row // size] * size + row % size for row in range(first, self.end)]


def in_passes(stretches: list[Stretch], rows: int) -> Iterator[list[Stretch]]:
    """Stretches in order, cut into lots of at most ``rows`` rows."""
    lot: list[Stretch] = []
    room = rows
    for stretch in stretches:
        start = stretch.start
        while start < stretch.end:
            end = min(stretch.end, start + room)
            lot.append(Stretch(stretch.sequence, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield lot
                lot, room = [], rows
    if lot:
        yield lot


@dataclass(frozen=True)
class Many:
    """A stretch of several rows: its slice of the packed rows, its context and who sees what."""

    rows: slice
    context: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Singles:
    """Stretches of one row that are attended together.

    ``rows`` (R,) are their packed rows, ``contexts`` (R, L) and ``mask`` (R, 1, 1, L); where a
    context is shorter, its first place stands, so that no row is read that is another's or
    unwritten.
    """

    rows: Tensor
    contexts: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Packed:
    """How packed rows lie and what they may see; ``positions`` (N,) and ``places`` (N,)."""

    stretches: list[Stretch]
    positions: Tensor
    places: Tensor
    singles: list[Singles]
    many: list[Many]

    @classmethod
    def of(cls, stretches: list[Stretch], device: torch.device) -> "Packed":
        """Lay out ``stretches`` one after the other."""
        ends = list(accumulate(len(s) for s in stretches))
        positions = [row for s in stretches for row in range(s.start, s.end)]
        places = [place for s in stretches for place in s.places(s.start)]
        laid = list(zip(stretches, pairwise([0, *ends]), strict=True))
        return cls(
            stretches,
            torch.tensor(positions, device=device),
            torch.tensor(places, device=device),
            [
                _singles(group, device)
                for group in _groups([(begin, s) for s, (begin, _) in laid if len(s) == 1])
            ],
            [_many(s, slice(begin, end), device) for s, (begin, end) in laid if len(s) > 1],
        )


def _groups(singles: list[tuple[int, Stretch]]) -> Iterator[list[tuple[int, Stretch]]]:
    """Single rows cut so that no group's contexts, padded to one length, pass ``MOST_PLACES``.

    Longest first, so that little is padded; without a bound one long conversation among many
    short ones would take memory as if all were long.
    """
    singles = sorted(singles, key=lambda single: -single[1].end)
    while singles:
        count = max(1, MOST_PLACES // singles[0][1].end)
        yield singles[:count]
        singles = singles[count:]


def _singles(group: list[tuple[int, Stretch]], device: torch.device) -> Singles:
    longest = group[0][1].end
    contexts = [_padded(stretch.places(), longest) for _, stretch in group]
    lengths = torch.tensor([stretch.end for _, stretch in group], device=device)
    mask = torch.arange(longest, device=device) < lengths[:, None]
    rows = torch.tensor([row for row, _ in group], device=device)
    return Singles(rows, torch.tensor(contexts, device=device), mask[:, None, None])


def _padded(places: list[int], length: int) -> list[int]:
    return places + places[:1] * (length - len(places))


def _many(stretch: Stretch, rows: slice, device: torch.device) -> Many:
    seen = torch.arange(stretch.end, device=device)
    new = torch.arange(stretch.start, stretch.end, device=device)
    context = torch.tensor(stretch.places(), device=device)
    return Many(rows, context, seen[None, :] <= new[:, None])


def run_block(block: Block, hidden: Tensor, packed: Packed, store: KVStore, theta: float) -> Tensor:
    """Packed rows (N, C) through a block's layers; their K and V go into ``store``."""
    head_dim = store.keys.shape[-1]
    tables = rotary_tables(packed.positions, head_dim, theta)
    for number, layer in enumerate(block.layers, block.first):
        assert isinstance(layer, DecoderLayer)
        normed = layer.input_layernorm(hidden)
        hidden = hidden + _attend(layer.self_attn, normed, tables, packed, store, number)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden


def _attend(
    attention: Attention,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    packed: Packed,
    store: KVStore,
    layer: int,
) -> Tensor:
    """Attention of packed rows (N, C), each to its own sequence's rows."""

    def heads(y: Tensor) -> Tensor:
        """(N, heads x D) to (heads, N, D)."""
        return y.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)

    query = rotate(attention.q_norm(heads(attention.q_proj(x))), tables)
    key = rotate(attention.k_norm(heads(attention.k_proj(x))), tables)
    keys, values = store.keys[layer], store.values[layer]
    keys[packed.places] = key.transpose(0, 1)
    values[packed.places] = heads(attention.v_proj(x)).transpose(0, 1)
    mixed = torch.empty_like(query)
    for single in packed.singles:
        found = F.scaled_dot_product_attention(
            query[:, single.rows].transpose(0, 1)[:, :, None],
            keys[single.contexts].transpose(1, 2),
            values[single.contexts].transpose(1, 2),
            attn_mask=single.mask,
            enable_gqa=True,
        )
        mixed[:, single.rows] = found[:, :, 0].transpose(0, 1)
    for many in packed.many:
        mixed[:, many.rows] = F.scaled_dot_product_attention(
            query[None, :, many.rows],
            keys[many.context].transpose(0, 1)[None],
            values[many.context].transpose(0, 1)[None],
            attn_mask=many.mask,
            enable_gqa=True,
        )[0]
    return attention.o_proj(mixed.transpose(0, 1).flatten(1))
