"""What live streams keep on the device: pages of one pool, taken as sound arrives.

Shapes: P rows of 20 ms in a page, H heads, d channels of a head, C = H d.
"""

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.errors import CodecFullError
from mosstalk.models.speech_tokenizer import CONV_STRIDE, SpeechTokenizer

Places = npt.NDArray[np.int64]
RETRY_AFTER_S = 1.0
"""Turns end all the time, and each gives back what it held."""
_GROWN_BY = 0.5
"""Growing copies what is kept, so the pool grows by a share of what it has."""
_FEWEST_BYTES = 128 * 2**20
"""By so much the pool grows at least: 16 s of sound in the published sizes."""
_FEWEST_UNTOUCHED_BYTES = 2**30
"""The same where memory is taken when it is first written to: 100 streams of the pocket codec."""


class Pages:
    """Keys and values of all layers, and features, of all streams.

    ``kv`` is for each layer (pages, 1, 2, H, P, d) in the weights' precision, ``log_mel``
    (pages, 2P, bins) float32, whole frames before any floor. Page 0 is no stream's: what is
    written only to fill a batch goes there. ``grown`` counts the times that the tensors moved.
    """

    def __init__(
        self,
        tokenizer: SpeechTokenizer,
        rows: int,
        limit_s: float | None = None,
        *,
        zeroed: bool = True,
    ) -> None:
        """``rows`` of a page; ``limit_s`` seconds of sound that all streams may hold together.

        ``zeroed``: all is finite from the start, for kernels that multiply what they do not see
        by zero.
        """
        config, weight = tokenizer.config, tokenizer.encoder.codebook.weight
        heads = config.encoder_attention_heads
        self.rows = rows
        self.longest = -(-config.max_source_positions // rows)
        """Pages of a whole segment."""
        self.grown = 0
        self.limit_s = limit_s
        self._zeroed = zeroed
        self._row_s = CONV_STRIDE / 100
        size = (0, 1, 2, heads, rows, config.d_model // heads)
        self.kv = [weight.new_empty(size) for _ in range(config.quantize_position)]
        bins = config.num_mel_bins
        self.log_mel = torch.empty(0, CONV_STRIDE * rows, bins, device=weight.device)
        self._free: deque[int] = deque()

    @property
    def count(self) -> int:
        """Pages that there are, taken or not; without page 0."""
        return max(self.log_mel.shape[0] - 1, 0)

    @property
    def taken(self) -> int:
        """Pages that streams hold."""
        return self.count - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Size of a page: keys, values and features."""
        return sum(
            kept.shape[1:].numel() * kept.element_size() for kept in (*self.kv, self.log_mel)
        )

    def reserve(self, pages: int) -> None:
        """Make sure that so many are free.

        Raises:
            CodecFullError: that is over the limit, or the device has no memory left for them.
        """
        missing = pages - len(self._free)
        if missing <= 0 and self.count:
            return
        fewest = (_FEWEST_BYTES if self._zeroed else _FEWEST_UNTOUCHED_BYTES) // self.page_bytes
        wanted = max(missing, fewest, int(_GROWN_BY * self.count))
        if self.limit_s is not None:
            room = self._pages_in(self.limit_s) - self.count
            if missing > room:
                raise CodecFullError(
                    f"the sound of all live streams together is limited to {self.limit_s:g} s, "
                    f"and {self.taken * self.rows * self._row_s:g} s are held: end one first",
                    RETRY_AFTER_S,
                )
            wanted = min(wanted, room)
        self._grow(wanted)

    def take(self, pages: int) -> list[int]:
        """So many free pages; they must have been reserved."""
        # The latest first: what was written to before need not be taken from the system anew.
        return [self._free.pop() for _ in range(pages)]

    def give(self, pages: list[int]) -> None:
        """Take pages back and forget them; any thread may."""
        self._free.extend(pages)
        pages.clear()

    def frames(self) -> Tensor:
        """All features one after the other: (pages 2P, bins), a view."""
        return self.log_mel.flatten(0, 1)

    def _pages_in(self, seconds: float) -> int:
        return -(-round(seconds / self._row_s) // self.rows)

    def _grow(self, pages: int) -> None:
        before = self.log_mel.shape[0]
        after = max(before, 1) + pages
        try:
            # Layer by layer, so that no more than one of them is there twice.
            for index, layer in enumerate(self.kv):
                self.kv[index] = self._longer(layer, after)
            self.log_mel = self._longer(self.log_mel, after)
        except torch.OutOfMemoryError:
            raise CodecFullError(
                f"the device has no memory for {pages} more pages of {self.page_bytes} bytes: "
                "end a live stream first",
                RETRY_AFTER_S,
            ) from None
        self.grown += 1
        self._free.extendleft(range(max(before, 1), after))

    def _longer(self, kept: Tensor, pages: int) -> Tensor:
        make = torch.zeros if self._zeroed else torch.empty
        longer = make((pages, *kept.shape[1:]), dtype=kept.dtype, device=kept.device)
        longer[: kept.shape[0]] = kept
        return longer


class Held:
    """The pages of one stream, in the order of its rows; given back when it is no more."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.ids: list[int] = []
        weakref.finalize(self, pages.give, self.ids).atexit = False

    def cover(self, rows: int) -> None:
        """Take what is missing for so many rows; the pages must have been reserved."""
        missing = -(-rows // self.pages.rows) - len(self.ids)
        if missing > 0:
            self.ids += self.pages.take(missing)

    def missing(self, rows: int) -> int:
        """How many pages ``cover`` would take."""
        return max(0, -(-rows // self.pages.rows) - len(self.ids))

    def give(self) -> None:
        """Give all back."""
        self.pages.give(self.ids)

    def row_places(self, start: int, end: int) -> tuple[Places, Places]:
        """Page and row in it of the rows from ``start`` to before ``end``."""
        rows = np.arange(start, end)
        return np.asarray(self.ids)[rows // self.pages.rows], rows % self.pages.rows

    def frame_places(self, start: int, end: int) -> Places:
        """Where features from ``start`` to before ``end`` are in ``Pages.frames``.

        Those before 0 have none: they point at page 0.
        """
        frames, size = np.arange(start, end), CONV_STRIDE * self.pages.rows
        ids = np.asarray(self.ids)[frames.clip(0) // size]
        return np.where(frames < 0, 0, ids * size + frames % size)


def joined(places: Sequence[Places], device: torch.device) -> Tensor:
    """Places (n,) of several stretches one after the other, on the device."""
    return torch.from_numpy(np.concatenate(places)).to(device)
