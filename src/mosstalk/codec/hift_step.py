"""One call of HiFT for a batch of replies: all of it on the device, nothing waits for the host.

What ``HiftStream`` does for one reply, with choices made by masks: replies that begin and
replies that continue share a batch. Shapes: B replies, T frames of which the first eight are
kept ones where a reply continues, N = 480 T samples, K harmonics.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from mosstalk.codec.hift_network import HiftNetwork, Layout
from mosstalk.config import HiftConfig
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.hift_stream import KEPT_FRAMES, NOISE_STREAM
from mosstalk.ops.vocoder import Excitation, harmonic_source
from mosstalk.runtime.device_inputs import DeviceInputs, Field

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
    """Inputs with room for the ``slots`` of so many replies; where there are fewer, nobody's."""
    return DeviceInputs({"slots": Field((replies,), "int64", "replies")}, device)


def place_frames(whole: Tensor, mels: list[Tensor]) -> None:
    """Put each of ``mels`` (80, T') at the end of its row of ``whole`` (B, 80, T)."""
    frames = whole.shape[2]
    places = [whole[row, :, frames - mel.shape[1] :] for row, mel in enumerate(mels)]
    torch._foreach_copy_(places, mels)
