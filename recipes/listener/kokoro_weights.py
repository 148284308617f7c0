"""Kokoro-82M's weights: out of its int8 ONNX file, into a small one, and wide again."""

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

_GATES = (0, 2, 3, 1)
"""Where torch's order of an LSTM's gates (in, forget, cell, out) lies in ONNX's (in, out, forget,
cell)."""
_IN_PREDICTOR = ("F0", "N", "shared", "F0_proj", "N_proj")
Array = NDArray[Any]
Found = Iterator[tuple[str, Array]]


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
