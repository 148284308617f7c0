"""``mosstalk bench compare``: pairs of the same sentences, from two documents."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, refused

from evals.compare import Compared, Words, compare
from evals.quality import FORMAT

SAID = ["The train is late.", "Good morning to you.", "It is cold in here."]
CLEAN = [text.lower().rstrip(".") for text in SAID]


def document(heard: list[str], written: list[str], said: list[str] = SAID) -> dict[str, Any]:
    """As ``document_of`` writes one, with what is compared."""
    lines = [{"said": a, "own": b, "judge": b} for a, b in zip(said, written, strict=True)]
    return {
        "format": FORMAT,
        "settings": {"checkpoint": "some", "weights": "synthetic", "model": "float32 on cpu"},
        "sentences": [
            {"text": text, "heard": {"own": one}} for text, one in zip(said, heard, strict=True)
        ],
        "transcripts": [{"group": "teacher", "lines": lines}],
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[Compared]:
    return compare(*(Words.of(each, "a document").said for each in (before, after)))


def saved(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_sentences_are_compared_in_pairs() -> None:
    worse = ["the rain is late", *CLEAN[1:]]
    heard, written = compared(document(CLEAN, worse), document(worse, CLEAN))
    assert (heard.name, written.name) == ("heard: own", "written down: teacher")
    assert (heard.n, heard.before.value) == (3, 0)
    assert heard.after.value == pytest.approx(1 / 13)
    assert heard.difference.value == -written.difference.value == pytest.approx(1 / 13)
    assert heard.difference.low == 0 < heard.difference.high
    (same, _) = compared(document(worse, CLEAN), document(worse, CLEAN))
    # Both are wrong in the same way: of that the difference is certain.
    assert same.before.high > 0 == same.difference.low == same.difference.high


def test_long_sentences_are_compared_where_both_have_them() -> None:
    long = [{"text": SAID[0], "heard": {"own, long sentences": CLEAN[0]}}]
    before, after = document(CLEAN, CLEAN), document(CLEAN, CLEAN) | {"long_sentences": long}
    assert [row.name for row in compared(before, after)] == ["heard: own", "written down: teacher"]
    names = [row.name for row in compared(after, after)]
    assert names == ["heard: own", "heard: own, long sentences", "written down: teacher"]


def test_the_command_prints_both_and_their_difference(mosstalk: Run, tmp_path: Path) -> None:
    first = saved(tmp_path / "first.json", document(CLEAN, CLEAN))
    second = saved(tmp_path / "second.json", document(["", *CLEAN[1:]], CLEAN))
    run = mosstalk("bench", "compare", first, second)
    assert run.returncode == 0, run.stderr
    assert "heard: own" in run.stdout
    assert "+30.8" in run.stdout
    run = mosstalk("bench", "compare", first, second, "--json")
    rows = json.loads(run.stdout)["words"]
    assert [row["name"] for row in rows] == ["heard: own", "written down: teacher"]


def test_what_cannot_be_compared_is_refused(mosstalk: Run, tmp_path: Path) -> None:
    first = saved(tmp_path / "first.json", document(CLEAN, CLEAN))
    other = saved(tmp_path / "other.json", document(CLEAN, CLEAN, ["A", "B", "C"]))
    none = saved(tmp_path / "none.json", {"format": "mosstalk-step-1"})
    empty = saved(tmp_path / "empty.json", document([], [], []) | {"transcripts": []})
    whole = document(CLEAN, CLEAN)
    cut = {
        key: saved(tmp_path / f"no-{key}.json", {k: whole[k] for k in whole if k != key})
        for key in ("settings", "sentences", "transcripts")
    }
    for path, complaint in (
        *((cut[key], f"is not whole (KeyError('{key}')); write it again") for key in cut),
        (other, "heard: own: the two documents are of other sentences"),
        (none, "is no document of mosstalk bench quality"),
        (tmp_path / "absent.json", "absent.json: no such file"),
        (empty, "have no reading in common"),
    ):
        assert complaint in refused(mosstalk("bench", "compare", first, path))
