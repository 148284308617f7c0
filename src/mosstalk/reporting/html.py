"""Pages of tables that need nothing but themselves: no script, no font, no other file."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mosstalk.reporting.tables import Table

_STYLE = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 10, 30
_COLOURS = ("#3b82c4", "#d97706", "#2f9e64", "#c2458f", "#7c6fd6", "#a08a1a", "#cf4b3f")
_DASHES = ("", "6 3", "2 3")
_TICKS = 4


def tables_page(title: str, settings: Mapping[str, Any], tables: Iterable[Table]) -> str:
    """A page of tables alone, with what they were measured on below its heading."""
    label = f"{settings['device']}, weights: {settings['weights']}"
    return page(title, label, settings, *map(table_html, tables))


def page(title: str, label: str, settings: Mapping[str, Any], *parts: str) -> str:
    """A page: heading and the line below it, ``parts`` in order but empty ones, settings."""
    head = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="label">{escape(label)}</p>"""
    return "\n".join((head, *filter(None, parts), _settings(settings), "</body>\n</html>\n"))


def table_html(table: Table) -> str:
    """A table under its title, with its note."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        # An interval stays on one line where its value may stand above it.
        + "".join(f"<td>{escape(cell).replace(', ', ',&nbsp;')}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n"
        f'<p class="note">{escape(table.note)}</p>'
    )


def skipped_html(skipped: Iterable[str]) -> str:
    """What was not measured, or nothing."""
    items = "".join(f"<li>{escape(line)}</li>" for line in skipped)
    if not items:
        return ""
    return f'<h2>Not measured</h2>\n<ul class="skipped">{items}</ul>'


def _settings(settings: Mapping[str, Any]) -> str:
    """All settings, folded."""
    items = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items()
    )
    return f"<details><summary>Settings</summary>\n<dl>\n{items}\n</dl></details>"


def line_chart(
    title: str, places: Sequence[str], lines: Mapping[str, Sequence[float]], unit: str = ""
) -> str:
    """A figure with a line for each name over ``places``, from 0 up, and a legend below.

    ``lines`` hold a value for each place; ``unit`` follows the numbers of the axis.
    """
    top = max((value for values in lines.values() for value in values), default=0.0) or 1.0
    drawn = "\n".join(
        f'<polyline points="{_points(values, top)}" fill="none" stroke="{colour}" '
        f'stroke-width="1.8" stroke-dasharray="{dash}"><title>{escape(name)}</title></polyline>'
        for (name, values), (colour, dash) in zip(lines.items(), _pens(len(lines)), strict=True)
    )
    return f"""<figure style="margin:1rem 0">
<figcaption><strong>{escape(title)}</strong></figcaption>
<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" \
style="width:100%;max-width:{_WIDTH}px" font-size="11" fill="currentColor">
{_axis(top, unit)}
{_labels(places)}
{drawn}
</svg>
{_legend(list(lines))}
</figure>"""


def _pens(count: int) -> list[tuple[str, str]]:
    """A colour and a pattern for each line: who sees no colours tells them by the pattern."""
    return [
        (_COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)]) for place in range(count)
    ]


def _points(values: Sequence[float], top: float) -> str:
    spots = ((_across(place, len(values)), _up(value, top)) for place, value in enumerate(values))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)


def _across(place: int, count: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / max(count, 1)


def _up(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _axis(top: float, unit: str) -> str:
    levels = [top * tick / _TICKS for tick in range(_TICKS + 1)]
    return "\n".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_up(level, top):.1f}" '
        f'y2="{_up(level, top):.1f}" stroke="currentColor" stroke-opacity="0.2"/>'
        f'<text x="{_LEFT - 6}" y="{_up(level, top) + 4:.1f}" text-anchor="end">'
        f"{level:.3g}{escape(unit)}</text>"
        for level in levels
    )


def _labels(places: Sequence[str]) -> str:
    """Names below the axis, as many as there is room for."""
    step = -(-len(places) // 10)
    return "\n".join(
        f'<text x="{_across(place, len(places)):.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
        f'text-anchor="middle">{escape(name)}</text>'
        for place, name in enumerate(places)
        if place % max(step, 1) == 0
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<span style="margin-right:1rem;white-space:nowrap"><svg width="28" height="8" '
        f'aria-hidden="true"><line x1="0" x2="28" y1="4" y2="4" stroke="{colour}" '
        f'stroke-width="2" stroke-dasharray="{dash}"/></svg> {escape(name)}</span>'
        for name, (colour, dash) in zip(names, _pens(len(names)), strict=True)
    )
    return f'<p class="note">{items}</p>'
