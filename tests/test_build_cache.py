"""Compiled kernels in a built folder: found again wherever it is, and never lost."""

import os
from pathlib import Path

import pytest

from mosstalk.bench import start
from mosstalk.bench.start import cached_share, evict, read_rate, weight_files
from mosstalk.errors import BenchError
from mosstalk.prepared.start import kernels_in, relocate, use_kernels

cache = pytest.importorskip("triton.runtime.cache", reason="needs Triton")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is set here goes with the test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nobody"))
    monkeypatch.setenv("MOSSTALK_CACHE", str(tmp_path / "user"))


def test_a_start_that_makes_no_sound_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_LONGEST_S", 0.01)
    with pytest.raises(BenchError, match=r"start 1 of .* made no sound within"):
        start._start(tmp_path, "cpu", "start 1", None)


def compiled(folder: Path, key: str = "k1") -> None:
    """What Triton leaves of a kernel, by its own code."""
    use_kernels(folder)
    manager = cache.FileCacheManager(key)
    files = {
        name: manager.put(data, name) for name, data in {"a.cubin": b"x", "a.json": b"{}"}.items()
    }
    manager.put_group("a.json", files)


def found(folder: Path, key: str = "k1") -> dict[str, str] | None:
    """What Triton finds of it."""
    use_kernels(folder)
    files: dict[str, str] | None = cache.FileCacheManager(key).get_group("a.json")
    return files


def test_triton_compiles_into_the_folder_and_finds_it_there(tmp_path: Path) -> None:
    compiled(tmp_path / "one")
    assert kernels_in(tmp_path / "one").count == 1
    assert found(tmp_path / "one") == {
        name: str(tmp_path / "one" / "k1" / name) for name in ("a.cubin", "a.json")
    }
    assert kernels_in(tmp_path / "absent").count == 0


def test_a_folder_that_is_moved_takes_its_kernels_along(tmp_path: Path) -> None:
    compiled(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    # Triton alone would find none of the files: they are listed by where they were.
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "two")
    assert cache.FileCacheManager("k1").get_group("a.json") == {}
    moved = found(tmp_path / "two")
    assert moved
    assert all(Path(path).is_file() for path in moved.values())


def test_a_build_names_the_place_that_it_will_have(tmp_path: Path) -> None:
    compiled(tmp_path / "part")
    assert relocate(tmp_path / "part", tmp_path / "out") == 1
    (tmp_path / "part").rename(tmp_path / "out")
    assert relocate(tmp_path / "out", tmp_path / "out") == 0, "nothing is written at a start"
    assert len(found(tmp_path / "out") or {}) == 2


def test_a_damaged_list_is_left_for_triton_to_make_anew(tmp_path: Path) -> None:
    compiled(tmp_path / "one")
    (tmp_path / "one" / "k1" / "__grp__a.json").write_text("{")
    assert found(tmp_path / "one") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_copied(tmp_path: Path) -> None:
    compiled(tmp_path / "one")
    (tmp_path / "one").chmod(0o555)
    try:
        used = use_kernels(tmp_path / "one")
        assert used.is_relative_to(tmp_path / "user")
        assert len(found(tmp_path / "one") or {}) == 2
    finally:
        (tmp_path / "one").chmod(0o755)


def test_the_disk_is_timed_and_memory_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "model" / "a.safetensors"
    file.parent.mkdir()
    file.write_bytes(os.urandom(3_000_000))
    (tmp_path / "notes.txt").write_text("no weights")
    assert weight_files(tmp_path) == [file]
    assert read_rate([file]).bytes == 3_000_000
    warm = read_rate([file])
    assert warm.cached in (None, 1.0)
    evict([file])
    cold = cached_share([file])
    assert cold is None or 0.0 <= cold <= 1.0
    assert "GB/s" in warm.describe()
