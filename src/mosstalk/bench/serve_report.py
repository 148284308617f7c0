"""What ``mosstalk bench serve`` found, as tables and as a page with the curve."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from mosstalk.bench.html import END, head, settings_html, table_html
from mosstalk.bench.serve import QUANTILES, Crowd, Load
from mosstalk.bench.tables import NONE, Table

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 56, 40, 12
_SHADES = (1.0, 0.7, 0.4)


def tables_of(crowds: Sequence[Crowd], load: Load) -> list[Table]:
    """Tables for the terminal and the page."""
    return [_latencies(crowds, load), *_servers(crowds)]


def _latencies(crowds: Sequence[Crowd], load: Load) -> Table:
    hands_free = load.pattern.hands_free
    rows = []
    for crowd in crowds:
        under = crowd.underruns_ms
        rows.append(
            (
                str(crowd.clients),
                str(len(crowd.turns)),
                _joined(crowd.quantiles("commit_to_audio_ms")),
                *([_joined(crowd.quantiles("decision_to_audio_ms"))] if hands_free else []),
                _joined(crowd.quantiles("first_delta_ms")),
                f"{crowd.broken}",
                f"{np.median(under):.0f} / {max(under):.0f}" if under else NONE,
                str(crowd.failed),
                str(crowd.clients - crowd.admitted),
                f"{crowd.lags_ms[1]:.1f}" if crowd.lags_ms else NONE,
                "; ".join(crowd.breaches(load.bounds)) or "served",
            )
        )
    begin = "end of the last word" if hands_free else "commit"
    pattern = load.pattern
    note = (
        f"Milliseconds at the client, p50 / p95 / p99, from the {begin} to the first sound, and "
        f"the length of that sound. Each client hears {pattern.heard_s:g} s, is answered for up "
        f"to {pattern.spoken_s:g} s and pauses {pattern.pause_s:g} s, in frames of "
        f"{pattern.frame_ms} ms. Broken: turns in which a player without a buffer fell silent, "
        f"with median and longest silence. Lag: how much too late clients themselves sent a "
        f"frame, p99. Seed {load.seed}."
    )
    return Table(
        "Conversations at a time",
        note,
        (
            *("conversations", "turns", f"{begin} to sound"),
            *(["decision to sound"] if hands_free else []),
            *("first sound", "broken", "silence", "failed", "refused", "lag", "verdict"),
        ),
        tuple(rows),
    )


def _servers(crowds: Sequence[Crowd]) -> Iterator[Table]:
    names = list(dict.fromkeys(name for crowd in crowds for name in crowd.server))
    if not names:
        return
    rows = [
        (str(crowd.clients), *(_figure(crowd.server, name) for name in names))
        for crowd in crowds
        if crowd.server
    ]
    note = (
        "Shares of the time, 1.00 being all of it: what each of the worker's parts computed, and "
        "the front's processor. Memory of the processes in MiB, at the end."
    )
    yield Table("The server meanwhile", note, ("conversations", *names), tuple(rows))


def _figure(values: Mapping[str, float], name: str) -> str:
    if name not in values:
        return NONE
    return f"{values[name]:.0f}" if name.endswith("_mib") else f"{values[name]:.2f}"


def _joined(values: Sequence[float] | None) -> str:
    return " / ".join(f"{value:.0f}" for value in values) if values else NONE


def verdict(crowds: Sequence[Crowd], load: Load) -> str:
    """The largest crowd that was served, and the first bound that broke beyond it, in words."""
    served = 0
    for crowd in sorted(crowds, key=lambda crowd: crowd.clients):
        if breaches := crowd.breaches(load.bounds):
            return f"{served} conversations served; at {crowd.clients}: {breaches[0]}"
        served = crowd.clients
    return f"{served} conversations served; no bound broke"


def page_of(settings: Mapping[str, Any], crowds: Sequence[Crowd], load: Load) -> str:
    """The curve, the tables and the settings as one page that needs nothing else."""
    label = f"{settings['device']}, weights: {settings['weights']}"
    parts = (
        head("Conversations at a time", label),
        _curve(crowds, load),
        *map(table_html, tables_of(crowds, load)),
        settings_html(settings),
        END,
    )
    return "\n".join(parts)


def _curve(crowds: Sequence[Crowd], load: Load) -> str:
    """Time to first sound over the size of the crowd, with the bound as a broken line (SVG)."""
    measured = [(crowd, found) for crowd in crowds if (found := _first_ms(crowd))]
    if not measured:
        return ""
    most_ms = 1.1 * max(load.bounds.first_audio_ms, *(max(found) for _, found in measured))
    most = max(crowd.clients for crowd, _ in measured)

    def place(clients: float, ms: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 12) * clients / most
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - ms / most_ms)
        return f"{x:.1f},{y:.1f}"

    parts = []
    for number, shade in enumerate(_SHADES):
        points = " ".join(place(crowd.clients, found[number]) for crowd, found in measured)
        parts.append(f'<polyline points="{points}" opacity="{shade}"/>')
        at = place(measured[-1][0].clients, measured[-1][1][number]).split(",")
        parts.append(f'<text x="{at[0]}" y="{at[1]}" class="end">p{QUANTILES[number]}</text>')
    bound = load.bounds.first_audio_ms
    ends = [place(0, bound).split(","), place(most, bound).split(",")]
    parts.append(
        f'<line x1="{ends[0][0]}" y1="{ends[0][1]}" x2="{ends[1][0]}" y2="{ends[1][1]}" '
        f'class="bound"/><text x="{_LEFT + 4}" y="{float(ends[0][1]) - 4:.1f}">'
        f"at most {bound:g} ms</text>"
    )
    floor = _HEIGHT - _BOTTOM
    for crowd, _ in measured:
        x = place(crowd.clients, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{floor + 16}" class="tick">{crowd.clients}</text>')
    for ms in np.linspace(0, most_ms, 5):
        y = place(0, float(ms)).split(",")[1]
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" class="end">{ms:.0f}</text>')
    title = escape("Milliseconds to the first sound over conversations at a time")
    style = (
        "polyline{fill:none;stroke:var(--added);stroke-width:2}"
        ".bound{stroke:var(--wrong);stroke-dasharray:6 4}"
        "svg text{fill:var(--faint);font-size:11px}.end{text-anchor:end}.tick{text-anchor:middle}"
    )
    return (
        f"<style>{style}</style>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>{''.join(parts)}"
        f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 6}" class="tick">conversations; '
        "milliseconds to the first sound upwards</text></svg>"
    )


def _first_ms(crowd: Crowd) -> list[float] | None:
    return crowd.quantiles("commit_to_audio_ms")
