"""Autotuning: which tiles and splits are fastest on this card for matmuls of few rows.

A ``Division`` of ``ops.linear_tiles`` is a tile and what goes beside it, a product is a matmul of
the language model. For each line of the tables there a short list of divisions is timed on the
model's own weights, those of all layers in turn, so that none is in the card's cache. Those of
batch-invariant mode are left as they are: there a row's sums must not depend on the card either.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosstalk.engine.linears import (
    Fp8Matrix,
    LayerBuffers,
    LayerWeights,
    Linears,
    Matrix,
    packed_stacks,
)
from mosstalk.files import write_document
from mosstalk.models.language_model import LanguageModel
from mosstalk.numerics.fp8 import E4M3
from mosstalk.ops.launch import CompileError, Workspace, compiled_together, interprets
from mosstalk.ops.linear import rms_linear, rms_linear_reference
from mosstalk.ops.linear_fp8 import fp8_linear, fp8_linear_reference
from mosstalk.ops.linear_tiles import (
    ANY_ROWS,
    FEW_ROWS,
    LIMITS,
    Division,
    Key,
    Kind,
    few_candidates,
    kind_of,
    package_division,
    tuned_as,
    use_tuned,
)
from mosstalk.prepared.machine import machine_of
from mosstalk.prepared.tiles import TILES_FILE, Choice, Tuning, choose
from mosstalk.progress import Progress
from mosstalk.runtime.graphs import STEPPING, captured

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]
"""Seconds that calls take, one after another."""
ROWS = {1: 1, 16: 8, 32: 32, ANY_ROWS: FEW_ROWS}
"""With how many rows a line of the tables is timed, by the most that it is for."""
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, E4M3: 1.6e-2}
"""Relative norms: what rounding makes, by the dtype of the weights."""
_LEAST_CALLS = 32
_REPLAYS = 7
_SEED = 7


@dataclass(frozen=True)
class Product:
    """Rows times a matrix: normed first if there is a ``norm_weight``, SwiGLU of both halves if
    ``gated``, ``added`` to what is there.
    """

    matrix: Matrix
    norm_weight: Tensor | None = None
    gated: bool = False
    added: bool = False

    @property
    def weight(self) -> Tensor:
        """Its numbers."""
        return self.matrix.weight.q if isinstance(self.matrix, Fp8Matrix) else self.matrix

    @property
    def kind(self) -> Kind:
        """As the tables call it."""
        return kind_of(self.weight.shape[1], normed=self.norm_weight is not None, gated=self.gated)


@dataclass(frozen=True)
class Operands:
    """What a product takes and leaves besides its weights: rows ``x`` (R, C), in E4M3 where there
    is a ``scale`` (R,), ``residual`` and ``out`` (R, N).
    """

    x: Tensor
    scale: Tensor | None
    residual: Tensor
    out: Tensor
    workspace: Workspace | None

    def call(self, product: Product, eps: float) -> Call:
        """The product by the kernel that the tables name."""
        how = self._how(product) | {"workspace": self.workspace}
        if isinstance(product.matrix, Fp8Matrix):
            assert self.scale is not None
            return partial(fp8_linear, self.x, self.scale, product.matrix.weight, self.out, **how)
        normed = product.norm_weight
        return partial(rms_linear, self.x, normed, eps, product.matrix, self.out, **how)

    def expected(self, product: Product, eps: float) -> Tensor:
        """The product by its reference, in float32."""
        out, how = torch.empty_like(self.out, dtype=torch.float32), self._how(product)
        if isinstance(product.matrix, Fp8Matrix):
            assert self.scale is not None
            return fp8_linear_reference(self.x, self.scale, product.matrix.weight, out, **how)
        return rms_linear_reference(self.x, product.norm_weight, eps, product.matrix, out, **how)

    def _how(self, product: Product) -> dict[str, Any]:
        return {"residual": self.residual if product.added else None, "gated": product.gated}


@dataclass(frozen=True)
class TileLine:
    """All products of a line of the tables: those of the ``layers``, one of each shape with what
    its reference makes of it, and the ``heads``, which share a line of the layers'.
    """

    key: Key
    layers: list[Call]
    checks: list[tuple[Operands, Call, Tensor]]
    heads: list[Call]

    @property
    def name(self) -> str:
        """For people."""
        dtype, kind, limit = self.key
        return f"{kind} of {str(dtype).removeprefix('torch.')}, {ROWS[limit]} rows"

    @property
    def candidates(self) -> list[Division]:
        """The package's own division first."""
        return few_candidates(self.key)


class GraphTimer:
    """Times calls within a CUDA graph, as passes run: the median of several replays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, calls: Sequence[Call]) -> float:
        """Seconds of all calls."""

        def compute() -> None:
            for call in calls:
                call()

        graph = captured(compute, self._device, STEPPING, None, empty_caches=False)
        return statistics.median([self._replay(graph) for _ in range(_REPLAYS + 1)][1:])

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def tune_into(
    folder: Path, model: LanguageModel, tell: Progress, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tune for the GPU that ``model`` is on, use what was found, and write it to ``TILES_FILE``.

    Returns a summary for ``engine.json``.
    """
    found = Tuner(model, GraphTimer(model.device), tell).run()
    use_tuned(found.divisions)
    for line in found.dropped:
        say(f"  dropped: {line}")
    machine = machine_of(model.device, model.config.weights_kind)
    write_document(folder / TILES_FILE, found.as_values(machine))
    torch.cuda.empty_cache()
    return found.summary()


@dataclass
class Tuner:
    """Tries divisions of the products of ``model``, whose matrices are packed in place."""

    model: LanguageModel
    timer: Timer
    tell: Progress
    found: Tuning = field(default_factory=Tuning)

    @torch.inference_mode()
    def run(self) -> Tuning:
        """Try all; what was found is not in use yet."""
        self._eps = self.model.config.rms_norm_eps
        stacks = packed_stacks(self.model.model).values()
        layers = [layer for stack in stacks for layer in stack.layers]
        generator = torch.Generator(self.model.device).manual_seed(_SEED)
        lines = list(self._lines(layers, generator))
        self.tell("compiling divisions", 0, len(lines))
        self._compile(lines)
        for number, line in enumerate(lines):
            self.tell(f"tuning {line.name}", number, len(lines))
            package, *others = line.candidates
            clocks = partial(self._seconds, line), partial(self._seconds, line, heads=True)
            self.found.choices[line.key] = choose(package, others, *clocks)
            self.found.tried += 1 + len(others)
        for limit in LIMITS:
            self.tell("all layers", LIMITS.index(limit), len(LIMITS))
            self.found.passes[limit] = self._whole(layers, limit, generator)
        return self.found

    def _lines(self, layers: list[LayerWeights], generator: torch.Generator) -> Iterator[TileLine]:
        groups: dict[tuple[torch.dtype, Kind], list[Product]] = {}
        for product in (product for layer in layers for product in _products(layer)):
            groups.setdefault((product.weight.dtype, product.kind), []).append(product)
        both = (self.model.text_lm_head, self.model.audio_lm_head)
        heads = [Product(head.weight.detach()) for head in both]
        for (dtype, kind), products in groups.items():
            if dtype not in BOUNDS:
                continue  # in float32 sums are taken in one way
            beside = [head for head in heads if (head.weight.dtype, head.kind) == (dtype, kind)]
            for limit in LIMITS:
                yield self._line((dtype, kind, limit), products, beside, generator)

    def _line(
        self, key: Key, products: list[Product], heads: list[Product], generator: torch.Generator
    ) -> TileLine:
        candidates, drawn = few_candidates(key), dict[tuple[int, ...], Operands]()
        checks, calls = list[tuple[Operands, Call, Tensor]](), list[Call]()
        for product in products:
            shape = tuple(product.weight.shape)
            if shape not in drawn:
                drawn[shape] = self._operands(product, ROWS[key[2]], generator, candidates)
                expected = drawn[shape].expected(product, self._eps)
                checks.append((drawn[shape], drawn[shape].call(product, self._eps), expected))
            calls.append(drawn[shape].call(product, self._eps))
        beside = [self._operands(head, ROWS[key[2]], generator).call(head, 0.0) for head in heads]
        return TileLine(key, calls * -(-_LEAST_CALLS // len(calls)), checks, beside)

    def _operands(
        self,
        product: Product,
        rows: int,
        generator: torch.Generator,
        candidates: Sequence[Division] = (),
    ) -> Operands:
        """Drawn; with room for the sums of any candidate, so that making it is not timed."""
        weight, device = product.weight, product.weight.device
        columns, channels = len(weight) // (1 + product.gated), weight.shape[1]

        def draw(width: int) -> Tensor:
            drawn = torch.empty(rows, width, device=device, dtype=self.model.dtype)
            return drawn.normal_(generator=generator)

        x = draw(channels)
        in_fp8 = isinstance(product.matrix, Fp8Matrix)
        scale = torch.ones(rows, device=device) if in_fp8 else None
        sums = [each.sums(rows, columns, 1 + product.gated) for each in candidates]
        workspace = Workspace(max(sums), device) if sums else None
        x = x.to(E4M3) if in_fp8 else x
        return Operands(x, scale, draw(columns), draw(columns), workspace)

    def _compile(self, lines: list[TileLine]) -> None:
        if interprets():
            return
        with compiled_together(strict=False):
            for line in lines:
                for divided in line.candidates:
                    with tuned_as({line.key: divided}):
                        for _, call, _ in line.checks:
                            call()

    def _seconds(self, line: TileLine, divided: Division, *, heads: bool = False) -> float:
        """Of a product on average; infinite where it does not run here, or is wrong."""
        calls = line.layers + (line.heads if heads else [])
        with tuned_as({line.key: divided}):
            if heads and not interprets():
                with compiled_together(strict=False):
                    for call in line.heads:
                        call()
            try:
                errors = [_error(*check) for check in line.checks]
                if not all(error <= BOUNDS[line.key[0]] for error in errors):
                    self._drop(line, divided, f"errors are {errors}")
                    return math.inf
                return self.timer(calls) / len(calls)
            except (CompileError, RuntimeError) as fault:
                self._drop(line, divided, f"{type(fault).__name__}: {fault}")
                return math.inf

    def _drop(self, line: TileLine, divided: Division, why: str) -> None:
        tile = divided.tile
        size = f"{tile.columns} columns, {tile.inner} channels, {tile.stages} stages"
        self.found.dropped.append(f"{line.name}: {size}: {why.splitlines()[0][:120]}")

    def _whole(
        self, layers: list[LayerWeights], limit: int, generator: torch.Generator
    ) -> tuple[float, float]:
        """Seconds of all layers' products with the choices for so many rows, and with the
        package's divisions; where together they gain nothing, the choices are taken back.
        """
        chosen = {key: each for key, each in self.found.divisions.items() if key[2] == limit}
        package = self._pass_seconds(layers, limit, {}, generator)
        if not chosen:
            return package, package
        tuned = self._pass_seconds(layers, limit, chosen, generator)
        if tuned < package:
            return tuned, package
        for key in chosen:
            was = self.found.choices[key].package_s
            self.found.choices[key] = Choice(package_division(key), was, was, replaced=False)
        return package, package

    def _pass_seconds(
        self,
        layers: list[LayerWeights],
        limit: int,
        divisions: dict[Key, Division],
        generator: torch.Generator,
    ) -> float:
        rows, dtype = ROWS[limit], self.model.dtype
        buffers = LayerBuffers.allocate(self.model.config, rows, self.model.device, dtype)
        buffers.hidden.normal_(generator=generator)
        buffers.mixed.normal_(generator=generator)
        with tuned_as(divisions):
            products = Linears(layers, self._eps, rows, invariant=False)
            calls = [partial(_run_layer, products, layer, buffers) for layer in layers]
            try:
                return self.timer(calls)
            except (CompileError, RuntimeError):
                return math.inf  # of a line that has no division which runs, as was told


def _products(layer: LayerWeights) -> tuple[Product, ...]:
    return (
        Product(layer.qkv, layer.attention_norm_weight),
        Product(layer.o_proj, added=True),
        Product(layer.gate_up, layer.mlp_norm_weight, gated=True),
        Product(layer.down, added=True),
    )


def _run_layer(products: Linears, layer: LayerWeights, buffers: LayerBuffers) -> None:
    """As a pass does, without attention."""
    products.normed(buffers.hidden, layer.attention_norm_weight, layer.qkv, buffers.qkv, buffers)
    products.added(buffers.mixed, layer.o_proj, buffers.hidden, buffers)
    products.gated(buffers.hidden, layer.mlp_norm_weight, layer.gate_up, buffers.inner, buffers)
    products.added(buffers.inner, layer.down, buffers.hidden, buffers)


def _error(operands: Operands, call: Call, expected: Tensor) -> float:
    operands.out.fill_(math.nan)
    call()
    return float((operands.out.float() - expected).norm() / expected.norm())
