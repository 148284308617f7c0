"""``mosstalk bench report``: each figure of the page is one of a document, and of the right one."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ROOT, Run
from typer.testing import CliRunner, Result

from mosstalk.bench.codec import HopLoad
from mosstalk.bench.documents import CODEC, STEP, WHOLE, Document, read_document
from mosstalk.bench.report import ELSEWHERE, LINES, NOT_YET, report_page
from mosstalk.bench.timed import Timed
from mosstalk.cli import app
from mosstalk.plan.limits import Load

PAGE = ROOT / "docs" / "from-the-reports.md"
CHINESE = ROOT / "docs" / "from-the-reports.zh.md"
HOPS = "A hop of 5 codes through flow and vocoder, voice of 6.8 s"
SETTINGS = {"device": "NVIDIA H200", "precision": "bfloat16", "torch": "2.11", "commit": "0123456"}
PLACEHOLDER = re.compile(r"\{\{")


def timed(name: str, ms: float) -> dict[str, Any]:
    return Timed(name, 10 * ms, 1, (ms, ms, ms), (), ms / 2).figures()


def steps(rows: dict[str, float], **settings: str) -> dict[str, Any]:
    return {
        "format": STEP,
        "settings": SETTINGS | settings,
        "weights": "synthetic",
        "timed": [timed(name, ms) for name, ms in rows.items()],
    }


def hops(rows: dict[str, float], title: str = HOPS) -> dict[str, Any]:
    return {
        "format": CODEC,
        "settings": SETTINGS | {"precision": "float16"},
        "weights": "synthetic",
        "timed": {title: [timed(name, ms) for name, ms in rows.items()]},
    }


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*documents: dict[str, Any]) -> list[Document]:
        paths = [tmp_path / f"{place}.json" for place in range(len(documents))]
        for path, values in zip(paths, documents, strict=True):
            path.write_text(json.dumps(values))
        return [read_document(path) for path in paths]

    return write


def run(*words: str | Path) -> Result:
    line = ["bench", "report", *map(str, words)]
    return CliRunner().invoke(app, line, catch_exceptions=False)


def row(page: str, name: str, nth: int = 0) -> list[str]:
    """The cells of the line that begins with ``name``."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in lines[nth].strip("|").split(" | ")]


def test_without_documents_nothing_is_measured() -> None:
    page = report_page([])
    assert not PLACEHOLDER.search(page)
    for line in LINES:
        assert f"| {line.what} |" in page
    assert page.count(" ms (p95") == 0
    assert "None yet." in page


def test_the_page_is_what_the_command_writes_of_the_documents_at_hand() -> None:
    documents = [read_document(path) for path in sorted((ROOT / "docs" / "figures").glob("*.json"))]
    assert PAGE.read_text() == report_page(documents)


def test_names_are_those_of_the_benchmarks() -> None:
    names = {Load(1, 512).name, Load(64, 1000).name, Load(1, 0, 512).name}
    stretches = HopLoad.of(1, 60).stretches
    names |= {f"{n} x hop {name}" for n in (1, 32, 128) for name in stretches}
    names |= {"1 x 400 ms after 15 s"}
    for wanted in (each.wanted for each in (*LINES, *ELSEWHERE) if each.wanted):
        assert [name for name in names if re.fullmatch(wanted.row, name)], wanted.row


def test_steps_stand_in_their_own_rows(written: Any) -> None:
    page = report_page(
        written(
            steps({"1 x 1 row after 512": 3.71, "64 x 1 row after 1000": 7.42}),
            steps({"1 x 1 row after 512": 2.21}, precision="bfloat16, trunk fp8"),
            steps({"512 rows": 15.9}),
        )
    )
    *_, limit, ours, _ = row(page, "a step, 1 session of 512 rows, bf16")
    assert limit == "1.85 ms"
    assert ours.startswith("3.71 ms (p95 3.71, first of all 37.10; valid 3/3; NVIDIA H200, synth")
    assert row(page, "the same, trunk in FP8", 0)[5].startswith("2.21 ms")
    assert row(page, "the same, trunk in FP8", 1)[5] == NOT_YET
    assert row(page, "a step, 64 sessions of 1,000 rows, bf16")[5].startswith("7.42 ms")
    assert row(page, "a prompt of 512 rows, bf16")[5].startswith("15.90 ms")
    assert row(page, "a step, both blocks, transformers, eager")[2:] == ["64.1 ms", ours]
    assert "| 2.json | NVIDIA H200 | synthetic | bfloat16 | 2.11 | 0123456 | - |" in page


def test_hops_stand_in_their_own_rows(written: Any) -> None:
    heard = hops({"1 x 400 ms after 15 s": 1.64}, "400 ms of live sound to codes")
    said = hops({"1 x hop first": 19.3, "1 x hop 2-11": 21.0, "1 x hop 51-60": 21.2})
    crowd = hops({"32 x hop 2-11": 50.6})
    long = hops({"1 x hop 2-11": 23.7}, HOPS.replace("6.8", "26.8"))
    page = report_page(written(heard, said, crowd, long))
    for name, figure in {
        "codes to sound, first hop, flow and HiFT": "19.30",
        "a later hop of 5 codes, 1 reply": "21.00",
        "the same, 32 replies": "50.60",
        "400 ms of a user's speech to codes, arriving": "1.64",
    }.items():
        assert row(page, name)[5].startswith(f"{figure} ms"), name
    assert row(page, "the same, 128 replies")[5] == NOT_YET
    assert row(page, "the same, 253 codes said")[3].startswith("21.20 ms")
    assert row(page, "the same, voice of 27 s")[3].startswith("23.70 ms")


def test_figures_of_the_whole_pipeline_stand_side_by_side(written: Any) -> None:
    def turn(precision: str, ms: float, factor: float) -> dict[str, Any]:
        figures = {"commit_to_first_audio_ms": ms, "real_time_factor": factor}
        settings = SETTINGS | {"precision": precision}
        return {"format": WHOLE, "weights": "synthetic", "settings": settings} | figures

    page = report_page(written(turn("bf16", 253.65, 0.1393), turn("fp8", 261.81, 0.1294)))
    first = row(page, "end of turn to first sound, whole pipeline")[5]
    assert re.fullmatch(r"254 ms in bf16 \(.*0\.json\); 262 ms in fp8 \(.*1\.json\)", first)
    factors = row(page, "real-time factor, whole pipeline")[5]
    assert re.fullmatch(r"0\.139 in bf16 \(.*\); 0\.129 in fp8 \(.*\)", factors)
    assert "| 1.json | NVIDIA H200 | synthetic | fp8 | 2.11 | 0123456 | - |" in page


def test_a_turn_without_its_figures_is_refused(tmp_path: Path) -> None:
    values = {"format": WHOLE, "weights": "synthetic", "settings": SETTINGS}
    (tmp_path / "turn.json").write_text(json.dumps(values))
    found = run(tmp_path / "turn.json")
    assert found.exit_code == 2
    assert "commit_to_first_audio_ms" in found.output


def test_the_command_writes_the_page_whole(tmp_path: Path) -> None:
    document, page = tmp_path / "step.json", tmp_path / "page.md"
    document.write_text(json.dumps(steps({"1 x 1 row after 512": 3.71})))
    assert run(document, "--out", page).exit_code == 0
    assert page.read_text() == run(document).output
    assert "3.71 ms" in page.read_text()


# Slow: a measurement in small; the page's other tests have such documents as files.
@pytest.mark.slow
def test_a_document_of_a_real_run_is_taken(mosstalk: Run, tmp_path: Path) -> None:
    asked = ("--random-weights", "tiny", "--at", "1x512", "--steps", "2", "--dtype", "bfloat16")
    made = mosstalk("bench", "step", *asked, "--json", "step.json")
    assert made.returncode == 0, made.stderr
    found = json.loads((tmp_path / "step.json").read_text())["timed"][0]
    ours = row(run(tmp_path / "step.json").output, "a step, 1 session of 512 rows, bf16")[5]
    assert ours.startswith(f"{found['p50_ms']:.2f} ms (p95 {found['p95_ms']:.2f}")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"format": "mosstalk-quality-1"}', "the format is 'mosstalk-quality-1', not one of"),
        ("{", "not readable as json"),
        (json.dumps({"format": STEP}), "not as the benchmark writes it"),
        (json.dumps(steps({"a": 1.0}) | {"timed": [{"name": "a"}]}), "not as the benchmark"),
        (json.dumps(steps({"512 rows": 1.0}) | {"settings": {}}), "(no "),
        (json.dumps(steps({"512 rows": 1.0}, precision="float32")), "this is float32"),
        (json.dumps(steps({"7 rows": 1.0})), "nothing in it has a row on the page"),
    ],
)
def test_a_wrong_document_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    found = run(path)
    assert found.exit_code == 2
    assert complaint in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_run_that_was_not_right_gives_no_figure(tmp_path: Path) -> None:
    document = steps({"1 x 1 row after 512": 3.71})
    document["timed"][0]["valid"] = 2
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    found = run(path)
    assert found.exit_code == 2
    assert "valid 2/3" in found.stderr
    assert not found.stdout


def test_one_row_in_two_documents_is_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(steps({"512 rows": 15.0})))
    found = run(tmp_path / "a.json", tmp_path / "b.json")
    assert found.exit_code == 2
    assert "512 rows is in a.json and b.json: give one of them" in found.stderr


def test_the_commands_of_the_page_are_commands() -> None:
    group = typer.main.get_group(app)
    commands = {line.command for line in LINES if line.command}
    assert len(commands) >= 4
    for command in commands:
        program, *words = shlex.split(command)
        if program == "bash":
            assert (ROOT / words[0]).is_file()
            continue
        assert program == "mosstalk"
        group.make_context(program, words[:1])
        bench = group.commands["bench"]
        assert isinstance(bench, typer.core.TyperGroup)
        bench.commands[words[1]].make_context(words[1], words[2:])


def test_the_chinese_page_translates_the_names_of_this_one() -> None:
    chinese, plan = CHINESE.read_text(), (ROOT / "docs" / "plan.md").read_text()
    commands = re.findall(r"^    mosstalk (.+)$", chinese, re.MULTILINE)
    assert commands
    for command in commands:
        assert f"mosstalk {command}\n" in plan, command
    for name in ("trtllm-build", "GenerationSession", "paged_kv_cache", "use_fused_mlp"):
        assert name in chinese
        assert name in PAGE.read_text()
