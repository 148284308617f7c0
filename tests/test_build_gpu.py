"""Built folders on a GPU: tuned and compiled once, and found wherever the folder is."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run

from mosstalk.build.check import check_language, require
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.numerics.fp8 import E4M3
from mosstalk.offline.pipeline import Pipeline
from mosstalk.ops.linear_tiles import KINDS, LIMITS, Key, few_candidates, tuned_as, tuned_divisions
from mosstalk.prepared.default_models import BuiltEngine, chosen_model
from mosstalk.prepared.start import take_kernels
from mosstalk.prepared.tiles import TILES_FILE

pytestmark = pytest.mark.gpu
SESSIONS = ("--max-sessions", "4", "--device", "cuda")


def started(process: Run, engine: Path, to: Path) -> list[dict[str, Any]]:
    """What two starts took."""
    run = process("bench", "start", engine, "--device", "cuda", "--json", to, timeout=400)
    assert run.returncode == 0, run.stderr
    starts: list[dict[str, Any]] = json.loads(to.read_text())["starts"]
    return starts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_start_compiles_nothing_where_the_folder_was_moved_to(
    process: Run, tmp_path: Path, precision: str
) -> None:
    words = ("--precision", precision, *SESSIONS)
    run = process("build", "pocket", tmp_path / "one", *words, timeout=600)
    assert run.returncode == 0, run.stderr
    values = BuiltEngine.read(tmp_path / "one").values
    assert values["kernels"]["count"] > 0
    assert values["peaks_bytes"]["device"] > 0
    assert all(check["passed"] for check in values["checks"])
    assert values["tiles"]["tried"] > values["tiles"]["lines"] >= 12
    assert "tuning" in values["times_s"]
    assert not list((tmp_path / "one").glob(".cache-*")), "what lost is not kept"
    (tmp_path / "one").rename(tmp_path / "two")

    starts = started(process, tmp_path / "two", tmp_path / "starts.json")

    assert [start["compiled"] for start in starts] == [0, 0]
    inspected = process("checkpoint", "inspect", tmp_path / "two", "--json")
    assert json.loads(inspected.stdout)["foreign"] == []
    assert json.loads(inspected.stdout)["problems"] == []


@pytest.mark.timeout(900)
def test_a_start_divides_as_the_folder_says(
    process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, device = tmp_path / "out", torch.device("cuda")
    run = process("build", "pocket", out, *SESSIONS, timeout=600)
    assert run.returncode == 0, run.stderr
    values = json.loads((out / TILES_FILE).read_text())
    key: Key = (torch.bfloat16, "plain", 16)
    other = few_candidates(key)[1]
    line = values["tables"]["bfloat16"]["plain"]["16"]
    line |= {name: value for name, value in asdict(other).items() if name != "tile"}
    line["tile"] = {name: n for name, n in asdict(other.tile).items() if name != "groups"}
    line["replaced"] = True
    (out / TILES_FILE).write_text(json.dumps(values))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nobody"))
    with tuned_as({}):
        take_kernels(out, device)
        assert tuned_divisions()[key] == other
        machine = values["machine"] | {"card": "another"}
        (out / TILES_FILE).write_text(json.dumps(values | {"machine": machine}))
        take_kernels(out, device)
        assert tuned_divisions() == {}


@pytest.mark.timeout(900)
def test_a_build_that_is_not_tuned_has_the_packages_tiles(process: Run, tmp_path: Path) -> None:
    run = process("build", "pocket", tmp_path / "out", "--no-tune", *SESSIONS, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "not tuned" in run.stderr
    assert BuiltEngine.read(tmp_path / "out").values["tiles"] is None
    assert not (tmp_path / "out" / TILES_FILE).exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_candidate_replies_as_the_plain_network(number: int) -> None:
    keys: list[Key] = [
        (dtype, kind, limit)
        for dtype in (torch.bfloat16, E4M3)
        for kind in KINDS
        for limit in LIMITS
    ]
    model, codec = chosen_model(Path("pocket"), None)
    pipeline = Pipeline.load(model, codec, device="cuda", dtype=torch.bfloat16)
    with tuned_as({key: few_candidates(key)[number] for key in keys}):
        core = EngineCore(pipeline.model, pipeline.ids, EngineOptions(blocks=64))
        assert core.runner.layers.kernels
        require(list(check_language(core)))
