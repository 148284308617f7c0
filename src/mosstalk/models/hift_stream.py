"""HiFT hop by hop: eight mel frames kept, their sound held back and cross-faded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.models.hift import HiftVocoder
from mosstalk.numerics.rng import normal

KEPT_FRAMES = 8
"""Mel frames of a call that the next call computes again."""

NOISE_STREAM = 1
"""Keeps the vocoder's noise apart from other draws of the same seed."""


def crossfade(kept: Tensor, new: Tensor) -> Tensor:
    """Fade from ``kept`` (n,) into the first n samples of ``new`` with a Hamming window.

    The window's halves add to 1.08, as in the published code.
    """
    overlap = kept.shape[0]
    window = torch.hamming_window(2 * overlap, periodic=False, device=new.device)
    faded = new[:overlap] * window[:overlap] + kept * window[overlap:]
    return torch.cat([faded, new[overlap:]])


@dataclass
class _Kept:
    """What one call leaves for the next: its last eight frames, their sound and source."""

    mel: Tensor
    f0: Tensor
    phases: Tensor
    source: Tensor
    wave: Tensor


class HiftStream:
    """Sound of one reply, from mel frames as they come; total samples are 480 a frame.

    Noise is a function of (seed, sample index), so the same reply sounds the same however
    it was cut. The kept source is used again but for its last half frame, which was held
    for want of a next frame: it is drawn anew so that the phase runs on without a jump.
    """

    def __init__(self, vocoder: HiftVocoder, seed: int = 0) -> None:
        self.vocoder = vocoder
        self.seed = seed
        self.frames_done = 0
        self._kept: _Kept | None = None

    def push(self, mel: Tensor, *, final: bool = False) -> Tensor:
        """Take new frames (80, T) and return the sound that is now settled, float32.

        Unless ``final``, the last 3840 samples are held back for the next call, and T must
        be at least 8 at the first one.
        """
        limit = self.vocoder.config.audio_limit
        source, f0, phases, whole = self._source(mel)
        return self._emit(whole, source, f0, phases, final=final).clamp(-limit, limit)

    def push_with_source(self, mel: Tensor, source: Tensor, *, final: bool = False) -> Tensor:
        """As ``push``, with the source (samples of kept and new frames) given from outside.

        Not clamped after the cross-fade, as published.
        """
        whole = torch.cat([self._kept.mel, mel], dim=1) if self._kept else mel
        nothing = source.new_zeros(whole.shape[1])
        return self._emit(whole, source, nothing, nothing[:, None], final=final)

    def _source(self, mel: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        vocoder, kept = self.vocoder, self._kept
        whole = torch.cat([kept.mel, mel], dim=1) if kept else mel
        f0 = vocoder.f0(whole)
        if kept:
            f0 = torch.cat([kept.f0, f0[KEPT_FRAMES:]])
        steps = vocoder.phase_steps(f0)
        if kept:
            new = (kept.phases[-1] % 1) + steps[KEPT_FRAMES:].cumsum(0)
            phases = torch.cat([kept.phases - kept.phases[-1].floor(), new])
        else:
            phases = steps.cumsum(0)
        source = vocoder.source(f0, phases, self._noise(whole.shape[1], kept is not None))
        if kept:
            settled = kept.source.shape[0] - vocoder.config.samples_per_frame // 2
            source = torch.cat([kept.source[:settled], source[settled:]])
        return source, f0, phases, whole

    def _noise(self, frames: int, continued: bool) -> Tensor:
        per_frame = self.vocoder.config.samples_per_frame
        start = self.frames_done * per_frame - (KEPT_FRAMES * per_frame if continued else 0)
        device = self.vocoder.conv_pre.weight.device
        positions = torch.arange(start, start + frames * per_frame, device=device)
        return normal(self.seed, NOISE_STREAM, positions, self.vocoder.harmonics)

    def _emit(
        self, mel: Tensor, source: Tensor, f0: Tensor, phases: Tensor, *, final: bool
    ) -> Tensor:
        wave = self.vocoder.synthesise(mel, source)
        fresh = mel.shape[1] - (KEPT_FRAMES if self._kept else 0)
        if self._kept:
            wave = crossfade(self._kept.wave, wave)
        self.frames_done += fresh
        if final:
            self._kept = None
            return wave
        held = KEPT_FRAMES * self.vocoder.config.samples_per_frame
        assert mel.shape[1] >= KEPT_FRAMES, "a first call needs at least 8 frames"
        self._kept = _Kept(
            mel[:, -KEPT_FRAMES:],
            f0[-KEPT_FRAMES:],
            phases[-KEPT_FRAMES:],
            source[-held:],
            wave[-held:],
        )
        return wave[:-held]
