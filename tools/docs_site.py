"""The documentation as a site, and how it reads.

python -m tools.docs_site build     makes build/site, and names each broken link; exit code 1: some
python -m tools.docs_site reading   words, grade and longest sentences of the pages in docs/

Both need the extra ``docs``; ``zensical.toml`` has the site's navigation and look.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import typer
from markdown_it import MarkdownIt
from pygments.lexers import find_lexer_class_for_filename
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

import mosstalk
from mosstalk.cli import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
PAGE_FILES = ("favicon.ico", "icon.svg")
"""Of the server's page, for the site as well."""
PICTURES = {".svg", ".png", ".jpg", ".ico"}

REFERENCE = {"realtime.md", "command-line.md", "measurements.md"}
"""Pages to look things up in; all others are to be read."""
OTHER_LANGUAGE = ".zh.md"
"""How names of pages end whose words and sentences cannot be counted as English ones."""
MOST_WORDS = 15_000
"""The goal for all that is to be read."""
LONGEST_SHOWN = 10

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")
_OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|//")
_MARK = re.compile(r" *((?:[*+-]|\d+[.)]) +)")
_EXAMPLE = re.compile(r"^(\w[\w ]*: )?((?:[^\n`*#|]+\| )?mosstalk [^\n]*[^\n.:])$", re.MULTILINE)
_FOUND = re.compile(r"Warning: ([^\n]+)\n[^\[]*\[ ([^\s]+) \]")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+")


# The site's sources.


def prepare() -> None:
    """Fill ``build/site-source``: the pages, what they link to, and the generated reference.

    A file outside ``docs/``, and a file inside that is neither page nor picture, becomes a page
    under ``files/`` that shows its text; of a folder the names of its files.
    """
    shutil.rmtree(SOURCE, ignore_errors=True)
    waiting = sorted(DOCS.rglob("*.md"))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for linked in _stage(path):
            if linked not in seen:
                seen.add(linked)
                waiting.append(linked)
    for name in PAGE_FILES:
        shutil.copy(ROOT / "src" / "mosstalk" / "server" / "web" / name, SOURCE)
    reference = SOURCE / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text(commands_page())
    (reference / "python.md").write_text(python_page())


def _stage(path: Path) -> Iterator[Path]:
    """Write one file's place in the sources, and yield the files that it links to."""
    place = SOURCE / _place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in PICTURES:
        shutil.copy(path, place)
    elif path.suffix == ".md":
        found: list[Path] = []

        def moved(link: re.Match[str]) -> str:
            begin, target, anchor = link.groups()
            linked = (path.parent / target).resolve()
            if not (linked.is_relative_to(ROOT) and linked.exists()):
                return link.group()
            found.append(linked)
            there = os.path.relpath(SOURCE / _place(linked), place.parent)
            return f"{begin}{there}{anchor or ''})"

        text = spaced(_LINK.sub(moved, path.read_text()))
        place.write_text(text if path.is_relative_to(DOCS) else f"{_NOT_FOUND_BY_SEARCH}{text}")
        yield from found
    else:
        place.write_text(_page_of_text(path))


def spaced(text: str) -> str:
    """A page with its lists as Zensical's Markdown wants them, where GitHub's asks for less.

    What belongs to a point is indented by four, and a blank line comes before a list.
    """
    lines = text.split("\n")
    more = [0] * len(lines)
    blank = set()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        begin, end = token.map or (0, 0)
        if token.type == "list_item_open" and (mark := _MARK.match(lines[begin])):
            for number in range(begin + 1, end):
                more[number] += max(0, 4 - len(mark[1])) if lines[number][:1] == " " else 0
        elif token.type in ("bullet_list_open", "ordered_list_open") and begin:
            blank |= {begin} if lines[begin - 1].strip() and not token.level else set()
    return "\n".join(
        ("\n" if number in blank else "") + " " * more[number] + line
        for number, line in enumerate(lines)
    )


_NOT_FOUND_BY_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


def _place(path: Path) -> Path:
    stays_as_it_is = path.suffix in {".md", *PICTURES}
    if stays_as_it_is and path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    place = Path("files") / path.relative_to(ROOT)
    return place if stays_as_it_is else place.with_name(f"{place.name}.md")


def _page_of_text(path: Path) -> str:
    if path.is_dir():
        names = "".join(f"* `{each.name}`\n" for each in sorted(path.iterdir()))
        return f"{_NOT_FOUND_BY_SEARCH}# {path.name}\n\n`{path.relative_to(ROOT)}` has:\n\n{names}"
    text = path.read_text()
    lexer = find_lexer_class_for_filename(path.name, text)
    language = lexer.aliases[0] if lexer else "text"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    title = f"# {path.name}\n\n`{path.relative_to(ROOT)}` in the repository:\n\n"
    return f"{_NOT_FOUND_BY_SEARCH}{title}{fence}{language}\n{text.rstrip()}\n{fence}\n"


def commands_page() -> str:
    """Every command's help, by Typer's own generator."""
    group = typer.main.get_group(app)
    _tidy(group)
    text = get_docs_for_click(
        obj=group, ctx=typer.Context(group), name="mosstalk", title="All commands and options"
    )
    return _EXAMPLE.sub(
        lambda line: f"{line[1] or ''}\n\n    {html.unescape(line[2])}".lstrip("\n"), text
    )


def _tidy(group: TyperGroup) -> None:
    """Leave out commands that moved, and have lists of commands say whole sentences."""
    for name, command in list(group.commands.items()):
        if command.hidden:
            del group.commands[name]
            continue
        command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())
        if isinstance(command, TyperGroup):
            _tidy(command)


def python_page() -> str:
    """What mkdocstrings makes the page of the package's public names from."""
    whole = "::: mosstalk\n    options:\n      members: false\n      show_root_heading: false\n"
    names = "".join(f"\n::: mosstalk.{name}\n" for name in mosstalk.__all__)
    return f"# The Python interface\n\n{whole}{names}"


# The built site.


def build() -> list[str]:
    """Make ``build/site`` from the prepared sources; a line for each thing that is wrong."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    wrong = [f"{_origin(where)}: {what}" for what, where in _FOUND.findall(printed)]
    if done.returncode and not wrong:
        return printed.splitlines()
    return wrong or broken_links()


def _origin(place: str) -> str:
    """The file in the repository that a place in the sources was made from."""
    return place.removeprefix("files/") if place.startswith("files/") else f"docs/{place}"


@dataclass
class _Page(HTMLParser):
    """The anchors of a built page, and where its links and pictures lead."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not _OUTSIDE.match(value):
                self.targets.add(value)


def broken_links() -> list[str]:
    """Links and pictures of the built pages that lead nowhere, each with its page."""
    # Zensical looks at links to pages alone: not at pictures, other files, or generated pages.
    pages = {path: _Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in sorted(pages.items()):
        for target in sorted(page.targets):
            name, _, anchor = target.partition("#")
            there = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                wrong.append(f"{path.relative_to(SITE)}: {target}: no such file")
            elif anchor and there in pages and unquote(anchor) not in pages[there].anchors:
                wrong.append(f"{path.relative_to(SITE)}: {target}: no such anchor")
    return wrong


# How the pages read.


def paragraphs(page: Path) -> list[str]:
    """The paragraphs and points of a page: no headings, code, tables, or entries of a list.

    An entry begins with what it explains, as code.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [
        " ".join(_plain(token.content).split())
        for before, token in pairwise(tokens)
        if before.type == "paragraph_open"
        and not token.content.startswith("![")
        and not (token.level > 1 and token.content.lstrip("*").startswith("`"))
    ]


def _plain(text: str) -> str:
    """Text as it is read: of links the words, of code what it says."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*]", "", text)


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph."""
    return [each for each in _SENTENCE_END.split(text) if each]


def grade(texts: list[str]) -> float:
    """Years of school that the texts ask for, by the Automated Readability Index."""
    import textstat

    # Its sentences end at each point, those of 0.3 and of names in code as well.
    each = (re.sub(r"[.!?]", "", one) for text in texts for one in sentences(text))
    return float(textstat.automated_readability_index(". ".join(each) + "."))


def reading(docs: Path = DOCS) -> None:
    """Print words and grade of each page, their sum beside the goal, and the longest sentences."""
    total = 0
    longest: list[tuple[int, str, str]] = []
    print(f"{'page':32} {'words':>6} {'grade':>6}")
    for path in sorted(docs.rglob("*.md")):
        name = str(path.relative_to(docs))
        texts = paragraphs(path)
        if name.endswith(OTHER_LANGUAGE) or not texts:
            continue
        words = sum(len(text.split()) for text in texts)
        note = "  reference" if name in REFERENCE else ""
        print(f"{name:32} {words:6} {grade(texts):6.1f}{note}")
        if not note:
            total += words
            longest += [
                (len(each.split()), name, each) for text in texts for each in sentences(text)
            ]
    print(f"{'all outside the reference':32} {total:6}  goal: at most {MOST_WORDS}")
    for count, name, sentence in sorted(longest, reverse=True)[:LONGEST_SHOWN]:
        print(f"\n{name}, {count} words: {sentence}")


def main(words: list[str]) -> int:
    """Do what the one word asks for; the exit code."""
    if words == ["reading"]:
        reading()
        return 0
    if words != ["build"]:
        print(__doc__, file=sys.stderr)
        return 2
    begun_s = time.monotonic()
    prepare()
    wrong = build()
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        folder = SITE.relative_to(ROOT)
        print(f"made {folder} in {time.monotonic() - begun_s:.0f} s: open {folder}/index.html")
        print(f"or, for its search too: python3 -m http.server --directory {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
