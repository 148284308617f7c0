"""What the recorder writes passes ``mosstalk verify``: its form and its meaning.

The public code is not here: stand-ins take its place, and that they behave as the real thing
is not shown here.
"""

import json
import re
import subprocess
import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import QUESTION, ROOT, Checkpoint, Run
from reference_stand_ins import LIBRARY, StandInProcessor
from safetensors.torch import load_file

import record_reference
from mosstalk import Pipeline, read_audio
from mosstalk.files import new_folder
from mosstalk.synthesis.sizes import TINY
from mosstalk.synthesis.weights import Synthesis, synthesize
from reference_codec import find_parts, listening
from reference_rows import modes_of, new_rows

TOOL = ROOT / "tools" / "record_reference.py"
ROWS = 24
COMPONENTS = ("flow", "hift", "language-model", "speech-tokenizer")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 1.3 s of the question, 16 kHz, mono, 16 bit."""
    path = tmp_path_factory.mktemp("clip") / "question-16k.wav"
    samples = read_audio(QUESTION, 16_000).samples[:20_800]
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def words(tiny: Checkpoint, clip: Path, out: Path) -> list[str]:
    pairs = {
        "--model": tiny.model,
        "--codec": tiny.codec,
        "--wav": clip,
        "--voice": clip,
        "--out": out,
        "--device": "cpu",
        "--max-new-tokens": ROWS,
        "--logits": 5,
    }
    return [str(word) for pair in pairs.items() for word in pair]


whole_recording = pytest.mark.slow
"""Slow: a tool that is run once for a checkpoint records and verifies each component."""


@pytest.fixture(scope="module")
def recorded(tiny: Checkpoint, clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything the recorder writes for the stand-ins."""
    out = tmp_path_factory.mktemp("recorded") / "cases"
    assert record_reference.main(words(tiny, clip, out), LIBRARY) == 0
    return out


def cases(recorded: Path) -> list[Path]:
    return [recorded / name for name in COMPONENTS]


@whole_recording
def test_every_component_is_recorded_and_passes_verify(recorded: Path, mosstalk: Run) -> None:
    run = mosstalk("verify", *sorted(recorded.iterdir()), "--json")

    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(run.stdout)
    assert sorted(case["name"] for case in document["cases"]) == sorted(COMPONENTS)
    compared = {check["name"] for case in document["cases"] for check in case["checks"]}
    assert {"offline.mel", "noise_head", "wave", "f0", "clip0.tokens", "clip0.log_mel"} <= compared
    runs = [name for name in compared if name.endswith(".rows")]
    assert len(runs) == 2 * 2 * 2
    assert [case["not_compared"] for case in document["cases"]] == [[], [], [], []]


@whole_recording
def test_logits_of_the_first_steps_are_enough(recorded: Path) -> None:
    tensors = load_file(recorded / "language-model" / "expected.safetensors")
    stem = "clip0_to_audio.greedy_penalty"

    assert len(tensors[f"{stem}.rows"]) > 5
    assert tensors[f"{stem}.text_logits"].shape == (5, 264)
    assert tensors[f"{stem}.audio_logits"].shape == (5, 1152)
    assert not any("greedy_plain" in name and "logits" in name for name in tensors)


@whole_recording
def test_weights_stay_where_they_are_and_are_named(recorded: Path, tiny: Checkpoint) -> None:
    for folder in cases(recorded):
        names = {path.name for path in folder.iterdir()}
        assert names == {"case.json", "expected.safetensors", "NOTES.txt"}
        wanted = tiny.model if folder.name == "language-model" else tiny.codec
        assert json.loads((folder / "case.json").read_text())["weights"] == str(wanted)


# Slow: verifies every component twice more; ``test_goldens`` finds a weight 2 % off.
@pytest.mark.slow
def test_other_weights_are_out_of_bounds_and_the_same_elsewhere_are_not(
    recorded: Path, tiny: Checkpoint, mosstalk: Run, tmp_path: Path
) -> None:
    with new_folder(tmp_path / "other") as part:
        synthesize(part, Synthesis(TINY, seed=5))

    assert mosstalk("verify", *cases(recorded), "--weights", tiny.model.parent).returncode == 0
    other = mosstalk("verify", *cases(recorded), "--weights", "other", "--json")
    assert other.returncode == 1
    for case in json.loads(other.stdout)["cases"]:
        assert not all(check["passed"] for check in case["checks"]), case["name"]


@whole_recording
def test_weights_that_are_nowhere_are_said_to_be_missing(recorded: Path, mosstalk: Run) -> None:
    run = mosstalk("verify", recorded / "hift", "--weights", "nowhere")

    assert run.returncode == 2
    assert "its weights are not at nowhere; say where with --weights DIR" in run.stdout


@whole_recording
def test_the_flow_file_is_told_by_its_weights(recorded: Path) -> None:
    assert json.loads((recorded / "flow" / "case.json").read_text())["flow_name"] == "flow"


def test_a_codec_that_cannot_be_listened_to_is_named(
    tiny: Checkpoint, clip: Path, tmp_path: Path
) -> None:
    class Sealed(StandInProcessor):
        """Decodes in a place that no attribute leads to."""

        def decode(self, *_: object, **__: object) -> list[SimpleNamespace]:
            return []

    def sealed(path: str, *, codec_path: str, **_: object) -> StandInProcessor:
        processor = Sealed(Path(path), Path(codec_path))
        processor.parts = {}
        return processor

    library = SimpleNamespace(
        **vars(LIBRARY) | {"AutoProcessor": SimpleNamespace(from_pretrained=sealed)}
    )
    out = tmp_path / "cases"

    assert record_reference.main(words(tiny, clip, out), library) == 1
    notes = (out / "NOTES.txt").read_text()
    assert "flow: NOT RECORDED: no object that looks like flow was reachable" in notes
    assert "hift: NOT RECORDED: HiFTGenerator was not called" in notes
    assert {path.name for path in out.iterdir()} == {
        "NOTES.txt",
        "language-model",
        "speech-tokenizer",
    }


@whole_recording
def test_parts_are_as_they_were_after_listening(recorded: Path, tiny: Checkpoint) -> None:
    assert recorded.is_dir()
    processor = StandInProcessor(tiny.model, tiny.codec)
    parts = find_parts(processor)
    assert set(parts) == {"flow", "hift", "encoder", "f0"}
    with listening(parts):
        assert "inference" in vars(parts["flow"])
    assert "inference" not in vars(parts["flow"])


def test_the_prompt_is_taken_off_only_where_it_stands() -> None:
    prompt, reply = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])

    assert new_rows(torch, torch.cat([prompt, reply])[None], prompt).tolist() == [[5, 6]]
    assert new_rows(torch, reply[None], prompt).tolist() == [[5, 6]]


def test_modes_follow_the_rows() -> None:
    config = SimpleNamespace(
        modality_pad_token_id=9, sosp_token_id=7, eosp_token_id=3, audio_pad_token_id=2
    )
    rows = torch.tensor([[9, 0], [9, 3], [4, 1], [7, 3], [5, 0]])

    assert modes_of(torch.tensor([[7, 2]]), rows, config) == [1, 1, 0, 0, 0]
    assert modes_of(torch.tensor([[9, 1]]), rows[:2], config) == [1, 1]
    assert modes_of(torch.tensor([[9, 2]]), rows[:1], config) == [0]


def tool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_help_teaches_and_says_what_is_not_shown() -> None:
    run = tool("--help")

    assert run.returncode == 0
    assert "mosstalk verify recorded/*" in run.stdout
    assert "NOT YET RUN AGAINST THE REAL THING" in run.stdout


def test_a_dry_run_says_what_would_be_recorded_and_loads_nothing(
    clip: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cases"
    run = tool("--model", "M", "--codec", "C", "--wav", clip, "--out", out, "--dry-run")

    assert (run.returncode, run.stderr) == (0, "")
    assert "language-model: clip0_to_audio: greedy_plain (penalty 1.0)" in run.stdout
    assert "clip0: question-16k.wav, 20800 samples" in run.stdout
    assert "not recorded without --voice" in run.stdout
    assert not out.exists()


def test_missing_things_are_one_line(tiny: Checkpoint, clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "cases"
    rest = ("--codec", "C", "--out", out, "--model", "no-model")
    other = tool(*rest, "--wav", QUESTION)
    assert other.returncode == 2
    assert "not a readable wav file" in other.stderr
    (tmp_path / "transformers.py").write_text("raise ImportError('stopped by a test')\n")
    run = subprocess.run(
        [sys.executable, str(TOOL), *map(str, rest), "--wav", str(clip)],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "error: transformers cannot be imported (stopped by a test): run this in the environment "
        "in which the public MOSS-Speech demo runs"
    ]
    assert not out.exists()
    assert tiny.model.is_dir()


def test_a_model_that_is_not_there_is_one_line(
    tiny: Checkpoint, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words(tiny, clip, tmp_path / "cases")
    line[1] = "no-such-model"

    def no_processor(path: str, **_: Any) -> None:
        raise OSError(f"{path} is not a local folder")

    library = SimpleNamespace(
        **vars(LIBRARY) | {"AutoProcessor": SimpleNamespace(from_pretrained=no_processor)}
    )
    assert record_reference.main(line, library) == 2
    error = "error: cannot load no-such-model: no-such-model is not a local folder\n"
    assert capsys.readouterr().err == error


def test_the_tool_imports_nothing_from_the_package() -> None:
    paths = sorted((ROOT / "tools").glob("*.py"))
    assert TOOL in paths
    for path in paths:
        if path.name == "docs_site.py":  # it documents the package
            continue
        assert not re.search(r"^\s*(import|from) mosstalk", path.read_text(), re.MULTILINE)


@whole_recording
def test_the_stand_in_speaks(pipeline: Pipeline, recorded: Path) -> None:
    # A reply without codes would leave flow and vocoder unproven.
    rows = load_file(recorded / "language-model" / "expected.safetensors")
    spoken = rows["clip0_to_audio.greedy_penalty.rows"]
    assert int((spoken[:, 0] == pipeline.ids.modality_pad).sum()) > 8
