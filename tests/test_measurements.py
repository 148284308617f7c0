"""``mosstalk bench report --plots``: each figure and picture is of a document, and says which."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from conftest import ROOT, require_package
from typer.testing import CliRunner, Result

from mosstalk.bench.documents import SERVE, STARTS, Document, read_document
from mosstalk.bench.measurements import (
    CLAIMS,
    ELSEWHERE,
    NOTES,
    Claim,
    measurements_page,
    panels_of,
    shown,
)
from mosstalk.bench.plots import draw_pictures
from mosstalk.bench.serve import Bounds, Crowd, Meanwhile
from mosstalk.bench.serve_clients import Pattern, Turn
from mosstalk.cli import app

PAGE, PICTURES = ROOT / "docs" / "measurements.md", ROOT / "docs" / "img"
FIGURES = ROOT / "docs" / "figures"
FILES = sorted(FIGURES.glob("*.json")) + sorted((FIGURES / "beside").glob("*.json"))
LARGEST_PICTURE = 40_000
CLAIM = {claim.name: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [read_document(path) for path in FILES]


def run(*words: str | Path) -> Result:
    line = ["bench", "report", *map(str, words)]
    return CliRunner().invoke(app, line, catch_exceptions=False)


def served(name: str, folder: Path, *, free: bool = False, told: bool = True) -> Document:
    """What ``bench serve`` writes of a GPU where 1 and 64 talked, and 128 were not let in."""
    turn = Turn(0, 0, 0.0, "completed", 560.0 if free else 60.0, 60.0 if free else None)
    turn.audio_ms, turn.real_time_factor = 1000.0, 0.1
    if told:
        turn.server_ms = {"commit_to_first_text_ms": 20.0, "commit_to_first_audio_ms": 50.0}
    crowds = [Crowd(n, [], n * [turn], None, Meanwhile()) for n in (1, 64)]
    crowds.append(Crowd(128, ["full"], [], None, Meanwhile()))
    facts = {"device": "NVIDIA H200", "dtype": "bfloat16", "weights": "synthetic"}
    values = {
        "format": SERVE,
        "weights": "synthetic",
        "settings": facts | {"serve options": "--precision fp8", "clients' commit": "0123456"},
        "load": {
            "pattern": vars(replace(Pattern(), hands_free=free)),
            "bounds": vars(Bounds()),
        },
        "crowds": [crowd.as_values(Bounds()) for crowd in crowds],
    }
    (folder / name).write_text(json.dumps(values))
    return read_document(folder / name)


def test_the_page_is_what_the_command_writes_of_the_documents_at_hand(
    documents: list[Document],
) -> None:
    assert PAGE.read_text() == measurements_page(documents, "img")


@pytest.mark.system
def test_the_command_writes_the_committed_pictures_byte_for_byte(tmp_path: Path) -> None:
    require_package("matplotlib", "recipe")
    (tmp_path / "img").mkdir()
    asked: tuple[str | Path, ...] = (
        *FILES,
        "--plots",
        tmp_path / "img",
        "--out",
        tmp_path / "page.md",
    )
    assert run(*asked).exit_code == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
    for claim in CLAIMS:
        drawn = (tmp_path / "img" / claim.picture).read_bytes()
        assert drawn == (PICTURES / claim.picture).read_bytes(), claim.picture
    again = run(*asked)
    assert again.exit_code == 2
    assert "exists already; add --force" in again.stderr


def test_a_single_crowd_is_drawn_only_where_there_is_no_curve(documents: list[Document]) -> None:
    alone = [each for each in documents if len(each.crowds) == 1]
    assert alone
    assert all(len(panel.crowds) > 1 for panel in panels_of(CLAIM["load"], documents))
    assert len(panels_of(CLAIM["load"], alone)) == len(alone)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_picture_is_small_and_says_what_it_is_of(claim: Claim, documents: list[Document]) -> None:
    path = PICTURES / claim.picture
    assert path.stat().st_size < LARGEST_PICTURE
    texts = ["".join(each.itertext()) for each in ElementTree.parse(path).iter() if each.text]
    said = " ".join(texts)
    assert claim.title in said
    panels = panels_of(claim, documents)
    assert panels
    for panel in panels:
        for word in panel.title.split(", "):
            assert word in said
        for each in panel.bars if claim.kind == "bars" else ():
            assert f"{shown(each.p50_ms)} ms" in said
            assert each.bar.label in said
    assert f"](img/{claim.picture})" in PAGE.read_text()


def test_what_was_never_measured_is_said_first() -> None:
    head = PAGE.read_text().partition("## ")[0]
    assert head.index("What was never measured: the published weights") < 40


def test_every_sentence_with_figures_has_those_of_its_table() -> None:
    text = PAGE.read_text()
    for claim in CLAIMS:
        section = text.partition(f"## {claim.title}\n\n")[2].partition("\n## ")[0]
        sentence, _, rest = section.partition("\n")
        assert len(re.findall(r"\{\w+\}", claim.says)) <= len(re.findall(r"\d", sentence))
        for figure in re.findall(r"\d+\.\d\d", sentence):
            assert f"| {figure} |" in rest, (claim.name, figure)
        for command in claim.commands:
            assert f"* `{command}`" in section


def test_the_commands_of_the_page_are_commands() -> None:
    group = typer.main.get_group(app)
    for command in {command for claim in CLAIMS for command in claim.commands}:
        program, *words = shlex.split(command)
        if program == "bash":
            assert (ROOT / words[0]).is_file()
            continue
        assert program == "mosstalk"
        benches = group.commands["bench"]
        assert isinstance(benches, typer.core.TyperGroup)
        benches.commands[words[1]].make_context(words[1], words[2:])


def test_figures_of_others_have_a_source_and_hardware_and_stand_in_no_picture() -> None:
    text = PAGE.read_text()
    for each in ELSEWHERE:
        assert each.claim in CLAIM
        assert each.source.startswith("https://")
        assert re.match(r"20\d\d", each.date)
        assert each.hardware
        assert f"| [{each.who}]({each.source}) | {each.says} | {each.hardware} |" in text
        assert each.who not in (PICTURES / CLAIM[each.claim].picture).read_text()
    assert set(NOTES) <= {path.name for path in FILES}


def test_a_turns_stages_add_up_to_what_the_client_waited(tmp_path: Path) -> None:
    by_hand, free = served("a.json", tmp_path), served("b.json", tmp_path, free=True)
    (panel,) = panels_of(CLAIM["turn"], [by_hand])
    assert panel.stages
    assert list(panel.stages) == ["1 conversation", "64 conversations"]
    assert list(panel.stages["1 conversation"].values()) == [20.0, 30.0, 10.0]
    (panel,) = panels_of(CLAIM["turn"], [free])
    assert panel.stages
    assert list(panel.stages["64 conversations"].values()) == [500.0, 20.0, 30.0, 10.0]
    assert not panels_of(CLAIM["turn"], [served("c.json", tmp_path, told=False)])


def test_stages_of_the_documents_at_hand_are_the_whole_of_each_turn() -> None:
    for path in (path for path in FILES if json.loads(path.read_text())["format"] == SERVE):
        values = json.loads(path.read_text())
        for found, crowd in zip(values["crowds"], read_document(path).crowds, strict=True):
            whole = [turn["commit_to_audio_ms"] for turn in found["turns"]]
            assert sum(crowd.stages_ms.values()) == pytest.approx(sum(whole) / len(whole))
            assert min(crowd.stages_ms.values()) >= 0


@pytest.mark.system
def test_another_machines_crowds_get_panels_of_their_own(
    documents: list[Document], tmp_path: Path
) -> None:
    require_package("matplotlib", "recipe")
    more = [served("gpu.json", tmp_path), served("gpu-free.json", tmp_path, free=True)]
    page = measurements_page([*documents, *more], "img")
    assert "| 64 | 64 | 60 | 60 | 0 | none: served | gpu.json |" in page
    assert "| 128 | - | - | - | 0 | 1 of 128 not let in (1 x full) | gpu.json |" in page
    draw_pictures([*documents, *more], tmp_path / "img")
    for name in ("turn", "load"):
        said = (tmp_path / "img" / CLAIM[name].picture).read_text()
        for words in ("NVIDIA H200", "mosstalk-pocket", "fp8", "found by the server"):
            assert words in said, (name, words)


def test_of_two_documents_with_a_row_the_first_counts() -> None:
    steps, beside = FIGURES / "step-h200.json", FIGURES / "beside" / "step-beside-h200.json"
    for first, other in ((steps, beside), (beside, steps)):
        (panel,) = panels_of(CLAIM["step-64"], [read_document(first), read_document(other)])
        assert panel.bars[0].document.name == first.name


@pytest.mark.parametrize(
    ("left_out", "complaint"),
    [
        ("step-fp8-h200.json step-fp8-tuned-h200.json", "no document has the row 1 x 1 row after"),
        ("codec-h200.json", "A hop of the codec: no document has the row 1 x hop 2-"),
        ("start-fp8-h200.json", "no document is of mosstalk bench start"),
        (
            "serve-h200-hands-free.json serve-h200.json serve-pocket-by-hand.json "
            "serve-pocket-hands-free.json",
            "no document is of mosstalk bench serve",
        ),
    ],
)
def test_a_row_that_is_missing_is_named_with_its_command(
    tmp_path: Path, left_out: str, complaint: str
) -> None:
    kept = [path for path in FILES if path.name not in left_out.split()]
    found = run(*kept, "--plots", tmp_path, "--out", tmp_path / "page.md")
    assert found.exit_code == 2
    assert complaint in found.stderr
    assert "mosstalk bench" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not readable as json"),
        (json.dumps({"format": "mosstalk-quality-1"}), "the format is 'mosstalk-quality-1'"),
        (json.dumps({"format": SERVE, "weights": "x", "settings": {}}), "not as the benchmark"),
        (json.dumps({"format": STARTS, "weights": "x", "settings": {}}), "not as the benchmark"),
    ],
)
def test_a_wrong_document_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    found = run(*FILES, path, "--plots", tmp_path)
    assert found.exit_code == 2
    assert complaint in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_document_of_no_claim_is_refused(tmp_path: Path) -> None:
    shutil.copy(FIGURES / "step-h200.json", tmp_path / "other.json")
    values = json.loads((tmp_path / "other.json").read_text())
    values["timed"] = [row | {"name": "7 x 1 row after 7"} for row in values["timed"]]
    (tmp_path / "other.json").write_text(json.dumps(values))
    found = run(*FILES, tmp_path / "other.json", "--plots", tmp_path)
    assert found.exit_code == 2
    assert "other.json: nothing in it has a row on the page" in found.stderr
