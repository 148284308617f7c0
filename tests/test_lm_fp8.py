"""Matmuls in FP8 keep what ``lm_fp8_claims.py`` says, interpreted or compiled.

Here, too: where no kernel runs, the references are the model's own matmul in FP8.
"""

from pathlib import Path

import pytest
import torch
from claims_rig import outcomes_of, require_kept

from mosstalk.models.language_model import RMSNorm
from mosstalk.numerics.fp8 import E4M3, Fp8Linear, Fp8Weight
from mosstalk.ops.linear_fp8 import fp8_linear, fp8_rows, library_takes

CLAIMS = "lm_fp8_claims.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_their_references(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=True))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_equal_their_references(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=False))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_twins_are_the_models_own_matmul(dtype: torch.dtype, calibrated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gain, weight = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((5, 64), (64,), (48, 64))
    )
    fixed = torch.tensor(0.005) if calibrated else None
    norm, matmul = RMSNorm(64, 1e-6).to(dtype), Fp8Linear.holding(Fp8Weight.of(weight), fixed)
    norm.weight.data = gain
    q, scale = torch.empty(5, 64, dtype=E4M3), torch.empty(5)
    with torch.inference_mode():
        fp8_rows(x, gain, 1e-6, q, scale, fixed=fixed)
        found = fp8_linear(q, scale, matmul.value, torch.empty(5, 48, dtype=dtype))
        assert torch.equal(found, matmul(norm(x)))


def test_a_processor_has_no_librarys_matmul() -> None:
    weight = Fp8Weight.of(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    assert not library_takes(weight, torch.bfloat16)
