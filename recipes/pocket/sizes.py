"""The pocket model's sizes, in the published configs' keys."""

from dataclasses import dataclass, replace
from typing import Any

from mosstalk.config import FlowConfig, HiftConfig
from mosstalk.synthesis.sizes import PREPROCESSOR, PUBLISHED_CODEC, PUBLISHED_MODEL

TEXT_PIECES = 2048
"""Entries of the byte-pair vocabulary, bytes included."""
CODES = 4096

MODEL: dict[str, Any] = PUBLISHED_MODEL | {
    "audio_vocab_size": CODES + 8,
    "eosp_token_id": CODES,
    "head_dim": 64,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "modality_pad_token_id": TEXT_PIECES + 4,
    "num_attention_heads": 6,
    "num_hidden_layers": 7,
    "num_key_value_heads": 2,
    "num_modality_layers": 1,
    "num_shared_layers": 6,
    "rope_theta": 10_000.0,
    "sosp_token_id": TEXT_PIECES + 3,
    "vocab_size": TEXT_PIECES + 8,
}

CODEC: dict[str, Any] = PUBLISHED_CODEC | {
    "d_model": 384,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "encoder_layers": 4,
    "num_mel_bins": 80,
    "pooling_position": 4,
    "quantize_position": 4,
    "quantize_vocab_size": CODES,
}

FLOW = FlowConfig(
    input_size=160,
    attention_heads=4,
    linear_units=448,
    encoder_blocks=3,
    up_encoder_blocks=2,
    estimator_channels=192,
    estimator_head_dim=32,
    estimator_heads=6,
    estimator_mid_blocks=1,
    estimator_transformer_blocks=1,
    vocab_size=CODES,
    n_timesteps=5,
)

HIFT = HiftConfig(base_channels=256, f0_channels=96)

PREPROCESSING: dict[str, Any] = PREPROCESSOR | {"feature_size": CODEC["num_mel_bins"]}

SMOKE_MODEL: dict[str, Any] = MODEL | {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_shared_layers": 1,
}
SMOKE_CODEC: dict[str, Any] = CODEC | {
    "d_model": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "encoder_layers": 1,
    "pooling_position": 1,
    "quantize_position": 1,
}
SMOKE_FLOW = replace(
    FLOW,
    input_size=32,
    attention_heads=2,
    linear_units=64,
    encoder_blocks=1,
    up_encoder_blocks=1,
    estimator_channels=32,
    estimator_head_dim=16,
    estimator_heads=2,
)
SMOKE_HIFT = HiftConfig(base_channels=16, f0_channels=16)


@dataclass(frozen=True)
class Sizes:
    """Configs of all parts."""

    model: dict[str, Any]
    codec: dict[str, Any]
    flow: FlowConfig
    hift: HiftConfig


POCKET_SIZES = Sizes(MODEL, CODEC, FLOW, HIFT)
SMOKE_SIZES = Sizes(SMOKE_MODEL, SMOKE_CODEC, SMOKE_FLOW, SMOKE_HIFT)
