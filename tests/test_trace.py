"""Traces and documents of a chat: what they hold, and that they are whole."""

import contextlib
import json
import signal
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import QUESTION, SYNTHETIC, Run, command_environment, refused
from typer.testing import CliRunner

from mosstalk.cli import app
from mosstalk.diagnostics.figures import chrome_trace
from mosstalk.runtime.timing import TurnTimings

CODES = 12
STEPS = CODES + 2


@pytest.fixture(scope="module")
def folder(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat of two turns with ``--json`` and ``--trace``: its folder."""
    folder = tmp_path_factory.mktemp("traced")
    words = (
        "chat",
        "--speech",
        str(QUESTION),
        "--text",
        "and now?",
        "--json",
        "--show-rows",
        "--stats",
    )
    more = ("--script", f"speech:{CODES}", "--trace", "trace.json", "--seed", "3", *SYNTHETIC)
    with contextlib.chdir(folder):
        run = CliRunner().invoke(
            app, [*words, *more], env=command_environment(cache_folder), catch_exceptions=False
        )
    assert run.exit_code == 0, run.stderr
    (folder / "stdout").write_text(run.stdout)
    (folder / "stderr").write_text(run.stderr)
    return folder


@pytest.fixture
def document(folder: Path) -> dict[str, Any]:
    """What ``--json`` printed; anything else on stdout would not parse."""
    found: dict[str, Any] = json.loads((folder / "stdout").read_text())
    return found


@pytest.fixture
def trace(folder: Path) -> dict[str, Any]:
    """The trace of the same chat."""
    found: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return found


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_trace_has_every_stage_run_that_the_figures_count(
    trace: dict[str, Any], document: dict[str, Any]
) -> None:
    runs = Counter((event["args"]["turn"], event["name"]) for event in complete(trace))
    for number, turn in enumerate(document["turns"], 1):
        for stage, figures in turn["stages"].items():
            assert runs[number, stage] == figures["count"]
            took = sum(
                event["dur"]
                for event in complete(trace)
                if (event["args"]["turn"], event["name"]) == (number, stage)
            )
            assert took / 1000 == pytest.approx(figures["total_ms"], abs=0.001 * figures["count"])
    assert runs[1, "encode"] == 1
    assert runs[1, "step"] == runs[2, "step"] == STEPS


def test_runs_follow_one_another_from_zero_without_overlap(trace: dict[str, Any]) -> None:
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert events[0]["ts"] == 0
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    end = 0.0
    for event in complete(trace):
        assert event["ts"] >= end - 0.01
        end = event["ts"] + event["dur"]


def test_commit_and_first_audio_are_moments_as_far_apart_as_printed(
    trace: dict[str, Any], document: dict[str, Any]
) -> None:
    moments = {
        (event["args"]["turn"], event["name"]): event["ts"]
        for event in trace["traceEvents"]
        if event["ph"] == "i"
    }
    assert set(moments) == {(n, name) for n in (1, 2) for name in ("commit", "first audio")}
    for number, turn in enumerate(document["turns"], 1):
        apart = moments[number, "first audio"] - moments[number, "commit"]
        assert apart / 1000 == pytest.approx(turn["first_audio_ms"], abs=0.01)


def test_every_event_has_what_the_format_asks_for(trace: dict[str, Any]) -> None:
    named = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert "process_name" in {event["name"] for event in trace["traceEvents"]}
    for event in trace["traceEvents"]:
        assert event["pid"] == 1
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], float)
        assert event["tid"] in named
        assert (event["ph"] != "X") or event["dur"] > 0
        assert (event["ph"] != "i") or event["s"] == "p"


def test_a_trace_says_what_it_was_taken_on(trace: dict[str, Any]) -> None:
    about = trace["otherData"]
    assert (about["weights"], about["device"], about["dtype"]) == ("synthetic", "cpu", "float32")
    assert about["torch"] == version("torch")
    assert about["script"] == f"speech:{CODES}"


def test_a_step_that_was_taken_back_leaves_no_span() -> None:
    timings = TurnTimings(torch.device("cpu"))
    for _ in range(3):
        with timings.stage("step"):
            pass
    timings.stages["step"].pop()

    assert [span.stage for span in timings.spans()] == ["step", "step"]
    assert [span.ms for span in timings.spans()] == timings.stages["step"]


def test_a_turn_in_which_nothing_ran_has_names_alone() -> None:
    events = chrome_trace([TurnTimings(torch.device("cpu"))], {})["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}


# One document on stdout.


def test_a_document_says_what_was_asked_and_answered(
    document: dict[str, Any], folder: Path
) -> None:
    heard, read = (turn["input"] for turn in document["turns"])
    info = soundfile.info(QUESTION)
    assert (heard["kind"], heard["seconds"]) == ("speech", pytest.approx(info.duration, abs=1e-3))
    assert len(heard["codes"]) == -(-info.frames // 1280)
    assert read == {"kind": "text", "text": "and now?"}
    for number, turn in enumerate(document["turns"], 1):
        assert len(turn["codes"]) == CODES
        assert (turn["finish_reason"], turn["steps"]) == ("stop", STEPS)
        assert turn["out"] == f"answer-{number}.wav"
        assert soundfile.info(folder / turn["out"]).frames == CODES * 1920
        assert turn["audio_s"] == pytest.approx(CODES * 0.08)
        assert [audio for mode, _, audio in turn["rows"] if mode == "audio"][:-1] == turn["codes"]


def test_figures_in_a_document_agree_with_one_another(document: dict[str, Any]) -> None:
    for turn in document["turns"]:
        stages = turn["stages"].values()
        assert sum(stage["share"] for stage in stages) == pytest.approx(1)
        assert sum(stage["total_ms"] for stage in stages) == pytest.approx(turn["total_ms"])
        for stage in stages:
            assert stage["mean_ms"] * stage["count"] == pytest.approx(stage["total_ms"])
        factor = turn["total_ms"] / 1000 / turn["audio_s"]
        assert turn["real_time_factor"] == pytest.approx(factor)
        assert turn["peak_memory_mib"]["host"] > 50


def test_a_document_is_labelled(document: dict[str, Any]) -> None:
    wanted = {"weights": "synthetic", "device": "cpu", "dtype": "float32", "seed": 3}
    assert wanted.items() <= document.items()
    assert document["script"] == f"speech:{CODES}"
    assert document["interrupted"] is False


def test_the_text_for_people_goes_to_stderr(folder: Path) -> None:
    text = (folder / "stderr").read_text()
    assert text.startswith("The weights of this model are random")
    assert "commit to first audio" in text
    assert "trace of 2 turns -> trace.json" in text


# Slow: a process of its own; ``test_chat`` interrupts one, which ends the same way.
@pytest.mark.slow
def test_ctrl_c_leaves_a_whole_trace_and_document(cache_folder: Path, tmp_path: Path) -> None:
    words = ("chat", "--text", "hi", "--script", "speech:400", "--show-rows", "--json")
    with (
        subprocess.Popen(
            [sys.executable, "-m", "mosstalk.cli", *words, "--trace", "trace.json", *SYNTHETIC],
            cwd=tmp_path,
            env=command_environment(cache_folder) | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stderr
        for line in process.stderr:
            if line.startswith("  row    40"):
                break
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=200)
    assert process.returncode == 130
    document = json.loads(stdout)
    (turn,) = document["turns"]
    assert document["interrupted"] is True
    assert turn["finish_reason"] == "cancelled"
    assert turn["out"] == "answer.wav.part"
    trace = json.loads((tmp_path / "trace.json").read_text())
    steps = [event for event in complete(trace) if event["name"] == "step"]
    assert 40 <= len(steps) == turn["stages"]["step"]["count"] < 400
    assert {path.name for path in tmp_path.iterdir()} == {"answer.wav.part", "trace.json"}


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(
    mosstalk: Run, tmp_path: Path
) -> None:
    run = mosstalk("chat", "--text", "hi", "--trace", "no/folder/trace.json")
    assert "no such folder; make it first" in refused(run)
    assert run.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_input_leaves_stdout_empty(mosstalk: Run) -> None:
    run = mosstalk("chat", "--speech", "none.wav", "--json")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.splitlines()[-1] == "error: none.wav: no such file"
