"""One pass over packed rows: what it reads, at which size it runs, how spans are laid out in it.

Letters: N packed rows, S of them single (the only row of their span), T tiles of rows of
longer spans, B blocks of the longest context.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import EngineInputError
from mosstalk.ops.attention_prefill import TILE_ROWS, tiles_of
from mosstalk.runtime.device_inputs import DeviceInputs, Field, Values, check_values

NOTHING = -1


@dataclass(frozen=True)
class PassSize:
    """What a pass has room for; one graph of each stack of layers is captured for each."""

    rows: int
    singles: int
    tiles: int
    blocks: int

    @property
    def contexts(self) -> int:
        """Tables of blocks: one of each single row and of each span."""
        return self.singles + self.tiles


@dataclass(frozen=True)
class Planned:
    """A pass before it is on the device: the ``step`` it is for, its size and its ``values``."""

    step: int
    size: PassSize
    values: Values


@lru_cache
def _fields(size: PassSize, *, embeds: bool) -> dict[str, Field]:
    rows, singles, tiles = (size.rows,), (size.singles,), (size.tiles, 4)
    common = {
        "positions": Field(rows, count="rows"),
        "slot_mapping": Field(rows, count="rows", padding=NOTHING),
        "written": Field(rows, count="rows", padding=NOTHING),
        "context_lens": Field(singles, count="singles"),
        "tiles": Field(tiles, count="tiles"),
        "block_tables": Field((size.contexts, size.blocks), count="contexts", padding=None),
    }
    if not embeds:
        return common | {"wanted": Field(rows, count="wanted", padding=NOTHING)}
    return common | {
        "rows": Field((size.rows, 2), "int64", "rows", padding=NOTHING),
        "slots": Field(rows, count="rows", padding=NOTHING),
    }


def check_planned(planned: Planned, step: int, *, embeds: bool) -> None:
    """Raise EngineInputError unless a pass's descriptors are what they must be.

    See ``runtime.device_inputs.check_values``.
    """
    fields = _fields(planned.size, embeds=embeds)
    check_values(planned.values, fields, made_for=planned.step, step=step)


class PassInputs:
    """The descriptors of a pass on the device.

    ``positions`` (N,) and ``slot_mapping`` (N,) in the store, which is where ``written`` (N,) tells
    ``rope_kv`` to write: not the single rows, which attention itself writes. ``context_lens``
    (S,) are the keys that single rows see, their own included. ``tiles`` (T, 4): first packed
    row, rows, position of the first, and its table. ``block_tables`` (S + T, B): blocks of single
    rows, then of spans. Besides, the trunk's have ``rows`` (N, 2) int64 and ``slots`` (N,),
    whose latest row stands for a row not seen yet; a modality block's have ``wanted`` (N,),
    packed rows whose output is asked for. All int32 otherwise. Where a pass has fewer, -1 is
    no row, no place, no block, and a length or a tile of 0 rows is none.
    """

    rows: Tensor
    slots: Tensor
    wanted: Tensor
    positions: Tensor
    slot_mapping: Tensor
    written: Tensor
    context_lens: Tensor
    tiles: Tensor
    block_tables: Tensor
    size: PassSize


class ExactInputs(PassInputs):
    """What was planned as it is, without padding: for a pass that no graph has captured.

    Raises:
        EngineInputError: see ``check_planned``.
    """

    def __init__(self, planned: Planned, step: int, device: torch.device, *, embeds: bool) -> None:
        check_planned(planned, step, embeds=embeds)
        self.size = planned.size
        for name, value in planned.values.items():
            setattr(self, name, torch.from_numpy(value).to(device))


class StepInputs(PassInputs):
    """Descriptors with room for a size of pass: one buffer, and one copy to fill it."""

    def __init__(self, size: PassSize, device: torch.device, *, embeds: bool) -> None:
        self.size = size
        self._inputs = DeviceInputs(_fields(size, embeds=embeds), device)
        for name, tensor in self._inputs.tensors.items():
            setattr(self, name, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._inputs.nbytes

    def clear(self) -> None:
        """Fill with padding alone: a pass that reads and writes nothing."""
        self._inputs.clear()

    def fill(self, planned: Planned, step: int) -> None:
        """Copy a pass's descriptors to the device, in stream order and without waiting.

        Raises:
            EngineInputError: see ``check_planned``, or they are of another size; nothing was
                copied.
        """
        if planned.size != self.size:
            raise EngineInputError(f"the inputs are for {planned.size}, this pass is {self.size}")
        self._inputs.fill(planned.values, made_for=planned.step, step=step)


# Spans laid out as one pass.


Ints = npt.NDArray[np.int32]
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
"""Packed rows of a pass in which every span is one row."""
MIXED_BUCKETS = (8, 16, 32, 64, 128, 256, 512)
KEY_BUCKETS = (1024, 4096)
"""Rows of the longest context; beyond, the store's longest."""
_SPARE_TILES = 8


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


def in_passes(spans: list[QuerySpan], rows: int) -> Iterator[list[QuerySpan]]:
    """Spans in order, cut into lots of at most ``rows`` rows."""
    lot: list[QuerySpan] = []
    room = rows
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + room)
            lot.append(QuerySpan(span.sequence, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield lot
                lot, room = [], rows
    if lot:
        yield lot


@dataclass(frozen=True)
class PassLimits:
    """The most that a pass may have: packed ``rows``, of them ``singles``, contexts of ``keys``
    rows in blocks of ``block_rows``. ``tiled``: single rows are tiles too, so that a row is
    attended in the same way whoever is beside it. ``exact``: a pass has room for what is in it
    and no more, and each span, single rows too, is one tile.
    """

    rows: int
    singles: int
    keys: int
    block_rows: int
    tiled: bool
    exact: bool = False

    @property
    def tiles(self) -> int:
        """The most tiles of rows."""
        return min(self.rows, _few_tiles(self.rows) + self.singles)

    def size(self, rows: int, singles: int, tiles: int, keys: int) -> PassSize:
        """The smallest size that holds so many rows, single rows, tiles and keys."""
        if self.exact:
            return PassSize(rows, singles, tiles, -(-keys // self.block_rows))
        blocks = -(-_bucket(keys, KEY_BUCKETS, self.keys) // self.block_rows)
        if not tiles:
            count = _bucket(rows, ROW_BUCKETS, self.singles)
            return PassSize(count, count, 0, blocks)
        buckets = sorted({*ROW_BUCKETS, *MIXED_BUCKETS}) if self.tiled else MIXED_BUCKETS
        count = _bucket(rows, buckets, self.rows)
        few = min(count, _few_tiles(count))
        room = min(count, self.singles) if singles else 0
        return PassSize(count, room, few if tiles <= few else min(count, self.tiles), blocks)

    def one_row(self) -> PassSize:
        """The smallest size: of a row alone in a short context."""
        return self.size(1, int(not self.tiled), int(self.tiled), 1)

    def all(self) -> list[PassSize]:
        """Every size that ``size`` can give: with these captured no pass has to wait for more."""
        counts = sorted({*ROW_BUCKETS, *MIXED_BUCKETS, self.rows})
        counts = [count for count in counts if count <= self.rows]
        sizes = set[PassSize]()
        for keys in {*(n for n in KEY_BUCKETS if n < self.keys), self.keys}:
            if not self.tiled:
                sizes |= {self.size(n, n, 0, keys) for n in range(1, self.singles + 1)}
            for count in counts:
                most = min(count, self.tiles)
                beside = (0,) if self.tiled else (0, 1)
                sizes |= {self.size(count, n, tiles, keys) for n in beside for tiles in (1, most)}
        return sorted(sizes, key=astuple)

    def lots(self, spans: list[QuerySpan]) -> Iterator[list[QuerySpan]]:
        """Spans in order, cut into lots that a pass can have."""
        for whole in in_passes(spans, self.rows):
            if self.exact:
                yield whole
                continue
            lot: list[QuerySpan] = []
            singles = tiles = 0
            for span in whole:
                single = len(span) == 1 and not self.tiled
                more = 0 if single else tiles_over(span.start, span.end)
                if singles + single > self.singles or tiles + more > self.tiles:
                    yield lot
                    lot, singles, tiles = [], 0, 0
                lot.append(span)
                singles, tiles = singles + single, tiles + more
            yield lot


def tiles_over(start: int, end: int) -> int:
    """How many tiles rows ``start`` .. ``end`` - 1 are cut into."""
    return (end - 1) // TILE_ROWS - start // TILE_ROWS + 1


def _few_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS) + _SPARE_TILES


def _bucket(wanted: int, buckets: Several[int], most: int) -> int:
    assert wanted <= most, f"{wanted} are more than the {most} that a pass may have"
    return next((size for size in buckets if wanted <= size < most), most)


class Tables:
    """Blocks of sequences as arrays, kept from pass to pass: most tables change every 16 rows."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], Ints]] = {}
        self._used: dict[int, tuple[list[int], Ints]] = {}

    def of(self, sequence: Sequence) -> Ints:
        """Blocks of a sequence, which is told by its table's content and not by its name."""
        key = id(sequence)
        kept = self._used.get(key) or self._known.get(key)
        if kept is None or kept[0] != sequence.table:
            table = list(sequence.table)
            kept = table, np.array(table, np.int32)
        self._used[key] = kept
        return kept[1]

    def turn(self) -> None:
        """A pass is laid out: keep what it used, and forget what neither it nor the last did."""
        self._known, self._used = self._used, {}


@dataclass(frozen=True)
class Layout:
    """Spans in the order in which a pass has their rows: single rows first.

    ``order[n]`` is which of the given packed rows the pass has at n, None if all are where
    they were. ``tiles`` are lines as ``attention_prefill`` takes them.
    """

    limits: PassLimits
    singles: list[QuerySpan]
    longer: list[QuerySpan]
    order: Ints | None
    tiles: list[list[int]]

    @classmethod
    def of(cls, spans: list[QuerySpan], limits: PassLimits) -> "Layout":
        """Lay out a lot that the limits allow."""
        all_tiled = limits.tiled or limits.exact
        singles = [] if all_tiled else [s for s in spans if len(s) == 1]
        longer = spans if all_tiled else [s for s in spans if len(s) > 1]
        tiles: list[list[int]] = []
        first = len(singles)
        for item, span in enumerate(longer, len(singles)):
            whole = first, len(span), span.start, item
            tiles += [list(whole)] if limits.exact else tiles_of(*whole)
            first += len(span)
        order = _singles_first(spans) if singles and longer else None
        return cls(limits, singles, longer, order, tiles)

    @property
    def size(self) -> PassSize:
        """The size that the pass runs at."""
        rows = len(self.singles) + sum(map(len, self.longer))
        keys = max(s.end for s in (*self.singles, *self.longer))
        if keys > self.limits.keys:
            raise EngineInputError(f"a row at {keys - 1} is past the last, {self.limits.keys - 1}")
        return self.limits.size(rows, len(self.singles), len(self.tiles), keys)

    def placed(self, rows: list[int]) -> Ints:
        """Where the pass has these of the given packed rows."""
        given = np.array(rows, np.int32)
        if self.order is None:
            return given
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(back), dtype=np.int32)
        return back[given]

    def values(self, size: PassSize, tables: Tables) -> dict[str, Ints]:
        """What every pass reads; see ``StepInputs``."""
        block_rows = self.limits.block_rows
        laid = (*self.singles, *self.longer)
        table = np.full((len(laid), size.blocks), NOTHING, np.int32)
        ends = [span.end for span in laid]
        for line, span, end in zip(table, laid, ends, strict=True):
            used = -(-end // block_rows)
            line[:used] = tables.of(span.sequence)[:used]
        tables.turn()
        count = len(self.singles)
        lengths = np.array(ends[:count], np.int32)
        owner, positions = np.arange(count), lengths - 1
        if self.longer:
            ranges = [np.arange(s.start, s.end, dtype=np.int32) for s in self.longer]
            owners = np.repeat(np.arange(count, len(laid)), [len(s) for s in self.longer])
            owner, positions = np.concatenate([owner, owners]), np.concatenate([positions, *ranges])
        block, inside = np.divmod(positions, np.int32(block_rows))
        places = table[owner, block] * np.int32(block_rows) + inside
        written = places.copy()
        written[:count] = NOTHING
        return {
            "positions": positions,
            "slot_mapping": places,
            "written": written,
            "context_lens": lengths,
            "tiles": np.array(self.tiles, np.int32).reshape(-1, 4),
            "block_tables": table,
        }


class Planner:
    """Plans passes one after another."""

    def __init__(self, limits: PassLimits) -> None:
        self.limits = limits
        self._tables = Tables()

    def embedding(self, step: int, rows: list[Row], spans: list[QuerySpan]) -> Planned:
        """A pass of the trunk over ``rows`` of ``spans``."""
        layout = Layout.of(spans, self.limits)
        given = np.array(rows)
        if layout.order is not None and len(given) == len(layout.order):
            given = given[layout.order]
        size = layout.size
        values = layout.values(size, self._tables)
        slots = np.full(len(given), NOTHING, np.int32)
        if given.ndim == 2 and given.shape[1] == 2:
            unseen = given[:, 0] < 0
            slots[unseen] = given[unseen, 1]
        return Planned(step, size, {"rows": given, "slots": slots} | values)

    def wanting(self, step: int, spans: list[QuerySpan], wanted: list[int]) -> Planned:
        """A pass of a modality block whose outputs at packed rows ``wanted`` are asked for."""
        layout = Layout.of(spans, self.limits)
        size = layout.size
        values = layout.values(size, self._tables)
        return Planned(step, size, {"wanted": layout.placed(wanted)} | values)


def _singles_first(spans: list[QuerySpan]) -> Ints:
    counts = np.array([len(s) for s in spans])
    single = np.repeat(counts == 1, counts)
    return np.concatenate([single.nonzero()[0], (~single).nonzero()[0]]).astype(np.int32)
