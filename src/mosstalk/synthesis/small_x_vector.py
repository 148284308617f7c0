"""A small x-vector model of the published shapes, with random weights, as an ONNX file."""

import importlib.util
import zlib
from pathlib import Path
from typing import Any

import torch

from mosstalk.models.voices import FBANK_BINS

_HIDDEN = 64
# The oldest that say all of this, so that any ONNX Runtime in use reads the file.
_OPSET, _IR_VERSION = 13, 7


def write_x_vector_model(path: Path, size: int, seed: int, hidden: int = _HIDDEN) -> bool:
    """Write a model of features (1, T, 80) to (1, ``size``); False where ``onnx`` is missing.

    A layer with ReLU, the mean over time, a layer: the mean of the features themselves is
    zero. The same seed gives the same bytes.
    """
    if importlib.util.find_spec("onnx") is None:
        return False
    from onnx import helper

    nodes = [
        helper.make_node("MatMul", ["features", "frame_weight"], ["projected"]),
        helper.make_node("Relu", ["projected"], ["hidden"]),
        helper.make_node("ReduceMean", ["hidden"], ["pooled"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["pooled", "output_weight"], ["x_vector"]),
    ]
    graph = helper.make_graph(
        nodes,
        "synthetic x-vector",
        [_value("features", [1, "frames", FBANK_BINS])],
        [_value("x_vector", [1, size])],
        [
            _weight("frame_weight", (FBANK_BINS, hidden), seed),
            _weight("output_weight", (hidden, size), seed),
        ],
    )
    model = helper.make_model(
        graph, producer_name="mosstalk", opset_imports=[helper.make_opsetid("", _OPSET)]
    )
    model.ir_version = _IR_VERSION
    path.write_bytes(model.SerializeToString(deterministic=True))
    return True


def _value(name: str, shape: list[int | str]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _weight(name: str, shape: tuple[int, int], seed: int) -> Any:
    from onnx import numpy_helper

    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} campplus {name}".encode()))
    value = torch.randn(shape, generator=generator) * shape[0] ** -0.5
    return numpy_helper.from_array(value.numpy(), name)
