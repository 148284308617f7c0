"""Every kernel compiles for three cards, at the published sizes, without a card.

Triton's own compiler and NVIDIA's assembler, which comes with it, do all but run the kernels.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import LAYERS, cases, rooms
from torch import Tensor

from mosstalk.ops.launch import Launch
from mosstalk.ops.tiles import norms_apart

triton = pytest.importorskip("triton", reason="Triton is there on Linux alone")

SHARED_KIB = {80: 163, 89: 99, 90: 227}
"""Shared memory that one block may have, by compute capability."""
MOST_SPILLED_BYTES = 256
"""Of a thread: more than a few registers' worth in the slower memory."""
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
ITEMS = {torch.float16: 1, torch.bfloat16: 32, torch.float32: 2}
"""In 16 bit one precision for few rows, one for many; float32 divides both alike."""


def undrawn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def compiled(launch: Launch, capability: int, dependent: bool) -> Any:
    """The kernel as it would be compiled at its first launch."""
    constants = launch.constants | {"DEPENDENT": dependent}
    signature: dict[str, str] = {}
    divisible: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = constants.get(name, launch.arguments.get(name))
        one = isinstance(value, int) and value == 1
        if name in constants or value is None or one:
            constants[name], signature[name] = value, "constexpr"
        elif isinstance(value, Tensor):
            signature[name], divisible[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                divisible[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, divisible)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    options = {"num_warps": launch.tile.warps, "num_stages": launch.tile.stages}
    if launch.registers:
        options["maxnreg"] = launch.registers
    return triton.compile(source, target=target, options=options)


def usage(binary: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack of a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    tool = triton.knobs.nvidia.cuobjdump.path
    shown = subprocess.run(
        [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}


ONE_OF_EACH = {
    "norm_qkv",
    "norm_qkv of half",
    "norm_linear of half",
    "attention_flow",
    "linear_add of heads",
    "norm_linear",
    "conv1d",
    "norm_act",
    "close_residual",
    "euler",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ITEMS, ids=str)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_the_card(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    items = ITEMS[dtype]
    shared = rooms(dtype, items, undrawn, splits=8 if items == 1 else 1)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        every = cases(shared, LAYERS // 2, dtype, undrawn)
        for name, case in every.items():
            apart = norms_apart(shared.x.shape[0], dtype) and f"{name} of half" in every
            if name not in ONE_OF_EACH or apart:
                continue
            kernel = compiled(case.plan(), capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{name:20} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)
