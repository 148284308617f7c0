"""Pages of tables that need nothing but themselves: no script, no font, no other file."""

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from mosstalk.bench.tables import Table

_STYLE = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
END = "</body>\n</html>\n"


def tables_page(title: str, settings: Mapping[str, Any], tables: Iterable[Table]) -> str:
    """A page of tables alone, with what they were measured on below its heading."""
    label = f"{settings['device']}, weights: {settings['weights']}"
    parts = (head(title, label), *map(table_html, tables), settings_html(settings), END)
    return "\n".join(parts)


def head(title: str, label: str) -> str:
    """Everything up to the heading and the line below it."""
    style = _STYLE.read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="label">{escape(label)}</p>"""


def table_html(table: Table) -> str:
    """A table under its title, with its note."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{_unbroken(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n"
        f'<p class="note">{escape(table.note)}</p>'
    )


def _unbroken(cell: str) -> str:
    """A cell whose interval stays on one line where its value may stand above it."""
    return escape(cell).replace(", ", ",&nbsp;")


def skipped_html(skipped: Iterable[str]) -> str:
    """What was not measured, or nothing."""
    items = "".join(f"<li>{escape(line)}</li>" for line in skipped)
    if not items:
        return ""
    return f'<h2>Not measured</h2>\n<ul class="skipped">{items}</ul>'


def settings_html(settings: Mapping[str, Any]) -> str:
    """All settings, folded."""
    items = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items()
    )
    return f"<details><summary>Settings</summary>\n<dl>\n{items}\n</dl></details>"
