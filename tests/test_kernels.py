"""The kernels keep what ``kernel_claims.py`` says of them, interpreted or compiled."""

from pathlib import Path

import pytest
from claims_rig import Outcomes, outcomes_of, require_kept

CLAIMS = "kernel_claims.py"
KERNELS = (
    "norm_act",
    "norm_linear",
    "linear_add",
    "norm_qkv",
    "attention_flow",
    "conv1d",
    "close_residual",
    "euler",
)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of the claims where Triton interprets, in float32 and float16."""
    return outcomes_of(CLAIMS, tmp_path_factory.mktemp("interpreted"), interpret=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_interpreted_kernel_equals_its_reference(kernel: str, interpreted: Outcomes) -> None:
    require_kept([one for one in interpreted if str(one.get("name")).startswith(f"test_{kernel}")])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_claims_are_kept(interpreted: Outcomes) -> None:
    require_kept(interpreted)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_equal_their_references(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=False))
