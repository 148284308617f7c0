"""What can be said of the web page without a browser."""

import re

import numpy as np
import pytest
from conftest import ROOT

WEB = ROOT / "src" / "mosstalk" / "server" / "web"
TEXTS = [path for path in WEB.iterdir() if path.suffix != ".ico"]
LONGEST_FILE_LINES = 300
PAIRS = [
    ("ink", "ground"), ("ink", "paper"), ("quiet", "ground"), ("quiet", "paper"),
    ("on-leaf", "leaf"), ("on-hot", "hot"), ("warn-ink", "warn"),
]  # fmt: skip
LINES = [("edge", "paper"), ("leaf", "ground"), ("you", "ground"), ("leaf", "paper")]


@pytest.mark.parametrize("style", ["style.css", "dark.css"])
def test_words_and_edges_stand_out(style: str) -> None:
    found = re.findall(r"--([\w-]+): (#\w{6});", (WEB / style).read_text())
    colours = {name: luminance(value) for name, value in found}

    def contrast(pair: tuple[str, str]) -> float:
        low, high = sorted(colours[name] for name in pair)
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, PAIRS)) >= 4.5
    assert min(map(contrast, LINES)) >= 3


def luminance(colour: str) -> float:
    """As WCAG 2 has it."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_the_page_asks_for_nothing_from_elsewhere_and_stays_small() -> None:
    for path in TEXTS:
        text = path.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org|localhost)", text), path
        assert not re.search(r"<script(?![^>]*src)|<style|\sstyle=|\son\w+=\"", text), path
        assert text.count("\n") <= LONGEST_FILE_LINES, path


def test_whatever_the_page_says_it_says_in_chinese_too() -> None:
    english, chinese = (spoken(f"{name}.js") for name in ("english", "chinese"))
    always = set(re.findall(r'data-say(?:-label|-placeholder)?="([^"]+)"', page()))
    assert len(always) > 60
    assert english.keys() | always == chinese.keys()
    for key, text in english.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese[key])), key
    assert not [key for key, text in chinese.items() if not re.search(r"[\u3000-\u9fff{]", text)]


def spoken(name: str) -> dict[str, str]:
    """The table of a language."""
    found = re.findall(r'^  "?([\w-]+)"?: "(.*)",$', (WEB / name).read_text(), re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def page() -> str:
    """The page without a language."""
    return (WEB / "index.html").read_text()
