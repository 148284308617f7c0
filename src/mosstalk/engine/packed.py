"""Rows of many sequences side by side, without padding, through a stack of layers.

Letters: N packed rows, R sequences with one row each, L their longest context, H query heads,
G key/value heads, D head_dim, C hidden_size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.sequence import Sequence
from mosstalk.engine.staging import Staging
from mosstalk.models.language_model import Attention, Block, DecoderLayer
from mosstalk.numerics.rope import rotary_tables, rotate

MOST_PLACES = 1 << 16
"""Places whose K and V one attention of single rows reads, padding included."""


@dataclass(frozen=True)
class QuerySpan:
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


def in_passes(stretches: list[QuerySpan], rows: int) -> Iterator[list[QuerySpan]]:
    """Stretches in order, cut into lots of at most ``rows`` rows."""
    lot: list[QuerySpan] = []
    room = rows
    for stretch in stretches:
        start = stretch.start
        while start < stretch.end:
            end = min(stretch.end, start + room)
            lot.append(QuerySpan(stretch.sequence, start, end))
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

    stretches: list[QuerySpan]
    positions: Tensor
    places: Tensor
    singles: list[Singles]
    many: list[Many]

    @classmethod
    def of(cls, stretches: list[QuerySpan], staging: Staging) -> "Packed":
        """Lay out ``stretches`` one after the other."""
        ends = list(accumulate(len(s) for s in stretches))
        laid = list(zip(stretches, pairwise([0, *ends]), strict=True))
        groups = list(_groups([(begin, s) for s, (begin, _) in laid if len(s) == 1]))
        longer = [(s, slice(begin, end)) for s, (begin, end) in laid if len(s) > 1]
        positions = [row for s in stretches for row in range(s.start, s.end)]
        places = [place for s in stretches for place in s.places(s.start)]
        lists = {"positions": positions, "places": places}
        for number, group in enumerate(groups):
            lists[f"rows {number}"] = [row for row, _ in group]
            lists[f"lengths {number}"] = [stretch.end for _, stretch in group]
            lists[f"contexts {number}"] = _contexts(group)
        lists |= {f"context {number}": s.places() for number, (s, _) in enumerate(longer)}
        put = staging.put({name: np.array(values, np.int64) for name, values in lists.items()})
        return cls(
            stretches,
            put["positions"],
            put["places"],
            [
                _singles(*(put[f"{name} {number}"] for name in ("rows", "lengths", "contexts")))
                for number in range(len(groups))
            ],
            [_many(*each, put[f"context {number}"]) for number, each in enumerate(longer)],
        )


def _groups(singles: list[tuple[int, QuerySpan]]) -> Iterator[list[tuple[int, QuerySpan]]]:
    """Single rows cut so that no group's contexts, padded to one length, pass ``MOST_PLACES``.

    Longest first, so that little is padded; without a bound one long conversation among many
    short ones would take memory as if all were long.
    """
    singles = sorted(singles, key=lambda single: -single[1].end)
    while singles:
        count = max(1, MOST_PLACES // singles[0][1].end)
        yield singles[:count]
        singles = singles[count:]


def _contexts(group: list[tuple[int, QuerySpan]]) -> list[int]:
    """Places of all contexts, each padded to the first one's length, one after the other."""
    longest = group[0][1].end
    contexts = (stretch.places() for _, stretch in group)
    return [place for each in contexts for place in each + each[:1] * (longest - len(each))]


def _singles(rows: Tensor, lengths: Tensor, contexts: Tensor) -> Singles:
    contexts = contexts.view(len(rows), -1)
    mask = torch.arange(contexts.shape[1], device=rows.device) < lengths[:, None]
    return Singles(rows, contexts, mask[:, None, None])


def _many(stretch: QuerySpan, rows: slice, context: Tensor) -> Many:
    seen = torch.arange(stretch.end, device=context.device)
    new = torch.arange(stretch.start, stretch.end, device=context.device)
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
