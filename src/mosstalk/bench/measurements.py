"""``docs/measurements.md``: each claim of speed as a picture, a table and its commands.

What is claimed stands in ``measurements.json``, what others published in ``elsewhere.json``; the
figures are those of documents that benchmarks wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from pydantic import BaseModel

from mosstalk.bench.documents import (
    NONE,
    STARTS,
    Document,
    RowKey,
    ServedCrowd,
    Stages,
    filled,
    markdown_table,
    require_row,
    sources,
)
from mosstalk.errors import OptionError
from mosstalk.files import read_json

_TEMPLATE = Path(__file__).with_name("measurements.md")
_TABLE = ("", "n", "p50, ms", "p95, ms", "max, ms", "limit, ms", "p50 / limit", "valid", "document")
_CROWDS = (
    "conversations", "turns", "first audio p50, ms", "p95, ms", "turns with underruns",
    "bounds that broke", "document",
)  # fmt: skip
_ELSEWHERE = ("elsewhere", "says", "hardware", "date", "not the same, because")
_WEIGHTS = {
    "synthetic": "random weights",
    "pocket": "mosstalk-pocket's weights",
    "real": "the published weights",
}


class Bar(BaseModel):
    """A figure of a claim: its name in the sentence, in the picture, and the row it is from.

    ``panel``: the part of the picture that it stands in. ``series`` and ``x``: in a picture of
    lines, its line and place. ``ours``: False for other means of doing the same.
    """

    id: str
    label: str
    wanted: RowKey
    ours: bool = True
    panel: str = ""
    series: str = ""
    x: float = 0.0


class Claim(BaseModel):
    """What is claimed. ``says`` names bars in braces, with ``_limit`` behind them their limits."""

    name: str
    kind: Literal["bars", "lines", "load", "turn", "start"]
    title: str
    says: str
    commands: list[str]
    note: str = ""
    x_label: str = ""
    bars: list[Bar] = []

    @property
    def picture(self) -> str:
        """Name of its file."""
        return f"measured-{self.name}.svg"


class Note(BaseModel):
    """What must be known of a measurement: in few words for a picture, and in whole."""

    label: str
    text: str


class Elsewhere(BaseModel):
    """What others published, under a claim of ours."""

    claim: str
    who: str
    says: str
    hardware: str
    date: str
    source: str
    but: str


_FOUND = read_json(Path(__file__).with_name("measurements.json"))
CLAIMS = [Claim(**claim) for claim in _FOUND["claims"]]
NOTES = {name: Note(**note) for name, note in _FOUND["notes"].items()}
"""By a document's name."""
_PUBLISHED = read_json(Path(__file__).with_name("elsewhere.json"))
ELSEWHERE = [Elsewhere(**row) for row in _PUBLISHED["elsewhere"]]


@dataclass(frozen=True)
class Measured:
    """A bar with its row; milliseconds."""

    bar: Bar
    document: Document
    row: dict[str, Any]

    @property
    def p50_ms(self) -> float:
        """Its median."""
        return float(self.row["p50_ms"])

    @property
    def limit_ms(self) -> float | None:
        """What the hardware allows, if the benchmark computed it."""
        return self.row.get("limit_ms")

    @property
    def longest_ms(self) -> float:
        """How far bar and limit reach."""
        return max(self.p50_ms, self.limit_ms or 0.0)


@dataclass(frozen=True)
class Panel:
    """A part of a picture.

    Attributes:
        title: what was measured, on what.
        machine: the latter alone.
        bars: for kinds ``bars`` and ``lines``.
        crowds: for kind ``load``, all that were let in; ``bound_ms`` is theirs.
        stages: for kinds ``turn`` and ``start``, by the name of a bar, in milliseconds or seconds.
    """

    title: str
    machine: str
    bars: tuple[Measured, ...] = ()
    crowds: tuple[ServedCrowd, ...] = ()
    bound_ms: float = 0.0
    begin: str = ""
    stages: dict[str, Stages] | None = None


def panels_of(claim: Claim, documents: Sequence[Document]) -> list[Panel]:
    """The parts of a claim's picture: one for each machine and kind of weights, or document.

    Where several documents have a row, the first one's counts.
    """
    if claim.kind in ("bars", "lines"):
        return list(_bar_panels(claim, documents))
    if claim.kind == "start":
        return [
            Panel(_where(each), _where(each), stages=_named_starts(each.starts_s))
            for each in documents
            if each.format == STARTS
        ]
    served = [each for each in documents if each.crowds]
    if claim.kind == "load":
        loads = [panel for each in served if (panel := _load_panel(each)).crowds]
        curves = [panel for panel in loads if len(panel.crowds) > 1]
        return curves or loads  # one crowd is no curve; the table has it
    stages = [(each, _stages(each)) for each in served]
    return [Panel(_served(each), _where(each), stages=found) for each, found in stages if found]


def _bar_panels(claim: Claim, documents: Sequence[Document]) -> Iterator[Panel]:
    names = dict.fromkeys(bar.panel for bar in claim.bars)
    for device, weights in dict.fromkeys(_machine(each) for each in documents):
        mine = [each for each in documents if _machine(each) == (device, weights)]
        for name in names:
            bars = tuple(_measured([b for b in claim.bars if b.panel == name], mine))
            if bars:
                title = ", ".join(filter(None, (_where(bars[0].document), name)))
                yield Panel(title, _where(bars[0].document), bars)


def _measured(bars: Sequence[Bar], documents: Sequence[Document]) -> Iterator[Measured]:
    for bar in bars:
        found = ((each, row) for each in documents for row in each.rows(bar.wanted))
        if first := next(found, None):
            yield Measured(bar, *first)


def _machine(document: Document) -> tuple[str, str]:
    return document.settings["device"], document.weights


def _where(document: Document) -> str:
    device, weights = _machine(document)
    device = document.settings.get("clients on", "CPU") if device == "cpu" else device
    note = NOTES[document.name].label if document.name in NOTES else ""
    return ", ".join(filter(None, (device, note, _WEIGHTS.get(weights, weights))))


def _served(document: Document) -> str:
    ends = "turns' ends found by the server" if document.hands_free else "turns ended by the client"
    return f"{_where(document)}, {document.precision}, {ends}"


def _load_panel(document: Document) -> Panel:
    let_in = tuple(crowd for crowd in document.crowds if crowd.first_audio_ms)
    begin = "the server's decision" if document.hands_free else "the commit"
    return Panel(
        _served(document),
        _where(document),
        crowds=let_in,
        bound_ms=document.bound_ms,
        begin=begin,
    )


def _stages(document: Document) -> dict[str, Stages]:
    told = ((crowd.clients, crowd.stages_ms) for crowd in document.crowds if crowd.stages_ms)
    return {f"{n} conversation{'s'[: n != 1]}": stages for n, stages in told}


def _named_starts(starts: Sequence[Stages]) -> dict[str, Stages]:
    ordinals = ("first", "second", "third")
    return {
        f"{ordinals[at]} start" if at < len(ordinals) else f"start {at + 1}": stages
        for at, stages in enumerate(starts)
    }


def measurements_page(documents: Sequence[Document], images: str) -> str:
    """The page in Markdown; ``images`` is the pictures' folder, seen from the page.

    Raises:
        OptionError: a claim has a figure that no document has, or a document no figure of a claim.
    """
    for document in documents:
        if not (document.crowds or document.starts_s):
            require_row(document, (bar.wanted for claim in CLAIMS for bar in claim.bars))
    sections = [_section(claim, documents, images) for claim in CLAIMS]
    used = set[str]().union(*(names for _, names in sections))
    parts = {
        "claims": "\n\n".join(section for section, _ in sections),
        "documents": sources([each for each in documents if each.name in used]),
    }
    return filled(_TEMPLATE, parts)


def _section(claim: Claim, documents: Sequence[Document], images: str) -> tuple[str, set[str]]:
    """A claim's part of the page, and the names of the documents that it is of."""
    panels = panels_of(claim, documents)
    says = _sentence(claim, panels)
    head, rows, names = _table(claim, documents, panels)
    notes = [f"**{name}**: {NOTES[name].text}" for name in sorted(names & NOTES.keys())]
    elsewhere = [
        (f"[{each.who}]({each.source})", each.says, each.hardware, each.date, each.but)
        for each in ELSEWHERE
        if each.claim == claim.name
    ]
    parts = (
        f"## {claim.title}",
        says,
        f"![{says}]({images}/{claim.picture})",
        markdown_table(head, rows),
        *notes,
        claim.note,
        markdown_table(_ELSEWHERE, elsewhere) if elsewhere else "",
        "\n".join(f"* `{command}`" for command in claim.commands),
    )
    return "\n\n".join(filter(None, parts)), names


def _sentence(claim: Claim, panels: Sequence[Panel]) -> str:
    """What a claim says, with the figures of the first machine that has them.

    Raises:
        OptionError: no document has one of them.
    """
    values: dict[str, str] = {}
    for measured in (each for panel in reversed(panels) for each in panel.bars):
        values[measured.bar.id] = shown(measured.p50_ms)
        values[f"{measured.bar.id}_limit"] = shown(measured.limit_ms)
    for _, name, *_ in Formatter().parse(claim.says):
        if name and name not in values:
            bar = next(bar for bar in claim.bars if bar.id == name.removesuffix("_limit"))
            kind = f" in {bar.wanted.precision}" if bar.wanted.precision else ""
            raise OptionError(
                f"{claim.title}: no document has the row {bar.wanted.row}{kind}; it is of "
                f"{bar.wanted.format}: {claim.commands[0]} --json FILE"
            )
    if not panels:
        raise OptionError(f"{claim.title}: no document is of {claim.commands[0]}")
    return claim.says.format(**values)


def _table(
    claim: Claim, documents: Sequence[Document], panels: Sequence[Panel]
) -> tuple[Sequence[str], list[tuple[str, ...]], set[str]]:
    """Columns and rows below a claim's picture, and the names of the documents they are of."""
    if claim.kind in ("bars", "lines"):
        measured = [each for panel in panels for each in panel.bars]
        return _TABLE, [_bar_row(each) for each in measured], {m.document.name for m in measured}
    served = [each for each in documents if each.crowds]
    names = {each.name for each in served}
    if claim.kind == "load":
        return _CROWDS, [_crowd_row(crowd, each) for each in served for crowd in each.crowds], names
    unit, digits = "ms", 0
    if claim.kind == "start":
        unit, digits, names = "s", 2, {each.name for each in documents if each.starts_s}
    rows = [(p.title, name, found) for p in panels for name, found in (p.stages or {}).items()]
    columns = stage_names(panels)
    lines = [
        (
            f"{name}; {title}",
            *(shown(found.get(stage), digits) for stage in columns),
            shown(sum(found.values()), digits),
        )
        for title, name, found in rows
    ]
    return ("", *(f"{stage}, {unit}" for stage in columns), f"all, {unit}"), lines, names


def _bar_row(measured: Measured) -> tuple[str, ...]:
    row, bar, limit_ms = measured.row, measured.bar, measured.limit_ms
    times = measured.p50_ms / limit_ms if limit_ms else None
    return (
        ", ".join(filter(None, (bar.label, bar.panel))),
        str(row["n"]),
        shown(measured.p50_ms),
        shown(row.get("p95_ms")),
        shown(row.get("max_ms")),
        shown(limit_ms),
        shown(times),
        f"{row['valid']}/{row['n']}",
        measured.document.name,
    )


def _crowd_row(crowd: ServedCrowd, document: Document) -> tuple[str, ...]:
    first = crowd.first_audio_ms or (None, None)
    broken = "; ".join(crowd.breaches) or "none: served"
    turns = str(crowd.turns) if crowd.turns else NONE
    return (
        f"{crowd.clients}",
        turns,
        *(shown(each, 0) for each in first),
        str(crowd.broken),
        broken,
        document.name,
    )


def stage_names(panels: Sequence[Panel]) -> list[str]:
    """All stages of ``panels``, in the order of the bar that has most of them."""
    bars = [stages for panel in panels for stages in (panel.stages or {}).values()]
    return list(dict.fromkeys(name for bar in sorted(bars, key=len, reverse=True) for name in bar))


def shown(value: float | None, digits: int = 2) -> str:
    """A figure as people read it, with at most so many digits, of 100 and more with one less."""
    if value is None:
        return NONE
    return f"{value:,.{max(0, digits - 1) if value >= 100 else digits}f}"
