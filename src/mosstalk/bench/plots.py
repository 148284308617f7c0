"""The pictures of ``docs/measurements.md``."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.bench.documents import Document
from mosstalk.bench.measurements import CLAIMS, Claim, Panel, panels_of, shown, stage_names
from mosstalk.reporting.svg import COLOURS, FONT_SIZE, GROUND, INK, drawing, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN = 7.2
_BAR_IN, _PANEL_IN, _CHART_IN = 0.34, 0.95, 3.0
_OURS, _LIMIT, _OTHERS = COLOURS[0], COLOURS[1], "#9a9a9a"
_SHADES = ("#5b5b5b", "#a34700", "#0072b2", "#00724f", "#8c4a70")
"""Dark enough for light numbers, one for each stage in turn."""
_ROOM = 1.25
"""Of an axis, beside what its longest bar needs: for the number."""
_PAD_IN = 0.1
_LEGEND_IN = 0.6
"""With the heading."""
_NARROWEST = 0.055
"""Share of the widest bar below which a part of a bar has no number in it."""
_LONGEST_TITLE, _SLACK = 60, 8
"""Of a panel as wide as the picture, in characters of one line; its lines may differ so much."""
_LONGEST_LEGEND = 80
"""In characters, of three columns."""


def draw_pictures(documents: Sequence[Document], folder: Path) -> list[Path]:
    """Write each claim's picture into ``folder``; return their paths.

    Raises:
        OptionError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for claim in CLAIMS:
        panels = panels_of(claim, documents)
        path = folder / claim.picture
        with drawing(path, _WIDTH_IN, _height_in(claim, panels), claim.name) as figure:
            figure.set_layout_engine("constrained", w_pad=_PAD_IN, h_pad=_PAD_IN / 2)
            figure.suptitle(claim.title, fontsize=FONT_SIZE + 1, fontweight="bold", color=INK)
            _DRAWN[claim.kind](figure, claim, panels)
        paths.append(path)
    return paths


def _height_in(claim: Claim, panels: Sequence[Panel]) -> float:
    if claim.kind == "lines":
        return _CHART_IN + _LEGEND_IN
    if claim.kind == "load":
        return _CHART_IN * len(panels) + _LEGEND_IN
    rows = (len(panel.stages or panel.bars) for panel in panels)
    return sum(_PANEL_IN + _BAR_IN * n for n in rows) + _LEGEND_IN


def _below(figure: "Figure", panels: Sequence[Panel]) -> "Sequence[Axes]":
    """Axes below one another, each as high as its bars need."""
    heights = [_PANEL_IN + _BAR_IN * len(panel.stages or panel.bars) for panel in panels]
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    return [row[0] for row in grid]


def _bars(figure: "Figure", _: Claim, panels: Sequence[Panel]) -> None:
    for axes, panel in zip(_below(figure, panels), panels, strict=True):
        # Panels of one machine have one scale.
        most = max(each.longest_ms for p in panels if p.machine == panel.machine for each in p.bars)
        unit = "ms, median" if any(each.row["n"] > 1 for each in panel.bars) else "ms, one run"
        _across(axes, panel.title, [each.bar.label for each in panel.bars], most, unit)
        for place, each in enumerate(panel.bars):
            axes.barh(place, each.p50_ms, 0.62, color=_OURS if each.bar.ours else _OTHERS)
            inside = each.longest_ms > each.p50_ms  # behind it stands the limit
            _at_end(axes, f"{shown(each.p50_ms)} ms", each.p50_ms, place, inside=inside)
            if each.limit_ms is not None:
                axes.vlines(each.limit_ms, place - 0.42, place + 0.42, color=_LIMIT, linewidth=3)
    bars = [each for panel in panels for each in panel.bars]
    keys = [(_OURS, "mosstalk")]
    keys += [(_OTHERS, "other means, same card")] * any(not each.bar.ours for each in bars)
    keys += [(_LIMIT, "limit, measured in the same run")] * any(each.limit_ms for each in bars)
    _legend(figure, keys)


def _across(axes: "Axes", title: str, names: Sequence[str], most: float, unit: str) -> None:
    """Prepare axes for bars that lie: names to the left, the first on top."""
    plain(axes, _broken(title, _LONGEST_TITLE))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, most * _ROOM)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _lines(figure: "Figure", claim: Claim, panels: Sequence[Panel]) -> None:
    across = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(across, panels, strict=True):
        plain(axes, _broken(panel.title, _LONGEST_TITLE // 2))
        for series in dict.fromkeys(each.bar.series for each in panel.bars):
            bars = [each for each in panel.bars if each.bar.series == series]
            colour = _OURS if bars[0].bar.ours else _OTHERS
            points = [(each.bar.x, each.p50_ms) for each in bars]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4)
            for x, ms in (points[0], points[-1]):
                _number(axes, shown(ms), x, ms)
        axes.set_xlabel(claim.x_label)
        axes.set_ylabel("ms, median")
        axes.set_ylim(0, 1.15 * max(each.p50_ms for each in panel.bars))
        axes.margins(x=0.12)
        axes.grid(alpha=0.25)
    drawn = (each.bar for panel in panels for each in panel.bars)
    names = {bar.series: _OURS if bar.ours else _OTHERS for bar in drawn}
    _legend(figure, [(colour, name) for name, colour in names.items()])


def _load(figure: "Figure", _: Claim, panels: Sequence[Panel]) -> None:
    for axes, panel in zip(_below(figure, panels), panels, strict=True):
        plain(axes, _broken(panel.title, _LONGEST_TITLE))
        found = [crowd.first_audio_ms for crowd in panel.crowds if crowd.first_audio_ms]
        places = range(len(found))
        axes.axhline(panel.bound_ms, color=INK, linewidth=1.4, linestyle=":")
        for at, (style, colour) in enumerate((("o-", _OURS), ("s--", COLOURS[1]))):
            axes.plot(places, [each[at] for each in found], style, color=colour, markersize=5)
        for place, (p50, p95) in enumerate(found):
            _number(axes, shown(p50, 0), place, p50, below=True)
            _number(axes, shown(p95, 0), place, p95)
        axes.set_xticks(places, [str(crowd.clients) for crowd in panel.crowds])
        axes.set_xlabel("conversations at a time")
        axes.set_ylabel(f"ms from {panel.begin}\nto first audio")
        most = max(panel.bound_ms, *(p95 for _, p95 in found))
        axes.set_ylim(-0.12 * most, 1.18 * most)  # numbers below the lowest points need room
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.18 * most])
        axes.margins(x=0.08)
        axes.grid(alpha=0.25)
    keys = [
        (_OURS, "median"),
        (COLOURS[1], "95th percentile"),
        (INK, "bound for the latter (dotted)"),
    ]
    _legend(figure, keys)


def _stages(figure: "Figure", claim: Claim, panels: Sequence[Panel]) -> None:
    unit = "s" if claim.kind == "start" else "ms"
    digits = 1 if unit == "s" else 0
    colours = dict(zip(stage_names(panels), _SHADES, strict=False))
    for axes, panel in zip(_below(figure, panels), panels, strict=True):
        stages = panel.stages or {}
        most = max(sum(found.values()) for found in stages.values())
        _across(axes, panel.title, list(stages), most, f"{unit}, mean" if unit == "ms" else unit)
        for place, found in enumerate(stages.values()):
            left = 0.0
            for name, value in found.items():
                axes.barh(place, value, 0.62, left=left, color=colours[name])
                if value > _NARROWEST * most:
                    axes.text(left + value / 2, place, shown(value, digits), ha="center",
                              va="center", color=GROUND)  # fmt: skip
                left += value
            _at_end(axes, f"{shown(left, digits)} {unit}", left, place)
    _legend(figure, [(colour, name) for name, colour in colours.items()])


def _broken(title: str, width: int) -> str:
    """A title in lines of at most so many characters, all about as long."""
    lines = -(-len(title) // width)
    most = width if lines == 1 else len(title) // lines + _SLACK
    return textwrap.fill(title, most, break_on_hyphens=False)


def _at_end(axes: "Axes", text: str, x: float, y: float, *, inside: bool = False) -> None:
    """A number at the end of a bar."""
    axes.annotate(text, (x, y), (-5 if inside else 5, 0), textcoords="offset points",
                  ha="right" if inside else "left", va="center",
                  color=GROUND if inside else INK)  # fmt: skip


def _number(axes: "Axes", text: str, x: float, y: float, *, below: bool = False) -> None:
    ground = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.5}
    axes.annotate(text, (x, y), (0, -7 if below else 7), textcoords="offset points", ha="center",
                  va="top" if below else "bottom", color=INK, bbox=ground)  # fmt: skip


def _legend(figure: "Figure", keys: Sequence[tuple[str, str]]) -> None:
    """What each colour is, below the picture."""
    from matplotlib.patches import Patch

    across = 3 if sum(len(name) for _, name in keys) < _LONGEST_LEGEND else 2
    handles = [Patch(color=colour, label=name) for colour, name in keys]
    figure.legend(handles=handles, loc="outside lower center", ncols=across, frameon=False,
                  labelcolor=INK, handlelength=1.0, fontsize=10)  # fmt: skip


_DRAWN: dict[str, Callable[["Figure", Claim, Sequence[Panel]], None]] = {
    "bars": _bars,
    "lines": _lines,
    "load": _load,
    "turn": _stages,
    "start": _stages,
}
