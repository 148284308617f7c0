"""The tool that compares two commits: it sees what changes, and nothing where nothing does."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from freeze.__main__ import record
from freeze.commands import boxes_of
from freeze.compare import Known, compare, frozen_commit, lines_of, read_known, report
from freeze.node_ids import print_tests
from freeze.results import Results
from freeze.transcript import transcript
from freeze.wire import corpus


def kept(folder: Path, *, reply: str = "yes", shift: float = 0.0) -> Path:
    """A folder with two items, one of them with a sound."""
    results = Results(folder)
    sound = results.sound(np.linspace(0, 0.5, 100, dtype=np.float32) + np.float32(shift), 24_000)
    results.add("chat/short", {"rows": [[1, 2], [3, 4]], "sound": sound})
    results.add("wire/short", {"events": [{"type": "said", "reply": reply}]})
    return folder


def test_what_differs_is_found_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = kept(tmp_path / "old")
    assert report(compare(old, kept(tmp_path / "same"), []), []) == 0
    new = kept(tmp_path / "new", reply="no", shift=1e-6)
    assert report(compare(old, new, []), []) == 1
    printed = capsys.readouterr().out
    assert 'wire/short: events/0/reply: "yes" -> "no"' in printed
    assert "chat/short: sound: sounds are 1.0" in printed


def test_known_differences_pass_within_their_bounds(tmp_path: Path) -> None:
    old, new = kept(tmp_path / "old"), kept(tmp_path / "new", reply="no", shift=1e-3)
    known = [Known("wire/*", "said otherwise", "events/*/reply"), Known("chat/*", "sums", "sound")]
    assert [verdict.word for verdict in compare(old, new, known)] == ["known", "known"]
    known[1].samples_within = 1e-4
    assert [verdict.word for verdict in compare(old, new, known)] == ["DIFFERS", "known"]


def test_the_list_and_the_corpus_can_be_read() -> None:
    assert all(each.reason for each in read_known())
    assert len(frozen_commit()) >= 7
    assert len(corpus("pocket")) >= 20


def test_a_transcript_joins_deltas_and_numbers_ids(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "event_id": "event_1", "response": {"id": "resp_0123456789"}},
        *(
            {"type": "response.output_text.delta", "response_id": "resp_0123456789", "delta": text}
            for text in ("Good ", "morning.")
        ),
    ]
    assert transcript(events, Results(tmp_path)) == [
        {"type": "response.created", "response": {"id": "resp#1"}},
        {
            "type": "response.output_text.delta",
            "response_id": "resp#1",
            "delta": "Good morning.",
        },
    ]


def test_a_token_to_resume_is_numbered_and_told_from_another(tmp_path: Path) -> None:
    first, other = f"resume_{'a-_Z' * 10}abc", f"resume_{'0123' * 10}12-"
    events = [
        {"type": "session.updated", "session": {"mosstalk": {"resume": {"token": token}}}}
        for token in (first, first, other, f"{other}more")
    ]
    told = transcript(events, Results(tmp_path))
    tokens = [event["session"]["mosstalk"]["resume"]["token"] for event in told]
    assert tokens == ["resume#1", "resume#1", "resume#2", f"{other}more"]


def test_help_is_compared_entry_by_entry_wherever_its_lines_break() -> None:
    narrow = """
 Usage: mosstalk speak [OPTIONS] [text]

╭─ Arguments ─────────────────────────╮
│   text      <str>  What to read.    │
╰─────────────────────────────────────╯
╭─ Options ───────────────────────────╮
│ --out         <path>  Where the     │
│                       sound goes.   │
╰─────────────────────────────────────╯
"""
    wide = narrow.replace(
        "--out         <path>  Where the     │", "--out    -o   <path>  Where the     │"
    )
    wide = wide.replace("Where the     │\n│                       sound", "Where the sound")
    text, boxes = boxes_of(narrow)
    assert text.strip() == "Usage: mosstalk speak [OPTIONS] [text]"
    assert boxes == {
        "Arguments": {"text": "<str> What to read."},
        "Options": {"--out": "<path> Where the sound goes."},
    }
    assert boxes_of(wide) == (text, boxes | {"Options": boxes["Options"] | {"-o": "--out"}})


def test_tests_that_moved_are_told_from_those_that_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, files in {
        "old": {"test_one.py": ["stays", "moves", "goes"]},
        "new": {"test_one.py": ["stays"], "test_two.py": ["moves", "comes"]},
    }.items():
        for name, tests in files.items():
            path = tmp_path / place / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"def test_{test}():\n    pass\n" for test in tests))
    print_tests(tmp_path / "old", tmp_path / "new")
    assert capsys.readouterr().out.splitlines() == [
        "moved  tests/test_one.py::test_moves -> tests/test_two.py::test_moves",
        "gone   tests/test_one.py::test_goes",
        "new    tests/test_two.py::test_comes",
        "1 kept, 1 moved, 1 gone, 1 new",
    ]


def what_differs(old: Path, new: Path) -> list[str]:
    """All differences of two recordings, to be read."""
    return [
        f"{verdict.item}: {line}"
        for verdict in compare(old, new, [])
        for difference in verdict.differences
        for line in lines_of(difference)
    ]


@pytest.mark.system  # records what a server or a command does, three times: a minute
@pytest.mark.parametrize(
    ("only", "was", "now"),
    [
        ("refused/no-turn", "nothing to answer;", "nothing at all to answer;"),
        pytest.param(
            *("wire/built", "output_index: int = 0", "output_index: int = 1"),
            marks=pytest.mark.faults,  # a server as well
        ),
    ],
)
def test_a_changed_copy_is_caught(only: str, was: str, now: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src")
    shutil.copy(ROOT / "pyproject.toml", copy)
    path = next(each for each in copy.rglob("*.py") if was in each.read_text())
    path.write_text(path.read_text().replace(was, now))
    made, old, same, new = (tmp_path / name for name in ("made", "old", "same", "new"))
    assert record(ROOT, made, "made/built") == 0
    for checkout, out in ((ROOT, old), (ROOT, same), (copy, new)):
        assert record(checkout, out, only, made) == 0
    assert what_differs(old, same) == []
    assert what_differs(old, new)
