"""One call of HiFT for a batch of replies: all of it on the device, nothing waits for the host.

``HiftNetwork`` is the convolutions, with everything between them in fused steps: the same
arithmetic as ``hift.HiftVocoder`` on weights converted once. The matmuls of the middle may run in
16 bit; what decides phases (the first and the last convolution, the STFT and its inverse) stays
float32. ``HiftStep`` does what ``HiftStream`` does for one reply, with choices made by masks:
replies that begin and replies that continue share a batch. Shapes: B calls, one of each reply, T
mel frames of which the first eight are kept ones where a reply continues, N = 480 T samples,
M = N / 4 + 1 spectrum frames, K harmonics.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import HiftConfig
from mosstalk.models.hift import (
    KEPT_FRAMES,
    LAST_LEAKY_SLOPE,
    MAGNITUDE_LIMIT,
    NOISE_STREAM,
    HiftVocoder,
    Snake,
    SnakeResidual,
)
from mosstalk.ops.vocoder import (
    Excitation,
    add_snake,
    harmonic_source,
    inverse_basis,
    inverse_stft,
    scaled_sum,
    snake,
)
from mosstalk.runtime.sharing import at_once


@dataclass(frozen=True)
class Layout:
    """What activations are: their dtype, and who adds a bias.

    ``bias_apart``: convolutions leave their bias to the fused step after them. That saves a
    launch on a GPU; a CPU's convolutions add it for nothing.
    """

    dtype: torch.dtype
    bias_apart: bool


class Convolution:
    """One convolution, converted; ``rest`` (C,) float32 is the bias if it is still to be added."""

    def __init__(
        self, conv: nn.Conv1d | nn.ConvTranspose1d, layout: Layout, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or layout.dtype
        assert conv.bias is not None
        bias = conv.bias.detach()
        self.weight = conv.weight.detach().to(dtype).contiguous()
        self.rest = bias.float() if layout.bias_apart else None
        self.bias = None if layout.bias_apart else bias.to(dtype)
        self._transposed = isinstance(conv, nn.ConvTranspose1d)
        self._stride, self._dilation = conv.stride[0], conv.dilation[0]
        assert not isinstance(conv.padding, str)
        self._padding = conv.padding[0]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C_in, L) to (B, C_out, L'), without ``rest``, without gaps in memory."""
        given = (x, self.weight, self.bias, self._stride, self._padding)
        if self._transposed:
            return F.conv_transpose1d(*given).contiguous()
        return F.conv1d(*given, self._dilation).contiguous()

    @property
    def tensors(self) -> list[Tensor]:
        """Its weight and bias."""
        biases = (self.rest, self.bias)
        return [self.weight, *(bias for bias in biases if bias is not None)]


class SnakeChain:
    """``SnakeResidual``; its last sum is left to what follows."""

    def __init__(self, block: SnakeResidual, layout: Layout) -> None:
        self.convs = [
            (Convolution(first, layout), Convolution(second, layout))
            for first, second in zip(_convs(block.convs1), _convs(block.convs2), strict=True)
        ]
        self.alphas = [
            tuple(act.alpha.detach().float() for act in pair)
            for pair in zip(_snakes(block.activations1), _snakes(block.activations2), strict=True)
        ]
        self.rest = self.convs[-1][1].rest

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, L) to two tensors that, with ``rest``, add up to the block's output."""
        active, y = snake(x, self.alphas[0][0]), x
        for index, (first, second) in enumerate(self.convs):
            if index:
                x, active = add_snake(x, y, self.alphas[index][0], self.convs[index - 1][1].rest)
            y = second(snake(first(active), self.alphas[index][1], first.rest))
        return x, y

    @property
    def tensors(self) -> list[Tensor]:
        """Its weights and biases."""
        return [tensor for pair in self.convs for conv in pair for tensor in conv.tensors]


class _Stage:
    """One upsampling: what the source adds, then the mean of branches."""

    def __init__(self, vocoder: HiftVocoder, index: int, layout: Layout) -> None:
        kernels = len(vocoder.config.resblock_kernel_sizes)
        branches = list(vocoder.resblocks)[index * kernels : (index + 1) * kernels]
        up, down = vocoder.ups[index], vocoder.source_downs[index]
        assert isinstance(up, nn.ConvTranspose1d)
        assert isinstance(down, nn.Conv1d)
        self.last = index == len(vocoder.ups) - 1
        self.up = Convolution(up, layout)
        # With its bias: what comes next reads the sum several times.
        self.down = Convolution(down, Layout(layout.dtype, bias_apart=False))
        self.source = SnakeChain(_residual(vocoder.source_resblocks[index]), layout)
        self.branches = [SnakeChain(_residual(branch), layout) for branch in branches]
        self.source_rest = _total([self.up.rest, self.source.rest])
        self.branches_rest = _total([branch.rest for branch in self.branches])

    def added(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """What the source adds, in two tensors (B, C, rate L)."""
        return self.source(self.down(spectrum))

    def __call__(
        self, x: Tensor, added: tuple[Tensor, Tensor], slope: float, dtype: torch.dtype
    ) -> Tensor:
        """From one stage's activated sum (B, 2 C, L) to the next one's (B, C, rate L)."""
        x = self.up(x)
        if self.last:
            x = self._mirror_first(x)
        x = scaled_sum([x, *added], self.source_rest)
        # The last branch is the longest, and is begun first.
        sums = at_once([partial(branch, x) for branch in reversed(self.branches)], x.device)
        parts = [part for both in reversed(sums) for part in both]
        share = 1 / len(self.branches)
        return scaled_sum(parts, self.branches_rest, scale=share, slope=slope, dtype=dtype)

    def _mirror_first(self, x: Tensor) -> Tensor:
        longer = x.new_empty(*x.shape[:2], x.shape[2] + 1)
        longer[..., 1:] = x
        longer[..., 0] = x[..., 1]
        return longer

    @property
    def tensors(self) -> list[Tensor]:
        """Its weights and biases."""
        chains = [tensor for chain in (self.source, *self.branches) for tensor in chain.tensors]
        return [*self.up.tensors, *self.down.tensors, *chains]


class HiftNetwork:
    """From mels and sources to sound, in batches; reads the vocoder once, keeps its own weights."""

    def __init__(self, vocoder: HiftVocoder, layout: Layout) -> None:
        config = self.config = vocoder.config
        self.layout = layout
        self._pre = Convolution(vocoder.conv_pre, layout, torch.float32)
        self._stages = [_Stage(vocoder, index, layout) for index in range(len(vocoder.ups))]
        inside = Layout(layout.dtype, bias_apart=False)
        self._post = Convolution(vocoder.conv_post, inside, torch.float32)
        n_fft, device = config.istft_n_fft, vocoder.conv_pre.weight.device
        self._window = torch.hann_window(n_fft, device=device)
        self._inverse = inverse_basis(n_fft, self._window)
        self._forward = _forward_basis(self._window)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the converted weights."""
        tensors = [*self._pre.tensors, *self._post.tensors]
        tensors += [tensor for stage in self._stages for tensor in stage.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __call__(self, mel: Tensor, source: Tensor) -> Tensor:
        """Sound (B, N) float32, clamped, from mels (B, 80, T) and sources (B, N), float32."""
        config, dtype = self.config, self.layout.dtype
        spectrum = self._spectrum(source).to(dtype)
        sources = [partial(stage.added, spectrum) for stage in self._stages]
        added: Iterator[tuple[Tensor, Tensor]]
        if mel.is_cuda:  # each when it is needed: no others take memory meanwhile
            added = (source() for source in sources)
        else:
            added = reversed(at_once(sources[::-1], mel.device))
        x = self._pre(mel.contiguous())
        x = scaled_sum([x], self._pre.rest, slope=config.lrelu_slope, dtype=dtype)
        for stage, source_sum in zip(self._stages, added, strict=True):
            slope = LAST_LEAKY_SLOPE if stage.last else config.lrelu_slope
            x = stage(x, source_sum, slope, torch.float32 if stage.last else dtype)
        x = self._post(x)
        limit, hop = config.audio_limit, config.istft_hop
        return inverse_stft(x, self._inverse, self._window, hop, MAGNITUDE_LIMIT, limit)

    def _spectrum(self, source: Tensor) -> Tensor:
        """STFT of sources: real then imaginary parts, (B, n_fft + 2, M) float32."""
        n_fft, hop = self.config.istft_n_fft, self.config.istft_hop
        frames = F.pad(source, (n_fft // 2, n_fft // 2), mode="reflect").unfold(1, n_fft, hop)
        return (frames @ self._forward).mT.contiguous()


def _forward_basis(window: Tensor) -> Tensor:
    """Samples of a frame to real then imaginary parts of its windowed spectrum: (n_fft, 2 F)."""
    spectra = torch.fft.rfft(torch.diag(window.double().cpu()))
    return torch.cat([spectra.real, spectra.imag], dim=1).float().to(window.device)


def _convs(parts: nn.ModuleList) -> list[nn.Conv1d]:
    return [part for part in parts if isinstance(part, nn.Conv1d)]


def _snakes(parts: nn.ModuleList) -> list[Snake]:
    return [part for part in parts if isinstance(part, Snake)]


def _residual(block: nn.Module) -> SnakeResidual:
    assert isinstance(block, SnakeResidual)
    return block


def _total(biases: list[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return torch.stack(given).sum(dim=0) if given else None


# What HiFT keeps of each reply between calls, in tensors that are allocated once.


_SEED_RANGE = 1 << 64


@dataclass(frozen=True)
class HiftState:
    """The last eight frames of every reply, and their sound; one row a slot (S rows).

    Phases are turns, less whole turns at the last frame, so that long audio costs no accuracy.
    """

    begun: Tensor
    """(S,) whether there was a call before: without, the other tensors mean nothing."""
    seed: Tensor
    """(S,) int64."""
    first_sample: Tensor
    """(S,) int64: where in the reply the next call begins, eight kept frames included."""
    mel: Tensor
    """(S, 80, 8)."""
    f0: Tensor
    """(S, 8) in Hz."""
    phases: Tensor
    """(S, 8, K) float64."""
    source: Tensor
    """(S, 3840)."""
    wave: Tensor
    """(S, 3840), not heard yet."""

    @classmethod
    def empty(cls, slots: int, config: HiftConfig, device: torch.device) -> "HiftState":
        """State of ``slots`` replies that have not begun."""
        held = KEPT_FRAMES * config.samples_per_frame
        return cls(
            torch.zeros(slots, dtype=torch.bool, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(slots, config.in_channels, KEPT_FRAMES, device=device),
            torch.zeros(slots, KEPT_FRAMES, device=device),
            torch.zeros(
                slots, KEPT_FRAMES, config.nb_harmonics + 1, dtype=torch.float64, device=device
            ),
            torch.zeros(slots, held, device=device),
            torch.zeros(slots, held, device=device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [getattr(self, spec.name) for spec in fields(self)]

    def reset(self, slot: int, seed: int) -> None:
        """Make ``slot`` a reply that has not begun; no other slot changes."""
        wrapped = seed % _SEED_RANGE
        self.begun[slot] = False
        self.first_sample[slot] = 0
        self.seed[slot] = wrapped - _SEED_RANGE if wrapped >= _SEED_RANGE // 2 else wrapped

    def at(self, slots: Tensor) -> "HiftState":
        """Copies of the rows ``slots`` (B,)."""
        return HiftState(*(tensor.index_select(0, slots) for tensor in self.tensors))

    def write(self, slots: Tensor, rows: "HiftState") -> None:
        """Write ``rows`` back to ``slots`` (B,)."""
        for tensor, new in zip(self.tensors, rows.tensors, strict=True):
            tensor.index_copy_(0, slots, new)


Crossfade = Literal["published", "normalised"]


def fades(overlap: int, kind: Crossfade, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights of the new and of the kept sound over ``overlap`` samples, each (overlap,).

    ``published``: the halves of a Hamming window, which add to 1.08. ``normalised``: the same
    halves divided by their sum.
    """
    window = torch.hamming_window(2 * overlap, periodic=False, device=device)
    rise, fall = window[:overlap], window[overlap:]
    if kind == "normalised":
        return rise / (rise + fall), fall / (rise + fall)
    return rise, fall


class HiftStep:
    """The vocoder's weights, converted, and what one call computes from state and new frames."""

    @torch.inference_mode()
    def __init__(
        self, vocoder: HiftVocoder, state: HiftState, layout: Layout, crossfade: Crossfade
    ) -> None:
        config = self.config = vocoder.config
        self.state = state
        self.network = HiftNetwork(vocoder, layout)
        self._vocoder = vocoder
        self._f0 = copy.deepcopy(vocoder.f0_predictor).float()
        mixer = vocoder.m_source.l_linear
        assert mixer.bias is not None
        self._how = Excitation(
            config.nsf_alpha,
            config.nsf_sigma,
            config.nsf_voiced_threshold,
            config.samples_per_frame,
            NOISE_STREAM,
            mixer.weight.detach()[0].float(),
            mixer.bias.detach().float(),
        )
        self._held = KEPT_FRAMES * config.samples_per_frame
        self._settled = self._held - config.samples_per_frame // 2
        self._rise, self._fall = fades(self._held, crossfade, mixer.weight.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this holds besides the vocoder's own."""
        own = sum(part.numel() * part.element_size() for part in self._f0.parameters())
        return own + self.network.weight_bytes

    @torch.inference_mode()
    def __call__(
        self, slots: Tensor, mel: Tensor, source: Tensor | None = None, *, all_begun: bool = False
    ) -> Tensor:
        """Sound (B, N) of a call, cross-faded with what was held; the state moves on.

        ``slots`` (B,) int64; ``mel`` (B, 80, T) float32, written into: the first eight frames
        of replies that continue are put there. Fewer than eight frames leave no state.
        ``source`` (B, N) from outside replaces the computed one, and the cross-faded sound is
        then not clamped, as published. ``all_begun``: every reply is known to continue, which
        saves computing what is kept.
        """
        kept, kept_frames = self.state.at(slots), mel.shape[2] >= KEPT_FRAMES
        if kept_frames:
            self._fill(mel, kept.mel, kept.begun[:, None, None])
        f0, phases = mel.new_zeros(0), mel.new_zeros(0)
        given = source
        if source is None:
            f0 = self._f0(mel)
            f0, phases = self._phases(f0, kept)
            source = self._source(f0, phases, kept, all_begun=all_begun)
        wave = self.network(mel, source)
        if kept_frames:
            wave[:, : self._held] = self._faded(wave[:, : self._held], kept)
            held = wave[:, -self._held :].clone()
            self._keep(slots, kept, (mel, f0, phases, source, held))
        limit = self.config.audio_limit
        return wave if given is not None else wave.clamp_(-limit, limit)

    @staticmethod
    def _fill(whole: Tensor, kept: Tensor, begun: Tensor) -> None:
        """Put ``kept`` at the start of ``whole``'s last dimension where a reply has ``begun``."""
        start = whole[..., : kept.shape[-1]]
        start.copy_(torch.where(begun, kept, start))

    def _phases(self, f0: Tensor, kept: HiftState) -> tuple[Tensor, Tensor]:
        """F0 (B, T) with the kept frames' own, and the phases (B, T, K) that run on from them."""
        if f0.shape[1] < KEPT_FRAMES:
            return f0, self._vocoder.phase_steps(f0).cumsum(1)
        begun = kept.begun[:, None]
        self._fill(f0, kept.f0, begun)
        steps = self._vocoder.phase_steps(f0)
        steps[:, :KEPT_FRAMES].masked_fill_(begun[..., None], 0)
        last = kept.phases[:, -1]
        # No scalar in torch.where: it would be copied to the device, which a graph forbids.
        runs_on = (last % 1).masked_fill(~begun, 0)
        phases = runs_on[:, None] + steps.cumsum(1)
        whole_turns = (kept.phases - last.floor()[:, None]).mT
        self._fill(phases.mT, whole_turns, begun[..., None])
        return f0, phases

    def _source(self, f0: Tensor, phases: Tensor, kept: HiftState, *, all_begun: bool) -> Tensor:
        """Source (B, N): the kept one but for its last half frame, which awaited a next frame."""
        settled, place = self._settled, (f0, phases, kept.seed, kept.first_sample, self._how)
        if all_begun:
            new = harmonic_source(*place, skip=settled)
            return torch.cat([kept.source[:, :settled], new], dim=1)
        source = harmonic_source(*place)
        if f0.shape[1] >= KEPT_FRAMES:
            self._fill(source, kept.source[:, :settled], kept.begun[:, None])
        return source

    def _faded(self, start: Tensor, kept: HiftState) -> Tensor:
        faded = start * self._rise + kept.wave * self._fall
        return torch.where(kept.begun[:, None], faded, start)

    def _keep(
        self, slots: Tensor, before: HiftState, now: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        mel, f0, phases, source, held = now
        passed = (mel.shape[2] - KEPT_FRAMES) * self.config.samples_per_frame
        computed = phases.ndim == 3
        rows = HiftState(
            torch.ones_like(before.begun),
            before.seed,
            before.first_sample + passed,
            mel[:, :, -KEPT_FRAMES:],
            f0[:, -KEPT_FRAMES:] if computed else torch.zeros_like(before.f0),
            phases[:, -KEPT_FRAMES:] if computed else torch.zeros_like(before.phases),
            source[:, -self._held :],
            held,
        )
        self.state.write(slots, rows)
