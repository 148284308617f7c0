"""From the flow's mel to the mel that another vocoder was trained with: a fitted linear map.

The flow makes 80 bands to 8 kHz, 50 frames a second, of windows of 80 ms; BigVGAN-v2 wants 80
or 100 bands to 8, 11 or 12 kHz, 86 or 94 frames a second, of windows of 43 to 46 ms. A frame
of the other mel is W [before, here, after] + b, where these are the flow's log mel 20 ms before
the frame's centre, at it and 20 ms after it, interpolated by cubics (Catmull and Rom 1974), and W
and b are least squares with a ridge over recordings: ``python -m recipes.mel_bridge`` fitted what
ships. Bands above 8 kHz are guessed from those below. Shapes: T frames of the flow, M of the other.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.errors import ConfigError
from mosstalk.models.features import FLOW_MEL, MelSpec
from mosstalk.models.weights import open_safetensors

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
