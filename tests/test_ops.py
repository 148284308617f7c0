"""Ops: what their two forms have in common, and which of them runs."""

import importlib
import inspect
import operator
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mosstalk import ops
from mosstalk.ops import launch
from mosstalk.ops.launch import Launch, Op, op, strided
from mosstalk.ops.norm import rms_norm
from mosstalk.ops.tiles import Tile

Parameter = inspect.Parameter
MODULES = [
    importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__)
]
OPS: dict[str, Op[..., ..., Any]] = {
    name: value for one in MODULES for name, value in vars(one).items() if isinstance(value, Op)
}


def test_what_the_page_says_of_launches_is_there() -> None:
    page = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    names = re.findall(r"\blaunch\.([A-Za-z_.]+)", page)
    assert len(names) >= 3
    for name in names:
        operator.attrgetter(name)(launch)


@pytest.mark.parametrize("name", OPS)
def test_a_reference_takes_what_its_op_takes_but_what_is_for_kernels_alone(name: str) -> None:
    mine = inspect.signature(OPS[name]).parameters
    plain = inspect.signature(OPS[name].reference).parameters

    assert [p for p in mine if p in plain] == [p for p in plain if p in mine]
    for parameter in mine.keys() - plain.keys():
        assert mine[parameter].kind is Parameter.KEYWORD_ONLY
    for parameter in plain.keys() - mine.keys():
        assert plain[parameter].default is not Parameter.empty
    for parameter in mine.keys() & plain.keys():
        assert mine[parameter].kind is plain[parameter].kind
        assert mine[parameter].default == plain[parameter].default
        assert mine[parameter].annotation == plain[parameter].annotation


def test_an_op_keeps_its_functions_name_and_docstring() -> None:
    assert rms_norm.__name__ == "rms_norm"
    assert rms_norm.__doc__ is not None
    assert rms_norm.__doc__.startswith("Write norm_weight RMSNorm(x)")


class Kernel:
    """Notes the launches of a kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.calls.append((grid, given))


@pytest.mark.skipif(not launch.INSTALLED, reason="needs Triton")
def test_launches_that_are_compiled_alike_are_compiled_together_once() -> None:
    class Compiled(Kernel):
        """Notes what it is compiled for."""

        def warmup(self, **given: Any) -> None:
            self.calls.append((given["grid"], given))

    kernel, x = Compiled(), torch.ones(2, 3)
    with launch.compiled_together():
        for stride in (1, 17, 33, 16, 32, 5):
            given = {"x": x, "x_stride": stride}
            Launch(kernel, (1,), given, {}, Tile(1, 1, 1, 4, 2), short=False).run()

    assert [given["x_stride"] for _, given in kernel.calls] == [1, 17, 16, 5]


def test_a_launch_of_more_tiles_than_a_workspace_has_counters_makes_its_own() -> None:
    made, x = launch.Workspace(8, torch.device("cpu")), torch.ones(2, 3)
    few = launch.Shared.of(made, splits=2, tiles=2, numbers=2, like=x)
    many = launch.Shared.of(made, splits=2, tiles=5000, numbers=0, like=x)

    assert few.counters is made.counters
    assert many.counters is not None
    assert len(many.counters) >= 5000
    assert not many.counters.any()


def doubled_reference(x: Tensor, *, by: int = 2) -> Tensor:
    return x * by


def test_kernels_run_in_their_order_where_they_take_the_first_argument() -> None:
    first, second = Kernel(), Kernel()

    @op(doubled_reference, takes=lambda x: x.dtype == torch.float16)
    def doubled(x: Tensor, *, by: int = 2, splits: int = 1) -> tuple[Tensor, *tuple[Launch, ...]]:
        launches = (
            Launch(kernel, (splits,), strided(x=x), {"BY": by}, Tile(1, 1, 1, 4, 2), short=False)
            for kernel in (first, second)
        )
        return x, *launches

    x = torch.ones(2, 3)
    assert torch.equal(doubled(x, by=3, splits=4), x * 3)
    assert torch.equal(doubled(x=x, splits=4), x * 2)
    assert not first.calls

    half = x.half()
    assert doubled(half, splits=4) is half
    assert len(doubled.launches(half)) == 2
    for kernel in (first, second):
        ((grid, given),) = kernel.calls
        assert grid == (4,)
        assert given.pop("x") is half
        assert given == {
            "x_stride": 3, "BY": 2, "DEPENDENT": False, "num_warps": 4, "num_stages": 2
        }  # fmt: skip
