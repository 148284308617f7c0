"""The documentation's site: each page is in it, each link leads somewhere, and it can be read."""

import re
import tomllib
from pathlib import Path

import pytest
import typer
from conftest import ROOT, require_package
from test_changelog import commands

import docs_site
import mosstalk
from docs_site import (
    DOCS,
    MOST_WORDS,
    OTHER_LANGUAGE,
    REFERENCE,
    SITE,
    paragraphs,
    sentences,
    spaced,
)
from mosstalk.cli import app

PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
TO_BE_READ = [name for name in PAGES if name not in REFERENCE and not name.endswith(OTHER_LANGUAGE)]
LONGEST_PARAGRAPH = 80
"""In words."""
FRONT_PAGE_WORDS = 250


@pytest.mark.parametrize("name", TO_BE_READ)
def test_no_paragraph_is_longer_than_one_reads_at_once(name: str) -> None:
    for text in paragraphs(DOCS / name):
        assert len(text.split()) <= LONGEST_PARAGRAPH, text


def test_all_pages_are_read_in_an_hour() -> None:
    texts = [text for name in TO_BE_READ for text in paragraphs(DOCS / name)]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS


def test_the_front_page_takes_a_minute() -> None:
    assert len((DOCS / "index.md").read_text().split()) <= FRONT_PAGE_WORDS


def test_every_page_is_in_the_navigation_once() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = [page for part in project["nav"] for pages in part.values() for page in pages]
    generated = {"reference/commands.md", "reference/python.md"}
    assert sorted(listed) == sorted({*PAGES, *generated})


def test_prose_is_what_is_neither_code_nor_table_nor_entry(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# No heading\n\nOne [link](x.md) of 0.3 s. `Two.three` ends\nhere!\n\n    no code\n\n"
        "| no | table |\n|---|---|\n| a | b |\n\n* A point.\n* `--entry` no.\n\n![no](x.svg)\n"
    )
    assert paragraphs(page) == ["One link of 0.3 s. Two.three ends here!", "A point."]
    assert sentences(paragraphs(page)[0]) == ["One link of 0.3 s.", "Two.three ends here!"]


def test_lists_are_spaced_for_the_site() -> None:
    assert spaced("Text:\n* one\n\n      code\n\n  more\n1. a\n   b") == (
        "Text:\n\n* one\n\n        code\n\n    more\n\n1. a\n    b"
    )
    assert spaced("* one\n* two\nlazy\n\n```\n* code\n```") == (
        "* one\n* two\nlazy\n\n```\n* code\n```"
    )


def test_links_that_lead_nowhere_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "SITE", tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here"></a><a href="#there"></a><a href="b/"></a>'
        '<img src="b/no.png"><a href="https://elsewhere.org/no"></a>'
    )
    (tmp_path / "b" / "index.html").write_text('<a href="../a.html?q#here"></a><a href="..">')
    assert docs_site.broken_links() == [
        "a.html: #there: no such anchor",
        "a.html: b/no.png: no such file",
        "b/index.html: ..: no such file",
    ]


@pytest.fixture(scope="module")
def _built() -> None:
    require_package("zensical", "docs")
    docs_site.prepare()
    assert docs_site.build() == [], "make docs says the same"


@pytest.mark.system
@pytest.mark.usefixtures("_built")
def test_the_site_is_whole_and_asks_no_other_host_for_anything() -> None:
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<(?:script|img|iframe)[^>]* src=\"?https?:", text), page
        assert not re.search(r"<link[^>]* href=\"?https?:", text), page
    agent = (SITE / "files" / "examples" / "agent.py.html").read_text()
    assert "asyncio" in agent


@pytest.mark.system
@pytest.mark.usefixtures("_built")
def test_the_reference_has_every_command_and_every_public_name() -> None:
    told = (SITE / "reference" / "commands.html").read_text()
    listed = dict(commands(typer.main.get_group(app)))
    for name, options in listed.items():
        assert f'id="mosstalk-{name.replace(" ", "-")}"' in told, name
        assert all(option in told for option in options), name
    assert told.count("<h2 ") + told.count("<h3 ") == len(listed) + 3, "checkpoint, voice, bench"
    told = (SITE / "reference" / "python.html").read_text()
    for name in mosstalk.__all__:
        assert f'id="mosstalk.{name}"' in told, name


@pytest.mark.system
def test_a_broken_link_fails_the_build_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_package("zensical", "docs")
    for name in ("ROOT", "SOURCE", "SITE"):
        there = tmp_path / getattr(docs_site, name).relative_to(ROOT)
        monkeypatch.setattr(docs_site, name, there)
    (tmp_path / "zensical.toml").write_text(
        '[project]\nsite_name = "s"\ndocs_dir = "build/site-source"\nsite_dir = "build/site"\n'
    )
    docs_site.SOURCE.mkdir(parents=True)
    (docs_site.SOURCE / "index.md").write_text("# A page\n\n[a](none.md)\n[b](b.md#nowhere)\n")
    (docs_site.SOURCE / "b.md").write_text("# Another\n")
    assert sorted(docs_site.build()) == [
        "docs/index.md:3:5: page does not exist",
        "docs/index.md:4:10: anchor does not exist",
    ]


@pytest.mark.system
def test_the_reading_says_words_grade_and_the_longest_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_package("textstat", "docs")
    (tmp_path / "page.md").write_text("# Page\n\nA dog ran home. It was here at 0.3 s.\n\n* So.\n")
    (tmp_path / "realtime.md").write_text("Words of the reference count for themselves.\n")
    docs_site.reading(tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"^page.md +11 +-?\d+\.\d$", printed, re.MULTILINE)
    assert re.search(r"^realtime.md +7 +\d+\.\d  reference$", printed, re.MULTILINE)
    assert re.search(r"^all outside the reference +11 +goal: at most 15000$", printed, re.MULTILINE)
    assert "page.md, 6 words: It was here at 0.3 s." in printed
