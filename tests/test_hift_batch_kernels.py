"""The vocoder's kernels, without a GPU: interpreted, and compiled for the cards they are for."""

from pathlib import Path
from typing import Any

import pytest
from claims_rig import outcomes_of, require_kept

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mosstalk.ops.vocoder import (  # noqa: E402
    _inverse_kernel,
    _snake_kernel,
    _source_kernel,
    _sum_kernel,
)

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What a block may use on each compute capability."""

KERNELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    # Each argument that is no constant, in order: f a pointer to float32, h to float16, d to
    # float64, l to int64, i an integer, s a float.
    "snake": (
        _snake_kernel,
        "hhffhhiii",
        {"ADDS": True, "BIASED": True, "BLOCK": 1024, "EPS": 1e-9},
    ),
    "scaled_sum": (_sum_kernel, "hhhhhhffiiiss", {"TERMS": 6, "BIASED": True, "BLOCK": 1024}),
    "harmonic_source": (
        _source_kernel,
        "fdllfffiiisss",
        {"SAMPLES": 480, "HARMONICS": 9, "STREAM": 1, "BLOCK": 256},
    ),
    "inverse_stft": (
        _inverse_kernel,
        "ffffiiiiiss",
        {"BINS": 9, "LENGTH": 16, "HOP": 4, "BLOCK": 256},
    ),
}
TYPES = {"f": "*fp32", "h": "*fp16", "d": "*fp64", "l": "*i64", "i": "i32", "s": "fp32"}


@pytest.mark.slow
def test_what_is_claimed_of_the_kernels_holds_in_the_interpreter(tmp_path: Path) -> None:
    require_kept(outcomes_of("hift_kernel_claims.py", tmp_path, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_and_fit(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel, arguments, own = KERNELS[name]
    constants = {**own, "DEPENDENT": False}
    free = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {name: TYPES[kind] for name, kind in zip(free, arguments, strict=True)}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert compiled.asm["cubin"]
