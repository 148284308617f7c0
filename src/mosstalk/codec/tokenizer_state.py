"""What a live tokenizer keeps of each stream: pages of K and V, its segment, its codes so far."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.constants import INPUT_RATE
from mosstalk.errors import CodecFullError
from mosstalk.models.features import WHISPER_HOP, WHISPER_N_FFT, WHISPER_RANGE
from mosstalk.models.speech_tokenizer import CONV_STRIDE, SpeechTokenizer
from mosstalk.runtime.sharing import PagePool

# What live streams keep on the device: pages of one pool, taken as sound arrives.
#
# Shapes: P rows of 20 ms in a page, H heads, d channels of a head, C = H d.


Places = npt.NDArray[np.int64]
ROW_S = CONV_STRIDE * WHISPER_HOP / INPUT_RATE
"""Seconds of a row of the encoder: 20 ms."""
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
        size = (0, 1, 2, heads, rows, config.d_model // heads)
        self.kv = [weight.new_empty(size) for _ in range(config.quantize_position)]
        bins = config.num_mel_bins
        self.log_mel = torch.empty(0, CONV_STRIDE * rows, bins, device=weight.device)
        self._pool = PagePool()

    @property
    def count(self) -> int:
        """Pages that there are, taken or not; without page 0."""
        return self._pool.size

    @property
    def taken(self) -> int:
        """Pages that streams hold."""
        return self._pool.in_use

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
        missing = pages - self._pool.free
        if missing <= 0 and self.count:
            return
        fewest = (_FEWEST_BYTES if self._zeroed else _FEWEST_UNTOUCHED_BYTES) // self.page_bytes
        wanted = max(missing, fewest, int(_GROWN_BY * self.count))
        if self.limit_s is not None:
            room = self._pages_in(self.limit_s) - self.count
            if missing > room:
                raise CodecFullError(
                    f"the sound of all live streams together is limited to {self.limit_s:g} s, "
                    f"and {self.taken * self.rows * ROW_S:g} s are held: end one first",
                    RETRY_AFTER_S,
                )
            wanted = min(wanted, room)
        self._grow(wanted)

    def reserve_all(self) -> None:
        """Take the memory for all that ``limit_s`` allows, so that the tensors never move again.

        Without a limit this does nothing.

        Raises:
            CodecFullError: the device has no memory left for it.
        """
        if self.limit_s is not None:
            self.reserve(self._pages_in(self.limit_s) - self.taken)

    def take(self, pages: int) -> list[int]:
        """So many free pages; they must have been reserved."""
        taken = self._pool.take(pages)
        assert taken is not None, "pages that were not reserved"
        return taken

    def give(self, pages: list[int]) -> None:
        """Take pages back and forget them; any thread may."""
        self._pool.give(pages)
        pages.clear()

    def frames(self) -> Tensor:
        """All features one after the other: (pages 2P, bins), a view."""
        return self.log_mel.flatten(0, 1)

    def _pages_in(self, seconds: float) -> int:
        return -(-round(seconds / ROW_S) // self.rows)

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
        finally:
            # Also where memory ran out: the layers that came before it have moved.
            self.grown += 1
        self._pool.grow(range(max(before, 1), after))

    def _longer(self, kept: Tensor, pages: int) -> Tensor:
        """``kept`` with room for ``pages``; itself where a growth that failed has made the room."""
        if kept.shape[0] >= pages:
            return kept
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
    """Places (n,) of several spans one after the other, on the device."""
    return torch.from_numpy(np.concatenate(places)).to(device)


# What a live stream knows of the segment that it is in; keys, values and features are in pages.
#
# Sound and the least value of each frame stay on the host, where it is decided what must be
# encoded again. Shapes: F frames of 10 ms, two of them to a row.


Floats = npt.NDArray[np.float32]

MIRRORED = WHISPER_N_FFT // 2
"""Samples that stand before the first one and after the last one, mirrored."""
FRAMES_BEFORE = 2 * CONV_STRIDE
"""Frames before a row's own that it reads: two convolutions, each two steps back."""


@dataclass
class LiveSegment:
    """One segment while it is heard, of ``samples`` so far.

    ``sound`` (200 + samples + 200) has room for the mirrored ends. Of the first ``frames``
    the features are in the pages ``held``; ``quietest`` (F,) is the least of each, and
    ``loudest`` the largest of all. The first ``rows`` were encoded with the floor ``floor``.
    """

    sound: Floats
    quietest: Floats
    held: Held
    samples: int = 0
    frames: int = 0
    rows: int = 0
    loudest: float = -math.inf
    floor: float = -math.inf

    @classmethod
    def of(cls, tokenizer: SpeechTokenizer, pages: Pages) -> "LiveSegment":
        """An empty segment of the tokenizer's; it holds no page yet."""
        sound = np.empty(tokenizer.segment_samples + 2 * MIRRORED, np.float32)
        frames = tokenizer.segment_samples // WHISPER_HOP
        return cls(sound, np.empty(frames, np.float32), Held(pages))

    def clear(self) -> None:
        """Begin a new segment in the same memory."""
        self.samples = self.frames = self.rows = 0
        self.loudest = self.floor = -math.inf

    @property
    def room(self) -> int:
        """Samples that the segment still takes."""
        return len(self.sound) - 2 * MIRRORED - self.samples

    @property
    def pcm(self) -> Tensor:
        """The samples heard, (samples,), on the host."""
        return torch.from_numpy(self.sound[MIRRORED : MIRRORED + self.samples])

    def write(self, sound: Floats) -> None:
        """Take samples (n,), n no more than ``room``."""
        start = MIRRORED + self.samples
        self.sound[start : start + len(sound)] = sound
        if self.samples <= MIRRORED < self.samples + len(sound):
            self.sound[:MIRRORED] = self.sound[2 * MIRRORED : MIRRORED : -1]
        self.samples += len(sound)

    def whole_frames(self) -> int:
        """Frames all of whose samples are there; the first ones read 201 from the start."""
        if self.samples <= MIRRORED:
            return 0
        return (self.samples - MIRRORED) // WHISPER_HOP + 1

    def close(self, samples_per_code: int) -> int:
        """Pad with silence to whole codes and mirror the end; return all frames there are.

        ``samples`` stays what was heard.
        """
        padded = -(-self.samples // samples_per_code) * samples_per_code
        self.sound[MIRRORED + self.samples : MIRRORED + padded] = 0
        end = MIRRORED + padded
        self.sound[end : end + MIRRORED] = self.sound[padded - 1 : end - 1][::-1]
        if self.samples <= MIRRORED:
            self.sound[:MIRRORED] = self.sound[2 * MIRRORED : MIRRORED : -1]
        return padded // WHISPER_HOP

    def windows(self, start: int, end: int) -> Floats:
        """Samples (n, 400) that the frames from ``start`` to before ``end`` read, a view."""
        read = self.sound[start * WHISPER_HOP : (end - 1) * WHISPER_HOP + WHISPER_N_FFT]
        return np.lib.stride_tricks.sliding_window_view(read, WHISPER_N_FFT)[::WHISPER_HOP]

    def put(self, quietest: Floats, loudest: float) -> None:
        """Note the least values (n,) of the next frames and the largest of them all."""
        start, self.frames = self.frames, self.frames + len(quietest)
        self.quietest[start : self.frames] = quietest
        self.loudest = max(self.loudest, loudest)

    def first_row_changed_by(self, floor: float) -> int:
        """The first row that another floor than ``self.floor`` changes, or ``rows``: none."""
        if floor == self.floor or self.rows == 0:
            return self.rows
        read = self.quietest[: self.rows * CONV_STRIDE - 1]
        changed = read < max(floor, self.floor)
        first = int(changed.argmax())
        return -(-first // CONV_STRIDE) if changed[first] else self.rows


def floor_below(loudest: float) -> float:
    """Where the floor lies, in float32, of sound whose loudest value is ``loudest``."""
    return float(np.float32(loudest) - np.float32(WHISPER_RANGE))


# One turn's codes while they come, what may still change them, and what each push did to them.


@dataclass(frozen=True)
class Change:
    """What sound did to a stream's codes: the first ``kept`` stay, ``codes`` follow them.

    ``kept`` is less than the number of codes before where some of them changed: whatever was
    computed from the others is to be dropped. ``repaired``: some were encoded again, whether
    or not they changed.
    """

    kept: int
    codes: list[int]
    repaired: bool


@dataclass(frozen=True)
class Repair:
    """One repair: after how many samples of the turn, and how many rows of 20 ms it cost."""

    at_samples: int
    rows_again: int

    @property
    def at_s(self) -> float:
        """Seconds into the turn."""
        return self.at_samples / INPUT_RATE


@dataclass
class LiveCodes:
    """One turn's codes and all that its stream keeps; only ``LiveTokenizer`` writes here.

    The first ``settled`` of ``codes`` are final, the others but for repairs. ``leads`` says of
    each of those how much nearer its entry of the codebook is than the next one, see
    ``LiveEncoder.nearest``. ``trusted`` is the last turn's maximum while it is still taken for
    this turn's. For the record: ``blocks`` counts the times that something was encoded, ``rows``
    all rows of 20 ms that were, and ``ties`` the segments encoded whole at their end, because
    rounding could choose between two entries.
    """

    segment: LiveSegment = field(repr=False)
    trusted: float | None
    codes: list[int] = field(default_factory=list)
    settled: int = 0
    leads: list[float] = field(default_factory=list)
    samples: int = 0
    finished: bool = False
    maximum_before: float | None = None
    repairs: list[Repair] = field(default_factory=list)
    blocks: int = 0
    rows: int = 0
    ties: int = 0

    def as_if(self) -> "LiveCodes":
        """Another that goes on from here in the same pages and the same memory.

        What it writes there lies after all that this one knows, or is to be encoded again.
        """
        lists = {name: getattr(self, name).copy() for name in ("codes", "leads", "repairs")}
        return replace(self, segment=replace(self.segment), **lists)

    @property
    def seconds(self) -> float:
        """Length of the sound that was taken."""
        return self.samples / INPUT_RATE

    @property
    def rows_again(self) -> int:
        """Rows of 20 ms that repairs encoded again: their cost."""
        return sum(repair.rows_again for repair in self.repairs)

    @property
    def maximum(self) -> float | None:
        """Log power of the loudest band of any frame, to begin the speaker's next turn with.

        Of the latest segment of which anything was encoded; None before that.
        """
        return self.segment.loudest if self.segment.frames else self.maximum_before
