"""BigVGAN for many replies at once, behind the mel bridge: streamed sound is the whole's.

The bridge is a fitted linear map from the flow's mel to the one that BigVGAN was trained with.
The flow makes 80 bands to 8 kHz, 50 frames a second, of windows of 80 ms; BigVGAN-v2 wants 80
or 100 bands to 8, 11 or 12 kHz, 86 or 94 frames a second, of windows of 43 to 46 ms. A frame
of the other mel is W [before, here, after] + b, where these are the flow's log mel 20 ms before
the frame's centre, at it and 20 ms after it, interpolated by cubics (Catmull and Rom 1974), and W
and b are least squares with a ridge over recordings: ``python -m recipes.mel_bridge`` fitted what
ships. Bands above 8 kHz are guessed from those below.

A BigVGAN looks a fixed number of mel frames back and ahead (``bigvgan_reach``), and is no longer
causal than that: each call computes its new frames with as many kept ones before them, and holds
back as many as later frames would change. Shapes: T frames of the flow, M of BigVGAN's own mel.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.codec.vocoder import Slots, VocoderFigures, VocoderReply, Work, check_work
from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.errors import ConfigError, OptionError
from mosstalk.models.bigvgan import ACTIVATION_REACH, BigVgan, BigVganConfig
from mosstalk.models.features import FLOW_MEL, MelSpec
from mosstalk.models.weights import open_safetensors
from mosstalk.runtime.device import pick_dtype

SHIPPED = Path(__file__).with_name("mel_bridges.safetensors")
"""Coefficients of the three published BigVGAN-v2 mels."""
TAPS = (-1, 0, 1)
"""Frames of the flow around a place whose bands are read."""
_CUBIC_BEFORE, _CUBIC_AFTER = 1, 2
HISTORY = 8
"""Frames of the flow before the latest that later frames of the other mel may still read."""


def mel_name(spec: MelSpec) -> str:
    """What tells one vocoder mel from another: rate, n_fft, hop, bands and both ends in Hz."""
    ends = f"{spec.low_hz:g}-{spec.high_hz:g}"
    return f"{spec.rate}.{spec.n_fft}.{spec.hop}.{spec.bins}.{ends}"


def places(spec: MelSpec, start: int, end: int) -> NDArray[np.float64]:
    """Where frames ``start`` to ``end`` of the other mel lie, counted in the flow's frames.

    A frame that is not centred stands for the middle of its hop.
    """
    seconds = (np.arange(start, end) + 0.5) * spec.hop / spec.rate
    return seconds * (FLOW_MEL.rate / FLOW_MEL.hop) - 0.5


def frames_in(spec: MelSpec, flow_frames: int) -> int:
    """Frames of the other mel that cover all sound of ``flow_frames``."""
    return -(-flow_frames * FLOW_MEL.hop * spec.rate // (FLOW_MEL.rate * spec.hop))


def frames_ready(spec: MelSpec, flow_frames: int) -> int:
    """Frames of the other mel that frames after the first ``flow_frames`` do not change."""
    last = flow_frames - 1 - _CUBIC_AFTER - max(TAPS)
    # The first frame whose place is at or past last + 1 reads one that is not there.
    ready = math.ceil((last + 1.5) * FLOW_MEL.hop * spec.rate / (FLOW_MEL.rate * spec.hop) - 0.5)
    return max(0, min(ready, frames_in(spec, flow_frames)))


def interpolation(
    spec: MelSpec, start: int, end: int, first: int, frames: int
) -> NDArray[np.float32]:
    """Weights (frames, taps (end - start)) from the flow's frames to places and their neighbours.

    ``first`` is the index of the first of ``frames`` frames; before the first and after the
    last of them the mel is held.
    """
    centre = places(spec, start, end)
    at = np.concatenate([centre + tap for tap in TAPS])
    whole = np.floor(at).astype(int)
    t = at - whole
    cubic = (
        (-t + 2 * t**2 - t**3) / 2,
        (2 - 5 * t**2 + 3 * t**3) / 2,
        (t + 4 * t**2 - 3 * t**3) / 2,
        (t**3 - t**2) / 2,
    )
    weights = np.zeros((frames, len(at)), np.float32)
    for offset, share in zip(range(-_CUBIC_BEFORE, _CUBIC_AFTER + 1), cubic, strict=True):
        row = np.clip(whole + offset - first, 0, frames - 1)
        np.add.at(weights, (row, np.arange(len(at))), share)
    return weights


@dataclass(frozen=True)
class MelBridge:
    """The map for one mel: ``weight`` (bins, taps 80), ``bias`` (bins,) float32."""

    spec: MelSpec
    weight: Tensor
    bias: Tensor

    @classmethod
    def load(cls, spec: MelSpec, device: torch.device, path: Path = SHIPPED) -> "MelBridge":
        """The bridge to mels of ``spec``.

        Raises:
            ConfigError: none was fitted for it.
        """
        store, name = open_safetensors(path), mel_name(spec)
        if f"{name}.weight" not in store:
            known = sorted(key.removesuffix(".weight") for key in store if key.endswith("weight"))
            raise ConfigError(
                f"no bridge leads to the mel {name}; there are {', '.join(known)}. Fit one with "
                "python -m recipes.mel_bridge"
            )
        weight, bias = (store[f"{name}.{part}"].load() for part in ("weight", "bias"))
        return cls(spec, weight.to(device, torch.float32), bias.to(device, torch.float32))

    def convert(self, flow: Tensor, first: int, start: int, end: int) -> Tensor:
        """Frames ``start`` to ``end`` of the other mel, (bins, end - start) float32.

        ``flow`` (80, T) holds the flow's frames from ``first`` on. At the ends of the reply the
        mel is held; elsewhere ``flow`` must have what these frames read: see ``frames_ready``.
        """
        weights = torch.from_numpy(interpolation(self.spec, start, end, first, flow.shape[1]))
        if flow.device.type == "cuda":
            weights = weights.pin_memory().to(flow.device, non_blocking=True)
        around = flow.float() @ weights
        stacked = around.unflatten(1, (len(TAPS), end - start)).transpose(0, 1).flatten(0, 1)
        return self.weight @ stacked + self.bias[:, None]

    def whole(self, flow: Tensor) -> Tensor:
        """All frames (bins, M) of the other mel, of a whole reply's mel (80, T)."""
        return self.convert(flow, 0, 0, frames_in(self.spec, flow.shape[1]))


# How far a BigVGAN looks: the mel frames on either side that a frame's sound depends on.


class Reach(NamedTuple):
    """Frames before and after one whose sound is made."""

    left: int
    right: int


class _Span(NamedTuple):
    """Samples of a stage, both ends included."""

    first: int
    last: int

    def widened(self, by: int) -> "_Span":
        return _Span(self.first - by, self.last + by)


def reach(config: BigVganConfig) -> Reach:
    """The receptive field, from the samples of a frame backwards through all layers.

    Exact: every sample of the frame is a function of these frames alone, as far from the ends
    of the whole.
    """
    span = _Span(0, config.mel.hop - 1).widened(3 + ACTIVATION_REACH)
    blocks = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    block = max(_block_reach(kernel, dilations) for kernel, dilations in blocks)
    sizes = zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)
    for rate, kernel in reversed(list(sizes)):
        span = _before_upsampling(span.widened(block), rate, kernel)
    span = span.widened(3)
    return Reach(-span.first, span.last)


def _block_reach(kernel: int, dilations: tuple[int, ...]) -> int:
    half = kernel // 2
    return sum(2 * ACTIVATION_REACH + half * dilation + half for dilation in dilations)


def _before_upsampling(span: _Span, rate: int, kernel: int) -> _Span:
    """Inputs of a transposed convolution whose sample n reaches outputs rate n - p .. + kernel."""
    padding = (kernel - rate) // 2
    first = -((kernel - 1 - span.first - padding) // rate)
    return _Span(first, (span.last + padding) // rate)


_QUALITY = "HQ"
_MOST = 32
"""Windows in one batch."""


@dataclass(frozen=True)
class BigVganOptions:
    """How a ``BatchedBigVgan`` computes.

    ``dtype`` of its convolutions; ``replies``: places at once; ``lookahead_frames``: frames of
    BigVGAN's mel that must be known after one whose sound is made: None for all that it reads,
    which is exact; fewer let sound out earlier, and change it.

    Raises:
        OptionError: a value that means nothing.
        DeviceError: an unknown dtype.
    """

    dtype: str = "float32"
    replies: int = 256
    lookahead_frames: int | None = None

    def __post_init__(self) -> None:
        pick_dtype(self.dtype)
        if self.replies < 1:
            raise OptionError("a vocoder needs a place for at least one reply")
        if self.lookahead_frames is not None and self.lookahead_frames < 0:
            raise OptionError("lookahead_frames must be 0 or more")


@dataclass
class _Place:
    """How far a slot's reply is: mel frames known, frames heard, samples given at 24 kHz."""

    known: int = 0
    heard: int = 0
    given: int = 0
    resampler: soxr.ResampleStream | None = None


@dataclass(frozen=True)
class _Window:
    """Mel frames (bins, M) to run, and which of them are to be heard."""

    mel: Tensor
    first: int
    count: int


class BatchedBigVgan:
    """A ``StreamingVocoder`` that gives 24 kHz sound; 480 samples for each of the flow's frames.

    In float32 a reply's sound does not depend on who else is in its batch, as ``BatchedHift``'s.
    """

    @torch.inference_mode()
    def __init__(self, vocoder: BigVgan, options: BigVganOptions | None = None) -> None:
        self.options = options = options or BigVganOptions()
        self.spec = vocoder.config.mel
        self.device, dtype = vocoder.conv_pre.weight.device, pick_dtype(options.dtype)
        own = vocoder if vocoder.conv_pre.weight.dtype == dtype else copy.deepcopy(vocoder)
        self._vocoder = own.to(dtype)
        self._bridge = MelBridge.load(self.spec, self.device)
        self.reach = reach(vocoder.config)
        ahead = options.lookahead_frames
        self.lookahead = self.reach.right if ahead is None else min(ahead, self.reach.right)
        self._slots = Slots(options.replies)
        self._places = [_Place() for _ in range(options.replies + 1)]
        rows = options.replies + 1
        kept = self.reach.left + self.lookahead
        self._flow = torch.zeros(rows, FLOW_MEL.bins, HISTORY, device=self.device)
        self._mel = torch.zeros(rows, self.spec.bins, kept, device=self.device)
        self._most = _MOST if self.device.type == "cuda" else 1

    def open(self, seed: int = 0) -> VocoderReply:
        """Begin a reply; nothing in its sound is random, so ``seed`` changes nothing.

        Raises:
            CodecFullError: all places are taken.
        """
        del seed
        slot = self._slots.take()
        self._places[slot] = _Place()
        if self.spec.rate != OUTPUT_RATE:
            self._places[slot].resampler = soxr.ResampleStream(
                self.spec.rate, OUTPUT_RATE, 1, dtype="float32", quality=_QUALITY
            )
        return VocoderReply(slot)

    def close(self, reply: VocoderReply) -> None:
        """Give the reply's place back; closing twice does nothing."""
        if not reply.closed:
            reply.closed = reply.ended = True
            self._slots.give(reply.slot)

    @torch.inference_mode()
    def push(self, work: Sequence[Work]) -> list[Tensor]:
        """Take the flow's new frames (80, T) of several replies; return what is settled of each.

        Sound that frames to come would change is held back: some 40 frames, 0.4 s, at v2's sizes.
        """
        check_work(work, FLOW_MEL.bins)
        windows = [self._take(*one) for one in work]
        sound = self._run(windows)
        return [
            self._settle(reply, wave, final=final)
            for (reply, _, final), wave in zip(work, sound, strict=True)
        ]

    def warm(self) -> None:
        """Run a window of ordinary size once."""
        frames = self.reach.left + self.reach.right + frames_in(self.spec, 20)
        self._vocoder(torch.zeros(1, self.spec.bins, frames, device=self.device))

    def figures(self) -> VocoderFigures:
        """Sizes in bytes, and how many places are taken."""
        weights = sum(part.numel() * part.element_size() for part in self._vocoder.parameters())
        state = sum(part.numel() * part.element_size() for part in (self._flow, self._mel))
        return VocoderFigures(self._slots.count, self._slots.used, weights, state)

    def _take(self, reply: VocoderReply, mel: Tensor, final: bool) -> _Window:
        """Move a reply's state on by new frames; the window whose sound is settled by them."""
        place, before = self._places[reply.slot], reply.frames
        reply.frames += mel.shape[1]
        reply.ended = final
        flow = _joined(self._flow[reply.slot], before, mel.to(self.device, torch.float32))
        enough = frames_in if final else frames_ready
        ready = enough(self.spec, reply.frames)
        new = flow.new_zeros(self.spec.bins, 0)
        if ready > place.known:
            first = reply.frames - flow.shape[1]
            new = self._bridge.convert(flow, first, place.known, ready)
        whole = _joined(self._mel[reply.slot], place.known, new)
        place.known = ready
        _keep(self._flow[reply.slot], flow)
        _keep(self._mel[reply.slot], whole)
        return self._window(place, whole, final=final)

    def _window(self, place: _Place, whole: Tensor, *, final: bool) -> _Window:
        """What of ``whole``, which ends at the last known frame, makes the next sound."""
        start = place.known - whole.shape[1]
        end = place.known if final else max(place.heard, place.known - self.lookahead)
        begin = max(0, place.heard - self.reach.left)
        window = _Window(whole[:, begin - start :], place.heard - begin, end - place.heard)
        place.heard = end
        return window

    def _run(self, windows: list[_Window]) -> list[Tensor]:
        """Sound of each window's frames at BigVGAN's rate; windows of a size share a batch."""
        sound = {index: torch.zeros(0, device=self.device) for index in range(len(windows))}
        due = [index for index, window in enumerate(windows) if window.count]
        due.sort(key=lambda index: windows[index].mel.shape[1])
        hop = self.spec.hop
        for _, group in groupby(due, key=lambda index: windows[index].mel.shape[1]):
            rows = list(group)
            for start in range(0, len(rows), self._most):
                part = rows[start : start + self._most]
                waves = self._vocoder(torch.stack([windows[index].mel for index in part]))
                for index, wave in zip(part, waves, strict=True):
                    one = windows[index]
                    sound[index] = wave[one.first * hop : (one.first + one.count) * hop]
        return [sound[index] for index in range(len(windows))]

    def _settle(self, reply: VocoderReply, wave: Tensor, *, final: bool) -> Tensor:
        """At 24 kHz, and at the end of the reply exactly 480 samples a frame."""
        place = self._places[reply.slot]
        total = reply.frames * MEL_FRAME_SAMPLES
        if place.resampler is not None:
            wave = self._resampled(place.resampler, wave, final=final)
        if final:
            left = total - place.given
            wave = torch.nn.functional.pad(wave[:left], (0, max(0, left - wave.shape[0])))
        place.given += wave.shape[0]
        return wave

    def _resampled(self, resampler: soxr.ResampleStream, wave: Tensor, *, final: bool) -> Tensor:
        samples = np.asarray(wave.cpu().numpy(), np.float32)
        found = np.asarray(resampler.resample_chunk(samples, last=final), np.float32)
        return torch.from_numpy(found).to(self.device)


def _joined(kept: Tensor, before: int, new: Tensor) -> Tensor:
    """The last of ``before`` frames, as many as were ``kept`` (C, n), and the ``new`` ones."""
    count = min(before, kept.shape[1])
    return torch.cat([kept[:, kept.shape[1] - count :], new], dim=1)


def _keep(kept: Tensor, whole: Tensor) -> None:
    """Keep the end of ``whole`` (C, T) at the end of ``kept`` (C, n)."""
    count = min(kept.shape[1], whole.shape[1])
    kept[:, kept.shape[1] - count :] = whole[:, whole.shape[1] - count :]
