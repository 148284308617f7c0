"""What was measured as tables, as a document, and as a page with charts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from mosstalk.checkpoints.calibrate import WAYS, Measured, ProductError
from mosstalk.models.quantization import LINEARS, Quantization
from mosstalk.reporting.html import line_chart, page, table_html
from mosstalk.reporting.tables import Table

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
