"""The language model's products keep what ``lm_linear_claims.py`` says, interpreted or compiled.

Here, too: where no kernel runs, the references are the network's own layers.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from claims_rig import outcomes_of, require_kept

from mosstalk.models.language_model import RMSNorm
from mosstalk.ops.linear import gate_up, rms_linear
from mosstalk.ops.norm import rms_norm

CLAIMS = "lm_linear_claims.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_their_references(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=True))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_equal_their_references(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_twins_of_norm_and_gate_are_the_networks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gain = (torch.randn(*size, generator=generator).to(dtype) for size in ((5, 64), (64,)))
    norm = RMSNorm(64, 1e-6).to(dtype)
    norm.weight.data = gain
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, gain, 1e-6, torch.empty_like(x)), norm(x))
        gate, up = x.chunk(2, dim=1)
        assert torch.equal(gate_up(x, torch.empty_like(gate)), F.silu(gate) * up)


def test_the_reference_in_float32_is_a_layer_of_the_network() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, residual = (
        torch.randn(*size, generator=generator) for size in ((5, 64), (48, 64), (5, 48))
    )
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = torch.randn(64, generator=generator)
    with torch.inference_mode():
        expected = residual + F.linear(norm(x), weight)
        found = rms_linear(x, norm.weight, 1e-6, weight, residual, residual=residual)
        assert found is residual
        assert torch.equal(found, expected)
