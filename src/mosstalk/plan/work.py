"""What a step, a hop and a push must at least move and compute, from the models' sizes."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from mosstalk.config import HiftConfig, LanguageModelConfig
from mosstalk.conversation import Mode
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import KEPT_FRAMES, HiftVocoder
from mosstalk.models.quantization import Quantization
from mosstalk.models.speech_tokenizer import SpeechTokenizer

_KEYS_AND_VALUES = 2
_SCALE_BYTES = 4
_BRANCHES = 2


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved at least once, and operations (a multiply-add is two).

    Of the operations ``fp8`` are products of numbers in E4M3.
    """

    moved_bytes: float
    operations: float
    fp8: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
            self.fp8 + other.fp8,
        )


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a large copy (read and written), and operations a second of a large
    matrix product of random values in ``dtype``, and in E4M3 where it was measured; the best of a
    few runs each.
    """

    bytes_per_s: float
    flops_per_s: float
    dtype: torch.dtype
    fp8_per_s: float | None = None

    def limit_ms(self, work: Work) -> float:
        """The longer of the two: moving the bytes, or doing the operations."""
        computing_s = (work.operations - work.fp8) / self.flops_per_s
        computing_s += work.fp8 / (self.fp8_per_s or self.flops_per_s)
        return 1000 * max(work.moved_bytes / self.bytes_per_s, computing_s)

    def describe(self) -> str:
        """For people."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"copies {self.bytes_per_s / 1e9:,.0f} GB/s, multiplies {kind} at "
            f"{self.flops_per_s / 1e12:,.2f} TFLOP/s"
            + (f", E4M3 at {self.fp8_per_s / 1e12:,.2f}" if self.fp8_per_s else "")
        )


@dataclass(frozen=True)
class Load:
    """``sessions`` conversations of ``kept`` rows that read ``new`` rows each and draw one.

    In ``mode``, whose block and head alone are needed.
    """

    sessions: int
    kept: int
    new: int = 1
    mode: Mode = Mode.AUDIO

    @property
    def name(self) -> str:
        """For tables."""
        if self.new == 1:
            return f"{self.sessions} x 1 row after {self.kept}"
        if self.kept == 0:
            return f"{self.new} rows"
        return f"{self.new} rows after {self.kept}"


def layer_weights(config: LanguageModelConfig) -> int:
    """Weights of the products of one layer."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + _KEYS_AND_VALUES * keys)
    return attention + 3 * config.hidden_size * config.intermediate_size


def layer_channels(config: LanguageModelConfig) -> int:
    """Columns that the products of one layer write: each has a scale where it is quantised."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = queries + _KEYS_AND_VALUES * keys + config.hidden_size
    return attention + 2 * config.intermediate_size + config.hidden_size


def step_work(
    config: LanguageModelConfig,
    dtype: torch.dtype,
    load: Load,
    record: Quantization | None = None,
) -> Work:
    """Weights and kept rows read once, new rows through trunk and one block, a head each.

    Of layers that ``record`` says are in FP8 a weight is a byte, a channel has its scale, and
    products are of numbers in E4M3.
    """
    layers = config.num_shared_layers + config.num_modality_layers
    vocabulary = config.audio_vocab_size if load.mode is Mode.AUDIO else config.vocab_size
    head = config.hidden_size * vocabulary
    weights = layers * layer_weights(config)
    kept_row = layers * _KEYS_AND_VALUES * config.num_key_value_heads * config.head_dim
    seen = load.kept + (load.new + 1) / 2
    queries = config.num_attention_heads * config.head_dim
    attention = layers * load.sessions * load.new * seen * 2 * _KEYS_AND_VALUES * queries
    others = head + kept_row * load.sessions * (load.kept + load.new)
    quantized = _quantized_layers(config, record)
    saved = (dtype.itemsize - 1) * layer_weights(config) - _SCALE_BYTES * layer_channels(config)
    return Work(
        dtype.itemsize * (weights + others) - quantized * saved,
        2.0 * load.sessions * (load.new * weights + head) + attention,
        2.0 * load.sessions * load.new * quantized * layer_weights(config),
    )


def _quantized_layers(config: LanguageModelConfig, record: Quantization | None) -> int:
    """Of the layers that a step reads."""
    if record is None:
        return 0
    return config.num_shared_layers + (config.num_modality_layers if record.blocks == "all" else 0)


def hop_work(
    codec: Codec, dtype: torch.dtype, *, hops: int, voice_frames: int, own_frames: int, steps: int
) -> Work:
    """One hop of a block in each of ``hops`` replies of one voice.

    Each Euler step reads the estimator's weights, the voice's keys and values once for all replies,
    and those of the ``own_frames`` of each. The flow's encoder, a hundredth of it, is left out.
    """
    estimator = flow_work(codec.flow, dtype, hops, voice_frames, own_frames)
    vocoder = vocoder_work(codec.vocoder, dtype, hops)
    return Work(steps * estimator.moved_bytes, steps * estimator.operations) + vocoder


def flow_work(
    flow: FlowDecoder, dtype: torch.dtype, hops: int, voice_frames: int, own_frames: int
) -> Work:
    """One Euler step of the estimator on one block of each of ``hops`` replies."""
    config = flow.config
    weights = sum(weight.numel() for weight in flow.decoder.estimator.parameters())
    frames = config.chunk_size * config.token_mel_ratio
    rows = _BRANCHES * hops * frames
    layers = (config.estimator_mid_blocks + 2) * config.estimator_transformer_blocks
    inner = config.estimator_heads * config.estimator_head_dim
    kept_row = layers * _BRANCHES * _KEYS_AND_VALUES * inner * dtype.itemsize
    seen = voice_frames + own_frames + frames
    return Work(
        weights * dtype.itemsize + kept_row * (voice_frames + hops * (own_frames + frames)),
        2 * rows * weights + layers * 2 * _KEYS_AND_VALUES * rows * seen * inner,
    )


def vocoder_work(vocoder: HiftVocoder, dtype: torch.dtype, hops: int) -> Work:
    """HiFT on the kept frames and those of one block of 20, counted on one run."""
    weights = sum(weight.numel() for weight in vocoder.parameters())
    return Work(weights * dtype.itemsize, hops * _vocoder_operations(vocoder.config))


@cache
def _vocoder_operations(config: HiftConfig) -> int:
    """Counted on another vocoder of these sizes: one in use may lie anywhere, and in parts."""
    frames = KEPT_FRAMES + 20
    mel = torch.zeros(1, config.in_channels, frames)
    source = torch.zeros(1, frames * config.samples_per_frame)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        HiftVocoder(config)(mel, source)
    return counter.get_total_flops()


def push_work(tokenizer: SpeechTokenizer, rows: int, kept_rows: int) -> Work:
    """``rows`` new rows of 20 ms of one stream that has kept ``kept_rows``, in float32."""
    encoder, config = tokenizer.encoder, tokenizer.config
    weights = sum(weight.numel() for weight in encoder.layers.parameters())
    codebook = encoder.codebook.weight.numel()
    attention = config.quantize_position * 4 * rows * (kept_rows + rows) * config.d_model
    kept = config.quantize_position * _KEYS_AND_VALUES * (kept_rows + rows) * config.d_model
    return Work(
        4.0 * (weights + codebook + kept), 2.0 * rows * weights + attention + rows / 2 * codebook
    )
