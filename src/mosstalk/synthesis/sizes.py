"""Named sizes of synthetic checkpoints, and changes to them from the command line."""

from dataclasses import dataclass, replace
from typing import Any

from mosstalk.config import FlowConfig, HiftConfig
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json

PUBLISHED_MODEL: dict[str, Any] = {
    "architectures": ["MossSpeechForCausalLM"],
    "model_type": "moss_speech",
    "attention_bias": False,
    "audio_pad_token_id": 512,
    "audio_vocab_size": 16512,
    "channels": 2,
    "eosp_token_id": 16384,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "modality_pad_token_id": 151667,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_modality_layers": 4,
    "num_shared_layers": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sosp_token_id": 151646,
    "tie_word_embeddings": False,
    "vocab_size": 151680,
}

PUBLISHED_CODEC: dict[str, Any] = {
    "architectures": ["WhisperVQEncoder"],
    "model_type": "whisper",
    "activation_function": "gelu",
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_causal_attention": True,
    "encoder_causal_convolution": True,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
    "pooling_kernel_size": 4,
    "pooling_position": 16,
    "pooling_type": "avg",
    "quantize_causal_encoder": True,
    "quantize_encoder_only": True,
    "quantize_position": 16,
    "quantize_vocab_size": 16384,
}

PREPROCESSOR: dict[str, Any] = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
    "sampling_rate": 16000,
}


@dataclass(frozen=True)
class Sizes:
    """Configs of a checkpoint to write, in the published keys."""

    model: dict[str, Any]
    codec: dict[str, Any]
    flow: dict[str, Any]
    hift: dict[str, Any]
    preprocessor: dict[str, Any]


FULL = Sizes(
    PUBLISHED_MODEL, PUBLISHED_CODEC, FlowConfig().to_dict(), HiftConfig().to_dict(), PREPROCESSOR
)

TINY = Sizes(
    PUBLISHED_MODEL
    | {
        "audio_vocab_size": 1152,
        "eosp_token_id": 1024,
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 10240,
        "modality_pad_token_id": 260,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "num_modality_layers": 2,
        "num_shared_layers": 4,
        "sosp_token_id": 259,
        "vocab_size": 264,
    },
    PUBLISHED_CODEC
    | {
        "d_model": 64,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "encoder_layers": 3,
        "pooling_position": 2,
        "quantize_position": 2,
        "quantize_vocab_size": 1024,
    },
    FlowConfig(
        input_size=64,
        attention_heads=4,
        linear_units=128,
        encoder_blocks=2,
        up_encoder_blocks=2,
        estimator_channels=64,
        estimator_head_dim=16,
        estimator_heads=4,
        estimator_mid_blocks=2,
        estimator_transformer_blocks=1,
        vocab_size=1280,
    ).to_dict(),
    HiftConfig(base_channels=64, f0_channels=64).to_dict(),
    PREPROCESSOR,
)

NAMED = {"tiny": TINY, "full": FULL}


def named_sizes(word: str) -> Sizes:
    """The sizes that ``--random-weights`` names.

    Raises:
        OptionError: it names none.
    """
    if word not in NAMED:
        raise OptionError(f"--random-weights {word}: choose of {', '.join(NAMED)}")
    return NAMED[word]


def parse_sizes(words: list[str]) -> Sizes:
    """Sizes from words such as ``tiny``, ``hidden_size=256``, ``flow.input_size=128``.

    A name replaces everything said before it; ``codec.``, ``flow.`` and ``hift.`` lead to
    the codec's parts, keys without them to the language model's config.

    Raises:
        ConfigError: an unknown name, part or key, or a value that is no json.
    """
    sizes = TINY
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if word not in NAMED:
                raise ConfigError(f"unknown size {word!r}; say {', '.join(NAMED)} or KEY=VALUE")
            sizes = NAMED[word]
        else:
            sizes = _changed(sizes, key, value)
    layers = sizes.model["num_shared_layers"] + sizes.model["num_modality_layers"]
    return replace(sizes, model=sizes.model | {"num_hidden_layers": layers})


def _changed(sizes: Sizes, key: str, text: str) -> Sizes:
    part, dot, name = key.partition(".")
    if not dot:
        part, name = "model", key
    values = vars(sizes).get(part)
    if part == "preprocessor" or values is None or name not in values:
        raise ConfigError(
            f"unknown key {key!r} in --size; e.g. hidden_size=256, flow.input_size=96"
        )
    try:
        changed = values | {name: parse_json(text)}
    except ConfigError:
        raise ConfigError(f"--size {key}={text}: the value is not a number or json") from None
    if isinstance(changed[name], str) and not isinstance(values[name], str):
        raise ConfigError(f"--size {key}={text}: the value is not a number")
    if name in ("quantize_position", "pooling_position"):
        changed |= dict.fromkeys(("quantize_position", "pooling_position"), changed[name])
    return replace(sizes, **{part: changed})
