"""``mosstalk doctor`` finds what is there, what is broken, and says what then does not run."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import Run, command_environment

from mosstalk.diagnostics import doctor
from mosstalk.diagnostics.doctor import KV_ROWS, full_size_bytes
from mosstalk.environment import this_command
from mosstalk.synthesis.sizes import PUBLISHED_MODEL


def findings(stdout: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(stdout)["findings"]}


def test_a_sound_machine_exits_0_and_names_the_next_command(mosstalk: Run) -> None:
    run = mosstalk("doctor")

    assert (run.returncode, run.stderr) == (0, "")
    assert "Runs here: answering questions with sound, in float32 on the CPU" in run.stdout
    assert run.stdout.splitlines()[-1] == f"Next: {this_command()} chat --text hello"


def test_the_next_command_runs(mosstalk: Run, tmp_path: Path) -> None:
    line = mosstalk("doctor").stdout.splitlines()[-1]
    words = line.removeprefix(f"Next: {this_command()} ").split()

    assert mosstalk(*words, "--script", "speech:5").returncode == 0
    assert soundfile.info(tmp_path / "answer.wav").frames == 5 * 1920


def test_the_document_has_what_the_text_has(mosstalk: Run) -> None:
    text = mosstalk("doctor").stdout
    document = json.loads(mosstalk("doctor", "--json").stdout)

    assert document["exit_code"] == 0
    assert document["next_command"] in text
    for finding in document["findings"]:
        assert finding["name"] in text
        assert f"for {finding['purpose']}" in text
        assert (f"without it: {finding['without']}" in text) or finding["state"] == "ok"


def test_versions_are_those_that_are_installed(mosstalk: Run) -> None:
    found = findings(mosstalk("doctor", "--json").stdout)

    for package in ("mosstalk", "numpy", "safetensors", "tokenizers", "soxr"):
        assert (found[package]["state"], found[package]["detail"]) == ("ok", version(package))
    assert torch.__version__ in found["torch"]["detail"]
    assert soundfile.__libsndfile_version__ in found["libsndfile"]["detail"]
    assert all(name in found["libsndfile"]["detail"] for name in ("WAV", "FLAC", "OGG"))
    assert f"{os.cpu_count()} cores" in found["memory and cores"]["detail"]


def test_optional_packages_are_found_without_importing_them(cache_folder: Path) -> None:
    probe = (
        "import sys; from mosstalk.diagnostics.doctor import examine;"
        "print({f.name: f.state for f in examine().findings});"
        "print(sorted({'onnxruntime', 'fastapi', 'kaldi_native_fbank'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe],
        env=command_environment(cache_folder),
        capture_output=True,
        text=True,
        check=True,
    )
    states, imported = run.stdout.splitlines()
    there = "ok" if find_spec("onnxruntime") else "missing"
    assert f"'onnxruntime': '{there}'" in states
    assert all(f"'{name}'" in states for name in ("silero-vad", "aiortc", "redis", "ray"))
    assert imported == "[]"


def run_with(package: Path, cache: Path) -> "subprocess.CompletedProcess[str]":
    """The doctor where ``package`` stands before what is installed."""
    return subprocess.run(
        [sys.executable, "-m", "mosstalk.cli", "doctor", "--json"],
        env=command_environment(cache) | {"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("package", "name", "lost"),
    [
        ("soxr", "soxr", "chat does not run"),
        ("torch", "torch", "no model runs"),
        # The sizes of the published model cannot be counted without it.
        ("safetensors", "safetensors", "no model runs"),
        # Slow: a process that imports torch each; they are looked at as soxr is.
        pytest.param(*("soundfile", "libsndfile", "chat does not run"), marks=pytest.mark.slow),
        pytest.param(*("tokenizers", "tokenizers", "no model runs"), marks=pytest.mark.slow),
    ],
)
def test_a_broken_package_is_a_finding_and_no_traceback(
    package: str, name: str, lost: str, cache_folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / f"{package}.py"
    broken.write_text("raise OSError('cannot load library: wrong ELF class')\n")

    run = run_with(broken, cache_folder)

    assert (run.returncode, run.stderr) == (1, "")
    finding = findings(run.stdout)[name]
    assert finding["state"] == "unusable"
    assert finding["detail"] == "cannot load library: wrong ELF class"
    assert lost in finding["without"]
    document = json.loads(run.stdout)
    assert document["runs"][0] == f"Cannot answer with sound here: {name}"
    assert document["next_command"].endswith(f"pip install --force-reinstall {package}")


# Slow: a process; each broken package alone is shown above.
@pytest.mark.slow
def test_everything_that_is_broken_is_in_the_next_command(
    cache_folder: Path, tmp_path: Path
) -> None:
    for name in ("soxr", "soundfile"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('gone')\n")

    document = json.loads(run_with(tmp_path / "soxr.py", cache_folder).stdout)

    assert document["runs"][0] == "Cannot answer with sound here: libsndfile, soxr"
    assert document["next_command"].endswith("--force-reinstall soundfile soxr")


# Slow: a process; that none of them is imported is shown above.
@pytest.mark.slow
def test_a_broken_optional_package_changes_no_exit_code(cache_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "onnxruntime.py"
    broken.write_text("raise OSError('never imported')\n")

    assert run_with(broken, cache_folder).returncode == 0


def test_a_cache_folder_that_cannot_be_is_a_finding(
    mosstalk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSSTALK_CACHE", "/proc/no-cache")
    run = mosstalk("doctor")
    assert "cannot be used  cache folder" in run.stdout
    # The model that ships needs no cache: without one, only the synthetic model is lost.
    assert run.returncode == 0
    assert "--model synthetic does not run" in run.stdout


def test_full_size_is_counted_from_the_published_shapes() -> None:
    model, codec, kv = full_size_bytes()
    # 9.1 billion parameters in bf16; 160 KiB a row; the codec's parts are a tenth of that.
    assert model == pytest.approx(2 * 9.1e9, rel=0.01)
    assert kv == KV_ROWS * 160 * 1024
    assert 1 * 2**30 < codec < 3 * 2**30
    assert PUBLISHED_MODEL["num_hidden_layers"] == 36


def test_the_estimate_is_labelled_and_says_what_is_in_it(mosstalk: Run) -> None:
    text = mosstalk("doctor").stdout
    whole = sum(full_size_bytes()) / 2**30

    assert f"{whole:.1f} GiB (model in bf16 " in text
    assert "an estimate from bytes, without working memory" in text
    fits = "at full size would" if torch.cuda.is_available() else "No GPU that torch can use"
    assert fits in text


def test_what_is_missing_comes_with_the_command_that_brings_it() -> None:
    found = doctor._optional("mosstalk-no-such-package", "nothing", "nothing", "server")
    shown = doctor.printed(doctor.Diagnosis([found]))
    assert "to get it: make setup EXTRAS=server" in shown  # a clone's way
