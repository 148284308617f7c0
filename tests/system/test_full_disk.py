"""A disk that fills while a checkpoint is converted: a real small file system, really full."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Checkpoint, require_program

from mosstalk.checkpoints.convert import convert
from mosstalk.errors import OutputError

pytestmark = pytest.mark.system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    mount, umount = require_program("mount"), require_program("umount")
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount file systems here")
    yield disk
    subprocess.run([umount, str(disk)], check=True)


def test_a_disk_that_fills_meanwhile_is_told_and_nothing_is_left(
    tiny: Checkpoint, small_disk: Path
) -> None:
    filler = small_disk / "somebody-elses-file"

    def fill(what: str, *_: int) -> None:
        if what.startswith("shard 3") and not filler.exists():
            room = shutil.disk_usage(small_disk).free
            filler.write_bytes(b"x" * (room - 65536))

    with pytest.raises(OutputError, match="No space left on device"):
        convert(tiny.model, small_disk / "out", torch.float32, fill, shard_gib=0.0005)
    assert [path.name for path in small_disk.iterdir()] == [filler.name]


def test_too_small_a_disk_is_told_before_anything_is_written(
    tiny: Checkpoint, small_disk: Path
) -> None:
    (small_disk / "full").write_bytes(b"x" * (8 << 20))
    with pytest.raises(OutputError, match="MiB free"):
        convert(tiny.model, small_disk / "out", torch.float32)
    assert [path.name for path in small_disk.iterdir()] == ["full"]
