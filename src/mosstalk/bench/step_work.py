"""What a step of the language model must at least move and compute, from the model's sizes."""

from dataclasses import dataclass

import torch

from mosstalk.bench.ceilings import Work
from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Mode
from mosstalk.models.quantization import Quantization

_KEYS_AND_VALUES = 2
_SCALE_BYTES = 4


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
