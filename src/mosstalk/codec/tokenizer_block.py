"""Blocks of many streams, from samples to codes, on the device alone: new sound, and repairs.

Shapes: n blocks, T rows of each (4 a code), P rows of a page, C = d_model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.tokenizer_encoder import Attention, LiveEncoder
from mosstalk.codec.tokenizer_state import FRAMES_BEFORE, Floats, LiveSegment
from mosstalk.models.features import WHISPER_HOP, WHISPER_N_FFT, WHISPER_RANGE, floored
from mosstalk.models.speech_tokenizer import CONV_STRIDE
from mosstalk.ops.attention_tokenizer import Items, attention_tokenizer, splits_for
from mosstalk.ops.linear_tf32x3 import Tf32x3, takes
from mosstalk.runtime.device_inputs import DeviceInputs, Field
from mosstalk.runtime.graphs import LISTENING, Graphs

BLOCK_CODES = 5
"""Codes of a block: 400 ms, by which sessions listen."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of blocks that a step is made for."""
_FEWEST = 16
"""A step for so many there is even where few talk: 6.4 s of one stream."""


class BlockSpan(NamedTuple):
    """Rows of a segment from ``start`` to before ``end``, in whole codes.

    Of the segment so many ``frames`` are whole. The floor lies by ``loudest`` at least.
    """

    segment: LiveSegment
    start: int
    end: int
    frames: int
    loudest: float

    def starts(self, rows: int) -> range:
        """First rows of the blocks of so many ``rows`` that cover it.

        They end with it, and what is before it is encoded again; but where a segment begins there
        is not as much, and they begin with that. What they then make past the end is dropped.
        """
        count = -(-(self.end - self.start) // rows)
        first = max(self.end - count * rows, 0)
        return range(first, first + count * rows, rows)


class EncodedSpan(NamedTuple):
    """What a span came to, if its floor changes nothing before it.

    Its ``codes`` with the ``leads`` of their entries, and the least values ``quietest``
    (frames,) and the largest one ``loudest`` of the frames that are new.
    """

    codes: list[int]
    leads: list[float]
    quietest: Floats
    loudest: float


class _Item(NamedTuple):
    """A block of a step: the rows of span number ``span`` from ``start`` on."""

    span: int
    start: int


class _Encoding:
    """What blocks of a span have found so far."""

    def __init__(self, span: BlockSpan, pool: int) -> None:
        self._span, self._pool = span, pool
        count, self._known = (span.end - span.start) // pool, span.segment.frames
        self._codes = np.zeros(count, np.int32)
        self._leads = np.zeros(count, np.float32)
        self._quietest = np.zeros(span.frames - self._known, np.float32)
        self._loudest = -math.inf

    def take(self, row: int, found: npt.NDArray[np.int32]) -> None:
        """Note what ``BlockStep.run`` found in the block from ``row`` on."""
        floats = found.view(np.float32)
        at = (row - self._span.start) // self._pool
        own = slice(max(at, 0), min(at + BLOCK_CODES, len(self._codes)))
        part = slice(own.start - at, own.stop - at)
        self._codes[own] = found[:BLOCK_CODES][part]
        self._leads[own] = floats[BLOCK_CODES : 2 * BLOCK_CODES][part]
        least, most = np.split(floats[2 * BLOCK_CODES :], 2)
        self._loudest = max(self._loudest, float(most.max()))
        first = CONV_STRIDE * row - 1
        start, end = max(first, self._known), min(first + len(least), self._span.frames)
        if start < end:
            new = least[start - first : end - first]
            self._quietest[start - self._known : end - self._known] = new

    def result(self) -> EncodedSpan:
        """All of it."""
        codes, leads = self._codes.tolist(), self._leads.tolist()
        return EncodedSpan(codes, leads, self._quietest, self._loudest)


def block_rows(live: LiveEncoder) -> int:
    """Rows of a block."""
    return BLOCK_CODES * live.encoder.pool


class BlockStep:
    """Up to ``items`` blocks in one run, of one stream or of many, captured as a graph if asked.

    All layers of all blocks are computed together, and each layer's keys and values are kept before
    any row reads them: so a block sees those before it that are in the same run. The floor of each
    stream is taken from what was loudest before and in these frames. Whether a new floor reaches
    what was encoded before is for the host to find out.
    """

    def __init__(
        self,
        live: LiveEncoder,
        items: int,
        *,
        graphs: Graphs[int, Tensor] | None = None,
    ) -> None:
        """``graphs`` are those of all steps, by ``items``; None: there is none."""
        self.items = items
        self._live = live
        self._rows = block_rows(live)
        # The last of them is read by no row, but when a segment ends its floor lies by it too.
        self._frames = CONV_STRIDE * self._rows + 1
        self._samples = (self._frames - 1) * WHISPER_HOP + WHISPER_N_FFT
        # The last block of a segment may go past its last page, into page 0.
        self._columns = live.pages.longest + -(-self._rows // live.pages.rows)
        self._inputs = DeviceInputs(
            {
                "sound": Field((items, self._samples), "float32", "items"),
                "pages": Field((items, self._columns), "int32", "items"),
                "start": Field((items,), "int32", "items"),
                "back": Field((items,), "int32", "items"),
                "frames": Field((items,), "int32", "items"),
                "loudest": Field((items,), "float32", "items"),
            },
            live.device,
        )
        self._splits = splits_for(items, live.pages.kv[0].shape[3])
        source = torch.arange(items, dtype=torch.int32, device=live.device)
        rows = torch.full_like(source, self._rows)
        self._items = Items(source, source * self._rows, rows, rows)
        pinned = live.device.type == "cuda"
        sizes = (items, 2 * (BLOCK_CODES + self._frames))
        self._found = torch.empty(sizes, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        captured = graphs is not None and graphs.ready(items, self.compute)
        self._graphs = graphs if captured else None

    def run(self, spans: Sequence[BlockSpan], items: Sequence[_Item]) -> npt.NDArray[np.int32]:
        """Encode blocks of ``spans``, those of one in order; their pages must cover what they need.

        Returns what ``compute`` found, (items, 2 (5 + 2T + 1)), good until the next run. Nothing is
        noted in the segments, but what lies in their pages is overwritten.
        """
        self._fill(spans, items)
        graphs = self._graphs
        found = self.compute() if graphs is None else graphs.replay(self.items)
        self._found.copy_(found, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        return self._found.numpy()[: len(items)]

    def _fill(self, spans: Sequence[BlockSpan], items: Sequence[_Item]) -> None:
        each = [spans[item.span] for item in items]
        first = {item.span: place for place, item in reversed(list(enumerate(items)))}
        back = [place - first[item.span] for place, item in enumerate(items)]
        sounds = [self._sound(span, item.start) for span, item in zip(each, items, strict=True)]
        self._inputs.fill({
            "sound": np.stack(sounds),
            "pages": np.stack([self._pages(span.segment) for span in each]),
            "start": np.array([item.start for item in items], np.int32),
            "back": np.array(back, np.int32),
            "frames": np.array([span.frames for span in each], np.int32),
            "loudest": np.array([span.loudest for span in each], np.float32),
        })  # fmt: skip

    def _sound(self, span: BlockSpan, row: int) -> Floats:
        """Samples that the frames of the block from ``row`` on read, silence for no whole frame."""
        first = CONV_STRIDE * row - 1
        start, read = first * WHISPER_HOP, span.segment.sound
        if first >= 0 and span.frames - first >= self._frames - 1:
            return read[start : start + self._samples]
        sound = np.zeros(self._samples, np.float32)
        end = min((span.frames - 1) * WHISPER_HOP + WHISPER_N_FFT, start + self._samples)
        begin = max(start, 0)
        sound[begin - start : end - start] = read[begin:end]
        return sound

    def _pages(self, segment: LiveSegment) -> npt.NDArray[np.int32]:
        pages = np.zeros(self._columns, np.int32)
        pages[: len(segment.held.ids)] = segment.held.ids
        return pages

    def compute(self) -> Tensor:
        """What lies in the inputs, without a graph: (n, 2 (5 + 2T + 1)) as int32.

        Codes, leads, least and largest values of frames.
        """
        live, inputs = self._live, self._inputs.tensors
        start = inputs["start"].long()[:, None]
        rows = start + torch.arange(self._rows, device=live.device)
        page = inputs["pages"].long().gather(1, rows // live.pages.rows).flatten()
        frames, ends = self._floored(inputs, start)
        x = live.convolved(frames, self._known(start)).flatten(0, 1)
        visible = (start[:, 0] + self._rows).int()
        pooled = live.run(
            x, rows.flatten(), (page, rows.flatten() % live.pages.rows), self._attention(visible)
        )
        codes, leads = live.nearest(pooled)
        parts = (codes, leads.view(torch.int32), *(each.view(torch.int32) for each in ends))
        return torch.cat([part.view(self.items, -1) for part in parts], dim=1)

    def _attention(self, visible: Tensor) -> Attention:
        live, table = self._live, self._inputs.tensors["pages"]
        items = self._items._replace(visible=visible)

        def attend(layer: int, query: Tensor) -> Tf32x3:
            return attention_tokenizer(
                query, live.pages.kv[layer], table, items, splits=self._splits,
                split=takes(query), precision=live.precision, workspace=live.workspace,
            )  # fmt: skip

        return attend

    def _known(self, start: Tensor) -> Tensor:
        """Which frames (n, 2T + 3, 1) that are read are not padding before the first one."""
        count = CONV_STRIDE * self._rows + FRAMES_BEFORE - 1
        frames = torch.arange(count, device=start.device) + CONV_STRIDE * start - FRAMES_BEFORE
        return (frames >= 0)[:, :, None]

    def _floored(
        self, inputs: Mapping[str, Tensor], start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Frames (n, 2T + 3, bins) with each stream's floor; extremes (n, 2T + 1) of the new ones.

        New frames begin with the one that is read last by the row before: it was not whole then.
        """
        live, pages = self._live, self._live.pages
        size = CONV_STRIDE * pages.rows
        frames = torch.arange(-FRAMES_BEFORE, self._frames - 2, device=live.device)
        frames = frames + CONV_STRIDE * start
        page = inputs["pages"].long().gather(1, frames.clamp_min(0) // size)
        # What is no frame is at the beginning of page 0.
        places = torch.where(frames < 0, 0, page * size + frames % size)
        kept, new = places.split([FRAMES_BEFORE - 1, self._frames - 1], dim=1)
        windows = inputs["sound"].unfold(1, WHISPER_N_FFT, WHISPER_HOP)
        log_mel = live.log_mel(windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
        least, most = torch.aminmax(log_mel, dim=2)
        place = frames[:, :1] + FRAMES_BEFORE - 1 + torch.arange(self._frames, device=live.device)
        whole = (place >= 0) & (place < inputs["frames"][:, None])
        most = most.masked_fill(~whole, -torch.inf)
        loudest = self._of_streams(torch.maximum(inputs["loudest"], most.amax(dim=1)))
        log_mel = log_mel[:, :-1]
        pages.frames()[new] = log_mel
        # Now, because some may be those of another block of this run.
        read_by_rows = torch.cat([pages.frames()[kept], log_mel], dim=1)
        return floored(read_by_rows, (loudest - WHISPER_RANGE)[:, None, None]), (least, most)

    def _of_streams(self, loudest: Tensor) -> Tensor:
        """Of each block (items,) what is loudest in all blocks of its stream."""
        stream = (self._items.source - self._inputs.tensors["back"]).long()
        most = torch.full_like(loudest, -torch.inf).scatter_reduce(0, stream, loudest, "amax")
        return most[stream]


class Blocks:
    """Steps for every number of blocks, made when they are first needed.

    A graph reads the pages where they were when it was captured: once the pool has grown, it is
    captured again.
    """

    def __init__(self, live: LiveEncoder, *, graphs: bool) -> None:
        self._live = live
        self._graphs = Graphs[int, Tensor](live.device, LISTENING, enabled=graphs)
        self._steps: dict[int, BlockStep] = {}
        self._grown = live.pages.grown
        self.most = BUCKETS[-1]
        """Blocks of a run."""

    def run(self, spans: Sequence[BlockSpan]) -> list[EncodedSpan]:
        """Encode spans of streams, each at most once, in few runs.

        One of more than ``most`` blocks must have its final floor: its first run knows only what is
        loudest there.
        """
        encoded = [_Encoding(span, self._live.encoder.pool) for span in spans]
        for part in self._runs(spans):
            found = self.step_for(len(part)).run(spans, part)
            for item, row in zip(part, found, strict=True):
                encoded[item.span].take(item.start, row)
        return [each.result() for each in encoded]

    def _runs(self, spans: Sequence[BlockSpan]) -> Iterator[list[_Item]]:
        """Blocks that run together: all of a span, for it has one floor, if there are not more."""
        rows, run = block_rows(self._live), list[_Item]()
        for number, span in enumerate(spans):
            items = [_Item(number, start) for start in span.starts(rows)]
            if run and len(run) + len(items) > self.most:
                yield run
                run = []
            run += items
            while len(run) > self.most:
                yield run[: self.most]
                run = run[self.most :]
        if run:
            yield run

    def try_out(self, streams: int) -> None:
        """Compute the steps for up to so many streams once, without graphs."""
        for items in _sizes(streams):
            BlockStep(self._live, items).compute()

    def warm(self, streams: int) -> None:
        """Make the steps for up to so many streams; from now on no run has more blocks."""
        sizes = _sizes(streams)
        self.most = sizes[0]
        for items in sizes:
            self.step_for(items)
        if self._graphs.enabled:
            # What ran before each capture has left its own memory behind.
            torch.cuda.empty_cache()

    def step_for(self, blocks: int) -> BlockStep:
        """The step that takes so many blocks."""
        if self._grown != self._live.pages.grown:
            self._steps.clear()
            self._graphs.forget()
            self._grown = self._live.pages.grown
        items = next(bucket for bucket in BUCKETS if bucket >= blocks)
        if items not in self._steps:
            self._steps[items] = BlockStep(self._live, items, graphs=self._graphs)
        return self._steps[items]


def _sizes(streams: int) -> list[int]:
    """Buckets for up to so many streams, the largest first: the others fit into its memory.

    One stream may have many blocks: a repair, a recording.
    """
    wanted = min(max(streams, _FEWEST), BUCKETS[-1])
    most = next(bucket for bucket in BUCKETS if bucket >= wanted)
    return [bucket for bucket in reversed(BUCKETS) if bucket <= most]
