"""Layers of the language model at the published sizes, for what times and compiles matmuls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mosstalk.ops.launch import Workspace
from mosstalk.ops.linear import divided_linear, rms_linear
from mosstalk.ops.linear_tiles import Division, Kind
from mosstalk.ops.norm import rms_norm

HIDDEN, QKV, INNER, EPS = 4096, 6144, 12288, 1e-6
LAYERS = 36
Draw = Callable[..., Tensor]
SHAPES: dict[Kind, tuple[int, int]] = {
    "normed": (QKV, HIDDEN),
    "plain": (HIDDEN, HIDDEN),
    "gated": (INNER, HIDDEN),
    "deep": (HIDDEN, INNER),
}
"""Columns written, and channels of a row."""


@dataclass(frozen=True)
class Matmul:
    """One matmul of a layer, all but its weights."""

    kind: Kind
    x: Tensor
    gain: Tensor | None
    out: Tensor
    residual: Tensor | None
    workspace: Workspace

    @classmethod
    def of(
        cls, kind: Kind, rows: int, dtype: torch.dtype, draw: Draw, workspace: Workspace
    ) -> "Matmul":
        """With rows and gain drawn."""
        columns, channels = SHAPES[kind]
        normed = kind in ("normed", "gated")
        return cls(
            kind,
            draw(rows, channels, dtype=dtype),
            1 + 0.3 * draw(channels, dtype=dtype) if normed else None,
            draw(rows, columns, dtype=dtype),
            None if normed else draw(rows, columns, dtype=dtype),
            workspace,
        )

    def first(self, rows: int) -> "Matmul":
        """Of the first so many rows alone, written elsewhere."""
        return replace(
            self,
            x=self.x[:rows],
            out=torch.empty_like(self.out[:rows]),
            residual=None if self.residual is None else self.residual[:rows],
        )

    @property
    def how(self) -> dict[str, Any]:
        """What goes by name."""
        return {"residual": self.residual, "gated": self.kind == "gated"}

    def run(self, weight: Tensor, *, invariant: bool = False) -> Tensor:
        """As it is divided by the table."""
        return rms_linear(
            self.x, self.gain, EPS, weight, self.out,
            **self.how, invariant=invariant, workspace=self.workspace,
        )  # fmt: skip

    def run_divided(self, weight: Tensor, divided: Division) -> Tensor:
        """Divided so."""
        x, gain = self.x, self.gain
        if gain is not None and divided.apart:
            x, gain = rms_norm(x, gain, EPS, torch.empty_like(x)), None
        divided_linear(
            x, gain, EPS, weight, self.out, **self.how, divided=divided, workspace=self.workspace
        ).run()
        return self.out

    def compile_divided(self, weight: Tensor, divided: Division) -> None:
        """Compile what ``run_divided`` runs, for Triton's cache on disk."""
        gain = None if divided.apart else self.gain
        divided_linear(
            self.x, gain, EPS, weight, self.out,
            **self.how, divided=divided, workspace=self.workspace,
        ).compile()  # fmt: skip

    def expected(self, weight: Tensor) -> Tensor:
        """The reference's result, in float32."""
        out = torch.empty(self.out.shape, device=self.x.device)
        return rms_linear.reference(self.x, self.gain, EPS, weight, out, **self.how)


def weight_shape(kind: Kind) -> tuple[int, int]:
    """Rows of one matmul's weights, and channels."""
    columns, channels = SHAPES[kind]
    return columns * (2 if kind == "gated" else 1), channels


def weight_of(kind: Kind, dtype: torch.dtype, draw: Draw) -> Tensor:
    """Weights of one matmul."""
    wide, channels = weight_shape(kind)
    return draw(wide, channels, dtype=dtype).mul_(channels**-0.5)


def bytes_of(kind: Kind) -> int:
    """Bytes of one matmul's weights in 16 bit."""
    wide, channels = weight_shape(kind)
    return 2 * channels * wide


Weights = dict[Kind, list[Tensor]]


class Chain:
    """All matmuls of a step one after another, without attention, each with its own weights."""

    def __init__(self, rows: int, weights: Weights, draw: Draw, workspace: Workspace) -> None:
        dtype = weights["normed"][0].dtype
        self.weights, self.workspace = weights, workspace
        self.first, self.stream = (draw(rows, HIDDEN, dtype=dtype) for _ in range(2))
        self.qkv, self.active = draw(rows, QKV, dtype=dtype), draw(rows, INNER, dtype=dtype)
        self.gain = 1 + 0.3 * draw(HIDDEN, dtype=dtype)

    def runs(self, *, invariant: bool = False) -> Sequence[Callable[[], object]]:
        """One call for each layer."""
        count = len(self.weights["normed"])
        return [lambda n=n: self.layer(n, invariant) for n in range(count)]  # type: ignore[misc]

    def layer(self, n: int, invariant: bool) -> None:
        """One layer; what attention would mix is its queries themselves."""
        stream, how = self.stream, {"invariant": invariant, "workspace": self.workspace}
        before = stream if n else self.first
        w = {kind: weights[n] for kind, weights in self.weights.items()}
        rms_linear(before, self.gain, EPS, w["normed"], self.qkv, **how)  # type: ignore[arg-type]
        mixed = self.qkv[:, :HIDDEN]
        rms_linear(mixed, None, EPS, w["plain"], stream, residual=before, **how)  # type: ignore[arg-type]
        rms_linear(stream, self.gain, EPS, w["gated"], self.active, gated=True, **how)  # type: ignore[arg-type]
        rms_linear(self.active, None, EPS, w["deep"], stream, residual=stream, **how)  # type: ignore[arg-type]
