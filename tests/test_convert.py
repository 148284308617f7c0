"""Converting checkpoints: every tensor once, killed and taken up, nothing half-written."""

import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Checkpoint, Run, command_environment, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mosstalk import Pipeline
from mosstalk.checkpoints.convert import convert
from mosstalk.checkpoints.restartable import require_space
from mosstalk.errors import CheckpointError, OutputError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.codec_folder import load_codec

CPU = torch.device("cpu")
SMALL_SHARDS = 0.0005
"""Shards of half a MiB: the tiny model lies in seven."""
KILLS = 20
CONVERTING = f"""
import os, sys, torch
from pathlib import Path
from mosstalk.checkpoints.convert import convert

for _ in sys.stdin:
    child = os.fork()
    if not child:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), torch.float32, shard_gib={SMALL_SHARDS})
        os._exit(0)
    print(child, flush=True)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    print("ended", flush=True)
"""
"""Converts in a process for every line it reads, forked because importing torch takes seconds.

An ended one is left a zombie, so that its number is nobody else's when it is killed too late.
"""


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def left_beside(out: Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture(scope="module")
def converted(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny checkpoint, converted in its own precision into several shards."""
    folder = tmp_path_factory.mktemp("converted")
    for part in ("model", "codec"):
        convert(getattr(tiny, part), folder / part, torch.bfloat16, shard_gib=SMALL_SHARDS)
    return Checkpoint(folder / "model", folder / "codec")


def test_tensors_read_back_bit_identical(tiny: Checkpoint, converted: Checkpoint) -> None:
    before = load_language_model(tiny.model, device=CPU).state_dict()
    after = load_language_model(converted.model, device=CPU).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_every_published_tensor_is_in_the_result_once(
    tiny: Checkpoint, converted: Checkpoint
) -> None:
    published = sum(value.numel() for value in load_file(tiny.model / "model.safetensors").values())
    shards = sorted(converted.model.glob("model-*.safetensors"))
    assert len(shards) > 3
    found = [value.numel() for shard in shards for value in load_file(shard).values()]
    assert sum(found) == published
    # Eight tensors a layer instead of eleven.
    assert len(found) == 6 + 8 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_do_not_change(tiny: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    convert(tiny.model, tmp_path / "out", dtype, shard_gib=SMALL_SHARDS)
    rows = torch.tensor([[[7, 512], [260, 3], [260, 9], [65, 512]]])
    found = []
    for folder in (tiny.model, tmp_path / "out"):
        model = load_language_model(folder, device=CPU, dtype=torch.float32)
        with torch.inference_mode():
            found.append(model(rows, model.new_cache()))
    # float16 has more mantissa than the stored bfloat16, and no value here is too small for it.
    torch.testing.assert_close(found[0].text, found[1].text, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0].audio, found[1].audio, rtol=0, atol=1e-5)


def test_the_codec_reads_back_the_same_and_says_its_sizes(
    tiny: Checkpoint, converted: Checkpoint
) -> None:
    assert not list(converted.codec.rglob("*.pt"))
    for name in ("config.json", "hift.json"):
        assert (converted.codec / "flow" / name).is_file()
    before, after = (load_codec(part.codec, device=CPU) for part in (tiny, converted))
    for part in ("tokenizer", "flow", "vocoder"):
        old, new = getattr(before, part).state_dict(), getattr(after, part).state_dict()
        assert all(torch.equal(value, new[name]) for name, value in old.items())
    assert (converted.codec / "voices" / "default.safetensors").is_file()


def test_a_converted_checkpoint_answers_as_the_published_one(
    tiny: Checkpoint, converted: Checkpoint
) -> None:
    from mosstalk import Script

    rows = []
    for part in (tiny, converted):
        chat = Pipeline.load(part.model, part.codec, device="cpu").chat()
        chat.read("hello")
        list(chat.answer(script=Script.parse("speech:6")))
        rows.append(chat.conversation.rows)
    assert rows[0] == rows[1]


def test_the_manifest_has_the_hashes_of_sources_and_results(
    tiny: Checkpoint, converted: Checkpoint
) -> None:
    for before, after in ((tiny.model, converted.model), (tiny.codec, converted.codec)):
        manifest = json.loads((after / "mosstalk.json").read_text())
        sources = {name: facts["sha256"] for name, facts in manifest["sources"].items()}
        assert sources == files_of(before)
        results = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        assert results == {k: v for k, v in files_of(after).items() if k != "mosstalk.json"}


@pytest.mark.slow
def test_killed_twenty_times_it_ends_in_the_same_bytes(
    tiny: Checkpoint, cache_folder: Path, tmp_path: Path
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    convert(tiny.model, undisturbed, torch.float32, shard_gib=SMALL_SHARDS)
    words = [sys.executable, "-c", CONVERTING, str(tiny.model), str(out)]
    moments, killed = random.Random(1), 0
    with subprocess.Popen(
        words,
        env=command_environment(cache_folder),
        bufsize=0,  # else select would not see a line that was read with the one before it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        while killed < KILLS:
            parent.stdin.write(b"begin\n")
            converting = int(parent.stdout.readline())
            if not select.select([parent.stdout], [], [], moments.uniform(0, 0.06))[0]:
                os.kill(converting, signal.SIGKILL)
                killed += 1
            assert parent.stdout.readline() == b"ended\n"
            if out.exists():
                assert files_of(out) == files_of(undisturbed)
                shutil.rmtree(out)
    convert(tiny.model, out, torch.float32, shard_gib=SMALL_SHARDS)
    assert files_of(out) == files_of(undisturbed)
    assert left_beside(out) == []


def test_a_run_that_was_stopped_is_taken_up(tiny: Checkpoint, tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop_at_the_third_shard(what: str, *_: int) -> None:
        if what.startswith("shard 3"):
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(tiny.model, out, torch.float32, stop_at_the_third_shard, SMALL_SHARDS)
    assert not out.exists()
    # What safetensors leaves of a shard when it is killed.
    (tmp_path / ".out.converting" / ".tmpHalf").write_bytes(b"half")
    result = convert(tiny.model, out, torch.float32, shard_gib=SMALL_SHARDS)
    assert result.resumed == 2
    assert ".tmpHalf" not in files_of(out)


def test_another_precision_does_not_take_up_the_run_of_the_first(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    class Stop(BaseException):
        pass

    def stop(what: str, *_: int) -> None:
        if what.startswith("shard 3"):
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(tiny.model, out, torch.float32, stop, SMALL_SHARDS)
    assert convert(tiny.model, out, torch.float16, shard_gib=SMALL_SHARDS).resumed == 0
    for shard in out.glob("model-*.safetensors"):
        with safe_open(shard, framework="pt") as handle:
            assert {handle.get_slice(n).get_dtype() for n in handle.keys()} == {"F16"}  # noqa: SIM118


def test_a_source_that_changes_meanwhile_is_refused(tiny: Checkpoint, tmp_path: Path) -> None:
    source, out = tiny.copy(tmp_path / "copy").model, tmp_path / "out"

    def meddle(what: str, *_: int) -> None:
        if what.startswith("shard 2"):
            (source / "tokenizer.json").write_text("{}")

    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(source, out, torch.float32, meddle, SMALL_SHARDS)
    assert not out.exists()
    assert left_beside(out) == []


def test_values_that_overflow_float16_are_counted(tiny: Checkpoint, tmp_path: Path) -> None:
    source = tiny.copy(tmp_path / "copy").model

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.text_norm.weight"][:3] = 1e6
        tensors["model.audio_norm.weight"][:2] = -1e6

    edit(source, enlarge)
    with pytest.raises(CheckpointError, match="5 values in 2 tensors overflow float16"):
        convert(source, tmp_path / "out", torch.float16)
    assert left_beside(tmp_path / "out") == []


def test_a_nan_is_refused_by_name(tiny: Checkpoint, tmp_path: Path) -> None:
    source = tiny.copy(tmp_path / "copy").model
    edit(source, lambda tensors: tensors["audio_lm_head.weight"][0].fill_(float("nan")))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"audio_lm_head\.weight holds NaN"):
        convert(source, tmp_path / "out", torch.float32)
    assert left_beside(tmp_path / "out") == []


def test_a_disk_that_takes_no_more_leaves_nothing(
    tiny: Checkpoint, mosstalk: Run, tmp_path: Path
) -> None:
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        run = mosstalk("checkpoint", "convert", tiny.model, "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    assert "cannot be written" in refused(run)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="MiB free"):
        require_space(tmp_path / "out", 1 << 60)


def test_the_command_converts_both_halves_and_says_what_it_did(
    mosstalk: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    run = mosstalk("checkpoint", "convert", tiny.model.parent, "out", "--dtype", "fp32")
    assert run.returncode == 0, run.stderr
    assert "94 tensors accounted for once each" in run.stdout
    assert "largest anonymous memory" in run.stdout
    again = mosstalk("checkpoint", "convert", tiny.model, "out/model")
    assert "exists already" in refused(again)
    twice = mosstalk("checkpoint", "convert", "out/model", "other")
    assert "converted already" in refused(twice)
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    into_a_file = mosstalk("checkpoint", "convert", tiny.model.parent, "file")
    assert "cannot be made" in refused(into_a_file)


def test_a_layer_may_lie_in_two_shards_of_the_source(tiny: Checkpoint, tmp_path: Path) -> None:
    source = tiny.copy(tmp_path / "copy").model
    tensors = load_file(source / "model.safetensors")
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, source / file)
    (source / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(source, tmp_path / "split", torch.bfloat16, shard_gib=SMALL_SHARDS)
    convert(tiny.model, tmp_path / "whole", torch.bfloat16, shard_gib=SMALL_SHARDS)
    split, whole = files_of(tmp_path / "split"), files_of(tmp_path / "whole")
    assert {k: v for k, v in split.items() if k != "mosstalk.json"} == {
        k: v for k, v in whole.items() if k != "mosstalk.json"
    }


def test_a_layout_of_another_version_is_refused(converted: Checkpoint, tmp_path: Path) -> None:
    model = converted.copy(tmp_path).model
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"mosstalk_layout": "fused-9"}))
    with pytest.raises(CheckpointError, match="another version of mosstalk"):
        load_language_model(model, device=CPU)


def test_a_half_written_result_is_no_checkpoint(
    mosstalk: Run, converted: Checkpoint, tiny: Checkpoint, tmp_path: Path
) -> None:
    half = converted.copy(tmp_path).model
    sorted(half.glob("model-*.safetensors"))[1].unlink()
    run = mosstalk("chat", "--model", half, "--codec", tiny.codec, "--text", "hi")
    assert "no such file; the checkpoint is incomplete" in refused(run)
