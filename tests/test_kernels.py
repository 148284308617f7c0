"""The kernels keep what ``kernel_claims.py`` says of them, interpreted or compiled."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is there on Linux alone")

CLAIMS = ROOT / "tests" / "kernel_claims.py"
KERNELS = (
    "norm_act",
    "norm_linear",
    "linear_add",
    "norm_qkv",
    "attend_pages",
    "attend_groups",
    "conv_rows",
    "close_residual",
    "euler",
)


def claimed(folder: Path, interpret: bool) -> list[ElementTree.Element]:
    """Run the claims and return their outcomes.

    In a process of its own: Triton is an interpreter or a compiler for the whole of one, from
    when it is first imported.
    """
    report = folder / "claims.xml"
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CLAIMS))
    run = subprocess.run(
        [*words, f"--junitxml={report}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), run.stdout + run.stderr
    return list(ElementTree.parse(report).iter("testcase"))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[ElementTree.Element]:
    """Outcomes of the claims where Triton interprets, in float32 and float16."""
    return claimed(tmp_path_factory.mktemp("interpreted"), interpret=True)


def kept(outcomes: list[ElementTree.Element]) -> None:
    """Check that there are claims and that every one was run and kept."""
    assert outcomes
    broken = {
        outcome.get("name"): [part.get("message") for part in outcome] for outcome in outcomes
    }
    assert {name: messages for name, messages in broken.items() if messages} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_interpreted_kernel_equals_its_twin(
    kernel: str, interpreted: list[ElementTree.Element]
) -> None:
    kept([one for one in interpreted if str(one.get("name")).startswith(f"test_{kernel}")])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_claims_are_kept(interpreted: list[ElementTree.Element]) -> None:
    kept(interpreted)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_equal_their_twins(tmp_path: Path) -> None:
    kept(claimed(tmp_path, interpret=False))
