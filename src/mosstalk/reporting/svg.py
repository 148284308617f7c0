"""Diagrams as SVG files, drawn with matplotlib: one look, and the same bytes each time."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.environment import install_command
from mosstalk.errors import OptionError
from mosstalk.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's colours, which the colour-blind tell apart, on a ground of their own, so that
# labels are readable on a dark page too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
GROUND, INK = "#fbfbf8", "#222222"
_LINE = "#999999"
_LONG_NUMBER = re.compile(r"\b\d+\.\d{3,}\b")
"""What is read in a picture has fewer digits."""
_HASHED_ID = re.compile(r'id="([a-z][0-9a-f]{10})"')
"""matplotlib names a clip path by a hash of its exact place, whose last bit differs by machine."""
FONT_SIZE = 11


@contextmanager
def drawing(path: Path, width_in: float, height_in: float, name: str) -> Iterator["Figure"]:
    """An empty figure of this size in inches, which is written to ``path`` after the block.

    Ids in the file are ``name`` and a number, so that pictures can share a page.

    Raises:
        OptionError: matplotlib is not installed.
        OutputError: the disk cannot take it.
    """
    if not find_spec("matplotlib"):
        raise OptionError(f"drawing needs matplotlib; run: {install_command('recipe')}")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, in a font as wide as the one that it was laid out with.
    fonts = ["DejaVu Sans", "Verdana"]
    options = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": FONT_SIZE}
    options |= {"font.family": "sans-serif", "font.sans-serif": fonts}
    with rc_context(options):
        figure = Figure((width_in, height_in), layout="constrained", facecolor=GROUND)
        yield figure
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_whole(path, _shorter(drawn.getvalue(), name).encode())


def _shorter(svg: str, name: str) -> str:
    """The same picture without indentation, the same bytes on every machine.

    Places are rounded to a hundredth of a point, ids are ``name`` and a number.
    """
    rounded = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}", svg)
    for number, hashed in enumerate(dict.fromkeys(_HASHED_ID.findall(rounded))):
        rounded = rounded.replace(hashed, f"{name}-{number}")
    return re.sub(r"\n\s+", "\n", rounded)


def plain(axes: "Axes", title: str = "") -> None:
    """Give axes the look of all diagrams, and a title."""
    axes.set_facecolor(GROUND)
    axes.set_title(title, fontsize=FONT_SIZE, color=INK)
    for spine in axes.spines.values():
        spine.set_color(_LINE)
    axes.tick_params(colors=INK, which="both")
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
