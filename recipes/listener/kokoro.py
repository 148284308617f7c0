"""Kokoro-82M in PyTorch, in batches, with the weights of its int8 ONNX file.

The network's modules are those of the package ``kokoro`` (Apache-2.0), of which only the network
is loaded: its text front end and what that needs are not. Shapes: B clips, N symbols, T frames
of 25 ms.
"""

import importlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RATE = 24_000
FRAME_SAMPLES = 600
MOST_SYMBOLS = 510


def _network() -> Any:
    """The package's ``KModel`` without its text front end."""
    if "kokoro" not in sys.modules:
        spec = find_spec("kokoro")
        if spec is None or spec.submodule_search_locations is None:
            raise FileNotFoundError("the package kokoro is missing: pip install --no-deps kokoro")
        package = types.ModuleType("kokoro")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["kokoro"] = package
    return importlib.import_module("kokoro.model").KModel


@dataclass
class Clip:
    """One clip to speak: symbol ids without the pads, a style (256,), a speed."""

    symbols: list[int]
    style: Tensor
    speed: float


class Kokoro(nn.Module):
    """Speech of many clips at once."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        from torch.nn.utils import remove_weight_norm

        with tempfile.NamedTemporaryFile(suffix=".pt") as empty:
            torch.save({}, empty.name)
            self.model = _network()("hexgrad/Kokoro-82M", config, empty.name)
        for module in self.model.modules():
            if hasattr(module, "weight_g"):
                remove_weight_norm(module)
        wanted = self.model.state_dict()
        missing = [
            name
            for name in wanted
            if name not in weights and not name.endswith(("norm.weight", "norm.bias"))
        ]
        # The pooler's output is not read, nor do the norms over time have weights of their own.
        missing = [name for name in missing if "pooler" not in name and "position_ids" not in name]
        self.missing = missing
        for name, value in weights.items():
            if name in wanted:
                wanted[name].copy_(value.reshape(wanted[name].shape))
        self.eval()

    @torch.inference_mode()
    def durations(self, clips: list[Clip]) -> tuple[Tensor, Tensor, Tensor]:
        """Frames of each symbol (B, N), and what the decoder reads of them: (B, N, 640) of the
        prosody's and (B, 512, N) of the text's encoder."""
        model, device = self.model, next(self.parameters()).device
        lengths = torch.tensor([len(clip.symbols) + 2 for clip in clips])
        ids = torch.zeros(len(clips), int(lengths.max()), dtype=torch.long)
        for row, clip in enumerate(clips):
            ids[row, 1 : 1 + len(clip.symbols)] = torch.tensor(clip.symbols)
        ids = ids.to(device)
        past = torch.arange(ids.shape[1])[None] >= lengths[:, None]
        past = past.to(device)
        styles = torch.stack([clip.style for clip in clips]).to(device)
        speed = torch.tensor([clip.speed for clip in clips], device=device)
        hidden = model.bert_encoder(model.bert(ids, attention_mask=(~past).int())).mT
        prosody = model.predictor.text_encoder(hidden, styles[:, 128:], lengths, past)
        packed = nn.utils.rnn.pack_padded_sequence(
            prosody, lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = model.predictor.lstm(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        frames = torch.sigmoid(model.predictor.duration_proj(states)).sum(-1) / speed[:, None]
        frames = frames.round().clamp_min(1).long().masked_fill(past, 0)
        text = model.text_encoder(ids, lengths, past)
        return frames, prosody, text

    @torch.inference_mode()
    def sound(self, frames: Tensor, prosody: Tensor, text: Tensor, styles: Tensor) -> Tensor:
        """Sound (B, T * 600) at 24 kHz; every row of ``frames`` (B, N) has the same sum T."""
        total = int(frames[0].sum())
        ends = frames.cumsum(1)
        place = torch.arange(total, device=frames.device)
        spread = (place >= (ends - frames)[..., None]) & (place < ends[..., None])
        spread = spread.to(prosody.dtype)
        pitch, noise = self.model.predictor.F0Ntrain(prosody.mT @ spread, styles[:, 128:])
        sound = self.model.decoder(text @ spread, pitch, noise, styles[:, :128])
        return sound.reshape(frames.shape[0], -1)

    def speak(self, clips: list[Clip]) -> list[Tensor]:
        """Sound (samples,) of each clip; best of like length, since all are made as long.

        A shorter clip ends with a longer pause, so that the norms over time see nothing that is
        not spoken; the pause is cut off.
        """
        frames, prosody, text = self.durations(clips)
        sums = frames.sum(1)
        last = torch.tensor([len(clip.symbols) + 1 for clip in clips], device=frames.device)
        extra = (sums.max() - sums)[:, None]
        frames = frames.scatter_add(1, last[:, None], extra)
        styles = torch.stack([clip.style for clip in clips]).to(frames.device)
        sound = self.sound(frames, prosody, text, styles)
        return [row[: int(n) * FRAME_SAMPLES] for row, n in zip(sound, sums.tolist(), strict=True)]


def read_styles(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Voices' names and styles (510, 256), a row for each number of symbols, from npm's files."""
    for path in sorted(folder.glob("*.bin")):
        values = np.fromfile(path, dtype="<f4").reshape(-1, 256)
        yield path.stem, torch.from_numpy(values)


def read_config(path: Path) -> dict[str, Any]:
    """The network's sizes and its symbols, ``vocab``."""
    return json.loads(path.read_text(encoding="utf-8"))
