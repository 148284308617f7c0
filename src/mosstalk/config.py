"""Frozen configurations, read strictly from a checkpoint's own json files.

A key that would change the arithmetic raises; keys that do not are kept in ``extra``
and shown by tools. Nothing here imports torch.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from mosstalk.errors import ConfigError
from mosstalk.files import read_json

WEIGHTS_KIND_KEY = "mosstalk_weights"
"""Extra config key of checkpoints this project writes: ``synthetic``, ``pocket``, ..."""


_LONGEST_SHOWN = 80
"""Characters of a wrong value that an error quotes."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class Reader:
    """Takes typed values out of a json object and remembers which keys were used."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where, self.used = values, where, set[str]()

    def get(self, key: str, kind: type, default: Any = MISSING) -> Any:
        """The value of exactly this type (an int serves as float); null counts as absent."""
        self.used.add(key)
        value = self.values.get(key, MISSING)
        if value is MISSING or value is None:
            if default is MISSING:
                raise ConfigError(f"{self.where}: key {key!r} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self.where}: {key} must be {kind.__name__}, found {_shown(value)}")
        return value

    def size(self, key: str, default: Any = MISSING) -> int:
        """An int of at least 1."""
        value: int = self.get(key, int, default)
        if value < 1:
            raise ConfigError(f"{self.where}: {key} must be at least 1, found {value}")
        return value

    def positive(self, key: str, default: Any = MISSING) -> float:
        """A finite float above 0."""
        value: float = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key} must be finite and above 0, found {value}")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raise unless ``key`` is absent or has one of the values we implement."""
        self.used.add(key)
        if key in self.values and self.values[key] not in allowed:
            raise ConfigError(
                f"{self.where}: {key} = {_shown(self.values[key])} is not supported "
                f"(only {' or '.join(map(repr, allowed))}): it would change the arithmetic"
            )

    def rest(self) -> dict[str, Any]:
        """Keys that were not asked for, with their values."""
        return {key: value for key, value in self.values.items() if key not in self.used}


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and special ids of the two-headed language model (``config.json``)."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_shared_layers: int
    num_modality_layers: int
    vocab_size: int
    audio_vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    modality_pad_token_id: int
    sosp_token_id: int
    eosp_token_id: int
    audio_pad_token_id: int = 512
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep K and V for every position: trunk and both modality blocks."""
        return self.num_shared_layers + 2 * self.num_modality_layers

    @property
    def weights_kind(self) -> str:
        """What the weights are, as far as the checkpoint says: ``synthetic`` means random."""
        return str(self.extra.get(WEIGHTS_KIND_KEY, "unlabelled"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the published keys; raise ConfigError on what we do not compute."""
        reader = Reader(values, where)
        if values.get("model_type") != "moss_speech":
            raise ConfigError(
                f"{where}: model_type is {values.get('model_type')!r}, not 'moss_speech': "
                "this folder holds another architecture"
            )
        _refuse_other_arithmetic(reader)
        sizes = {
            key: reader.size(key)
            for key in (
                *("hidden_size", "intermediate_size", "num_attention_heads"),
                *("num_key_value_heads", "head_dim", "num_shared_layers", "num_modality_layers"),
                *("vocab_size", "audio_vocab_size", "max_position_embeddings"),
            )
        }
        config = cls(
            **sizes,
            rope_theta=_rope_theta(reader),
            rms_norm_eps=reader.positive("rms_norm_eps"),
            modality_pad_token_id=reader.get("modality_pad_token_id", int),
            sosp_token_id=reader.get("sosp_token_id", int),
            eosp_token_id=reader.get("eosp_token_id", int),
            audio_pad_token_id=reader.get("audio_pad_token_id", int, 512),
            extra=reader.rest(),
        )
        config._check(values.get("num_hidden_layers"), where)
        return config

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read ``folder/config.json``."""
        path = folder / "config.json"
        return cls.from_dict(read_json(path), str(path))

    def _check(self, num_hidden_layers: int | None, where: str) -> None:
        expected = self.num_shared_layers + self.num_modality_layers
        if num_hidden_layers not in (None, expected):
            raise ConfigError(
                f"{where}: num_hidden_layers is {num_hidden_layers}, but shared + modality "
                f"layers are {expected}"
            )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError(
                f"{where}: heads {self.num_attention_heads} must be a multiple of "
                f"KV heads {self.num_key_value_heads}, head_dim even"
            )
        for name, size in (
            ("modality_pad_token_id", self.vocab_size),
            ("sosp_token_id", self.vocab_size),
            ("eosp_token_id", self.audio_vocab_size),
            ("audio_pad_token_id", self.audio_vocab_size),
        ):
            if not 0 <= getattr(self, name) < size:
                raise ConfigError(f"{where}: {name} {getattr(self, name)} is not below {size}")


def _refuse_other_arithmetic(reader: Reader) -> None:
    reader.refuse("rope_scaling", (None,))
    reader.refuse("attention_bias", (False, None))
    reader.refuse("use_sliding_window", (False, None))
    reader.refuse("tie_word_embeddings", (False, None))
    reader.refuse("hidden_act", ("silu",))
    reader.refuse("channels", (2,))
    reader.used -= {"attention_bias", "use_sliding_window", "tie_word_embeddings", "hidden_act"}


def _rope_theta(reader: Reader) -> float:
    """Base of the rotary frequencies; the class default 1e4 is wrong for this model."""
    parameters = reader.get("rope_parameters", dict, {})
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(
            f"{reader.where}: rope_type {parameters['rope_type']!r} would change the arithmetic"
        )
    nested = Reader(parameters, f"{reader.where}: rope_parameters")
    fallback = nested.get("rope_theta", float, None)
    if reader.get("rope_theta", float, fallback) is None:
        raise ConfigError(f"{reader.where}: rope_theta is missing (published: 1000000.0)")
    return reader.positive("rope_theta", fallback)


@dataclass(frozen=True)
class SpeechTokenizerConfig:
    """Sizes of the causal Whisper encoder with a codebook (the codec's ``config.json``)."""

    d_model: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    encoder_layers: int
    num_mel_bins: int
    max_source_positions: int
    pooling_kernel_size: int
    quantize_position: int
    quantize_vocab_size: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the published keys; raise ConfigError on what we do not compute."""
        if "quantize_position" not in values:
            raise ConfigError(
                f"{where}: no quantize_position: this is not the config of a speech tokenizer"
            )
        reader = Reader(values, where)
        for key in (
            *("quantize_causal_encoder", "encoder_causal_attention"),
            *("encoder_causal_convolution", "quantize_encoder_only"),
        ):
            reader.refuse(key, (True,))
        reader.refuse("pooling_type", ("avg",))
        reader.refuse("activation_function", ("gelu",))
        reader.refuse("pooling_position", (values["quantize_position"],))
        names = [spec.name for spec in fields(cls) if spec.name != "extra"]
        config = cls(**{name: reader.size(name) for name in names}, extra=reader.rest())
        config._check(where)
        return config

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read ``folder/config.json``."""
        path = folder / "config.json"
        config = cls.from_dict(read_json(path), str(path))
        _check_preprocessor(folder / "preprocessor_config.json", config.num_mel_bins)
        return config

    def _check(self, where: str) -> None:
        if self.quantize_position > self.encoder_layers:
            raise ConfigError(f"{where}: quantize_position is past the last encoder layer")
        if self.d_model % self.encoder_attention_heads:
            raise ConfigError(f"{where}: d_model is no multiple of encoder_attention_heads")
        if self.max_source_positions % self.pooling_kernel_size:
            raise ConfigError(f"{where}: max_source_positions is no multiple of the pooling kernel")


def _check_preprocessor(path: Path, bins: int) -> None:
    """Refuse features other than Whisper's; the file may be absent."""
    if not path.exists():
        return
    reader = Reader(read_json(path), str(path))
    wanted = {"sampling_rate": 16_000, "n_fft": 400, "hop_length": 160, "feature_size": bins}
    for key, value in (wanted | {"dither": 0.0}).items():
        reader.refuse(key, (value,))


@dataclass(frozen=True)
class FlowConfig:
    """Sizes of the flow decoder; the defaults are the published checkpoint's.

    The published folder names them in no readable file; what this project writes carries
    them in ``flow/config.json``.
    """

    input_size: int = 512
    attention_heads: int = 8
    linear_units: int = 2048
    encoder_blocks: int = 6
    up_encoder_blocks: int = 4
    estimator_channels: int = 256
    estimator_head_dim: int = 64
    estimator_heads: int = 8
    estimator_mid_blocks: int = 12
    estimator_transformer_blocks: int = 4
    vocab_size: int = 20480
    chunk_size: int = 5
    token_mel_ratio: int = 4
    pre_lookahead_len: int = 3
    n_timesteps: int = 10
    cfg_rate: float = 0.7
    mel_bins: int = 80
    spk_embed_dim: int = 192

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "flow/config.json") -> "FlowConfig":
        """Read exactly these keys; absent ones have the published value."""
        config = _exact(FlowConfig, values, where)
        if config.input_size % (2 * config.attention_heads):
            raise ConfigError(f"{where}: input_size must be an even multiple of attention_heads")
        return config

    def to_dict(self) -> dict[str, Any]:
        """The keys and values as ``flow/config.json`` holds them."""
        return asdict(self)


@dataclass(frozen=True)
class HiftConfig:
    """Sizes of the HiFT vocoder; the defaults are the published checkpoint's."""

    base_channels: int = 512
    f0_channels: int = 512
    in_channels: int = 80
    nb_harmonics: int = 8
    sampling_rate: int = 24_000
    nsf_alpha: float = 0.1
    nsf_sigma: float = 0.003
    nsf_voiced_threshold: float = 10.0
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernel_sizes: tuple[int, ...] = (16, 11, 7)
    istft_n_fft: int = 16
    istft_hop: int = 4
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    source_resblock_kernel_sizes: tuple[int, ...] = (7, 7, 11)
    source_resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    lrelu_slope: float = 0.1
    audio_limit: float = 0.99

    @property
    def samples_per_frame(self) -> int:
        """Output samples of one mel frame."""
        product = self.istft_hop
        for rate in self.upsample_rates:
            product *= rate
        return product

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "flow/hift.json") -> "HiftConfig":
        """Read exactly these keys (``istft`` nested); absent ones have the published value."""
        flat = dict(values)
        nested = flat.pop("istft", {"n_fft": 16, "hop_len": 4})
        if not isinstance(nested, dict) or set(nested) != {"n_fft", "hop_len"}:
            raise ConfigError(f"{where}: istft must hold n_fft and hop_len")
        config = _exact(
            HiftConfig,
            flat | {"istft_n_fft": nested["n_fft"], "istft_hop": nested["hop_len"]},
            where,
        )
        lengths = {
            len(config.upsample_rates),
            len(config.upsample_kernel_sizes),
            len(config.source_resblock_kernel_sizes),
            len(config.source_resblock_dilation_sizes),
        }
        if len(lengths) != 1:
            raise ConfigError(f"{where}: one kernel and one source block per upsampling rate")
        if len(config.resblock_kernel_sizes) != len(config.resblock_dilation_sizes):
            raise ConfigError(f"{where}: one list of resblock_dilation_sizes per resblock kernel")
        return config

    def to_dict(self) -> dict[str, Any]:
        """The keys and values as ``flow/hift.json`` holds them."""
        values = asdict(self)
        n_fft, hop_len = values.pop("istft_n_fft"), values.pop("istft_hop")
        return values | {"istft": {"n_fft": n_fft, "hop_len": hop_len}}


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value is made of whole numbers of at least 1, in tuples that nest as its default's.

    How many there are may differ, but for none at all.
    """
    if not isinstance(default, tuple):
        return type(value) is int and value >= 1
    nested = isinstance(value, tuple) and bool(value)
    return nested and all(_is_like(each, default[0]) for each in value)


_C = TypeVar("_C", FlowConfig, HiftConfig)


def _exact(cls: type[_C], values: Mapping[str, Any], where: str) -> _C:
    """Build ``cls`` from json values: unknown keys and wrong types raise."""
    specs = {spec.name: spec for spec in fields(cls)}
    unknown = sorted(set(values) - set(specs))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(specs)}")
    reader = Reader({key: _tupled(value) for key, value in values.items()}, where)
    found: dict[str, Any] = {}
    for name, spec in specs.items():
        kind = type(spec.default)
        found[name] = reader.get(name, kind, spec.default)
        if kind is int and found[name] < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, found {found[name]}")
        if kind is tuple and not _is_like(found[name], spec.default):
            raise ConfigError(
                f"{where}: {name} must hold whole numbers of at least 1, nested as in "
                f"{spec.default}, found {_shown(found[name])}"
            )
    return cls(**found)
