"""What a checkpoint's config says of quantised weights, and the network made accordingly.

``config.json`` of a quantised folder has an object ``quantization``::

    {"version": 1, "scheme": "fp8", "blocks": "shared", "activations": "calibrated",
     "source_sha256": "...", "calibration": {"prompts": 540, "statistic": "largest"}}

A linear layer ``X`` then has ``X.weight`` in E4M3, ``X.weight_scale`` in float32 (one for each row)
and, where activations are calibrated, ``X.input_scale`` ().
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from mosstalk.config import LanguageModelConfig, Reader
from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.models.language_model import IN_LAYER, LanguageModel, blocks, fused_tensors
from mosstalk.models.weights import Store
from mosstalk.numerics.fp8 import E4M3, Fp8Linear, Fp8Weight

KEY = "quantization"
VERSION = 1
SCHEMES = ("fp8",)
BLOCKS = ("shared", "all")
"""Which layers: the shared block's, or those of both modality blocks too."""
ACTIVATIONS = ("row", "calibrated")
"""How a linear layer's input is scaled: each row by its largest magnitude, or by a fixed number."""
STATISTICS = ("largest", "p99.99")
"""What a fixed scale is made of: the largest magnitude seen, or that of all but 1 in 10,000."""

WEIGHT, WEIGHT_SCALE, INPUT_SCALE = "weight", "weight_scale", "input_scale"
_FOREIGN = "quantization_config"
"""Where other programs say how they quantised."""
_AGAIN = "quantise the checkpoint again with: mosstalk checkpoint quantize DIR OUT --scheme fp8"
LINEARS = tuple(
    name.removesuffix(f".{WEIGHT}")
    for names in IN_LAYER.values()
    for name in names
    if name.endswith(f"_proj.{WEIGHT}")
)
"""The seven linear layers of a decoder layer by their published names."""


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint was quantised; ``calibration`` is empty without calibrated activations."""

    blocks: str = "shared"
    activations: str = "row"
    source_sha256: str = ""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    scheme: str = "fp8"

    @classmethod
    def of(cls, config: LanguageModelConfig, where: str = "config.json") -> Self | None:
        """Read the record of a config; None where its weights are not quantised.

        Raises:
            ConfigError: the record is malformed, or of a scheme or version that is not known.
        """
        if config.extra.get(_FOREIGN) is not None:
            raise ConfigError(
                f"{where}: {_FOREIGN} says that another program quantised these weights, which "
                f"mosstalk does not read; take the published checkpoint and {_AGAIN}"
            )
        values = config.extra.get(KEY)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {KEY} must be an object, found {values!r}")
        return cls._read(Reader(values, f"{where}: {KEY}"))

    @classmethod
    def _read(cls, reader: Reader) -> Self:
        version = reader.get("version", int)
        if version != VERSION:
            raise ConfigError(
                f"{reader.where}: version {version} is of another mosstalk (this one reads "
                f"{VERSION}); install that one, or {_AGAIN}"
            )
        scheme = _one_of(reader, "scheme", SCHEMES)
        block = _one_of(reader, "blocks", BLOCKS)
        activations = _one_of(reader, "activations", ACTIVATIONS)
        calibrated = activations == "calibrated"
        calibration = reader.get("calibration", dict) if calibrated else {}
        if calibrated:
            Reader(calibration, f"{reader.where}: calibration").size("prompts")
        source = reader.get("source_sha256", str)
        unknown = sorted(reader.rest())
        if unknown:
            raise ConfigError(f"{reader.where}: unknown key {unknown[0]!r}; {_AGAIN}")
        return cls(block, activations, source, calibration, scheme)

    @property
    def calibrated(self) -> bool:
        """Whether inputs have fixed scales."""
        return self.activations == "calibrated"

    def as_dict(self) -> dict[str, Any]:
        """The record as ``config.json`` holds it."""
        values = {
            "version": VERSION,
            "scheme": self.scheme,
            "blocks": self.blocks,
            "activations": self.activations,
            "source_sha256": self.source_sha256,
        }
        return values | ({"calibration": dict(self.calibration)} if self.calibrated else {})

    def describe(self) -> str:
        """For people: what is quantised, and how its inputs are."""
        where = "shared block" if self.blocks == "shared" else "all three blocks"
        how = "by row" if not self.calibrated else "by scales calibrated on {prompts} prompts"
        return f"{self.scheme} (E4M3), {where}, activations {how.format(**self.calibration)}"

    def linears(self, config: LanguageModelConfig) -> list[str]:
        """Published names of the linear layers that are quantised, without ``.weight``."""
        return [
            f"model.{block}.layers.{layer}.{linear}"
            for block, layers in blocks(config).items()
            if self.blocks == "all" or block == "shared_block"
            for layer in range(layers)
            for linear in LINEARS
        ]


def _one_of(reader: Reader, key: str, known: tuple[str, ...]) -> str:
    value: str = reader.get(key, str)
    if value not in known:
        raise ConfigError(
            f"{reader.where}: unknown {key} {value!r}; this mosstalk knows {' and '.join(known)}: "
            f"install a newer one, or {_AGAIN}"
        )
    return value


def prepare(model: LanguageModel, record: Quantization) -> None:
    """Put ``Fp8Linear`` modules, not yet filled, in place of ``record``'s linear layers."""
    for name in record.linears(model.config):
        plain = plain_linear(model, name)
        with torch.device(plain.weight.device):
            replace_linear(
                model,
                name,
                Fp8Linear(plain.in_features, plain.out_features, calibrated=record.calibrated),
            )


def quantize_in_place(
    model: LanguageModel, record: Quantization, input_scales: Mapping[str, Tensor] | None = None
) -> None:
    """Quantise a loaded model's linear layers; ``input_scales`` () by name where calibrated."""
    for name in record.linears(model.config):
        scale = (input_scales or {})[name] if record.calibrated else None
        weight = Fp8Weight.of(plain_linear(model, name).weight.detach())
        replace_linear(model, name, Fp8Linear.holding(weight, scale))


def precision_of(dtype: torch.dtype, record: Quantization | None) -> str:
    """A model's precision for people: ``bfloat16``, or ``bfloat16, shared block in fp8``."""
    kind = str(dtype).removeprefix("torch.")
    if record is None:
        return kind
    return f"{kind}, {'shared block' if record.blocks == 'shared' else 'all blocks'} in fp8"


def plain_linear(model: LanguageModel, name: str) -> nn.Linear:
    """The linear layer called ``name`` of a model that is not quantised."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} is quantised already"
    return linear


def replace_linear(model: LanguageModel, name: str, linear: nn.Module) -> None:
    """Put another module in the place of the linear layer called ``name``."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, linear)


def own_dtypes(config: LanguageModelConfig, record: Quantization | None) -> dict[str, torch.dtype]:
    """Published names of the tensors that keep a dtype of their own, with it."""
    if record is None:
        return {}
    kinds = {WEIGHT: E4M3, WEIGHT_SCALE: torch.float32}
    kinds |= {INPUT_SCALE: torch.float32} if record.calibrated else {}
    names = record.linears(config)
    return {f"{name}.{kind}": dtype for name in names for kind, dtype in kinds.items()}


def wrong_dtypes(store: Store, own: Mapping[str, torch.dtype]) -> list[str]:
    """Every tensor whose stored dtype is not what the record says, one line each."""
    lines = []
    for name, stored in store.items():
        wanted = str(own[name]).removeprefix("torch.") if name in own else None
        if wanted and stored.dtype != wanted:
            lines.append(f"{name} is {stored.dtype}, must be {wanted}")
        elif not wanted and stored.dtype.startswith(("float8", "F8")):
            lines.append(f"{name} is {stored.dtype}, and config.json does not say by which scale")
    return lines


def unfused_scales(
    store: Store, config: LanguageModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Store:
    """See the scales of fused matrices under the published names.

    The rows of a weight's scales belong to its parts in order; an input's scale is that of all.
    What is absent or misshapen is left as it is, for the inventory to name.
    """
    published = dict(store)
    for stem, parts in _fused_linears(config):
        rows = [shapes[f"{part}.{WEIGHT}"][0] for part in parts]
        stored = store.get(f"{stem}.{WEIGHT_SCALE}")
        if stored is not None and stored.shape == (sum(rows),):
            del published[f"{stem}.{WEIGHT_SCALE}"]
            starts = [sum(rows[:place]) for place in range(len(rows))]
            for part, start, count in zip(parts, starts, rows, strict=True):
                published[f"{part}.{WEIGHT_SCALE}"] = stored.part(start, (count,))
        common = published.pop(f"{stem}.{INPUT_SCALE}", None)
        if common is not None:
            published |= {f"{part}.{INPUT_SCALE}": common for part in parts}
    return published


def _fused_linears(config: LanguageModelConfig) -> Iterator[tuple[str, list[str]]]:
    end = f".{WEIGHT}"
    for fused in fused_tensors(config):
        if len(fused.sources) > 1:
            yield fused.name.removesuffix(end), [name.removesuffix(end) for name in fused.sources]


def require_scales(model: LanguageModel, where: str) -> None:
    """Raise CheckpointError naming a scale that is not above 0."""
    for name, module in model.named_modules():
        if not isinstance(module, Fp8Linear):
            continue
        for kind, scale in module.named_parameters():
            if kind != WEIGHT and not bool((scale > 0).all()):
                raise CheckpointError(f"{where}: {name}.{kind} must be above 0; {_AGAIN}")
