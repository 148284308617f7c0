"""One conversation's rows, and how far each part of the network has read them."""

from dataclasses import dataclass, field
from enum import IntEnum

from mosstalk.conversation import Mode, Row
from mosstalk.engine.block_pool import ROOT, BlockPool, Digest, block_digest


class Part(IntEnum):
    """A stack of layers that keeps K and V of its own."""

    TRUNK = 0
    TEXT = 1
    AUDIO = 2


def part_of(mode: Mode) -> Part:
    """The modality block whose head is drawn from in ``mode``."""
    return Part.AUDIO if mode is Mode.AUDIO else Part.TEXT


@dataclass
class Sequence:
    """Rows with the blocks that hold their K and V.

    ``read[part]`` counts the leading rows that a part has K and V of. A modality block may
    lag behind the trunk; the trunk's outputs of the rows between lie in the same KV blocks,
    so they are shared, evicted and cut with them. What has been launched counts as read: the
    device does its work in order. ``pending`` are rows past the last one that the device draws
    and the host has not seen.
    """

    pool: BlockPool
    modality_pad: int
    rows: list[Row] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=lambda: [0, 0, 0])
    pending: int = 0
    _digests: list[Digest] = field(default_factory=list)

    @property
    def unread(self) -> int:
        """Rows that the trunk has not read, seen by the host or not."""
        return len(self.rows) + self.pending - self.read[Part.TRUNK]

    @property
    def lagging(self) -> int:
        """Rows that the trunk has read and a modality block has not."""
        return self.read[Part.TRUNK] - min(self.read)

    def blocks_needed(self, rows: int) -> int:
        """Blocks to take before the first ``rows`` rows have a place."""
        return max(0, -(-rows // self.pool.rows) - len(self.table))

    def make_room(self, rows: int) -> bool:
        """Take blocks for the first ``rows`` rows; take none and say False if some are missing."""
        needed = self.blocks_needed(rows)
        if needed > self.pool.available:
            return False
        for _ in range(needed):
            block = self.pool.take()
            assert block is not None
            self.table.append(block)
        return True

    def advance(self, part: Part, rows: int) -> None:
        """Note that ``part`` has read the first ``rows`` rows."""
        most = len(self.rows) + self.pending
        assert self.read[part] <= rows <= most, f"{part.name} cannot have read {rows}"
        self.read[part] = rows

    def match_prefix(self) -> int:
        """Begin an unread sequence with blocks that others have filled; return their rows.

        The last row is always left to read: its output is what is drawn from.
        """
        if self.table or any(self.read):
            return 0
        size, parent = self.pool.rows, ROOT
        for start in range(0, len(self.rows) - size, size):
            digest = block_digest(parent, self.rows[start : start + size], self.modality_pad)
            block = self.pool.find(digest)
            if block is None:
                break
            self.table.append(block)
            self._digests.append(digest)
            parent = digest
        self.read = [len(self.table) * size] * 3
        return self.read[Part.TRUNK]

    def truncate(self, rows: int) -> None:
        """Forget all but the first ``rows`` rows, and give back the blocks past them.

        A block that is cut in the middle and shared is given back too: its rows are read
        again into a block of this sequence's own.
        """
        assert 0 <= rows <= len(self.rows), f"cannot keep {rows} of {len(self.rows)} rows"
        del self.rows[rows:]
        self.free_from(rows)

    def free_from(self, rows: int) -> None:
        """Drop K and V of all but the first ``rows`` rows; the rows themselves stay."""
        kept, inside = divmod(rows, self.pool.rows)
        if inside and kept < len(self.table) and not self.pool.withdraw(self.table[kept]):
            inside, rows = 0, kept * self.pool.rows
        keep = kept + (inside > 0)
        # The last first: what is given back last is taken first, so that who takes them next has
        # them in order, which the references read without a copy.
        for block in reversed(self.table[keep:]):
            self.pool.release(block)
        del self.table[keep:]
        del self._digests[kept:]
        self.read = [min(count, rows) for count in self.read]

    def abandon(self) -> None:
        """Wait for no pending row, and leave the latest row unread, as if it had just come."""
        self.pending = 0
        if self.rows and self.read[Part.TRUNK] >= len(self.rows):
            self.free_from(len(self.rows) - 1)

    def invalidate(self) -> None:
        """Give all blocks back as worth nothing: nobody may find them again."""
        for block in self.table:
            self.pool.withdraw(block)
        self.free_from(0)

    def publish(self, known: int) -> None:
        """Make blocks of the first ``known`` rows findable that every part has read to their end.

        To be called once what was computed is known to be sound: a draw from it was finite.
        """
        size = self.pool.rows
        while (len(self._digests) + 1) * size <= min(known, *self.read):
            number = len(self._digests)
            parent = self._digests[-1] if self._digests else ROOT
            rows = self.rows[number * size : (number + 1) * size]
            digest = block_digest(parent, rows, self.modality_pad)
            self._digests.append(digest)
            self.pool.publish(self.table[number], digest)
