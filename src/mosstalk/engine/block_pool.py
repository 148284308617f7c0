"""KV blocks: who holds which, which can be shared, and which go first when room is needed.

A block is a fixed number of rows in every layer of one pool. Plain bookkeeping: nothing here
knows what a block holds. Full blocks are known by a digest of all rows up to their end, so a
prompt that begins like an earlier one reads the same blocks (Kwon et al. 2023).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from mosstalk.conversation import Row
from mosstalk.runtime.sharing import PagePool

Digest = bytes
ROOT: Digest = b""
_DIGEST_BYTES = 16


def embedded_token(row: Row, modality_pad: int) -> int:
    """What a row is embedded as: its text token, or -1 - its audio token under the pad."""
    text, audio = row
    return -1 - audio if text == modality_pad else text


def block_digest(parent: Digest, rows: Sequence[Row], modality_pad: int) -> Digest:
    """Digest of a block's rows and of all rows before them; equal only for equal K and V."""
    hasher = hashlib.blake2b(parent, digest_size=_DIGEST_BYTES)
    for row in rows:
        hasher.update(embedded_token(row, modality_pad).to_bytes(8, "little", signed=True))
    return hasher.digest()


class BlockPool:
    """Blocks 0 .. ``size`` - 1, each free, held by one or more, or kept for its digest alone.

    A block that nobody holds but whose digest is known stays readable until its place is
    needed; of these the one unused for longest goes first.
    """

    def __init__(self, size: int, rows: int) -> None:
        assert min(size, rows) > 0, "a pool has at least one block of one row"
        self.rows = rows
        self._free = PagePool(range(size))
        self._holders = [0] * size
        self._digests: dict[int, Digest] = {}
        self._known: dict[Digest, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def size(self) -> int:
        """All blocks, held or not."""
        return self._free.size

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.size - self.available

    @property
    def available(self) -> int:
        """Blocks that ``take`` can still give."""
        return self._free.free + len(self._kept)

    def grow(self, size: int) -> None:
        """Have ``size`` blocks from now on; those that there were stay whose they are."""
        assert size >= self.size, f"a pool of {self.size} blocks cannot become one of {size}"
        self._holders += [0] * (size - self.size)
        self._free.grow(range(self.size, size))

    def take(self) -> int | None:
        """A block of one's own, or None when all are held."""
        if free := self._free.take(1):
            block = free[0]
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, digest: Digest) -> int | None:
        """The block known by ``digest``, held once more from now on; None if there is none."""
        block = self._known.get(digest)
        if block is None:
            return None
        self._kept.pop(block, None)
        self._holders[block] += 1
        return block

    def publish(self, block: int, digest: Digest) -> None:
        """Make a held, full block findable; what is already known by this digest stays."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        if digest not in self._known and block not in self._digests:
            self._known[digest] = block
            self._digests[block] = digest

    def withdraw(self, block: int) -> bool:
        """Make a block its only holder's to write again; False if others hold it too."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        if self._holders[block] > 1:
            return False
        self._forget(block)
        return True

    def release(self, block: int) -> None:
        """Hold ``block`` once less."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._digests:
                self._kept[block] = None
            else:
                self._free.give([block])

    def _forget(self, block: int) -> None:
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._known[digest]
