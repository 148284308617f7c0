"""Seeded random weights at any size: files in the published layout, or straight into memory.

Speed, memory and parity are measured on real shapes where the real weights cannot be had.
What such a model says is noise; every config written here says ``synthetic``. Networks that are
drawn on a device have the same distributions as the files, though not the same numbers.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mosstalk.config import (
    WEIGHTS_KIND_KEY,
    FlowConfig,
    HiftConfig,
    LanguageModelConfig,
    SpeechTokenizerConfig,
)
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.environment import install_command, this_command
from mosstalk.files import new_folder
from mosstalk.models.codec_folder import FLOW_BLOCK_CODES, STREAMING_FLOW, Codec, read_fingerprint
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import CODEC_KEY, X_VECTOR_FILE, Voice, save_voice
from mosstalk.models.weights import in_shards, shapes_of, shard_name
from mosstalk.progress import Progress, no_progress, progress_bar
from mosstalk.runtime.device import pick_dtype
from mosstalk.synthesis.sizes import Sizes, parse_sizes
from mosstalk.synthesis.small_parts import copy_tokenizer, write_tokenizer, write_x_vector_model

SHARD_BYTES = 5_000_000_000
"""Largest shard; the published model at this size lies in four."""
VOICE_CODES = 25
_QUIET_LOG_MAGNITUDE = 0.0
_CALM = 0.1
"""Scale of the vocoder's last layer: left alone, its exponential would clip nearly always."""
_CPU = torch.device("cpu")
_MEL_LEVEL = -6.0
_ROWS_SEED = 11
_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class Synthesis:
    """What to write: sizes, seed, the language model's dtype and who is told of progress.

    The language model is drawn on ``device``: at full size a CPU takes minutes for it.
    """

    sizes: Sizes
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    tokenizer: Path | None = None
    tell: Progress = field(default=no_progress, compare=False)
    device: torch.device = _CPU


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
    shards = list(in_shards(shapes, lambda name: prod(shapes[name]) * itemsize, SHARD_BYTES))
    total, index = sum(map(prod, shapes.values())), dict[str, str]()
    done = 0
    for number, names in enumerate(shards, 1):
        file = shard_name(number, len(shards)) if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            what.tell("writing language model", done, total)
            tensors[name] = _drawn(name, shapes[name], what.seed, what.device).to(what.dtype).cpu()
            done += prod(shapes[name])
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
    what.tell("writing speech tokenizer", 0, 1)
    tensors = {name: _drawn(name, shape, what.seed) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_flow(folder: Path, what: Synthesis) -> None:
    flow_config = FlowConfig.from_dict(what.sizes.flow)
    hift_config = HiftConfig.from_dict(what.sizes.hift)
    _write_json(folder / "config.json", flow_config.to_dict())
    _write_json(folder / "hift.json", hift_config.to_dict())
    with torch.device("meta"):
        flow, hift = shapes_of(FlowDecoder(flow_config)), shapes_of(HiftVocoder(hift_config))
    for offset, name in enumerate(FLOW_BLOCK_CODES):
        what.tell(f"writing {name}", 0, 1)
        state = {key: _drawn(key, shape, what.seed + offset) for key, shape in flow.items()}
        # The published files carry training counters; readers must drop them.
        torch.save(state | {"epoch": 0, "step": 0}, folder / f"{name}.pt")
    what.tell("writing hift", 0, 1)
    torch.save(dict(_hift_state(hift, hift_config, what.seed)), folder / "hift.pt")


def _hift_state(
    shapes: Mapping[str, tuple[int, ...]], config: HiftConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """HiFT's tensors with weight norm as published: g and v instead of most weights."""
    plain = ("source_downs.", "m_source.", "f0_predictor.classifier.")
    for name, shape in shapes.items():
        value = _drawn(name, shape, seed)
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
    flow, limit = FlowConfig.from_dict(what.sizes.flow), what.sizes.codec["quantize_vocab_size"]
    voice = _voice(flow, VOICE_CODES, limit, zlib.crc32(f"{what.seed} voice".encode()))
    info = {"name": "default", "weights": "synthetic", CODEC_KEY: fingerprint}
    save_voice(replace(voice, info=info), path)


def _voice(config: FlowConfig, codes: int, limit: int, seed: int) -> Voice:
    random = torch.Generator().manual_seed(seed)
    mel = torch.randn((codes * config.token_mel_ratio, config.mel_bins), generator=random)
    return Voice(
        torch.randint(limit, (codes,), generator=random),
        mel + _MEL_LEVEL,
        torch.randn(config.spk_embed_dim, generator=random),
    )


def _drawn(name: str, shape: tuple[int, ...], seed: int, device: torch.device = _CPU) -> Tensor:
    """A tensor that depends on its name, shape, the seed and the device alone, float32.

    Norm weights and Snake's a lie near one; matrices are scaled by their fan-in, so that
    activations keep their size through any depth.
    """
    # torch keeps the low 32 bits of a seed alone.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    value = torch.randn(shape, generator=generator, device=device)
    scale, offset = scale_of(name, shape)
    return value.mul_(scale).add_(offset)


def scale_of(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Scale and offset of normal values for a tensor of that name and shape."""
    if name.endswith(".bias") or "pos_bias" in name:
        return 0.02, 0.0
    if name.endswith((".alpha", "norm.weight", "norm1.weight", "norm3.weight")):
        return 0.1, 1.0
    if "embed" in name or "codebook" in name:
        return 1.0, 0.0
    return (shape[0] if len(shape) == 1 else prod(shape[1:])) ** -0.5, 0.0


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


@torch.inference_mode()
def random_codec(sizes: Sizes, device: torch.device, seed: int = 0) -> Codec:
    """The codec in float32; its ``folder`` names none that exists."""
    flow = FlowConfig.from_dict(sizes.flow)
    hift = HiftConfig.from_dict(sizes.hift)
    speech = SpeechTokenizerConfig.from_dict(sizes.codec)
    vocoder = _random(lambda: HiftVocoder(hift), device, seed)
    vocoder.conv_post.weight.mul_(_CALM)
    calm = vocoder.conv_post.bias
    assert calm is not None
    calm[: hift.istft_n_fft // 2 + 1] = 0
    return Codec(
        Path("random-codec"),
        _random(lambda: SpeechTokenizer(speech), device, seed),
        _random(lambda: FlowDecoder(flow), device, seed),
        vocoder,
        FLOW_BLOCK_CODES[STREAMING_FLOW],
    )


def random_voice(codec: Codec, seconds: float, seed: int = 0) -> Voice:
    """A voice of whole blocks, at most ``seconds`` long."""
    config = codec.flow.config
    codes = int(seconds * CODES_PER_SECOND) // config.chunk_size * config.chunk_size
    limit = min(config.vocab_size, codec.tokenizer.config.quantize_vocab_size)
    return _voice(config, codes, limit, seed)


def _random(make: Callable[[], _M], device: torch.device, seed: int) -> _M:
    with torch.device("meta"):
        module = make()
    module = module.to_empty(device=device).eval().requires_grad_(requires_grad=False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            tensor.copy_(_drawn(name, tuple(tensor.shape), seed, device))
        else:
            tensor.zero_()
    return module


def random_language_model(
    sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> LanguageModel:
    """The model in ``dtype``; of one seed, device and dtype always the same."""
    config = LanguageModelConfig.from_dict(sizes.model)
    return _random(lambda: LanguageModel(config).to(dtype), device, seed)


def special_ids(config: LanguageModelConfig) -> SpecialIds:
    """Ids as published and as ``synthesize`` writes them: three right before ``sosp``."""
    endoftext, im_start, im_end = (config.sosp_token_id - back for back in (3, 2, 1))
    return SpecialIds(
        endoftext=endoftext,
        im_start=im_start,
        im_end=im_end,
        sosp=config.sosp_token_id,
        modality_pad=config.modality_pad_token_id,
        eosp=config.eosp_token_id,
        audio_pad=config.audio_pad_token_id,
        stop=frozenset((endoftext, im_end)),
    )


def random_rows(
    model: LanguageModel, ids: SpecialIds, mode: Mode, count: int, rows: int
) -> list[list[Row]]:
    """``count`` prompts of so many random rows in one mode, those of each its own."""
    random = torch.Generator().manual_seed(_ROWS_SEED)
    if mode is Mode.AUDIO:
        codes = torch.randint(ids.eosp, (count, rows), generator=random)
        codes[codes == ids.audio_pad] = 0
        return [[(ids.modality_pad, code) for code in part] for part in codes.tolist()]
    most = min(*ids.stop, ids.sosp, ids.modality_pad, model.config.vocab_size)
    texts = torch.randint(most, (count, rows), generator=random)
    return [[(text, ids.audio_pad) for text in part] for part in texts.tolist()]
