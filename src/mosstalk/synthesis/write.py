"""Seeded random weights in the published layout, at any size.

Speed, memory and parity are measured on real shapes where the real weights cannot be had.
What such a model says is noise; every config written here says ``synthetic``.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mosstalk.config import (
    WEIGHTS_KIND_KEY,
    FlowConfig,
    HiftConfig,
    LanguageModelConfig,
    SpeechTokenizerConfig,
)
from mosstalk.environment import install_command, this_command
from mosstalk.files import new_folder
from mosstalk.models.codec_folder import read_fingerprint
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import CODEC_KEY, X_VECTOR_FILE, Voice, save_voice
from mosstalk.models.weights import in_shards, shapes_of, shard_name
from mosstalk.progress import Progress, progress_bar
from mosstalk.runtime.device import pick_dtype
from mosstalk.synthesis.sizes import Sizes, parse_sizes
from mosstalk.synthesis.small_tokenizer import copy_tokenizer, write_tokenizer
from mosstalk.synthesis.small_x_vector import write_x_vector_model

SHARD_BYTES = 5_000_000_000
"""Largest shard; the published model at this size lies in four."""
VOICE_CODES = 25
_QUIET_LOG_MAGNITUDE = 0.0
_CALM = 0.1
"""Scale of the vocoder's last layer: left alone, its exponential would clip nearly always."""
_FLOWS = ("flow", "flow-chunk-5", "flow-chunk-25")


@dataclass(frozen=True)
class Synthesis:
    """What to write: sizes, seed, the language model's dtype and who is told of progress."""

    sizes: Sizes
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    tokenizer: Path | None = None
    progress: Progress | None = field(default=None, compare=False)


def synthesize(out: Path, what: Synthesis) -> None:
    """Write ``out/model`` and ``out/codec``; ``out`` must exist and be empty.

    Without the ``onnx`` package the x-vector model ``codec/flow/campplus.onnx`` is left out.
    """
    model, codec = out / "model", out / "codec"
    model.mkdir()
    (codec / "flow").mkdir(parents=True)
    (codec / "voices").mkdir()
    _write_language_model(model, what)
    _write_speech_tokenizer(codec, what)
    _write_flow(codec / "flow", what)
    write_x_vector_model(
        codec / "flow" / X_VECTOR_FILE, what.sizes.flow["spk_embed_dim"], what.seed
    )
    _write_voice(codec / "voices" / "default.safetensors", what, read_fingerprint(codec))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _label(what: Synthesis) -> dict[str, Any]:
    return {WEIGHTS_KIND_KEY: "synthetic", "mosstalk_seed": what.seed}


def _write_language_model(folder: Path, what: Synthesis) -> None:
    if what.tokenizer:
        copy_tokenizer(what.tokenizer, folder, what.sizes.model)
    else:
        write_tokenizer(folder, what.sizes.model)
    dtype_name = str(what.dtype).removeprefix("torch.")
    values = what.sizes.model | {"torch_dtype": dtype_name} | _label(what)
    config = LanguageModelConfig.from_dict(values)
    _write_json(folder / "config.json", values)
    with torch.device("meta"):
        shapes = shapes_of(LanguageModel(config))
    itemsize = what.dtype.itemsize
    shards = list(in_shards(shapes, lambda name: _numel(shapes[name]) * itemsize, SHARD_BYTES))
    total, index = sum(map(_numel, shapes.values())), dict[str, str]()
    done = 0
    for number, names in enumerate(shards, 1):
        file = shard_name(number, len(shards)) if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            _tell(what, "language model", done, total)
            tensors[name] = _random_tensor(name, shapes[name], what.seed).to(what.dtype)
            done += _numel(shapes[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        metadata = {"total_size": total * itemsize}
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": index}
        )


def _write_speech_tokenizer(folder: Path, what: Synthesis) -> None:
    values = what.sizes.codec | _label(what)
    _write_json(folder / "config.json", values)
    _write_json(
        folder / "preprocessor_config.json",
        what.sizes.preprocessor | {"feature_size": what.sizes.codec["num_mel_bins"]},
    )
    config = SpeechTokenizerConfig.from_dict(values)
    with torch.device("meta"):
        shapes = shapes_of(SpeechTokenizer(config))
    _tell(what, "speech tokenizer", 0, 1)
    tensors = {name: _random_tensor(name, shape, what.seed) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_flow(folder: Path, what: Synthesis) -> None:
    flow_config = FlowConfig.from_dict(what.sizes.flow)
    hift_config = HiftConfig.from_dict(what.sizes.hift)
    _write_json(folder / "config.json", flow_config.to_dict())
    _write_json(folder / "hift.json", hift_config.to_dict())
    with torch.device("meta"):
        flow, hift = shapes_of(FlowDecoder(flow_config)), shapes_of(HiftVocoder(hift_config))
    for offset, name in enumerate(_FLOWS):
        _tell(what, name, 0, 1)
        state = {key: _random_tensor(key, shape, what.seed + offset) for key, shape in flow.items()}
        # The published files carry training counters; readers must drop them.
        torch.save(state | {"epoch": 0, "step": 0}, folder / f"{name}.pt")
    _tell(what, "hift", 0, 1)
    torch.save(dict(_hift_state(hift, hift_config, what.seed)), folder / "hift.pt")


def _hift_state(
    shapes: Mapping[str, tuple[int, ...]], config: HiftConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """HiFT's tensors with weight norm as published: g and v instead of most weights."""
    plain = ("source_downs.", "m_source.", "f0_predictor.classifier.")
    for name, shape in shapes.items():
        value = _random_tensor(name, shape, seed)
        if name.startswith("conv_post."):
            value *= _CALM
        if name == "conv_post.bias":
            value[: config.istft_n_fft // 2 + 1] = _QUIET_LOG_MAGNITUDE
        if name.endswith(".weight") and not name.startswith(plain):
            stem = f"{name.removesuffix('.weight')}.parametrizations.weight"
            norm = value.flatten(1).norm(dim=1).reshape(-1, *[1] * (value.ndim - 1))
            yield f"{stem}.original0", norm
            yield f"{stem}.original1", value
        else:
            yield name, value


def _write_voice(path: Path, what: Synthesis, fingerprint: str) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{what.seed} voice".encode()))
    flow = FlowConfig.from_dict(what.sizes.flow)
    limit = what.sizes.codec["quantize_vocab_size"]
    mel = torch.randn((VOICE_CODES * flow.token_mel_ratio, flow.mel_bins), generator=generator)
    voice = Voice(
        torch.randint(limit, (VOICE_CODES,), generator=generator),
        mel - 6.0,
        torch.randn(flow.spk_embed_dim, generator=generator),
        {"name": "default", "weights": "synthetic", CODEC_KEY: fingerprint},
    )
    save_voice(voice, path)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _tell(what: Synthesis, part: str, done: int, total: int) -> None:
    if what.progress:
        what.progress(f"writing {part}", done, total)


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor that depends on its name, shape and the seed alone, float32.

    Norm weights and Snake's a lie near one; matrices are scaled by their fan-in, so that
    activations keep their size through any depth.
    """
    # torch keeps the low 32 bits of a seed alone.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    value = torch.randn(shape, generator=generator)
    scale, offset = scale_of(name)(shape)
    return value.mul_(scale).add_(offset)


def scale_of(name: str) -> Callable[[tuple[int, ...]], tuple[float, float]]:
    """Scale and offset of normal values for a tensor of that name, from its shape."""
    if name.endswith(".bias") or "pos_bias" in name:
        return lambda _: (0.02, 0.0)
    if name.endswith((".alpha", "norm.weight", "norm1.weight", "norm3.weight")):
        return lambda _: (0.1, 1.0)
    if "embed" in name or "codebook" in name:
        return lambda _: (1.0, 0.0)
    return lambda shape: ((shape[0] if len(shape) == 1 else _numel(shape[1:])) ** -0.5, 0.0)


def run_synthesize(
    out: Path, words: list[str], seed: int, dtype: str, tokenizer: Path | None
) -> None:
    """Write a synthetic checkpoint to ``out`` and print what it is."""
    sizes = parse_sizes([part for word in words for part in word.split(",")])
    started = time.perf_counter()
    with progress_bar() as tell, new_folder(out) as part:
        synthesize(part, Synthesis(sizes, seed, pick_dtype(dtype), tokenizer, tell))
    files = [path for path in out.rglob("*") if path.is_file()]
    size_mib = sum(path.stat().st_size for path in files) / 2**20
    print(
        f"{out}: {len(files)} files, {size_mib:.1f} MiB of random weights (seed {seed}) "
        f"in {time.perf_counter() - started:.1f} s"
    )
    if not (out / "codec" / "flow" / X_VECTOR_FILE).exists():
        print(
            f"without codec/flow/{X_VECTOR_FILE}, which voices are made with: "
            f"to get it: {install_command('voices')}"
        )
    print(
        f"try: {this_command()} chat --model {out / 'model'} --codec {out / 'codec'} "
        "--text hello --script speech:25"
    )
