"""Tiles that a build finds: chosen by clocks, kept in a file, refused where they do not belong."""

import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from claims_rig import outcomes_of, require_kept
from engine_rig import wild_model

from mosstalk.build import tune
from mosstalk.build.tune import Call, Tuner
from mosstalk.engine.linears import _most_sums
from mosstalk.errors import CheckpointError
from mosstalk.files import write_document
from mosstalk.numerics.fp8 import E4M3
from mosstalk.ops import linear, linear_fp8
from mosstalk.ops.launch import INSTALLED
from mosstalk.ops.linear_tiles import (
    KINDS,
    LIMITS,
    TRIED,
    Division,
    Key,
    division,
    few_candidates,
    package_division,
    tuned_as,
    tuned_divisions,
    use_tuned,
)
from mosstalk.prepared.start import kernels_apart, take_kernels, take_tiles
from mosstalk.prepared.tiles import Tuning, choose, describe, tiles_for

BRAIN = torch.bfloat16
KEYS: list[Key] = [(d, k, n) for d in (BRAIN, E4M3) for k in KINDS for n in LIMITS]
HERE = {"card": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0"}
PLAIN: Key = (BRAIN, "plain", 16)


@pytest.fixture(autouse=True)
def own_tables() -> Any:
    """What a test sets goes with it."""
    with tuned_as({}):
        yield


def chosen(first: Sequence[float], second: dict[int, float]) -> tuple[int, float, float, bool]:
    """Which of PLAIN's candidates is taken whose clocks read so."""
    package, *others = few_candidates(PLAIN)[: len(first)]
    every = [package, *others]
    again = {every[number]: seconds for number, seconds in second.items()}
    found = choose(
        package, others, dict(zip(every, first, strict=True)).__getitem__, again.__getitem__
    )
    return every.index(found.divided), found.seconds, found.package_s, found.replaced


def test_a_division_must_win_twice_and_clearly() -> None:
    assert chosen([10, 9, 8, 11], {0: 10, 2: 8.5}) == (2, 8.5, 10, True)
    assert chosen([10, 9.81, 9.9], {}) == (0, 10, 10, False)
    assert chosen([10, 9, 8], {0: 10, 2: 9.9}) == (0, 10, 10, False)
    assert chosen([10], {}) == (0, 10, 10, False)
    assert chosen([10, math.inf], {}) == (0, 10, 10, False)


def test_what_runs_is_taken_where_the_package_does_not() -> None:
    assert chosen([math.inf, 9], {0: math.inf, 1: 9}) == (1, 9, math.inf, True)
    assert chosen([math.inf, math.inf], {}) == (0, math.inf, math.inf, False)


def test_candidates_are_few_and_begin_with_the_package() -> None:
    for key in KEYS:
        found = few_candidates(key)
        assert found[0] == package_division(key)
        assert len(set(found)) == len(found)
        assert 5 < len(found) <= TRIED
        assert {divided.tile.rows for divided in found} == {min(key[2], 64)}


def test_tables_are_replaced_for_one_precision_and_put_back() -> None:
    other = few_candidates(PLAIN)[1]
    before = [division("plain", 8, dtype) for dtype in (BRAIN, torch.float16, E4M3)]
    with tuned_as({PLAIN: other}):
        assert division("plain", 2, BRAIN) == division("plain", 16, BRAIN) == other != before[0]
        assert division("plain", 17, BRAIN) == package_division((BRAIN, "plain", 32))
        assert division("plain", 1, BRAIN) == package_division((BRAIN, "plain", 1))
        assert [division("plain", 8, dtype) for dtype in (torch.float16, E4M3)] == before[1:]
    assert division("plain", 8, BRAIN) == before[0]


def test_divisions_without_company_are_never_tuned() -> None:
    every = {key: few_candidates(key)[-1] for key in KEYS}
    cases = [(k, n, d) for k in KINDS for n in (1, 16, 33, 500) for d in (BRAIN, E4M3)]
    before = [division(k, n, d, invariant=True) for k, n, d in cases]
    exact = division("gated", 1, torch.float32)
    with tuned_as(every):
        assert [division(k, n, d, invariant=True) for k, n, d in cases] == before
        assert division("gated", 1, torch.float32) == exact


def test_an_engine_makes_room_for_what_the_tables_say() -> None:
    more = Division(few_candidates(PLAIN)[1].tile, splits=8)
    usual = _most_sums("plain", 4096, BRAIN, 16, invariant=False)
    with tuned_as({PLAIN: more}):
        assert _most_sums("plain", 4096, BRAIN, 16, invariant=False) == 8 * 16 * 4096 > usual


def tuned_by(timer: tune.Timer, dtype: torch.dtype = torch.bfloat16) -> Tuning:
    """A small model's products, which run, tuned by a clock that is given."""
    return Tuner(wild_model(dtype=dtype), timer, lambda *_: None).run()


def is_pass(calls: Sequence[Call]) -> bool:
    return isinstance(calls[0], partial) and calls[0].func is tune._run_layer


def recorded(calls: Sequence[Call]) -> float:
    """The second candidate is a tenth faster; all choices for one row together are slower."""
    ((key, divided),) = list(tuned_divisions().items())[:1] or [(PLAIN, package_division(PLAIN))]
    if is_pass(calls):
        return 1.1 if key[2] == 1 else 1.0 if not tuned_divisions() else 0.9
    for call in calls:
        call()
    return len(calls) * (0.9 if divided == few_candidates(key)[2] else 1.0)


def test_every_line_of_a_models_products_is_tuned() -> None:
    found = tuned_by(recorded)
    assert set(found.choices) == {(BRAIN, k, n) for k in KINDS if k != "deep" for n in LIMITS}
    for key, choice in found.choices.items():
        kept_own = key[2] == 1  # alone faster, together slower
        assert choice.divided == few_candidates(key)[0 if kept_own else 2]
        assert choice.seconds == pytest.approx(1.0 if kept_own else 0.9)
        assert choice.replaced is not kept_own
    assert found.passes == {1: (1.0, 1.0)} | dict.fromkeys(LIMITS[1:], (0.9, 1.0))
    assert found.tried == 7 * len(found.choices)
    assert found.dropped == []
    assert tuned_divisions() == {}, "nothing is in use before it is told"
    assert "9 of 12 replaced, 84 tried" in describe(found.summary())
    assert "-10.0%" in describe(found.summary())


def test_nothing_is_tuned_in_float32() -> None:
    assert tuned_by(recorded, torch.float32).choices == {}


def test_what_is_wrong_or_fails_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(calls: Sequence[Call]) -> float:
        ((key, divided),) = list(tuned_divisions().items()) or [(PLAIN, package_division(PLAIN))]
        if not is_pass(calls) and divided == few_candidates(key)[1]:
            raise RuntimeError("out of resource: shared memory\nmore")
        return 1.0 * len(calls)

    found = tuned_by(failing)
    assert found.divisions == {}
    assert len(found.dropped) == len(found.choices)
    assert all(line.endswith("RuntimeError: out of resource: shared memory")
               for line in found.dropped)  # fmt: skip
    assert "normed of bfloat16, 1 rows" in found.dropped[0]

    monkeypatch.setitem(tune.BOUNDS, BRAIN, 0.0)
    found = tuned_by(recorded)
    assert len(found.dropped) == found.tried == 7 * len(found.choices)
    assert "errors are" in found.dropped[0]
    assert found.divisions == {}
    line = found.as_values(HERE)["tables"]["bfloat16"]["plain"]["16"]
    assert (line["us"], line["package_us"], line["replaced"]) == (None, None, False)


def test_a_summary_tells_what_only_runs_here() -> None:
    passes = {1: (1.0, math.inf), 16: (math.inf, math.inf), 32: (0.5, 0.5)}
    summary = Tuning(passes=passes).summary()
    assert summary["gain"] == {"1": None, "16": 0.0, "32": 0.0}
    assert describe(summary).endswith("products at 1 row: none before")
    assert describe(None) == "the package's: not tuned"


def written(folder: Path) -> tuple[Path, Tuning]:
    found = tuned_by(recorded)
    write_document(folder / "tiles.json", found.as_values(HERE | {"driver": "580"}))
    return folder / "tiles.json", found


def test_what_was_found_is_found_again(tmp_path: Path) -> None:
    path, found = written(tmp_path)
    assert tiles_for(path, HERE) == (found.divisions, None)
    assert len(found.divisions) == 9
    values = json.loads(path.read_text())
    assert values["machine"] == HERE
    assert values["passes"]["16"] == {"us": 0.9e6, "package_us": 1e6}
    line = values["tables"]["bfloat16"]["gated"]["more"]
    assert (line["us"], line["package_us"]) == (0.9e6, 1e6)
    assert tiles_for(tmp_path / "absent.json", HERE) == ({}, None)
    take_tiles(path, HERE)
    assert tuned_divisions() == found.divisions


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"card": "NVIDIA L4"}, "card is NVIDIA L4 here, and NVIDIA H200 where it was built"),
        ({"triton": "3.7.0"}, "triton is 3.7.0 here"),
        ({"torch": "2.13.0"}, "torch is 2.13.0 here"),
        ({"capability": "8.9"}, "capability is 8.9 here"),
    ],
)
def test_another_machine_keeps_the_packages_tiles(
    changed: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = written(tmp_path)
    use_tuned({PLAIN: few_candidates(PLAIN)[1]})
    with caplog.at_level(logging.WARNING):
        take_tiles(path, HERE | changed)
    assert tuned_divisions() == {}
    (record,) = caplog.records
    assert said in record.getMessage()
    assert str(path) in record.getMessage()
    assert "the package's tiles are used" in record.getMessage()


def test_a_newer_format_keeps_the_packages_tiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tiles.json"
    path.write_text('{"format": "mosstalk-tiles-9"}')
    take_tiles(path, HERE)
    assert "mosstalk-tiles-9" in caplog.text
    assert tuned_divisions() == {}


def line_of(values: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = values["tables"]["bfloat16"]["normed"]["16"]
    return line


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda v: line_of(v).update(splits="2"), "normed 16: splits is '2'"),
        (lambda v: line_of(v).update(splits=True), "splits is True"),
        (lambda v: line_of(v).update(ask=-1), "ask is -1"),
        (lambda v: line_of(v).update(run=8), "divided so"),
        (lambda v: line_of(v).update(one=True), "divided so"),
        (lambda v: line_of(v).update(apart=False, splits=2), "divided so"),
        (lambda v: line_of(v).update(apart=1), "must be true or false"),
        (lambda v: line_of(v)["tile"].update(columns=48), "columns is 48, which is no power"),
        (lambda v: line_of(v)["tile"].update(rows=8), "divided so"),
        (lambda v: line_of(v)["tile"].pop("warps"), "no 'warps'"),
        (lambda v: line_of(v).pop("replaced"), "no 'replaced'"),
        (lambda v: line_of(v).update(tile=[16]), "damaged"),
        (lambda v: v["tables"]["bfloat16"].update(head={"1": {}}), "no line 'bfloat16 head 1'"),
        (lambda v: v["tables"].update(int8=v["tables"]["bfloat16"]), "no line 'int8 normed 1'"),
        (lambda v: v["tables"]["bfloat16"]["plain"].update({"128": {}}), "no line"),
        (lambda v: v.update(tables=[]), "damaged"),
        (lambda v: v.pop("machine"), "no 'machine'"),
        (lambda v: v.pop("format"), "no 'format'"),
    ],
)
def test_a_damaged_file_is_named(spoil: Any, said: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    values = json.loads(path.read_text())
    spoil(values)
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as refusal:
        tiles_for(path, HERE)
    assert str(refusal.value).startswith(f"{path}: damaged")
    assert said in str(refusal.value)
    assert str(refusal.value).endswith("build it again")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\udc80"])
def test_a_file_that_is_no_document_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tiles.json: damaged: .*build it again"):
        tiles_for(path, HERE)


def test_a_start_from_another_folder_is_divided_as_the_package_says() -> None:
    use_tuned({PLAIN: few_candidates(PLAIN)[1]})
    assert take_kernels(None, torch.device("cpu")) is None
    assert tuned_divisions() == {}


@pytest.mark.skipif(not INSTALLED, reason="needs Triton")
def test_what_loses_is_kept_neither_on_the_disk_nor_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = pytest.importorskip("triton.runtime.cache").FileCacheManager
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nobody"))
    cache = tmp_path / "cache"
    cache.mkdir()
    kernels = linear._rms_linear, linear_fp8._fp8_linear_one_row
    before = [dict(kernel.device_caches) for kernel in kernels]
    with kernels_apart(cache):
        lost = Path(manager("k1").put(b"x", "a.cubin"))
        assert lost.is_file()
        for kernel in kernels:
            kernel.device_caches[7] = ({"compiled": 1},)
    assert not lost.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert all(7 not in kernel.device_caches for kernel in kernels)
    kept_there = Path(manager("k2").put(b"x", "a.cubin"))
    assert kept_there.is_relative_to(cache)
    for kernel, held in zip(kernels, before, strict=True):
        kernel.device_caches.update(held)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_claimed_of_tuning_holds_in_the_interpreter(tmp_path: Path) -> None:
    require_kept(outcomes_of("tune_claims.py", tmp_path, interpret=True))
