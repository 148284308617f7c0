"""``mosstalk verify --path fast``: language-model cases through the engine, and said to be so."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from conftest import GOLDENS, Run, plain_copy
from engine_rig import on_every_device
from safetensors.torch import load_file, save_file

from mosstalk.runtime.device import pick_device
from mosstalk.verify import ComputePath
from mosstalk.verify.run import run_case

CASES = sorted(path.parent for path in GOLDENS.glob("lm-*/case.json"))

JUDGED = [
    ("lm-square", torch.float32),
    ("lm-wide-heads", torch.bfloat16),
]


@lru_cache
def plain_names(folder: Path) -> set[str]:
    """What the plain path compares, at any precision."""
    return {check.name for check in run_case(folder, pick_device("cpu"), torch.float32)}


@on_every_device
@pytest.mark.parametrize(
    ("folder", "dtype"),
    [
        # Slow: one model exactly and the other in a precision that rounds is enough here.
        pytest.param(
            folder,
            dtype,
            id=f"{folder.name}-{dtype}",
            marks=[] if (folder.name, dtype) in JUDGED else [pytest.mark.slow],
        )
        for folder in CASES
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
)
def test_cases_pass_through_the_engine(folder: Path, dtype: torch.dtype, device: str) -> None:
    found = run_case(folder, pick_device(device), dtype, ComputePath.FAST)
    assert [check.name for check in found if not check.passed] == []
    names = {check.name for check in found}
    plain = plain_names(folder)
    runs = {name for name in plain if name.endswith((".rows", ".modes"))}
    assert runs
    assert names >= plain | {f"{name} mixed" for name in runs}


def test_the_report_says_which_path_was_verified(mosstalk: Run) -> None:
    cases = [GOLDENS / "lm-wide-heads", GOLDENS / "prompt-mel"]
    run = mosstalk("verify", *cases, "--path", "fast", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["path"] == "fast"
    assert "lm-wide-heads: language_model on cpu, float32, by the fast path" in run.stderr
    assert "prompt-mel: prompt_mel on cpu, float32\n" in run.stderr
    assert run.stderr.splitlines()[-1].endswith("; fast path")
    plain = mosstalk("verify", GOLDENS / "prompt-mel", "--json")
    assert json.loads(plain.stdout)["path"] == "reference"
    assert plain.stderr.splitlines()[-1].endswith("; reference path")


def test_a_wrong_row_is_found_alone_and_mixed(mosstalk: Run, tmp_path: Path) -> None:
    case = plain_copy(GOLDENS / "lm-wide-heads", tmp_path / "case")
    expected = load_file(case / "expected.safetensors")
    name = next(name for name in expected if name.endswith("greedy_plain.rows"))
    expected[name][-1, 1] += 1
    save_file(expected, case / "expected.safetensors")
    run = mosstalk("verify", case, "--path", "fast", "--json")
    assert run.returncode == 1
    checks = json.loads(run.stdout)["cases"][0]["checks"]
    failed = [check["name"] for check in checks if not check["passed"]]
    assert failed == [name, f"{name} mixed"]


def test_an_unknown_path_is_refused(mosstalk: Run) -> None:
    run = mosstalk("verify", GOLDENS / "lm-square", "--path", "slow")
    assert run.returncode == 2
    assert "'reference'" in run.stderr
    assert "Traceback" not in run.stderr
