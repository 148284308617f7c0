"""How large the inputs of each product get, and what quantising them costs.

The first is what a fixed scale is made of; the second is each product's error, and how far each
head moves, on prompts apart: as tables, as a document, and as a page with charts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from mosstalk.checkpoints.prompts import Prompt
from mosstalk.errors import CheckpointError
from mosstalk.models.language_model import IN_LAYER, LanguageModel, Logits
from mosstalk.models.quantization import (
    LINEARS,
    STATISTICS,
    WEIGHT,
    Quantization,
    plain_linear,
    replace_linear,
)
from mosstalk.numerics.fp8 import E4M3_MAX, Fp8Linear, Fp8Weight
from mosstalk.progress import Progress
from mosstalk.reporting.html import line_chart, page, table_html
from mosstalk.reporting.tables import Table

SHARE = 0.9999
"""Of an input's numbers that statistic ``p99.99`` does not clip."""
_CUT_BITS = 23 - 6
_KEPT_BITS = 31 - _CUT_BITS
_SAME_INPUT = {
    name.removesuffix(f".{WEIGHT}"): names[0].removesuffix(f".{WEIGHT}")
    for names in IN_LAYER.values()
    for name in names
}
"""Products by the first one that reads the same input: k and v by q, up by gate."""
BY_ROW = "row"
Products = dict[str, Fp8Linear]
"""Quantised products by name."""
_NOTHING = 1e-30
FORMAT = "mosstalk-quantize-1"
PLUMBING = (
    "These weights are random: the figures show that everything works and nothing of what FP8 "
    "costs a model that was trained."
)
_BLOCK_NAMES = {"shared_block": "shared", "text_block": "text", "audio_block": "audio"}
_PRODUCTS_NOTE = (
    "Norm of the error over norm of what is exact, in %. Outputs are of inputs that the "
    "unquantised model has there: no error of earlier layers is in them."
)


@dataclass
class Magnitudes:
    """The largest magnitude of an input, and how often each 64th of an octave occurred.

    A float32's exponent and the first 6 bits of its mantissa number these 64ths in order.
    """

    largest: Tensor = field(default_factory=lambda: torch.zeros(()))
    counts: Tensor = field(default_factory=lambda: torch.zeros(1 << _KEPT_BITS, dtype=torch.int64))

    def add(self, x: Tensor) -> None:
        """Count an input of any shape."""
        sizes = x.detach().float().abs().flatten()
        self.largest = torch.maximum(self.largest.to(sizes.device), sizes.max())
        bins = torch.bincount(sizes.view(torch.int32) >> _CUT_BITS, minlength=len(self.counts))
        self.counts = self.counts.to(sizes.device) + bins

    def watch(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Count the input of a module; a hook."""
        self.add(inputs[0])

    def scale(self, statistic: str) -> Tensor:
        """The float32 scale () by ``largest``, or by the magnitude that ``SHARE`` do not exceed."""
        top = float(self.largest)
        if statistic != "largest":
            below = self.counts.cumsum(0) >= SHARE * self.counts.sum()
            end = (below.long().argmax() + 1) << _CUT_BITS
            top = min(top, float(end.int().view(torch.float32)))
        return torch.tensor(max(top / E4M3_MAX, torch.finfo(torch.float32).tiny))


@torch.inference_mode()
def calibrate(
    model: LanguageModel, names: Sequence[str], prompts: Sequence[Prompt], tell: Progress
) -> dict[str, Magnitudes]:
    """Run prompts through a plain model; the magnitudes of each product's input, by its name.

    Raises:
        CheckpointError: an input is not finite.
    """
    watched = {first_of(name): Magnitudes() for name in names}
    with ExitStack() as hooks:
        for name, magnitudes in watched.items():
            linear = plain_linear(model, name)
            hooks.enter_context(linear.register_forward_pre_hook(magnitudes.watch))
        for place, prompt in enumerate(prompts):
            tell("calibrating", place, len(prompts))
            model(grid(prompt, model), model.new_cache(), last_only=True)
    for name, magnitudes in watched.items():
        if not bool(torch.isfinite(magnitudes.largest)):
            raise CheckpointError(
                f"inputs of {name} are not finite: the weights are damaged or overflow "
                f"{model.dtype}; try --dtype float32"
            )
    return {name: watched[first_of(name)] for name in names}


def first_of(name: str) -> str:
    """The first product that reads the same input as this one."""
    product = next(product for product in LINEARS if name.endswith(f".{product}"))
    return name.removesuffix(product) + _SAME_INPUT[product]


def grid(prompt: Prompt, model: LanguageModel) -> Tensor:
    """The rows of a prompt as the model takes them: (1, T, 2)."""
    return torch.tensor([list(prompt.rows)], device=model.device)


def way_name(statistic: str) -> str:
    """How a way of scaling activations is called."""
    return f"calibrated, {statistic}"


WAYS = (BY_ROW, *map(way_name, STATISTICS))
"""Ways of scaling activations that are compared."""


@dataclass(frozen=True)
class ProductError:
    """||error|| / ||exact|| of a product's weight, and of its output by each way.

    Outputs are of the unquantised model's own inputs, so errors of earlier layers are not in them.
    """

    name: str
    weight: float
    outputs: Mapping[str, float]


@dataclass(frozen=True)
class HeadError:
    """How a head's distributions moved, over ``rows`` draws that count.

    ``kl`` is the mean of KL(unquantised || quantised) in nats, ``kl_p95`` and ``kl_max`` its 95th
    percentile and largest; ``top1`` the share of rows with the same likeliest id.
    """

    head: str
    way: str
    rows: int
    kl: float
    kl_p95: float
    kl_max: float
    top1: float


@dataclass
class Measured:
    """Everything that was measured."""

    products: list[ProductError] = field(default_factory=list)
    heads: list[HeadError] = field(default_factory=list)


def quantised_ways(
    model: LanguageModel, names: Sequence[str], magnitudes: Mapping[str, Magnitudes]
) -> dict[str, Products]:
    """The products by each way; their weights are the same tensors in all."""
    weights = {name: Fp8Weight.of(plain_linear(model, name).weight.detach()) for name in names}
    ways: dict[str, Products] = {
        BY_ROW: {name: Fp8Linear.holding(weight) for name, weight in weights.items()}
    }
    for statistic in STATISTICS:
        ways[way_name(statistic)] = {
            name: Fp8Linear.holding(
                weight, magnitudes[name].scale(statistic).to(weight.scale.device)
            )
            for name, weight in weights.items()
        }
    return ways


@torch.inference_mode()
def measure(
    model: LanguageModel, ways: Mapping[str, Products], prompts: Sequence[Prompt], tell: Progress
) -> Measured:
    """Run the model as it is and by each way over the same prompts."""
    names = list(next(iter(ways.values())))
    sums = {name: _Sums() for name in names}
    drawn = {(head, way): _Draws() for head in Logits._fields for way in ways}
    for place, prompt in enumerate(prompts):
        tell("measuring", place, len(prompts))
        rows = grid(prompt, model)
        with ExitStack() as hooks:
            for name, found_sums in sums.items():
                compare = partial(found_sums.add, {way: ways[way][name] for way in ways})
                hooks.enter_context(plain_linear(model, name).register_forward_hook(compare))
            exact = model(rows, model.new_cache())
        for way, products in ways.items():
            with _instead(model, products):
                found = model(rows, model.new_cache())
            _add_draws(drawn, way, prompt, exact, found, model.config.eosp_token_id)
    found_products = [
        ProductError(name, _weight_error(model, name, ways), sums[name].relative())
        for name in names
    ]
    heads = [draws.error(head, way) for (head, way), draws in drawn.items() if draws.kl]
    return Measured(found_products, heads)


@dataclass
class _Sums:
    """Squares of what is exact, and of each way's error."""

    exact: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        products: Mapping[str, Fp8Linear],
        _: nn.Module,
        inputs: tuple[Tensor, ...],
        exact: Tensor,
    ) -> None:
        """Compute a product by every way too, while the model runs as it is; a hook."""
        self.exact += float(exact.float().square().sum())
        for way, product in products.items():
            error = product(inputs[0]).float() - exact.float()
            self.errors[way] = self.errors.get(way, 0.0) + float(error.square().sum())

    def relative(self) -> dict[str, float]:
        whole = max(self.exact, _NOTHING)
        return {way: (error / whole) ** 0.5 for way, error in self.errors.items()}


@contextmanager
def _instead(model: LanguageModel, products: Products) -> Iterator[None]:
    """Run the model with these products in the place of its own."""
    own = {name: plain_linear(model, name) for name in products}
    try:
        for name, product in products.items():
            replace_linear(model, name, product)
        yield
    finally:
        for name, plain in own.items():
            replace_linear(model, name, plain)


def _weight_error(model: LanguageModel, name: str, ways: Mapping[str, Products]) -> float:
    exact = plain_linear(model, name).weight.float()
    error = ways[BY_ROW][name].value.dequantized() - exact
    return float(error.norm() / exact.norm().clamp_min(_NOTHING))


@dataclass
class _Draws:
    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)

    def add(self, exact: Tensor, found: Tensor) -> None:
        """Logits (R, V) of the rows at which a draw counts."""
        before, after = exact.float().log_softmax(-1), found.float().log_softmax(-1)
        self.kl.append((before.exp() * (before - after)).sum(-1).clamp_min(0).cpu())
        self.agree.append((before.argmax(-1) == after.argmax(-1)).cpu())

    def error(self, head: str, way: str) -> HeadError:
        kl, agree = torch.cat(self.kl), torch.cat(self.agree)
        return HeadError(
            head, way, len(kl), float(kl.mean()), float(kl.quantile(0.95)), float(kl.max()),
            float(agree.float().mean()),
        )  # fmt: skip


def _add_draws(
    drawn: Mapping[tuple[str, str], _Draws],
    way: str,
    prompt: Prompt,
    exact: Logits,
    found: Logits,
    eosp: int,
) -> None:
    """Audio ids above ``eosp`` are never drawn, so they count in no distribution."""
    for head, places, ids in (("text", prompt.text, None), ("audio", prompt.audio, eosp + 1)):
        if places:
            chosen = [getattr(each, head)[0, list(places), :ids] for each in (exact, found)]
            drawn[head, way].add(*chosen)


def document_of(
    record: Quantization, settings: Mapping[str, Any], measured: Measured
) -> dict[str, Any]:
    """Every figure as plain values; errors are fractions, KL is in nats."""
    return {
        "format": FORMAT,
        "weights": settings["weights"],
        "quantization": record.as_dict(),
        "settings": dict(settings),
        "heads": [asdict(each) for each in measured.heads],
        "products": [asdict(each) for each in measured.products],
    }


def tables_of(measured: Measured) -> list[Table]:
    """Heads, kinds of products, and every product."""
    every = tuple(
        (short_name(each.name), *_cells(each.weight, each.outputs)) for each in measured.products
    )
    columns = ("", "weight %", *(f"output %, {way}" for way in WAYS))
    kinds = tuple(
        (
            kind,
            *_cells(
                fmean(each.weight for each in group),
                {way: fmean(each.outputs[way] for each in group) for way in WAYS},
            ),
        )
        for kind, group in _by_kind(measured.products)
    )
    return [
        _heads(measured),
        Table("Errors by kind of product", _PRODUCTS_NOTE, columns, kinds),
        Table("Errors of every product", _PRODUCTS_NOTE, columns, every),
    ]


def _heads(measured: Measured) -> Table:
    note = (
        "Over rows that the assistant draws, on conversations that were not calibrated on. KL of "
        "the quantised distribution from the unquantised, in nats; same top: rows whose likeliest "
        "id is the same. Heads are not quantised themselves."
    )
    rows = tuple(
        (
            *(f"{each.head} head, {each.way}", str(each.rows), f"{each.kl:.5f}"),
            *(f"{each.kl_p95:.5f}", f"{each.kl_max:.4f}", f"{100 * each.top1:.2f}"),
        )
        for each in measured.heads
    )
    return Table("Heads", note, ("", "rows", "KL mean", "KL p95", "KL max", "same top %"), rows)


def page_of(settings: Mapping[str, Any], measured: Measured) -> str:
    """One page that needs nothing but itself."""
    label = f"weights: {settings['weights']}; {settings['quantization']}"
    warning = f'<p class="skipped">{PLUMBING}</p>' if settings["weights"] == "synthetic" else ""
    heads, kinds, every = map(table_html, tables_of(measured))
    return page(
        "mosstalk in FP8",
        label,
        settings,
        warning,
        heads,
        *_charts(measured.products),
        kinds,
        f"<details><summary>Every product</summary>\n{every}</details>",
    )


def _charts(products: Sequence[ProductError]) -> Iterator[str]:
    """Errors over layers, a line for each kind of product."""
    layers = list(dict.fromkeys(_layer_of(each.name) for each in products))
    grouped = list(_by_kind(products))
    weights = {kind: [100 * each.weight for each in group] for kind, group in grouped}
    yield line_chart("Error of weights, % by layer", layers, weights, "%")
    for way in WAYS:
        lines = {kind: [100 * each.outputs[way] for each in group] for kind, group in grouped}
        yield line_chart(f"Error of outputs, activations {way}, % by layer", layers, lines, "%")


def short_name(name: str) -> str:
    """``shared 3 q_proj`` of a product's published name."""
    return f"{_layer_of(name)} {_kind_of(name)}"


def _layer_of(name: str) -> str:
    _, block, _, layer, *_ = name.split(".")
    return f"{_BLOCK_NAMES[block]} {layer}"


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def _by_kind(products: Sequence[ProductError]) -> Iterator[tuple[str, list[ProductError]]]:
    for product in LINEARS:
        kind = _kind_of(product)
        yield kind, [each for each in products if _kind_of(each.name) == kind]


def _cells(weight: float, outputs: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{100 * value:.3f}" for value in (weight, *(outputs[way] for way in WAYS)))
