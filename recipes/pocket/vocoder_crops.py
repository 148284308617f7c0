"""Crops of recordings for the vocoder: sound, mel and pitch of the same frames, in batches."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.constants import MEL_FRAME_SAMPLES
from mosstalk.models.features import vocoder_mel
from recipes.pocket.vocoder_pitch import pitch

_CONTEXT_FRAMES = 2
"""Frames around a crop that its mel's windows reach into."""
_HELD_OUT_EVERY = 50
_PERTURBED_SHARE = 0.3
_LOUDEST_MEL_NOISE = 0.2


class Recordings(Protocol):
    """All recordings end to end, on the device that trains."""

    @property
    def waves(self) -> Tensor:
        """Sound (total samples,) int16 at 24 kHz."""

    @property
    def starts(self) -> Tensor:
        """First sample of each recording, (n,) int64, a multiple of 480."""

    @property
    def lengths(self) -> Tensor:
        """Samples of each recording, (n,) int64, a multiple of 480."""


@dataclass(frozen=True)
class Crops:
    """A batch: ``wave`` (B, N) in [-1, 1], ``mel`` (B, 80, T) and ``f0`` (B, T) in Hz."""

    wave: Tensor
    mel: Tensor
    f0: Tensor


class Cropper:
    """Cuts batches from recordings; one recording in fifty is held out from ``draw``.

    ``mels`` (total frames, 80) stand for the recordings' own where they are given.
    """

    def __init__(self, data: Recordings, frames: int, mels: Tensor | None = None) -> None:
        self.waves, self.frames, self.mels = data.waves, frames, mels
        self.f0 = pitch(data.waves)
        starts, lengths = data.starts.cpu(), data.lengths.cpu()
        assert not bool(torch.cat([starts, lengths]).remainder(MEL_FRAME_SAMPLES).any())
        self._starts, self._lengths = (x // MEL_FRAME_SAMPLES for x in (starts, lengths))
        held = torch.arange(len(starts)) % _HELD_OUT_EVERY == 0
        self.held_out = held.nonzero()[:, 0].tolist()
        spans = (self._lengths - frames - 2 * _CONTEXT_FRAMES + 1).clamp_min(0)
        # A set of one recording is drawn from and held out.
        spans = torch.where(held, 0, spans) if not bool(held.all()) else spans
        self._ends = spans.cumsum(0).to(self.waves.device)
        self._bases = (self._starts + _CONTEXT_FRAMES + spans).to(self.waves.device) - self._ends
        self._places = int(spans.sum())
        assert self._places > 0, "recordings are shorter than a crop"

    def draw(self, count: int) -> Crops:
        """``count`` crops, every place of the training recordings as likely as another."""
        place = torch.randint(self._places, (count,), device=self.waves.device)
        recording = torch.searchsorted(self._ends, place, right=True)
        return self._cut(self._bases[recording] + place, self.frames)

    def validation(self, count: int, frames: int) -> Crops:
        """The middles of the first ``count`` recordings held out that are long enough."""
        needed = frames + 2 * _CONTEXT_FRAMES
        longest = max(int(self._lengths[index]) for index in self.held_out)
        frames -= max(0, needed - longest)
        needed = frames + 2 * _CONTEXT_FRAMES
        chosen = [index for index in self.held_out if int(self._lengths[index]) >= needed]
        firsts = [
            int(self._starts[index]) + (int(self._lengths[index]) - frames) // 2
            for index in chosen[:count]
        ]
        return self._cut(torch.tensor(firsts, device=self.waves.device), frames)

    def recording(self, index: int, longest_frames: int) -> Tensor:
        """Sound (480 frames,) float of a recording's beginning."""
        frames = min(int(self._lengths[index]), longest_frames)
        start = int(self._starts[index]) * MEL_FRAME_SAMPLES
        return self.waves[start : start + frames * MEL_FRAME_SAMPLES].float() / 32768

    def _cut(self, first: Tensor, frames: int) -> Crops:
        """Crops of ``frames`` frames from ``first`` (B,), counted over all recordings."""
        around = torch.arange(-_CONTEXT_FRAMES, frames + _CONTEXT_FRAMES, device=first.device)
        inner = slice(_CONTEXT_FRAMES, _CONTEXT_FRAMES + frames)
        rows = self.waves.view(-1, MEL_FRAME_SAMPLES)[first[:, None] + around]
        wave = rows.float() / 32768
        places = first[:, None] + around[inner]
        if self.mels is None:
            mel = vocoder_mel(wave.flatten(1))[:, inner]
        else:
            mel = self.mels[places].float()
        return Crops(wave[:, inner].flatten(1), mel.mT.contiguous(), self.f0[places])


def perturbed(mel: Tensor) -> Tensor:
    """Mels (B, 80, T) of which some are a little noisy and smooth, as a flow's mels are."""
    count = mel.shape[0]
    chosen, level, blend = torch.rand((3, count, 1, 1), device=mel.device)
    kernel = mel.new_tensor([0.25, 0.5, 0.25])
    around = F.pad(mel[:, None], (1, 1, 1, 1), mode="replicate")
    smooth = F.conv2d(around, (kernel[:, None] * kernel)[None, None])[:, 0]
    noisy = torch.randn_like(mel) * level * _LOUDEST_MEL_NOISE
    changed = torch.lerp(mel, smooth, blend) + noisy
    return torch.where(chosen < _PERTURBED_SHARE, changed, mel)
