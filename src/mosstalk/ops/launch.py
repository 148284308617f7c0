"""Steps in two forms, kernels and plain torch: dispatched, planned, checked and compiled together.

Pieces that the references share are at the end.
"""

import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from inspect import signature
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.environment import triton_was_asked_for
from mosstalk.ops.tiles import Tile

try:
    if not (torch.version.cuda or torch.version.hip or triton_was_asked_for()):
        raise ImportError("nothing here would run a kernel, and a start would take 0.3 s longer")
    import triton as triton

    tl = triton.language

    INSTALLED = True
    CompileError: type[Exception] = triton.TritonError
except ImportError:
    INSTALLED = False
    CompileError = RuntimeError

    class _Absent:
        """Lets kernels be defined where Triton is not imported."""

        constexpr = int

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function or (lambda function: function)

    triton = tl = _Absent

Norm = tuple[Tensor, Tensor, float]
"""Weight and bias (C,) of a LayerNorm, and its epsilon."""

_SMALLEST_SIDE = 16
"""The fewest rows, columns or channels of a tile that ``tl.dot`` takes."""
_DEPENDENT_SINCE = (9, 0)
"""The first compute capability with programmatic dependent launch."""
LINE_BYTES = 128
"""Size of a line of the card's L2 cache."""


@dataclass
class Switches:
    """What all kernels share; a captured graph keeps what was set when it was captured.

    ``dependent``: a kernel is launched while the one before it still runs and waits in the device
    (programmatic dependent launch, from compute capability 9.0 on), where it is short enough for
    that to pay.
    """

    dependent: bool = True


SWITCHES = Switches()


def interprets() -> bool:
    """Whether Triton was imported as an interpreter, which runs kernels on the CPU."""
    return INSTALLED and bool(triton.knobs.runtime.interpret)


_references_only: ContextVar[bool] = ContextVar("references_only", default=False)


@contextmanager
def references_only() -> Iterator[None]:
    """Operations that this thread calls within are computed by their references everywhere."""
    token = _references_only.set(True)
    try:
        yield
    finally:
        _references_only.reset(token)


def runs(tensor: Tensor) -> bool:
    """Whether kernels, rather than their references, take ``tensor``."""
    if not INSTALLED or _references_only.get():
        return False
    return tensor.is_cuda or interprets()


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` and may be a matmul's side."""
    return max(_SMALLEST_SIDE, 1 << (size - 1).bit_length())


def ceil_div(size: int, part: int) -> int:
    """How many parts cover ``size``."""
    return -(-size // part)


def sides(size: Tile, channels: int, weight: Tensor) -> dict[str, int]:
    """What ``parts.matmul`` and those beside it are compiled for.

    ``channels`` are those of a row; rows of ``weight`` may hold several windows of them.
    AT_ONCE is 1 where all channels are in one matmul, whose weights can then be held before
    a kernel's turn; GROUPS of them are summed apart, each by its own warps.
    """
    width = power_of_two(channels)
    line = LINE_BYTES // weight.element_size()
    return {
        "ROWS": size.rows,
        "COLUMNS": size.columns,
        "INNER": min(size.inner, width),
        "WIDTH": width,
        "LINES": 1 << (ceil_div(weight.shape[1], line) - 1).bit_length(),
        "LINE": line,
        "AT_ONCE": int(size.inner >= width),
        "GROUPS": size.groups,
    }


def strided(**tensors: Tensor | None) -> dict[str, Any]:
    """Tensors by a kernel's arguments, and numbers from row to row: ``x`` and ``x_stride``."""
    given: dict[str, Any] = tensors.copy()
    for name, one in tensors.items():
        given[name + "_stride"] = 0 if one is None else one.stride(0)
    return given


def page_strides(kv: Tensor) -> dict[str, int]:
    """Strides of one layer's pages (pages, branches, 2, H, P, d), by a kernel's arguments."""
    page, branch, part, head, row, _ = kv.stride()
    return {"kv_page": page, "kv_branch": branch, "kv_part": part, "kv_head": head, "kv_row": row}


def forget_compiled() -> None:
    """Have all kernels looked up on the disk anew at their next launch, and compiled if need be.

    Graphs that hold them must not be replayed any more.
    """
    if not INSTALLED:
        return
    modules = [module for name, module in sys.modules.items() if name.startswith(__package__)]
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, triton.JITFunction):
            value.device_caches.clear()


Variant = tuple[Hashable, ...]
_gathered: ContextVar[dict[Variant, "Launch"] | None] = ContextVar("gathered", default=None)


@contextmanager
def compiled_together(*, strict: bool = True) -> Iterator[None]:
    """Kernels that this thread launches within are not run, but compiled when it ends, at once.

    A flow has some 60 variants of them, which one after another take half a minute. Without
    ``strict`` what cannot be compiled raises where it is launched, and not here.
    """
    found: dict[Variant, Launch] = {}
    token = _gathered.set(found)
    try:
        yield
    finally:
        _gathered.reset(token)
    if not found:
        return
    with (
        ThreadPoolExecutor(min(len(found), os.cpu_count() or 1)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=not strict),
    ):
        for launch in found.values():
            launch.compile()


class Launch(NamedTuple):
    """One kernel with everything it is called with.

    ``arguments`` are tensors and numbers known at run time, ``constants`` those known when
    the kernel is compiled. A tensor that is None is never read. ``registers`` is the most that
    a thread may have, None as many as the compiler likes. ``short``: there are few rows.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile
    registers: int | None = None
    short: bool = True

    def run(self) -> None:
        """Launch the kernel on the current stream."""
        gathered = _gathered.get()
        if gathered is None:
            self.kernel[self.grid](**self.arguments, **self.constants, **self._options())
        else:
            gathered.setdefault(self._variant(), self)

    def compile(self) -> None:
        """Compile the kernel, or begin to, as ``run`` would."""
        options = self._options()
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.constants, **options)

    def _options(self) -> dict[str, Any]:
        """What the tile, the switches and the card say."""
        options: dict[str, Any] = {
            "DEPENDENT": False,
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
        }
        if self.short and SWITCHES.dependent and _can_depend(self._device()):
            options["DEPENDENT"] = options["launch_pdl"] = True
        if self.registers:
            options["maxnreg"] = self.registers
        return options

    def _device(self) -> torch.device:
        for value in self.arguments.values():
            if isinstance(value, Tensor):
                return value.device
        raise AssertionError("a kernel reads or writes a tensor")

    def _variant(self) -> Variant:
        """What tells apart launches that are not compiled alike, and perhaps some that are.

        Triton compiles anew for numbers that 16 divides, and for 1.
        """
        values = (
            value.dtype
            if torch.is_tensor(value)
            else isinstance(value, int) and (value % 16, value == 1)
            for value in self.arguments.values()
        )
        return self.kernel, self.tile, self.registers, self.short, *values, *self.constants.values()


_USUAL_TILES = 4096
"""Tiles of one launch that several programs share, of which each has a counter."""


class Workspace:
    """Room for the sums of programs that share a tile.

    Calls that follow one another on a stream share it: each leaves the counters at zero.
    """

    def __init__(self, numbers: int, device: torch.device, tiles: int = _USUAL_TILES) -> None:
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)
        self.sums = torch.empty(numbers, dtype=torch.float32, device=device)


class Shared(NamedTuple):
    """What a launch uses of a workspace: nothing where no programs share a tile."""

    counters: Tensor | None
    sums: Tensor | None

    @classmethod
    def of(
        cls, workspace: Workspace | None, splits: int, tiles: int, numbers: int, like: Tensor
    ) -> "Shared":
        """For ``splits`` of so many ``tiles``, which leave ``numbers`` each."""
        if splits == 1:
            return cls(None, None)
        numbers *= tiles * splits
        # One that was made before other divisions were found for the card may be too small, and
        # one for steps of a usual size for a longer one.
        if (
            workspace is None
            or workspace.sums.numel() < numbers
            or workspace.counters.numel() < tiles
        ):
            workspace = Workspace(numbers, like.device, max(tiles, _USUAL_TILES))
        return cls(workspace.counters, workspace.sums)


@lru_cache
def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_SINCE


P = ParamSpec("P")
R = ParamSpec("R")
T = TypeVar("T")
Plans = tuple[T, *tuple[Launch, ...]]
"""What a call returns, and the kernels that it launches, in their order."""


class Op(Generic[P, R, T]):
    """A step in two forms: kernels where they take its first argument, elsewhere ``reference``.

    Both write the same and return the same. What only kernels need to be told, always by
    keyword, the reference is not told.
    """

    __name__: str

    def __init__(
        self,
        plans: Callable[P, Plans[T]],
        reference: Callable[R, T],
        takes: Callable[[Any], bool],
    ) -> None:
        update_wrapper(self, plans)
        self.reference = reference
        self._plans, self._takes = plans, takes
        names = signature(plans).parameters
        self._first = next(iter(names))
        self._for_kernels = names.keys() - signature(reference).parameters.keys()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the step's own docstring says."""
        if not self._takes(args[0] if args else kwargs[self._first]):
            told: dict[str, Any] = dict(kwargs)
            for name in self._for_kernels:
                told.pop(name, None)
            plain: Callable[..., T] = self.reference
            return plain(*args, **told)
        planned = self._plans(*args, **kwargs)
        for launch in planned[1:]:
            launch.run()
        return planned[0]

    def launches(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Launch, ...]:
        """The kernels that such a call launches, in their order, as values."""
        return self._plans(*args, **kwargs)[1:]

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Launch:
        """The one kernel that such a call launches, as a value."""
        (launch,) = self.launches(*args, **kwargs)
        return launch


def op(
    reference: Callable[R, T], *, takes: Callable[[Any], bool] = runs
) -> Callable[[Callable[P, Plans[T]]], Op[P, R, T]]:
    """Make a step of what checks a call's arguments and plans its kernels.

    The function decorated is the step's signature and docstring; it returns what the call
    returns, then its launches. ``reference`` does the same in plain torch where ``takes`` says
    that kernels do not take the first argument.
    """
    return lambda plans: Op(plans, reference, takes)


# Pieces that the references share, in plain torch.

_ITEMS_APART = 3
"""Dimensions of rows whose items are matmuls of their own."""


def normalise(x: Tensor, norm: Norm | None, *, mish: bool = False) -> Tensor:
    """LayerNorm of (..., C) in float32, then Mish where asked for."""
    if norm is None:
        return F.mish(x) if mish else x
    norm_weight, shift, eps = norm
    if norm_weight.dtype != torch.float32:
        norm_weight, shift = norm_weight.float(), shift.float()
    y = torch.layer_norm(x, norm_weight.shape, norm_weight, shift, eps)
    return F.mish(y, inplace=True) if mish else y


_FEWEST = 1 << 14
"""Numbers in the smallest matrix that is worth it: a call costs some microseconds."""


class _Kept(NamedTuple):
    """A matrix and its bias as FBGEMM takes them, and which state of the matrix that is."""

    version: int
    bias: Tensor | None
    packed: Any


_kept: dict[int, _Kept] = {}
"""By a matrix's id; one that nobody holds any more is forgotten."""


def keep_fp16(weight: Tensor, bias: Tensor | None = None) -> bool:
    """Pack ``weight`` (N, K) in float32 and ``bias`` (N,) for ``linear_fp16``; say if it is packed.

    It is not if it is not on a CPU, not exact in float16, small, or if FBGEMM is missing. The
    tensor itself is known afterwards, and no other view of its numbers.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _FEWEST:
        return False
    if not torch.equal(weight.half().float(), weight):
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)
    except (AttributeError, RuntimeError):  # a torch without FBGEMM, as on Arm
        return False
    if id(weight) not in _kept:
        weakref.finalize(weight, _kept.pop, id(weight))
    _kept[id(weight)] = _Kept(_version(weight), bias, packed)
    return True


def linear_fp16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + b of ``x`` (..., K), or None if ``weight`` with this ``bias`` is not kept as it is.

    A file's 8 or 16 bits are widened to float32 for a CPU, and a step of few rows then takes the
    time that reading its weights takes. FBGEMM, which torch has on x86-64, reads half the bytes:
    the same products, sums in float32. A row's last bits may depend on how many rows there are,
    up to two, as with the float32 library (``engine.layers``).
    """
    kept = _kept.get(id(weight))
    if kept is None or kept.bias is not bias or kept.version != _version(weight):
        return None
    if x.dtype != torch.float32 or (x.requires_grad and torch.is_grad_enabled()):
        return None
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, kept.packed)
    return y


def _version(weight: Tensor) -> int:
    """How often it was changed in place, as far as torch counts."""
    return 0 if weight.is_inference() else weight._version


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, inputs rounded to the weight's dtype, sums float32, (..., N) float32.

    Each item of (I, R, K) is a matmul of its own: matmuls of other sizes round otherwise, and
    in float32 nothing may depend on company.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        x, weight = x.to(weight.dtype).float(), weight.float()
        bias = None if bias is None else bias.float()
    if x.ndim != _ITEMS_APART:
        y = linear_fp16(x, weight, bias)
        return F.linear(x, weight, bias) if y is None else y
    out = x.new_empty(*x.shape[:2], weight.shape[0])
    for rows, place in zip(x, out, strict=True):
        if (y := linear_fp16(rows, weight, bias)) is not None:
            place.copy_(y)
        elif bias is None:
            torch.mm(rows, weight.T, out=place)
        else:
            torch.addmm(bias, rows, weight.T, out=place)
    return out


def given(y: Tensor, out: Tensor | None) -> Tensor:
    """``y`` in ``out`` and its dtype, or as it is where there is none."""
    return y if out is None else out.copy_(y)
