"""Small parts of checkpoints: byte-level tokenizers in Qwen3's format, random x-vector models."""

import importlib.util
import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import read_json
from mosstalk.models.text_tokenizer import REQUIRED_TOKENS, added_tokens
from mosstalk.models.voices import FBANK_BINS

_BYTES = 256
_BETWEEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_AFTER = ("<|empty|>", "<|end_empty|>")
_HIDDEN = 64
# The oldest that say all of this, so that any ONNX Runtime in use reads the file.
_OPSET, _IR_VERSION = 13, 7


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019).

    Printable bytes stand for themselves; the others take the code points from 256 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in printable else next(spare)) for byte in range(_BYTES)]


def write_tokenizer(
    folder: Path, model: dict[str, Any], pieces: Sequence[str] = (), merges: Sequence[str] = ()
) -> None:
    """Write ``tokenizer.json`` with the special ids where ``model`` (its config) has them.

    ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>`` stand just before sosp, as published.
    ``pieces`` follow the 256 bytes, and ``merges`` ("left right") make them.
    """
    sosp, pad = model["sosp_token_id"], model["modality_pad_token_id"]
    first = sosp - len(_BETWEEN)
    names = {first + place: name for place, name in enumerate((*_BETWEEN, "<|object_ref_start|>"))}
    names[pad] = "<|modality_pad|>"
    names |= {pad + 1 + place: name for place, name in enumerate(_AFTER)}
    if first < _BYTES or pad <= sosp or pad + len(_AFTER) >= model["vocab_size"]:
        raise ConfigError(
            f"sosp_token_id {sosp}, modality_pad_token_id {pad} and vocab_size "
            f"{model['vocab_size']} leave no room for 256 bytes and their special tokens"
        )
    fillers = [f"[unused{index}]" for index in range(_BYTES + len(pieces), first)]
    tokens = [*byte_alphabet(), *pieces, *fillers]
    if len(tokens) > first:
        raise ConfigError(f"{len(pieces)} pieces and 256 bytes do not fit below id {first}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    added = [_added_token(index, name) for index, name in sorted(names.items())]
    document = _document(vocabulary, added, merges)
    (folder / "tokenizer.json").write_text(json.dumps(document, indent=1))


def copy_tokenizer(source: Path, folder: Path, model: dict[str, Any]) -> None:
    """Put a given ``tokenizer.json`` beside the config, if its ids fit the vocabulary.

    Raises:
        CheckpointError: a needed token is missing or an id is not below ``vocab_size``.
    """
    ids = added_tokens(source, read_json(source))
    absent = [name for name in (*REQUIRED_TOKENS, "<|object_ref_start|>") if name not in ids]
    if absent:
        raise CheckpointError(f"{source}: added token {absent[0]} is missing")
    if ids["<|object_ref_start|>"] != model["sosp_token_id"]:
        raise CheckpointError(
            f"{source}: its <|object_ref_start|> is {ids['<|object_ref_start|>']}; add --size "
            f"sosp_token_id={ids['<|object_ref_start|>']} and a fitting modality_pad_token_id"
        )
    if max(ids.values()) >= model["vocab_size"]:
        raise CheckpointError(f"{source}: ids up to {max(ids.values())}; add --size vocab_size=...")
    shutil.copyfile(source, folder / "tokenizer.json")


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def _document(
    vocabulary: dict[str, int], added: list[dict[str, Any]], merges: Sequence[str]
) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": list(merges),
        },
    }


def write_x_vector_model(path: Path, size: int, seed: int, hidden: int = _HIDDEN) -> bool:
    """Write a random x-vector model of features (1, T, 80) to (1, ``size``).

    False where ``onnx`` is missing. A layer with ReLU, the mean over time, a layer: the mean of
    the features themselves is zero. The same seed gives the same bytes.
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
