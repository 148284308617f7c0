"""``mosstalk verify --path fast`` on codec cases: batches of replies and live sound."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import GOLDENS, Run, plain_copy
from engine_rig import on_every_device
from safetensors.torch import load_file, save_file

from mosstalk.runtime.device import pick_device
from mosstalk.verify import ComputePath
from mosstalk.verify.compare import Check
from mosstalk.verify.run import COMPONENTS, run_case

CPU = torch.device("cpu")
CASES = [GOLDENS / name for name in ("flow", "flow-tails", "hift", "speech-tokenizer")]
HALF = torch.float16
PAIRS = [
    # Slow: flows; ``test_flow_batch`` has their hops, and ``test_goldens`` the plain ones.
    pytest.param(
        folder,
        dtype,
        id=f"{folder.name}-{dtype}",
        marks=[pytest.mark.slow] if folder.name.startswith("flow") else [],
    )
    for folder in CASES
    for dtype in (torch.float32, HALF)
]


@on_every_device
@pytest.mark.parametrize(("folder", "dtype"), PAIRS)
def test_cases_pass_in_batches_and_live(folder: Path, dtype: torch.dtype, device: str) -> None:
    found = run_case(folder, pick_device(device), dtype, ComputePath.FAST)
    assert [check.name for check in found if not check.passed] == []
    if folder.name.startswith("flow") and dtype == torch.float32:
        require_both_streams({check.name for check in found})
    words = {"flow": ("paged.", "together."), "hift": ("fast.",), "speech": ("live tokens",)}
    for word in words[folder.name.split("-")[0]]:
        if device == "cpu" or word != "paged.":
            assert any(word in check.name for check in found)


def require_both_streams(names: set[str]) -> None:
    """Check that every hop was computed by the stream that recomputes and by the one that keeps."""
    hops = {name for name in names if re.search(r"(hop\d+|final_streaming)\.mel", name)}
    kept = {name for name in hops if "fast." in name}
    recomputed = {name for name in hops if not re.search(r"fast|paged", name)}
    assert recomputed == {name.replace("fast.", "") for name in kept}
    assert recomputed


def test_a_card_that_is_full_is_no_fault_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Iterator[Check]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setitem(COMPONENTS, "hift", full)
    with pytest.raises(torch.OutOfMemoryError):
        run_case(GOLDENS / "hift", CPU, torch.float32)


@pytest.mark.parametrize("folder", CASES[2:], ids=lambda path: path.name)
def test_what_the_plain_path_compares_is_compared_too(folder: Path) -> None:
    plain = {check.name for check in run_case(folder, CPU, torch.float32)}
    fast = {check.name for check in run_case(folder, CPU, torch.float32, ComputePath.FAST)}
    assert fast > plain
    assert not any(name.startswith("fast.") or "live tokens" in name for name in plain)


@pytest.mark.parametrize(
    ("case", "tensor", "failing"),
    [
        # Slow; the same is found in HiFT's below.
        pytest.param(
            *("flow", "hop1.mel", ["hop1.mel", "fast.hop1.mel", "fast together.hop1.mel"]),
            marks=pytest.mark.slow,
        ),
        ("hift", "chunk1.wave", ["chunk1.wave", "fast.chunk1.wave"]),
    ],
)
def test_a_wrong_frame_is_found_on_every_way(
    mosstalk: Run, tmp_path: Path, case: str, tensor: str, failing: list[str]
) -> None:
    folder = plain_copy(GOLDENS / case, tmp_path / "case")
    expected = load_file(folder / "expected.safetensors")
    expected[tensor].view(-1)[7] += 0.1
    save_file(expected, folder / "expected.safetensors")
    run = mosstalk("verify", folder, "--path", "fast", "--json")
    assert run.returncode == 1
    checks = json.loads(run.stdout)["cases"][0]["checks"]
    failed = {check["name"] for check in checks if not check["passed"]}
    assert failed >= set(failing)
    assert all(name.endswith(tensor) for name in failed)
