"""Built folders: made whole or not at all, answering as their sources, looked at, refused."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import Checkpoint, Run, command_environment, refused
from torch import Tensor, nn
from typer.testing import CliRunner

from mosstalk import Pipeline
from mosstalk.build.check import (
    bound_of,
    check_codec,
    check_language,
    checked_codes,
    plain_hops,
    require,
)
from mosstalk.build.make import at_work, clear_leftovers
from mosstalk.cli import app
from mosstalk.codec.hift_vocoder import HiftOptions
from mosstalk.codec.speech_decoder import DecoderOptions, SpeechDecoder, SpeechStream
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.engine.layers import Layers
from mosstalk.errors import BuildError, CheckpointError, DeviceError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.codec_folder import load_codec
from mosstalk.prepared.default_models import (
    BuiltEngine,
    chosen_codec,
    chosen_language_model,
    chosen_model,
    default_model,
)
from mosstalk.prepared.machine import foreign, machine_of
from mosstalk.prepared.start import configs_of
from mosstalk.reply_options import SoundRequest
from mosstalk.server.ipc import BY_HAND, WorkerOptions, as_built
from mosstalk.server.loading import load, require_room, room_refusal

GIB = 2**30
LIMITS = ("--max-sessions", "3", "--max-rows", "600")


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process."""
    line = [str(word) for word in words]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    return subprocess.CompletedProcess(line, result.exit_code, result.stdout, result.stderr)


def build(tiny: Checkpoint, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return command("build", tiny.model, tiny.codec, out, *LIMITS, "--device", "cpu", *words)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def built(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, built in bf16; nobody changes it."""
    out = tmp_path_factory.mktemp("built") / "engine"
    run = build(tiny, out)
    assert run.returncode == 0, run.stderr
    assert "there are no kernels to compile, and none to tune" in run.stderr
    assert "peak host memory" in run.stdout
    assert run.stdout.endswith(f"serve --model {out}\n")
    return out


def answer(here: Run, out: Path, *words: str | Path) -> tuple[list[float], dict[str, Any]]:
    run = here("chat", "--text", "Hello", "--out", out, "--json", *words)
    assert run.returncode == 0, run.stderr
    samples, _ = soundfile.read(out)
    document: dict[str, Any] = json.loads(run.stdout)
    return samples.tolist(), document


def test_a_built_folder_answers_as_its_sources(built: Path, here: Run, tiny: Checkpoint) -> None:
    words = ("--script", "speech:12", "--device", "cpu")
    found, _ = answer(here, Path("built.wav"), "--model", built, *words)
    expected, _ = answer(
        here, Path("own.wav"), "--model", tiny.model, "--codec", tiny.codec, *words
    )
    assert found == expected
    assert len(found) > 0


# Slow: a second build and a second quantised model; that a folder answers as its sources is
# above.
@pytest.mark.slow
def test_an_fp8_folder_answers_as_its_quantised_source(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    assert build(tiny, tmp_path / "fp8", "--precision", "fp8").returncode == 0
    quantised = command("checkpoint", "quantize", tiny.model, tmp_path / "q", "--device", "cpu")
    assert quantised.returncode == 0
    words = ("--script", "speech:8", "--device", "cpu")
    found, _ = answer(here, Path("a.wav"), "--model", tmp_path / "fp8", *words)
    source = ("--model", tmp_path / "q", "--codec", tiny.codec)
    assert found == answer(here, Path("b.wav"), *source, *words)[0]
    values = BuiltEngine.read(tmp_path / "fp8").values
    assert values["dtypes"]["shared block"] == "bfloat16, float32, float8_e4m3fn"
    assert values["dtypes"]["audio block"] == "bfloat16"

    bf16 = command("build", tmp_path / "q", tiny.codec, tmp_path / "no", "--device", "cpu")
    assert "is quantised" in refused(bf16)


# Slow: one more build, without a voice of the default name.
@pytest.mark.slow
def test_what_is_to_be_tried_next_names_the_voice_that_there_is(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    sources = tiny.copy(tmp_path)
    voices = sources.codec / "voices"
    (voices / "default.safetensors").rename(voices / "ada.safetensors")
    run = build(sources, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(f"serve --model {tmp_path / 'out'} --voice ada\n")


# Slow: one more build, without one folder.
@pytest.mark.slow
def test_a_codec_without_voices_is_built_as_well(tiny: Checkpoint, tmp_path: Path) -> None:
    sources = tiny.copy(tmp_path)
    shutil.rmtree(sources.codec / "voices")
    run = build(sources, tmp_path / "out", "--embeddings", "host")
    assert run.returncode == 0, run.stderr
    assert left_in(tmp_path / "out") == ["cache", "codec", "engine.json", "model"]
    assert not (tmp_path / "out" / "codec" / "voices").exists()
    start = as_built(WorkerOptions(model=tmp_path / "out"), None, None, 64)
    assert start.embeddings == "host"


def test_a_second_build_is_refused_and_changes_nothing(built: Path, tiny: Checkpoint) -> None:
    before = (built / "engine.json").read_bytes()
    assert "exists already" in refused(build(tiny, built))
    assert (built / "engine.json").read_bytes() == before
    assert left_in(built.parent) == ["engine"]


def begun(tiny: Checkpoint, out: Path) -> "subprocess.Popen[bytes]":
    """A build in a process of its own; its first line says that it has written something."""
    words = ["build", tiny.model, tiny.codec, out, "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-m", "mosstalk.cli", *map(str, words)],
        env=command_environment(out.parent / "cache"),
        stderr=subprocess.PIPE,
    )


# Slow: two processes; ``test_synthesize`` ends one mid way, through the same folder of a maker.
@pytest.mark.slow
def test_ended_mid_way_a_build_leaves_nothing(tiny: Checkpoint, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("terminated", "killed")]
    for folder in folders:
        folder.mkdir()
    with begun(tiny, folders[0] / "out") as terminated:
        assert terminated.stderr
        assert b"weights" in terminated.stderr.readline()
        terminated.send_signal(signal.SIGTERM)
        assert terminated.wait(60) == 143, terminated.stderr.read()
    assert left_in(folders[0]) == []
    with begun(tiny, folders[1] / "out") as killed:
        assert killed.stderr
        assert b"weights" in killed.stderr.readline()
        assert clear_leftovers(folders[1] / "out") == 0, "its maker is at work"
        assert len(left_in(folders[1])) == 1
        killed.kill()
    # Nothing can tidy up after SIGKILL; the next build of that name does.
    assert "out" not in left_in(folders[1])
    assert clear_leftovers(folders[1] / "out") == 1
    assert left_in(folders[1]) == []


ENDED = """
import os, signal, sys
from pathlib import Path
from mosstalk.cli.build import _ended_in_order

with _ended_in_order() as unfinished:
    unfinished.append(Path(sys.argv[1]))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("goes on")
    except BaseException:
        print("goes on all the same")
"""


def test_no_code_that_catches_all_errors_keeps_a_build_from_ending(tmp_path: Path) -> None:
    """Some calls of torch catch all: an exception of a signal's handler would be lost there."""
    part = tmp_path / "part"
    part.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", ENDED, part], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr) == (143, "", "")
    assert not part.exists()


def test_folders_that_others_make_are_no_leftovers(tmp_path: Path) -> None:
    part = tmp_path / ".out.abc.part"
    part.mkdir()
    with at_work(part):
        pass
    assert clear_leftovers(tmp_path / "out") == 0
    assert part.is_dir()


def test_inspect_says_what_it_is(built: Path) -> None:
    run = command("checkpoint", "inspect", built, "--hashes")
    assert run.returncode == 0, run.stdout
    for words in (
        "4 shared + 2 text + 2 audio = 8 KV layers",
        "paged, always",
        "packed, always",
        "verified on",
        "3 sessions, 600 rows",
        f"torch {torch.__version__}",
        "the package's: not tuned",
        "sound",
    ):
        assert words in run.stdout
    document = json.loads(command("checkpoint", "inspect", built, "--json").stdout)
    assert document["weights"] == "synthetic"
    assert document["tiles"] is None
    assert document["problems"] == []
    assert all(check["passed"] for check in document["checks"])


def test_inspect_names_what_was_changed_or_is_gone(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    shutil.copytree(built, out)
    (out / "codec" / "flow" / "hift.pt").unlink()
    config = out / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    run = command("checkpoint", "inspect", out, "--hashes")
    assert run.returncode == 1
    assert "codec/flow/hift.pt is missing" in run.stdout
    assert "model/config.json is not the file" in run.stdout
    assert "model/config.json" not in command("checkpoint", "inspect", out).stdout

    (out / "tiles.json").write_text("{")
    assert "tiles.json: damaged" in command("checkpoint", "inspect", out).stdout
    (out / "tiles.json").unlink()
    values = json.loads((out / "engine.json").read_text())
    tuned = {"lines": 16, "replaced": 2, "tried": 112, "dropped": 0, "gain": {"1": 0.031}}
    (out / "engine.json").write_text(json.dumps(values | {"tiles": tuned}))
    found = command("checkpoint", "inspect", out).stdout
    assert "2 of 16 replaced, 112 tried; time of all layers' products at 1 row: -3.1%" in found
    assert "tiles.json is missing" in found
    (out / "engine.json").write_text(json.dumps(values | {"format": "mosstalk-engine-9"}))
    assert "mosstalk-engine-9" in refused(command("checkpoint", "inspect", out))
    with pytest.raises(CheckpointError, match="build it again"):
        chosen_model(out, None)
    less = {name: value for name, value in values.items() if name != "machine"}
    for damaged, lost in ((less, "machine"), (values | {"settings": {}}, "codec_memory_mib")):
        (out / "engine.json").write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match=f"damaged: no {lost}; build it again"):
            BuiltEngine.read(out)
    (out / "engine.json").write_text("{")
    assert "damaged" in refused(command("checkpoint", "inspect", out))


def test_a_foreign_cache_is_named() -> None:
    here = machine_of(torch.device("cpu"), "synthetic")
    card = {"card": "NVIDIA H200", "capability": "9.0", "torch": "2.11", "triton": "3.6.0"}
    assert foreign(here, here) == []
    assert foreign(here | card, here | card) == []
    other = foreign(here | card, here | card | {"card": "NVIDIA L4", "capability": "8.9"})
    assert other == [
        "card is NVIDIA L4 here, and NVIDIA H200 where it was built",
        "capability is 8.9 here, and 9.0 where it was built",
    ]
    newer = foreign(here | card, here | card | {"triton": "3.7.0"})
    assert newer == ["triton is 3.7.0 here, and 3.6.0 where it was built"]
    assert "no GPU here" in foreign(here | card, here)[0]
    assert "without a GPU" in foreign(here, here | card)[0]


def test_a_built_folder_stands_for_model_and_codec_and_settings(built: Path) -> None:
    assert chosen_model(built, None) == (built / "model", built / "codec")
    assert chosen_language_model(built) == built / "model"
    assert chosen_codec(built) == built / "codec"
    asked = WorkerOptions(model=built)
    own = as_built(asked, None, None, 64)
    assert (own.sessions, own.context_rows, own.embeddings) == (3, 600, "device")
    chosen = as_built(asked, 2, 100, 64, "host")
    assert (chosen.sessions, chosen.context_rows, chosen.embeddings) == (2, 100, "host")
    other = as_built(WorkerOptions(), None, None, 64)
    assert (other.sessions, other.context_rows, other.embeddings) == (64, None, "device")


def test_a_start_that_cannot_fit_is_refused_with_the_setting(built: Path, tiny: Checkpoint) -> None:
    options = WorkerOptions(model=built, device="cpu", detector=BY_HAND, memory_bytes=100_000)
    options = as_built(options, None, None, 64)
    said = r"may have 600: give --kv-gib (0\.\d+), or --max-rows \d+"
    with pytest.raises(DeviceError, match=said) as refusal:
        load(options, lambda *_: None)
    advised = float(str(refusal.value).split("give --kv-gib ")[1].split(",")[0])
    loaded = load(replace(options, memory_bytes=int(advised * GIB)), lambda *_: None)
    pool = loaded.host.engine.core.pool
    assert 600 <= pool.size * pool.rows < 2 * 600

    plain = WorkerOptions(model=tiny.model, codec=tiny.codec, memory_bytes=100_000)
    with pytest.raises(DeviceError, match="one conversation may have 10240"):
        require_room(plain, tiny.model, tiny.codec, torch.device("cpu"), torch.float32)


def test_what_a_gpu_cannot_hold_is_refused_before_weights_are_read() -> None:
    options = replace(WorkerOptions(), sessions=1, context_rows=8192)
    published = configs_of()
    assert room_refusal(options, published, 24 * GIB) is None
    refusal = room_refusal(options, published, 18 * GIB)
    assert refusal
    assert "18.0 GiB of the GPU are free" in refusal
    assert "mosstalk build --precision fp8" in refusal
    crowd = room_refusal(replace(options, sessions=64), published, 24 * GIB)
    assert crowd
    assert "--max-sessions" in crowd
    many = replace(options, sessions=256, context_rows=1700)
    assert room_refusal(many, published, 75 * GIB)
    faster = replace(many, sound=SoundRequest(steps=5))
    assert room_refusal(faster, published, 75 * GIB) is None


def test_wrong_inputs_are_refused_in_a_line(tiny: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "must be bf16 or fp8, not" in refused(build(tiny, out, "--precision", "int4"))
    assert "give MODEL CODEC OUT" in refused(command("build", tiny.model, out))
    random = command("build", tiny.model, tiny.codec, out, "--random-weights", "tiny")
    assert "in place of MODEL and CODEC" in refused(random)
    assert "must be full or tiny" in refused(command("build", out, "--random-weights", "huge"))
    assert "no such folder" in refused(command("build", tmp_path / "x", tiny.codec, out))
    assert "no such folder" in refused(command("build", tiny.model, tmp_path / "x", out))
    words = ("--max-rows", "20000", "--device", "cpu")
    assert "10240 rows" in refused(command("build", tiny.model, tiny.codec, out, *words))
    assert "has no engine.json" in refused(command("bench", "start", tiny.model))
    assert left_in(tmp_path) == []


def test_a_spoiled_engine_does_not_pass(tiny: Checkpoint, pipeline: Pipeline) -> None:
    model = load_language_model(tiny.model, device=torch.device("cpu"), dtype=torch.float32)
    core = EngineCore(model, pipeline.ids, EngineOptions(blocks=64))
    sound = list(check_language(core))
    require(sound)
    assert max(check.error for check in sound) <= bound_of(model)
    spoiled = load_language_model(tiny.model, device=torch.device("cpu"), dtype=torch.float32)
    product = spoiled.get_submodule("model.shared_block.layers.2.mlp.down_proj")
    product.get_parameter("weight").mul_(1.05)
    runner = core.runner
    runner.layers = Layers(spoiled, runner.store, runner.layers.latest)
    with pytest.raises(BuildError, match=r"check failed: 24 rows of text, text head.* verify"):
        require(list(check_language(core)))


def test_a_spoiled_decoder_does_not_pass(pipeline: Pipeline) -> None:
    codec, voice = pipeline.codec, pipeline.codec.voice("default")
    plain = plain_hops(codec, voice)
    assert len(plain) >= 2
    require(check_codec(SpeechDecoder(codec), codec, voice, plain))
    decoder = SpeechDecoder(codec)
    plain[1] = plain[1] * 1.05
    with pytest.raises(BuildError, match="check failed: codec, hop 2"):
        require(check_codec(decoder, codec, voice, plain))


def test_a_decoder_in_16_bit_is_held_to_its_spectrum(pipeline: Pipeline) -> None:
    codec, voice = pipeline.codec, pipeline.codec.voice("default")
    plain = plain_hops(codec, voice)
    options = DecoderOptions(hift=HiftOptions(dtype="bfloat16"))
    decoder = SpeechDecoder(codec, options)
    checks = check_codec(decoder, codec, voice, plain, torch.bfloat16)
    require(checks)
    assert all(check.error > 0 for check in checks)
    shifted = [torch.roll(sound, 700) for sound in plain]
    with pytest.raises(BuildError, match="codec, hop 1"):
        require(check_codec(decoder, codec, voice, shifted, torch.bfloat16))


def test_what_float16_rounds_passes_and_one_wrong_code_does_not() -> None:
    codec = load_codec(default_model()[1], device=torch.device("cpu"))
    voice, decoder = codec.voice("default"), SpeechDecoder(codec)

    def rounded(_: nn.Module, __: tuple[Tensor, ...], found: Tensor) -> Tensor:
        return found.half().float()

    def in_16_bit(codes: list[int]) -> list[Tensor]:
        parts = [each for each in codec.flow.modules() if isinstance(each, nn.Linear | nn.Conv1d)]
        hooks = [each.register_forward_hook(rounded) for each in parts]
        with torch.inference_mode():
            sound = SpeechStream(codec, voice).push(codes)
        for hook in hooks:
            hook.remove()
        return sound

    codes = checked_codes(codec)
    checks = check_codec(decoder, codec, voice, in_16_bit(codes), torch.float16)
    require(checks)
    assert all(check.error > 0 for check in checks)
    codes[7] = (codes[7] + 1000) % codec.flow.config.vocab_size
    with pytest.raises(BuildError, match="codec, hop 2"):
        require(check_codec(decoder, codec, voice, in_16_bit(codes), torch.float16))


# Slow: starts processes; how starts are added up is ``test_bench_command``'s.
@pytest.mark.slow
def test_a_start_is_timed_beside_the_disk(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "starts.json"
    words = ("--device", "cpu", "--runs", "1", "--json", target)
    run = command("bench", "start", built, *words)
    assert run.returncode == 0, run.stderr
    found = json.loads(target.read_text())
    assert found["disk"]["bytes"] == found["weight_bytes"] > 0
    (start,) = found["starts"]
    assert start["first_audio_s"] == pytest.approx(sum(start["parts_s"].values()))
    assert start["compiled"] == 0
    assert "start 1" in run.stdout
