"""Reports to send hold what helps and nothing private; ``verify --json`` agrees with its text."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDENS, ROOT, SYNTHETIC, Checkpoint, Run, command_environment, refused

from mosstalk.diagnostics.report import without_paths

CASE = GOLDENS / "prompt-mel"


def strings(value: Any) -> Iterator[str]:
    """Every string in json values, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


@pytest.fixture
def private(tiny: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A checkpoint in a folder whose name is nobody's business, blanks and all."""
    return tiny.copy(tmp_path / "Jane Doe's clients" / "secret project")


def test_a_report_holds_facts_figures_versions_and_hashes(
    mosstalk: Run, tmp_path: Path, private: Checkpoint
) -> None:
    folders = ("--model", private.model, "--codec", private.codec)
    run = mosstalk(
        "doctor", "--report", "r.json", *folders, "--cases", CASE, "--cases", tmp_path / "none"
    )

    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert {"torch", "GPU", "libsndfile"} <= {f["name"] for f in report["doctor"]["findings"]}
    assert report["packages"]["torch"] == version("torch")
    assert report["packages"]["typer"] == version("typer")
    cases = {case["name"]: case for case in report["verify"]["cases"]}
    assert cases["prompt-mel"]["checks"][0]["passed"] is True
    assert cases["none"]["error"] == "none: no such folder; give folders that hold a case.json"
    turn = report["turn"]
    assert (turn["weights"], turn["steps"], turn["audio_s"]) == ("synthetic", 27, 2.0)
    assert turn["stages"]["step"]["count"] == 27
    config = (private.model / "config.json").read_bytes()
    found = report["config_files"]["model"]["config.json"]
    assert found == {"bytes": len(config), "sha256": sha256(config).hexdigest()}
    names = {*report["config_files"]["model"], *report["config_files"]["codec"]}
    assert {"tokenizer.json", "flow/hift.json"} <= names
    assert not any(name.endswith((".safetensors", ".pt")) for name in names)


def test_a_report_names_no_folder_that_is_not_the_packages(
    mosstalk: Run, tmp_path: Path, private: Checkpoint, cache_folder: Path
) -> None:
    folders = ("--model", private.model, "--codec", private.codec)
    (private.codec / "flow" / "hift.pt").write_bytes(b"torn")
    run = mosstalk("doctor", "--report", "r.json", *folders, "--cases", tmp_path / "none")

    assert run.returncode == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert "hift.pt: " in report["turn"]["error"]
    # The parent of every folder that was given or is used must be gone.
    gone = [private.model.parent, tmp_path, cache_folder.parent, Path.home(), ROOT]
    for text in strings(report):
        assert not re.search(r"(^|[\s('\"=])/\w", text), text
        for folder in gone:
            assert str(folder) not in text
        assert "Jane" not in text
        assert "secret project" not in text


def test_a_report_tells_what_is_in_it_and_without_cases_says_so(
    mosstalk: Run, tmp_path: Path
) -> None:
    run = mosstalk("doctor", "--report", "r.json", *SYNTHETIC)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("r.json holds:\n")
    assert "no golden cases were given and none are shipped" in run.stdout
    assert re.search(
        r"turn      a scripted one \(speech:25\), weights synthetic: 27 steps", run.stdout
    )
    assert "It holds no sound, no text that you typed, and no paths" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    report = json.loads((tmp_path / "r.json").read_text())
    assert "skipped" in report["verify"]
    assert not {"codes", "text", "out"} & set(report["turn"])


# Slow: a process of its own; what it finds is the doctor's, whose tests break packages.
@pytest.mark.slow
def test_where_a_package_is_broken_a_report_says_so(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "soxr.py").write_text(f"raise OSError('{tmp_path}/soxr.so: wrong ELF class')\n")
    run = subprocess.run(
        [sys.executable, "-m", "mosstalk.cli", "doctor", "--report", "r.json"],
        cwd=tmp_path,
        env=command_environment(cache_folder) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["doctor"]["exit_code"] == 1
    assert report["turn"]["error"] == "OSError: soxr.so: wrong ELF class"
    assert "soxr.so: wrong ELF class" in run.stdout
    assert str(tmp_path) not in run.stdout


def test_a_file_that_exists_is_replaced_only_by_force(mosstalk: Run, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("older")

    assert "exists already; add --force" in refused(mosstalk("doctor", "--report", "r.json"))
    assert (tmp_path / "r.json").read_text() == "older"
    assert mosstalk("doctor", "--report", "r.json", "--force", *SYNTHETIC).returncode == 0
    assert json.loads((tmp_path / "r.json").read_text())["format"] == "mosstalk-report-1"


def test_a_report_that_cannot_be_written_is_refused(mosstalk: Run) -> None:
    assert "no such folder" in refused(mosstalk("doctor", "--report", "no/folder/r.json"))
    assert "belong together" in refused(mosstalk("doctor", "--report", "r.json", "--model", "m"))
    for option in ("--model", "--cases", "--dtype", "--device"):
        assert f"{option} is for a report" in refused(mosstalk("doctor", option, "cpu"))


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("/data/jane/model/config.json: no such file", "config.json: no such file"),
        ("cannot read ('/data/jane/x.pt')", "cannot read ('x.pt')"),
        (r"C:\Users\jane\model.pt: damaged", "model.pt: damaged"),
        ("/known place/of jane/sub/x.pt: damaged", "x.pt: damaged"),
        ("at /known place/of jane, twice", "at of jane, twice"),
        ("at /known place/of jane.", "at of jane."),
        ("/data/ann-marie/secret/x.pt", "x.pt"),
        ("~/models/x is", "x is"),
        ("flow/config.json and 3/4 stay", "flow/config.json and 3/4 stay"),
    ],
)
def test_paths_are_cut_to_their_last_component(text: str, cut: str) -> None:
    known = [Path("/known place/of jane"), Path("/data/ann")]
    assert without_paths({"a": [text]}, known) == {"a": [cut]}
    assert without_paths({text: 1}, known) == {cut: 1}


def test_the_home_folder_itself_is_no_name() -> None:
    home = Path.home()
    assert without_paths(f"{home}: full", [home]) == "~: full"
    assert without_paths(f"{home}/a/b: full", [home]) == "b: full"


# verify --json.


def test_verify_prints_the_same_in_a_document_as_in_its_text(mosstalk: Run) -> None:
    cases = [GOLDENS / "prompt-mel", GOLDENS / "hift-unvoiced"]
    text, run = mosstalk("verify", *cases), mosstalk("verify", *cases, "--json")

    assert (text.returncode, run.returncode) == (0, 0)
    assert run.stderr == text.stdout
    document = json.loads(run.stdout)
    lines = re.findall(r"^  (\S+) .* ok", text.stdout, re.MULTILINE)
    checks = [check for case in document["cases"] for check in case["checks"]]
    assert [check["name"] for check in checks] == lines
    assert f"{document['totals']['comparisons']} comparisons" in text.stdout
    assert document["totals"]["out_of_bounds"] == 0


def test_verify_keeps_its_exit_code_in_a_document(mosstalk: Run, tmp_path: Path) -> None:
    case = tmp_path / "case"
    case.mkdir()
    for file in CASE.iterdir():
        (case / file.name).write_bytes(file.read_bytes())
    settings = json.loads((case / "case.json").read_text())
    settings["config"]["fmax"] = 4000
    (case / "case.json").write_text(json.dumps(settings))

    run = mosstalk("verify", "case", "--json")
    assert run.returncode == json.loads(run.stdout)["exit_code"] == 1
    both = mosstalk("verify", "case", "none", "--json")
    document = json.loads(both.stdout)
    assert both.returncode == document["exit_code"] == 2
    assert document["totals"]["unreadable"] == 1


def test_an_error_that_is_not_finite_is_null_in_a_document(mosstalk: Run, tmp_path: Path) -> None:
    case = tmp_path / "case"
    case.mkdir()
    for file in CASE.iterdir():
        (case / file.name).write_bytes(file.read_bytes())
    settings = json.loads((case / "case.json").read_text())
    settings["config"]["num_mels"] = 40
    (case / "case.json").write_text(json.dumps(settings))

    (check,) = json.loads(mosstalk("verify", "case", "--json").stdout)["cases"][0]["checks"]
    assert check["error"] is None
    assert check["passed"] is False
    assert check["note"].startswith("shape [40, ")
