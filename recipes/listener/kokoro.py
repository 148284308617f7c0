"""Kokoro-82M in PyTorch, in batches, with the weights of its int8 ONNX file.

The network's modules are those of the package ``kokoro`` (Apache-2.0), of which only the network
is loaded: its text front end and what that needs are not. Shapes: B clips, N symbols, T frames
of 25 ms.
"""

import importlib
import json
import lzma
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
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

RATE = 24_000
FRAME_SAMPLES = 600
MOST_SYMBOLS = 510
_GATES = (0, 2, 3, 1)
"""Where torch's order of an LSTM's gates (in, forget, cell, out) lies in ONNX's (in, out, forget,
cell)."""
_IN_PREDICTOR = ("F0", "N", "shared", "F0_proj", "N_proj")
Array = NDArray[Any]
Found = Iterator[tuple[str, Array]]


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


def read_styles(folder: Path) -> dict[str, Tensor]:
    """Voices' names and styles (51, 256) float16 from npm's files.

    Of their rows, one for each number of symbols, every tenth: neighbouring rows hardly differ.
    """
    values = {path.stem: np.fromfile(path, "<f4") for path in sorted(folder.glob("*.bin"))}
    return {name: torch.from_numpy(v.reshape(-1, 256)[5::10]).half() for name, v in values.items()}


def read_config(path: Path) -> dict[str, Any]:
    """The network's sizes and its symbols, ``vocab``."""
    return json.loads(path.read_text(encoding="utf-8"))


# Its weights: out of the int8 ONNX file, into a small one, and wide again.


def module_of(node: str) -> str | None:
    """The module in ``KModel`` whose weight the ONNX node of this name reads."""
    side, *pieces = node.strip("/").split("/")[:-1] or [""]
    if not pieces or side not in ("encoder", "decoder"):
        return None
    if side == "encoder" and pieces[0].split(".")[0] in _IN_PREDICTOR:
        pieces.insert(0, "predictor")
    path: list[str] = []
    for piece in pieces:
        if path and piece.startswith(path[-1] + "."):
            path.pop()
        path.append(piece)
    # The one layer of ALBERT is run twelve times; the first run's names have no number.
    again = any("albert" in piece for piece in path)
    if again and path[-1].rsplit("_", 1)[-1].isdigit():
        return None
    return ".".join(path)


def parameter_of(initializer: str) -> str:
    """The parameter of ``KModel`` that an initializer of this name holds."""
    for prefix, name in (("decoder.decoder.", "decoder."), ("encoder.", "")):
        if initializer.startswith(prefix):
            return name + initializer.removeprefix(prefix)
    return initializer


class _Graph:
    """The file's nodes and arrays."""

    def __init__(self, path: Path) -> None:
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(str(path)).graph
        self.nodes = list(graph.node)
        self.arrays: dict[str, Array] = {
            item.name: np.asarray(numpy_helper.to_array(item)) for item in graph.initializer
        }
        self.reader = {name: node for node in self.nodes for name in node.input}

    def floats(self) -> Found:
        """Parameters that the file holds in float32 under their own names."""
        for name, value in self.arrays.items():
            anonymous = name.startswith(("onnx::", "/")) or name.endswith("_scale")
            if value.dtype == np.float32 and value.ndim and not anonymous:
                yield parameter_of(name), value

    def weights(self, node: Any) -> Found:
        """What a node reads, as torch lays it out."""
        module, names = module_of(node.name), list(node.input)
        if module is None:
            return
        kind, weight = node.op_type, f"{module}.weight"
        if kind == "MatMulInteger":
            yield from self._narrow(weight, names[1], names[3], turned=True)
        elif kind == "ConvInteger":
            yield from self._narrow(weight, names[1], names[3])
        elif kind == "Gather" and names[0].endswith("weight_quantized"):
            widened = self.reader[node.output[0]]
            yield from self._narrow(weight, names[0], widened.input[2])
        elif kind == "DynamicQuantizeLSTM":
            yield from self._lstm(module, names)
        elif kind in ("Conv", "ConvTranspose", "MatMul") and names[1] in self.arrays:
            wide = self.arrays[names[1]]
            yield weight, wide.T if kind == "MatMul" else wide
            if len(names) > 2:
                yield f"{module}.bias", self.arrays[names[2]]

    def _narrow(self, name: str, weight: str, zero: str, *, turned: bool = False) -> Found:
        values = self.arrays[weight]
        values = values.T if turned else values
        # A scale for each output, or one for all.
        shape = [-1] + [1] * (values.ndim - 1)
        scale = self.arrays[weight.removesuffix("_quantized") + "_scale"]
        yield name, values
        yield f"{name}|scale", scale.reshape(shape)
        yield f"{name}|zero", self.arrays[zero].reshape(shape)

    def _lstm(self, module: str, names: list[str]) -> Found:
        """A bidirectional LSTM's weights (2, in, 4H) and biases (2, 8H)."""
        arrays = [self.arrays.get(name) for name in names]
        for direction, suffix in enumerate(("", "_reverse")):
            for kind, weight, scale, zero in (("ih", 1, 8, 9), ("hh", 2, 10, 11)):
                name = f"{module}.weight_{kind}_l0{suffix}"
                yield name, in_torchs_order(self._of(arrays, weight)[direction].T)
                yield f"{name}|scale", self._of(arrays, scale)[direction].reshape(1, 1)
                yield f"{name}|zero", self._of(arrays, zero)[direction].reshape(1, 1)
            biases = np.split(self._of(arrays, 3)[direction], 2)
            for kind, bias in zip(("ih", "hh"), biases, strict=True):
                yield f"{module}.bias_{kind}_l0{suffix}", in_torchs_order(bias)

    @staticmethod
    def _of(arrays: list[Array | None], place: int) -> Array:
        value = arrays[place]
        if value is None:
            raise ValueError("an LSTM of the file computes its own weights")
        return value


def in_torchs_order(gates: Array) -> Array:
    """The four gates of ONNX's LSTM (4H, ...) in torch's order."""
    parts = np.split(gates, 4)
    return np.concatenate([parts[gate] for gate in _GATES])


def read_onnx(path: Path) -> dict[str, Tensor]:
    """``KModel``'s tensors in torch's layouts.

    Those of 8 bits have ``NAME|scale`` and ``NAME|zero`` beside them.
    """
    graph = _Graph(path)
    found = dict(graph.floats())
    for node in graph.nodes:
        found |= graph.weights(node)
    return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}


def write_packed(tensors: dict[str, Tensor], path: Path) -> None:
    """Write the tensors small: floats as float16, all compressed."""
    halved = {
        name: (value.half() if value.is_floating_point() and "|" not in name else value)
        for name, value in tensors.items()
    }
    path.write_bytes(lzma.compress(save({n: v.contiguous() for n, v in halved.items()}), preset=6))


def read_packed(path: Path) -> dict[str, Tensor]:
    """What ``write_packed`` wrote, as float32 weights."""
    stored = load(lzma.decompress(path.read_bytes()))
    weights = {}
    for name, value in stored.items():
        if "|" in name:
            continue
        if f"{name}|scale" in stored:
            value = value.float() - stored[f"{name}|zero"].float()
            value = value * stored[f"{name}|scale"]
        weights[name] = value.float()
    return weights
