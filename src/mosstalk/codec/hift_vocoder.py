"""HiFT for many replies at once: calls of equal length share a batch, on a GPU a CUDA graph.

A call of T frames in all, kept ones included, is the same work whether a reply begins or
continues, so replies are grouped by T alone: 28 for an ordinary hop, others at the first hop and
at the last.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from mosstalk.codec.hift_step import Crossfade, HiftState, HiftStep, Layout
from mosstalk.codec.vocoder import Slots, VocoderFigures, VocoderReply, Work, check_work
from mosstalk.constants import MEL_FRAMES_PER_CODE
from mosstalk.errors import OptionError
from mosstalk.models.hift import KEPT_FRAMES, HiftVocoder
from mosstalk.runtime.device import pick_dtype
from mosstalk.runtime.device_inputs import DeviceInputs, Field
from mosstalk.runtime.graphs import DECODING, Graphs

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
"""Batch sizes that are captured; a batch in between runs as the next larger one."""
_HOP_FRAMES = 5 * MEL_FRAMES_PER_CODE
_OTHER_FRAMES = range(KEPT_FRAMES, KEPT_FRAMES + 10 * MEL_FRAMES_PER_CODE, MEL_FRAMES_PER_CODE)
"""Lengths of first and last hops, and of whole short replies but for one code alone."""
_OTHER_BUCKETS = (32, 8, 4, 1)
"""Batch sizes that are captured for these."""
_LONGEST_CAPTURED = 64
_WARM_UPS = 3


@dataclass(frozen=True)
class HiftOptions:
    """How a ``BatchedHift`` computes.

    ``dtype``: of the convolutions in between; ``float32`` is exact. ``graphs``: CUDA graphs on
    a GPU. ``replies``: places for replies at once. ``crossfade``: the published Hamming window,
    whose halves add to 1.08, or the same divided by its sum. ``tune``: have cuDNN try kernels at
    warm-up.

    Raises:
        OptionError: a value that means nothing.
        DeviceError: an unknown dtype.
    """

    dtype: str = "float32"
    graphs: bool = True
    replies: int = 256
    crossfade: Crossfade = "published"
    tune: bool = False

    def __post_init__(self) -> None:
        pick_dtype(self.dtype)
        if self.replies < 1:
            raise OptionError("a vocoder needs a place for at least one reply")
        if self.crossfade not in get_args(Crossfade):
            raise OptionError(f"crossfade must be one of {', '.join(get_args(Crossfade))}")


@dataclass(frozen=True)
class _Captured:
    """What a graph reads, and the sound that it writes."""

    inputs: DeviceInputs
    mel: Tensor
    wave: Tensor


class BatchedHift:
    """``HiftStream`` for many replies; a ``StreamingVocoder``.

    In float32 a reply's sound does not depend on the other replies in its batch: on a CPU each
    is computed alone, since there a convolution rounds otherwise in another batch size; on a GPU
    that holds for one batch size, and between sizes to rounding.
    """

    def __init__(self, vocoder: HiftVocoder, options: HiftOptions | None = None) -> None:
        self.options = options = options or HiftOptions()
        self.config = vocoder.config
        self.device = vocoder.conv_pre.weight.device
        on_gpu, dtype = self.device.type == "cuda", pick_dtype(options.dtype)
        layout = Layout(dtype, bias_apart=on_gpu)
        self._slots = Slots(options.replies)
        self._state = HiftState.empty(options.replies + 1, self.config, self.device)
        self._step = HiftStep(vocoder, self._state, layout, options.crossfade)
        self._graphs = Graphs[tuple[int, int], _Captured](
            self.device, DECODING, enabled=options.graphs, warm_ups=_WARM_UPS
        )
        self._most = BUCKETS[-1] if on_gpu else 1
        self._warmed = False
        self._eager = slots_of(self._most, self.device)
        self._held = KEPT_FRAMES * self.config.samples_per_frame

    def open(self, seed: int = 0) -> VocoderReply:
        """Begin a reply; its noise is a function of ``seed`` and the sample alone.

        Raises:
            CodecFullError: all places are taken.
        """
        slot = self._slots.take()
        self._state.reset(slot, seed)
        return VocoderReply(slot)

    def close(self, reply: VocoderReply) -> None:
        """Give the reply's place back; closing twice does nothing."""
        if not reply.closed:
            reply.closed = reply.ended = True
            self._slots.give(reply.slot)

    def push(self, work: Sequence[Work]) -> list[Tensor]:
        """Take new frames (80, T) of several replies; return what is settled of each.

        480 samples a frame; unless it is a reply's last call, 3840 samples are held back, and
        the first call needs at least 8 frames.
        """
        check_work(work, self.config.in_channels, KEPT_FRAMES)
        frames = [mel.shape[1] + KEPT_FRAMES * (reply.frames > 0) for reply, mel, _ in work]
        sound: dict[int, Tensor] = {}
        order = sorted(range(len(work)), key=frames.__getitem__)
        for length, group in groupby(order, key=frames.__getitem__):
            rows = list(group)
            for start in range(0, len(rows), self._most):
                part = rows[start : start + self._most]
                waves = self._call([work[index] for index in part], length)
                sound.update(zip(part, waves, strict=True))
        return [self._settle(work[index], sound[index]) for index in range(len(work))]

    def push_with_source(
        self, reply: VocoderReply, mel: Tensor, source: Tensor, *, final: bool = False
    ) -> Tensor:
        """``push`` of one reply with the source of kept and new frames (N,) from outside.

        Not clamped after the cross-fade, as published.
        """
        work = (reply, mel, final)
        check_work([work], self.config.in_channels, KEPT_FRAMES)
        frames = mel.shape[1] + KEPT_FRAMES * (reply.frames > 0)
        given = source[None].to(self.device, torch.float32)
        return self._settle(work, self._eagerly([work], frames, given)[0])

    def warm(self) -> None:
        """Capture the graphs of ordinary hops, and for a few replies those of first and last ones.

        Without graphs there is nothing to do. After that nothing is captured any more: what is
        longer runs without a graph, and more replies than a length has a graph for run one lot
        after another.
        """
        if not self._graphs.enabled:
            return
        for frames in (KEPT_FRAMES + _HOP_FRAMES, _HOP_FRAMES):
            for bucket in reversed(BUCKETS):
                self.capture(bucket, frames)
        for frames in reversed(_OTHER_FRAMES):
            for bucket in _OTHER_BUCKETS:
                self.capture(bucket, frames)
        self._warmed = True

    def capture(self, bucket: int, frames: int) -> None:
        """Capture the graph for up to ``bucket`` replies, one of ``BUCKETS``, of T = ``frames``.

        Without graphs, or where it is there, this does nothing. The calls that warm it up touch
        slot 0 alone.
        """
        assert bucket in BUCKETS
        if not self._graphs.enabled or (bucket, frames) in self._graphs:
            return
        inputs = slots_of(bucket, self.device)
        mel = torch.zeros(bucket, self.config.in_channels, frames, device=self.device)

        def compute() -> _Captured:
            return _Captured(inputs, mel, self._step(inputs["slots"], mel))

        with steady_convolutions(tune=self.options.tune), torch.inference_mode():
            self._graphs.ready((bucket, frames), compute)

    def figures(self) -> VocoderFigures:
        """Sizes in bytes, and how many places are taken."""
        state = sum(part.numel() * part.element_size() for part in self._state.tensors)
        return VocoderFigures(
            self._slots.count,
            self._slots.used,
            self._step.weight_bytes,
            state,
            self._graphs.nbytes,
            len(self._graphs),
        )

    def _call(self, work: list[Work], frames: int) -> list[Tensor]:
        """Sound of calls of ``frames`` each, by the fastest way there is."""
        if not self._graphs.enabled or frames > _LONGEST_CAPTURED:
            return list(self._eagerly(work, frames))
        if not self._warmed:
            # Without ``warm`` a first call captures the graph that it runs in.
            ordinary = frames in (KEPT_FRAMES + _HOP_FRAMES, _HOP_FRAMES)
            buckets = BUCKETS if ordinary else sorted(_OTHER_BUCKETS)
            self.capture(next((n for n in buckets if n >= len(work)), buckets[-1]), frames)
        there = [size for size in BUCKETS if (size, frames) in self._graphs]
        if not there:
            return list(self._eagerly(work, frames))
        if len(work) > there[-1]:
            lots = [work[at : at + there[-1]] for at in range(0, len(work), there[-1])]
            return [wave for lot in lots for wave in self._call(lot, frames)]
        bucket = next(size for size in there if size >= len(work))
        return list(self._replayed(work, (bucket, frames)))

    @torch.inference_mode()
    def _replayed(self, work: list[Work], shape: tuple[int, int]) -> Tensor:
        """Sound (replies, N) by the graph of ``shape``, a copy.

        The rest of the batch runs on slot 0, which is never given out.
        """
        found = self._graphs[shape]
        found.inputs.fill({"slots": np.array([reply.slot for reply, _, _ in work])})
        place_frames(found.mel, [mel.to(self.device, torch.float32) for _, mel, _ in work])
        self._graphs.replay(shape)
        return found.wave[: len(work)].clone()

    def _eagerly(self, work: list[Work], frames: int, source: Tensor | None = None) -> Tensor:
        self._eager.fill({"slots": np.array([reply.slot for reply, _, _ in work])})
        slots = self._eager["slots"][: len(work)]
        mel = torch.zeros(len(work), self.config.in_channels, frames, device=self.device)
        place_frames(mel, [mel.to(self.device, torch.float32) for _, mel, _ in work])
        all_begun = all(reply.frames > 0 for reply, _, _ in work)
        with steady_convolutions(tune=False):
            return self._step(slots, mel, source, all_begun=all_begun)

    def _settle(self, work: Work, wave: Tensor) -> Tensor:
        """Count the frames, and leave the sound that the next call fades into for that call."""
        reply, mel, final = work
        reply.frames += mel.shape[1]
        reply.ended = final
        return wave if final else wave[: -self._held]


# Around a call.


@contextmanager
def steady_convolutions(*, tune: bool) -> Iterator[None]:
    """Have cuDNN choose among kernels that give the same sum each time; ``tune``: by trying."""
    settings = torch.backends.cudnn
    before = settings.deterministic, settings.benchmark
    settings.deterministic, settings.benchmark = True, tune
    try:
        yield
    finally:
        settings.deterministic, settings.benchmark = before


def slots_of(replies: int, device: torch.device) -> DeviceInputs:
    """Inputs with room for the ``slots`` of so many replies; places beyond them are slot 0."""
    return DeviceInputs({"slots": Field((replies,), "int64", "replies")}, device)


def place_frames(whole: Tensor, mels: list[Tensor]) -> None:
    """Put each of ``mels`` (80, T') at the end of its row of ``whole`` (B, 80, T)."""
    frames = whole.shape[2]
    places = [whole[row, :, frames - mel.shape[1] :] for row, mel in enumerate(mels)]
    torch._foreach_copy_(places, mels)
