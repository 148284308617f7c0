"""Bytes of every part of a language model and a codec, from their configs alone.

What cannot be computed, because it was measured or is set aside, is in ``measured.json``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import torch

from mosstalk.codec.flow_pages import FlowOptions, PageLayout
from mosstalk.codec.hift_step import HiftState
from mosstalk.codec.tokenizer_state import ROW_S
from mosstalk.config import FlowConfig, HiftConfig, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.engine.kv_store import bytes_per_row
from mosstalk.errors import ConfigError
from mosstalk.files import read_json
from mosstalk.models.checkpoint import model_shapes
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.speech_tokenizer import CONV_STRIDE, SpeechTokenizer
from mosstalk.models.weights import shapes_of
from mosstalk.reply_options import CONTEXT_S

Shapes = Mapping[str, tuple[int, ...]]
BytesOf = Callable[[str, tuple[int, ...]], int]
MEASURED_FORMAT = "mosstalk-measured-2"
MIB = 2**20
_MEASURED = Path(__file__).with_name("measured.json")

PRECISIONS = ("bf16", "fp8")
SOUND_DTYPE = torch.float16
"""Of flow and vocoder on a GPU, unless something else is asked for."""
_WIDE, _NARROW = 4, 2
_PARTS = {
    "trunk": ("model.shared_block.",),
    "text block": ("model.text_block.",),
    "audio block": ("model.audio_block.",),
    "embeddings": ("model.embed_tokens.", "model.audio_embed."),
    "heads and norms": (
        *("text_lm_head.", "audio_lm_head."),
        *("model.text_norm.", "model.audio_norm."),
    ),
}
_NOT_PACKED = ("decoder.estimator.time_mlp.", ".mlp.")
"""Of the estimator: what makes its times, which are computed once."""
_MIDDLE = ("ups.", "resblocks.", "source_resblocks.", "source_downs.")
"""Of the vocoder: what is packed in 16 bit."""


@dataclass(frozen=True)
class Part:
    """Weights of one part: how many, and the bytes that they take on a GPU."""

    name: str
    weights: int
    bytes: int


@dataclass(frozen=True)
class Configs:
    """What a plan is made for."""

    model: LanguageModelConfig
    speech: SpeechTokenizerConfig
    flow: FlowConfig
    hift: HiftConfig

    def with_steps(self, steps: int | None) -> "Configs":
        """The same with so many Euler steps of the flow; None leaves them as they are."""
        return replace(self, flow=replace(self.flow, n_timesteps=steps)) if steps else self


def language_parts(config: LanguageModelConfig, precision: str) -> list[Part]:
    """The language model in bf16, or with the trunk's products in FP8.

    In FP8 a product's weight is a byte, with one float32 scale for each of its outputs.
    """
    shapes = _language_shapes(config)
    found = []
    for name, stems in _PARTS.items():
        own = {key: shape for key, shape in shapes.items() if key.startswith(stems)}
        fp8 = precision == "fp8" and name == "trunk"
        found.append(_part(name, own, _quantized_bytes if fp8 else _narrow_bytes))
    return found


def _part(name: str, shapes: Shapes, bytes_of: BytesOf) -> Part:
    size = sum(bytes_of(key, shape) for key, shape in shapes.items())
    return Part(name, sum(map(prod, shapes.values())), size)


def _wide_bytes(_: str, shape: tuple[int, ...]) -> int:
    return _WIDE * prod(shape)


def _narrow_bytes(_: str, shape: tuple[int, ...]) -> int:
    return _NARROW * prod(shape)


def _quantized_bytes(name: str, shape: tuple[int, ...]) -> int:
    if name.endswith("_proj.weight"):
        return prod(shape) + shape[0] * _WIDE
    return _NARROW * prod(shape)


def _mixed_bytes(name: str, shape: tuple[int, ...]) -> int:
    """A matrix or a convolution's weight in 16 bit; norms and biases in float32."""
    return (_narrow_bytes if len(shape) > 1 else _wide_bytes)(name, shape)


def _estimator_bytes(name: str, shape: tuple[int, ...]) -> int:
    return 0 if any(mark in name for mark in _NOT_PACKED) else _mixed_bytes(name, shape)


def _vocoder_bytes(name: str, shape: tuple[int, ...]) -> int:
    return (_mixed_bytes if name.startswith(_MIDDLE) else _wide_bytes)(name, shape)


def text_table_bytes(config: LanguageModelConfig) -> int:
    """Of the text embeddings, which need not be in the GPU's memory."""
    return _NARROW * config.vocab_size * config.hidden_size


@cache
def _language_shapes(config: LanguageModelConfig) -> Shapes:
    return model_shapes(config)


@cache
def codec_on_meta(configs: Configs) -> Codec:
    """The codec's modules without memory, for counting."""
    with torch.device("meta"):
        return Codec(
            Path("sizes"),
            SpeechTokenizer(configs.speech),
            FlowDecoder(configs.flow),
            HiftVocoder(configs.hift),
            configs.flow.chunk_size,
        )


def codec_parts(codec: Codec) -> list[Part]:
    """The codec as it is served on a GPU.

    The speech tokenizer and the flow's encoder are float32; matrices of the estimator and of the
    vocoder's middle are float16, all else of them float32.
    """
    flow = shapes_of(codec.flow)
    estimator = {name: shape for name, shape in flow.items() if name.startswith("decoder.")}
    encoder = {name: shape for name, shape in flow.items() if name not in estimator}
    return [
        _part("speech tokenizer", shapes_of(codec.tokenizer), _wide_bytes),
        _part("flow encoder", encoder, _wide_bytes),
        _part("flow estimator", estimator, _estimator_bytes),
        _part("vocoder", shapes_of(codec.vocoder), _vocoder_bytes),
    ]


def heard_bytes(speech: SpeechTokenizerConfig, seconds: float) -> float:
    """What a GPU keeps of so much sound of turns under way: keys, values and features."""
    row = 2 * speech.quantize_position * speech.d_model + CONV_STRIDE * speech.num_mel_bins
    return _WIDE * row * seconds / ROW_S


@dataclass(frozen=True)
class Rates:
    """What grows with use, in bytes: a row of conversation, a reply, a second heard or of voice.

    ``row``: K and V of all layers and the trunk's output. A reply takes ``reply_pages`` of the
    flow's pages and ``vocoder_state``. ``heard``: a second of a turn under way. ``page``: one
    block of the flow; ``page_s`` seconds of sound.
    """

    row: int
    reply_pages: int
    vocoder_state: int
    heard: float
    page: int
    page_s: float

    @classmethod
    def of(cls, configs: Configs, context_s: float = CONTEXT_S) -> "Rates":
        """With a reply that remembers ``context_s`` of itself besides its voice."""
        layout = PageLayout(configs.flow, configs.flow.n_timesteps, SOUND_DTYPE)
        pages = FlowOptions(context_s=context_s).reply_pages(configs.flow)
        assert pages is not None
        state = HiftState.empty(1, configs.hift, torch.device("meta")).tensors
        held = sum(tensor.numel() * tensor.element_size() for tensor in state)
        return cls(
            bytes_per_row(configs.model, torch.bfloat16),
            pages,
            held,
            heard_bytes(configs.speech, 1.0),
            layout.bytes,
            configs.flow.chunk_size / CODES_PER_SECOND,
        )


@dataclass(frozen=True)
class Overhead:
    """Memory that every process takes; ``basis``: measured, set aside or assumed."""

    name: str
    bytes: int
    basis: str
    source: str


@dataclass(frozen=True)
class Peak:
    """Device memory of a whole pipeline; ``gib`` None: not stated or not measured."""

    name: str
    device: str | None
    gib: float | None
    command: str | None


@dataclass(frozen=True)
class Measured:
    """All of it."""

    overheads: tuple[Overhead, ...]
    peaks: tuple[Peak, ...]


@cache
def measured(path: Path = _MEASURED) -> Measured:
    """Read the file of the package, or another of its form.

    Raises:
        ConfigError: it is of another form.
    """
    values = read_json(path)
    if values.get("format") != MEASURED_FORMAT:
        raise ConfigError(
            f"{path}: the format is {values.get('format')!r}, not {MEASURED_FORMAT!r}"
        )
    overheads = (
        Overhead(each["name"], each["mib"] * MIB, each["basis"], each["source"])
        for each in values["overheads"]
    )
    return Measured(tuple(overheads), tuple(Peak(**peak) for peak in values["peaks"]))
