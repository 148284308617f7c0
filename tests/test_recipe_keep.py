"""The pocket recipe's codes, labels and texts as one file, and in a folder again."""

import io
import json
import lzma
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.pocket.data import load_recordings
from recipes.pocket.keep import KeptError, keep, unkeep
from recipes.pocket.tokenizer import read_codes
from recipes.pocket.voices import TEACHER

TEACHERS = f"00-{TEACHER}-00000"
LENGTHS = {TEACHERS: (12_800, 1), "01-slt-00003": (2_561, 7_000, 1_280)}
"""Samples of each clip, by shard."""
CODES = {TEACHERS: 11, "01-slt-00003": 10}
"""10 + 1 of the teacher's two clips, 3 + 6 + 1 of another voice's: an odd number together."""


def encoded(work: Path, largest: int = 4_095) -> Path:
    """Two shards in three hearings: the second equals the clean one, the third differs.

    Codes are up to ``largest``; with 0 all hearings are the same.
    """
    (work / "data").mkdir(parents=True)
    (work / "codes").mkdir()
    draw = np.random.default_rng(0)
    for name, lengths in LENGTHS.items():
        voice = name.split("-")[1]
        rows = [
            {"text": f"Tea, “{n}” café.", "voice": voice, "length": n, "length24": n * 3 // 2}
            for n in lengths
        ]
        labels = draw.integers(0, 256, 4 * CODES[name], dtype=np.uint8)
        clean = draw.integers(0, largest + 1, CODES[name]).astype(np.uint16).view(np.int16)
        clean[1] = np.uint16(largest).view(np.int16)
        other = clean.copy()
        other[2:7] ^= min(largest, 1)
        np.save(work / "data" / f"{name}.labels.npy", labels)
        np.save(work / "codes" / f"{name}.npy", np.stack([clean, clean, other]))
        # Sound is not kept.
        np.save(work / "data" / f"{name}.16k.npy", np.zeros(sum(lengths), np.int16))
        (work / "data" / f"{name}.json").write_text(json.dumps(rows))
    return work


def files(work: Path) -> dict[str, bytes]:
    """Every file without its sound, by its path in the folder."""
    paths = (path for path in work.rglob("*") if path.is_file())
    return {str(p.relative_to(work)): p.read_bytes() for p in paths if ".16k." not in p.name}


def codes(work: Path, parts: tuple[int, ...] = (0, 1)) -> list[NDArray[np.int16]]:
    data = load_recordings(work / "data", torch.device("cpu"), parts, sound=())
    return read_codes(work / "codes", data)


def main(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """Run ``python -m recipes.pocket`` in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["recipes.pocket", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipes.pocket", run_name="__main__")
    return int(ended.value.code or 0)


# Codes of 12 bits, 1, 15 and 16, which int16 has as negative numbers, and all the same.
@pytest.mark.parametrize("largest", [4_095, 1, 32_767, 65_535, 0])
def test_what_was_kept_is_there_again_to_the_bit(tmp_path: Path, largest: int) -> None:
    first = encoded(tmp_path / "first", largest)
    keep(first, [0, 1], tmp_path / "new" / "kept.xz")

    shards = unkeep(tmp_path / "again", tmp_path / "new" / "kept.xz")

    assert shards == CODES
    assert files(tmp_path / "again") == files(first)
    assert len(files(first)) == 6
    assert not list(tmp_path.glob("again/data/*.16k.npy"))


def test_one_part_and_fewer_hearings_are_kept_on_request(tmp_path: Path) -> None:
    first = encoded(tmp_path / "first")
    keep(first, [1], tmp_path / "kept.xz", hearings=2)

    unkeep(tmp_path / "again", tmp_path / "kept.xz")

    assert [path.name for path in (tmp_path / "again" / "codes").iterdir()] == ["01-slt-00003.npy"]
    assert np.array_equal(codes(tmp_path / "again", (1,)), codes(first, (1,))[:2])


def test_parts_of_two_files_come_into_one_folder(tmp_path: Path) -> None:
    first = encoded(tmp_path / "first")
    for part in (0, 1):
        keep(first, [part], tmp_path / f"{part}.xz")
        unkeep(tmp_path / "again", tmp_path / f"{part}.xz")

    assert files(tmp_path / "again") == files(first)


def test_both_stages_run_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, kept = encoded(tmp_path / "first"), tmp_path / "kept.xz"

    assert main(monkeypatch, "keep", "--work", first, "--parts", "0,1", "--out", kept) == 0
    assert capsys.readouterr().out == f"{kept}: {kept.stat().st_size:,} bytes\n"
    assert main(monkeypatch, "unkeep", "--work", tmp_path / "again", kept) == 0
    assert capsys.readouterr().out == "wrote 2 shards, 0.0 h\n"
    assert files(tmp_path / "again") == files(first)


@pytest.mark.parametrize(
    "taken", ["data/01-slt-00003.json", "data/01-slt-00003.16k.npy", "codes/01-slt-00003.npy"]
)
def test_a_shard_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    keep(encoded(tmp_path / "first"), [0, 1], tmp_path / "kept.xz")
    there = tmp_path / "again" / taken
    there.parent.mkdir(parents=True)
    there.write_text("mine")

    assert main(monkeypatch, "unkeep", "--work", tmp_path / "again", tmp_path / "kept.xz") == 2

    said = capsys.readouterr().err
    assert said == f"error: {there}: is there already; name another folder\n"
    assert [path for path in (tmp_path / "again").rglob("*") if path.is_file()] == [there]
    assert there.read_text() == "mine"


def flipped(kept: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(kept) // 2
    return kept[:middle] + bytes([kept[middle] ^ 4]) + kept[middle + 1 :]


def renamed(kept: bytes) -> bytes:
    """A sound file with a shard whose name leads out of the folder."""
    arrays = dict(np.load(io.BytesIO(lzma.decompress(kept))))
    tables = arrays["tables"].tobytes().replace(b'"01-slt-00003"', b'"../slt-00003"')
    arrays["tables"] = np.frombuffer(tables, np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return lzma.compress(file.getvalue())


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda kept: kept[: len(kept) // 2],
        flipped,
        renamed,
        lambda _: b"",
        lambda _: b"no such thing",
        lambda _: lzma.compress(b"something else"),
    ],
    ids=["cut", "flipped", "renamed", "empty", "text", "text-in-xz"],
)
def test_of_a_damaged_file_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoiled: Callable[[bytes], bytes],
) -> None:
    kept = tmp_path / "kept.xz"
    keep(encoded(tmp_path / "first"), [0, 1], kept)
    kept.write_bytes(spoiled(kept.read_bytes()))

    assert main(monkeypatch, "unkeep", "--work", tmp_path / "again", kept) == 2

    assert capsys.readouterr().err == f"error: {kept}: damaged, or no file that keep wrote\n"
    assert not (tmp_path / "again").exists()


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "unkeep", "--work", tmp_path, tmp_path / "none.xz") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert f"{tmp_path}/none.xz" in said
    assert said.count("\n") == 1


def test_what_does_not_fit_together_is_not_kept(tmp_path: Path) -> None:
    work, kept = encoded(tmp_path / "first"), tmp_path / "kept.xz"
    with pytest.raises(KeptError, match=r"codes of \S+ are int16 \(3, 11\), but int16 \(4, 11\)"):
        keep(work, [0, 1], kept, hearings=4)

    labels, found = work / "data/01-slt-00003.labels.npy", work / "codes/01-slt-00003.npy"
    whole = np.load(labels)
    np.save(labels, whole[:-1])
    with pytest.raises(KeptError, match=r"labels of 01-slt-00003 are uint8 \(39,\)"):
        keep(work, [0, 1], kept)

    np.save(labels, whole)
    np.save(found, np.load(found)[:2])
    with pytest.raises(KeptError, match=r"codes of 01-slt-00003 are int16 \(2, 10\)"):
        keep(work, [0, 1], kept)

    found.unlink()
    with pytest.raises(FileNotFoundError, match=r"01-slt-00003\.npy"):
        keep(work, [0, 1], kept)
    assert not kept.exists()
