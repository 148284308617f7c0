"""Built folders on a GPU: kernels are compiled once, and found wherever the folder is."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from mosstalk.build.folder import BuiltEngine

pytestmark = pytest.mark.gpu
SESSIONS = ("--max-sessions", "4", "--device", "cuda")


def started(mosstalk: Run, engine: Path, to: Path) -> list[dict[str, Any]]:
    """What two starts took."""
    run = mosstalk("bench", "start", engine, "--device", "cuda", "--json", to, timeout=400)
    assert run.returncode == 0, run.stderr
    starts: list[dict[str, Any]] = json.loads(to.read_text())["starts"]
    return starts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_start_compiles_nothing_where_the_folder_was_moved_to(
    mosstalk: Run, tmp_path: Path, precision: str
) -> None:
    words = ("--precision", precision, *SESSIONS)
    run = mosstalk("build", "pocket", tmp_path / "one", *words, timeout=600)
    assert run.returncode == 0, run.stderr
    values = BuiltEngine.read(tmp_path / "one").values
    assert values["kernels"]["count"] > 0
    assert values["peaks_bytes"]["device"] > 0
    assert all(check["passed"] for check in values["checks"])
    (tmp_path / "one").rename(tmp_path / "two")

    starts = started(mosstalk, tmp_path / "two", tmp_path / "starts.json")

    assert [start["compiled"] for start in starts] == [0, 0]
    inspected = mosstalk("engine", "inspect", tmp_path / "two", "--json")
    assert json.loads(inspected.stdout)["foreign"] == []
