"""Every kernel of the flow at the published sizes, for what compiles, checks and times them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosstalk.codec.flow_pages import packs_of
from mosstalk.ops.attention_flow import attention_flow, attention_workspace
from mosstalk.ops.conv1d import conv1d
from mosstalk.ops.flow_linear import close_residual, euler, linear_add, norm_linear, norm_qkv
from mosstalk.ops.launch import Launch
from mosstalk.ops.norm import norm_act

WIDTH, HEADS, CHANNELS, FRAMES, BRANCHES = 256, 8, 64, 20, 2
INNER = HEADS * CHANNELS
LAYERS = 56
VOICE_PAGES, OWN_PAGES = 17, 6
"""Of 0.4 s: a voice of 6.8 s and 2 s of reply with the block in hand."""
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A call of one kernel; ``written`` says which arguments, in ``call``, it writes into."""

    name: str
    op: Callable[..., Any]
    call: dict[str, Any]
    written: tuple[str, ...]

    def run(self) -> None:
        """Call the public function."""
        self.op(**self.call)

    def run_reference(self) -> None:
        """Call the reference, which knows nothing of splits and packs."""
        plain = {key: value for key, value in self.call.items() if key not in _SPLITTING}
        op: Any = self.op
        op.reference(**plain)

    def plan(self) -> Launch:
        """What the public function would launch."""
        op: Any = self.op
        launch: Launch = op.plan(**self.call)
        return launch

    @property
    def function(self) -> str:
        """The public function's name."""
        return self.op.__name__


_SPLITTING = {"splits", "least", "workspace", "packs"}


@dataclass(frozen=True)
class Rooms:
    """What the layers of one pass share: activations, and the pages of all layers."""

    x: Tensor
    wide: Tensor
    query: Tensor
    mixed: Tensor
    active: Tensor
    given: Tensor
    raw: Tensor
    velocity: Tensor
    kv: Tensor
    tails: Tensor
    workspace: Tensor
    table: Tensor
    visible: Tensor
    packs: Tensor
    valid: Tensor
    nothing: Tensor
    splits: int


def rooms(
    dtype: torch.dtype,
    items: int,
    draw: Draw,
    splits: int,
    layers: int = LAYERS,
    voice_pages: int = VOICE_PAGES,
) -> Rooms:
    """Rooms for ``items`` replies in one voice, each with its own pages behind the voice's."""
    rows, pages = BRANCHES * items * FRAMES, 1 + voice_pages + items * OWN_PAGES
    kv = draw(pages, layers, BRANCHES, 2, HEADS, FRAMES, CHANNELS, dtype=dtype)
    own = 1 + voice_pages + torch.arange(items * OWN_PAGES).view(items, OWN_PAGES)
    voice = torch.arange(1, 1 + voice_pages).expand(items, -1)
    seen = torch.full((items,), (voice_pages + OWN_PAGES) * FRAMES)
    room = attention_workspace(items, kv[:, 0], FRAMES, splits)
    table = torch.cat([voice, own], dim=1)
    packs = packs_of(table.numpy(), [voice_pages + OWN_PAGES] * items)

    def ints(values: Tensor) -> Tensor:
        return values.to(kv.device, torch.int32)

    return Rooms(
        x=draw(rows, WIDTH),
        wide=draw(rows, 4 * WIDTH, dtype=dtype),
        query=draw(rows, INNER, dtype=dtype),
        mixed=draw(rows, INNER, dtype=dtype),
        active=draw(rows, WIDTH, dtype=dtype),
        given=draw(rows, 320),
        raw=draw(rows, WIDTH),
        velocity=draw(rows, 80),
        kv=kv,
        tails=draw(pages, 14, BRANCHES, 2, WIDTH, dtype=dtype),
        workspace=room,
        table=ints(table),
        visible=ints(seen),
        packs=ints(torch.from_numpy(packs)),
        valid=ints(torch.full((items,), FRAMES)),
        nothing=ints(torch.full((items,), -1)),
        splits=splits,
    )


def cases(shared: Rooms, layer: int, dtype: torch.dtype, draw: Draw) -> dict[str, Case]:
    """One transformer block's kernels in their order, then the others, with their own weights."""

    def weight(outputs: int, inputs: int) -> Tensor:
        return draw(outputs, inputs, dtype=dtype) / inputs**0.5

    def norm() -> tuple[Tensor, Tensor, float]:
        return draw(WIDTH), draw(WIDTH), 1e-5

    x, active = shared.x, shared.active
    heads, wide = weight(WIDTH, INNER), weight(WIDTH, 4 * WIDTH)
    beside = {"weight": weight(WIDTH, WIDTH), "bias": draw(WIDTH)}
    before = {"x": x, "norm": norm()}
    found = [
        _norm_qkv("norm_qkv", before, shared, layer, weight(3 * INNER, WIDTH)),
        _attend(shared, layer),
        _linear_add("linear_add of heads", x, shared.mixed, heads, draw),
        _norm_linear("norm_linear", before, shared, weight(4 * WIDTH, WIDTH), draw),
        _linear_add("linear_add of wide", x, shared.wide, wide, draw),
        _norm_qkv("norm_qkv of half", normed(active), shared, layer, weight(3 * INNER, WIDTH)),
        _norm_linear("norm_linear of half", normed(active), shared, weight(4 * WIDTH, WIDTH), draw),
        _conv_rows(shared, layer, weight(WIDTH, 3 * WIDTH), draw),
        Case(
            "norm_act",
            norm_act,
            {
                "x": shared.raw,
                "norm": norm(),
                "out": active,
                "activation": "mish",
                "add": draw(WIDTH),
            },
            ("out",),
        ),
        Case(
            "close_residual",
            close_residual,
            {"y": shared.raw, "norm": norm(), "x": active, "out": x, **beside},
            ("out",),
        ),
        Case(
            "euler",
            euler,
            {
                "x_in": shared.given,
                "velocity": shared.velocity,
                "guidance": 0.7,
                "duration": 0.01,
                "rounded": active,
            },
            ("x_in", "rounded"),
        ),
    ]
    return {case.name: case for case in found}


def _conv_rows(shared: Rooms, layer: int, weight: Tensor, draw: Draw) -> Case:
    call = {
        "x": shared.active,
        "weight": weight,
        "bias": draw(WIDTH),
        "out": shared.raw,
        "before_item": shared.nothing,
        "before_page": shared.table[:, -2].contiguous(),
        "tails": shared.tails[:, layer % shared.tails.shape[1]],
        "page": shared.table[:, -1].contiguous(),
        "frames": FRAMES,
        "valid": shared.valid,
    }
    return Case("conv1d", conv1d, call, ("out", "tails"))


def normed(active: Tensor) -> dict[str, Any]:
    """What products take whose rows are normalised already."""
    return {"x": active, "norm": None}


def _norm_qkv(name: str, read: dict[str, Any], shared: Rooms, layer: int, weight: Tensor) -> Case:
    call = {
        **read,
        "weight": weight,
        "q_out": shared.query,
        "kv": shared.kv[:, layer],
        "page": shared.table[:, -1].contiguous(),
        "frames": FRAMES,
    }
    return Case(name, norm_qkv, call, ("q_out", "kv"))


def _attend(shared: Rooms, layer: int) -> Case:
    call = {
        "q": shared.query,
        "kv": shared.kv[:, layer],
        "table": shared.table,
        "visible": shared.visible,
        "out": shared.mixed,
        "frames": FRAMES,
        "packs": shared.packs,
        "splits": shared.splits,
        "least": 512,
        "workspace": shared.workspace,
    }
    return Case("attention_flow", attention_flow, call, ("out",))


def _norm_linear(
    name: str, read: dict[str, Any], shared: Rooms, weight: Tensor, draw: Draw
) -> Case:
    call = {
        **read,
        "weight": weight,
        "bias": draw(weight.shape[0]),
        "out": shared.wide,
        "activation": "gelu",
    }
    return Case(name, norm_linear, call, ("out",))


def _linear_add(name: str, x: Tensor, a: Tensor, weight: Tensor, draw: Draw) -> Case:
    call = {"x": x, "a": a, "weight": weight, "bias": draw(weight.shape[0]), "out": x}
    return Case(name, linear_add, call, ("out",))
