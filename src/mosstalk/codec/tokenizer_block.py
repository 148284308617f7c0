"""One block of new sound of each of many streams, from samples to codes, on the device alone.

Shapes: n streams, T new rows of each (4 a code), P rows of a page, C = d_model.
"""

from collections.abc import Mapping, Sequence
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
"""Numbers of streams that a step is made for."""


class Block(NamedTuple):
    """The rows of a segment from ``start`` on, as many as a step takes, from whole ``frames``.

    What they make past those is nobody's. The floor lies by ``loudest`` at least. Rows that were
    encoded before are encoded again, to fill the block.
    """

    segment: LiveSegment
    start: int
    frames: int
    loudest: float


class EncodedBlock(NamedTuple):
    """What a block of one stream came to, if its floor changes nothing before it.

    ``codes`` (5,) with the ``leads`` (5,) of their entries, and the least values ``quietest``
    (frames,) and the largest one ``loudest`` of the frames that are new.
    """

    codes: list[int]
    leads: list[float]
    quietest: Floats
    loudest: float


def block_rows(live: LiveEncoder) -> int:
    """Rows of a block."""
    return BLOCK_CODES * live.encoder.pool


class BlockStep:
    """A block of up to ``items`` streams in one run, captured as a graph where that is asked.

    The floor of each stream is taken from what was loudest before and in these frames. Whether
    a new floor reaches what was encoded before is for the host to find out.
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
        self._inputs = DeviceInputs(
            {
                "sound": Field((items, self._samples), "float32", "streams"),
                "pages": Field((items, live.pages.longest), "int32", "streams"),
                "start": Field((items,), "int32", "streams"),
                "frames": Field((items,), "int32", "streams"),
                "loudest": Field((items,), "float32", "streams"),
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
        captured = graphs is not None and graphs.ready(items, self.compute)
        self._graphs = graphs if captured else None

    def run(self, blocks: Sequence[Block]) -> list[EncodedBlock]:
        """Encode a block of each stream; its pages must cover what it needs of them.

        Nothing is noted in the segments, but what lies in their pages from ``start`` on is
        overwritten.
        """
        self._fill(blocks)
        graphs = self._graphs
        self._found.copy_(self.compute() if graphs is None else graphs.replay(self.items))
        return self._read(blocks)

    def _fill(self, blocks: Sequence[Block]) -> None:
        self._inputs.fill({
            "sound": np.stack([self._sound(block) for block in blocks]),
            "pages": np.stack([self._pages(block.segment) for block in blocks]),
            "start": np.array([block.start for block in blocks], np.int32),
            "frames": np.array([block.frames for block in blocks], np.int32),
            "loudest": np.array([block.loudest for block in blocks], np.float32),
        })  # fmt: skip

    def _sound(self, block: Block) -> Floats:
        """Samples that the frames read, silence for what is no whole frame."""
        first = CONV_STRIDE * block.start - 1
        start, read = first * WHISPER_HOP, block.segment.sound
        if first >= 0 and block.frames - first >= self._frames - 1:
            return read[start : start + self._samples]
        sound = np.zeros(self._samples, np.float32)
        end = (block.frames - 1) * WHISPER_HOP + WHISPER_N_FFT
        begin = max(start, 0)
        sound[begin - start : end - start] = read[begin:end]
        return sound

    def _pages(self, segment: LiveSegment) -> npt.NDArray[np.int32]:
        pages = np.zeros(self._live.pages.longest, np.int32)
        pages[: len(segment.held.ids)] = segment.held.ids
        return pages

    def _read(self, blocks: Sequence[Block]) -> list[EncodedBlock]:
        """What the device found; the host's own until the next run."""
        found = self._found.numpy()[: len(blocks)]
        floats = found.view(np.float32)
        least, most = BLOCK_CODES * 2, BLOCK_CODES * 2 + self._frames
        codes, leads = found[:, :BLOCK_CODES].tolist(), floats[:, BLOCK_CODES:least].tolist()
        loudest = floats[:, most:].max(axis=1).tolist()
        quietest = []
        for block, row in zip(blocks, floats, strict=True):
            first = least - (CONV_STRIDE * block.start - 1)
            quietest.append(row[first + block.segment.frames : first + block.frames])
        return [EncodedBlock(*each) for each in zip(codes, leads, quietest, loudest, strict=True)]

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
        loudest = torch.maximum(inputs["loudest"], most.amax(dim=1))
        log_mel, before = log_mel[:, :-1], pages.frames()[kept]
        pages.frames()[new] = log_mel
        read_by_rows = torch.cat([before, log_mel], dim=1)
        return floored(read_by_rows, (loudest - WHISPER_RANGE)[:, None, None]), (least, most)


class Blocks:
    """Steps for every number of streams, made when they are first needed.

    A graph reads the pages where they were when it was captured: once the pool has grown, it is
    captured again.
    """

    def __init__(self, live: LiveEncoder, *, graphs: bool) -> None:
        self._live = live
        self._graphs = Graphs[int, Tensor](live.device, LISTENING, enabled=graphs)
        self._steps: dict[int, BlockStep] = {}
        self._grown = live.pages.grown

    def run(self, blocks: Sequence[Block]) -> list[EncodedBlock]:
        """``BlockStep.run`` for any number of streams."""
        found: list[EncodedBlock] = []
        for start in range(0, len(blocks), BUCKETS[-1]):
            part = blocks[start : start + BUCKETS[-1]]
            found += self.step_for(len(part)).run(part)
        return found

    def try_out(self, streams: int) -> None:
        """Compute the steps for up to so many streams once, without graphs."""
        for items in _sizes(streams):
            BlockStep(self._live, items).compute()

    def warm(self, streams: int) -> None:
        """Make the steps for up to so many streams."""
        for items in _sizes(streams):
            self.step_for(items)
        if self._graphs.enabled:
            # What ran before each capture has left its own memory behind.
            torch.cuda.empty_cache()

    def step_for(self, streams: int) -> BlockStep:
        """The step that takes so many streams."""
        if self._grown != self._live.pages.grown:
            self._steps.clear()
            self._graphs.forget()
            self._grown = self._live.pages.grown
        items = next(bucket for bucket in BUCKETS if bucket >= streams)
        if items not in self._steps:
            self._steps[items] = BlockStep(self._live, items, graphs=self._graphs)
        return self._steps[items]


def _sizes(streams: int) -> list[int]:
    """Buckets for up to so many streams, the largest first: the others fit into its memory."""
    most = next(bucket for bucket in BUCKETS if bucket >= min(streams, BUCKETS[-1]))
    return [bucket for bucket in reversed(BUCKETS) if bucket <= most]
