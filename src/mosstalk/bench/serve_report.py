"""What ``mosstalk bench serve`` found, as tables and as a page with the curve."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from mosstalk.bench.serve import QUANTILES, Crowd, Load, quantiles
from mosstalk.bench.serve_clients import FIRST_AUDIO_MS, Pattern
from mosstalk.reporting.html import line_chart, page, skipped_html, table_html
from mosstalk.reporting.tables import NONE, Table


def tables_of(crowds: Sequence[Crowd], load: Load) -> list[Table]:
    """Tables for the terminal and the page: a column for each crowd, and what decided."""
    pattern = load.pattern
    note = (
        f"{' / '.join(f'p{each}' for each in QUANTILES)}, at the client. A user says "
        f"{pattern.heard_s:g} s, is answered for up to {pattern.spoken_s:g} s and pauses "
        f"{pattern.pause_s:g} s, in frames of {pattern.frame_ms} ms; first turns begin uniformly "
        f"over {pattern.turn_s:g} s, seed {load.seed}; before them {pattern.history_words} words "
        f"are typed into each conversation. First audio: {FIRST_AUDIO_MS:g} ms of sound "
        "have come, as much as a first hop of 5 codes gives, or the whole of a shorter answer. "
        "Text that is written first: its last piece that came before any sound. "
        "Real-time factor: from there to the last sound, over the sound's length. "
        "Gap: from one delta to the next. Underrun: a player that starts at the first delta, "
        "without a buffer, falls silent. Lag: how much too late a client itself sent a frame."
    )
    server_note = (
        "Shares of the time, 1 being all of it: how long a part of the worker was at work / of "
        "that its thread's processor; of the front its processor, also for each message that it "
        "read or wrote. Captures lie within other parts. Card: a GPU's own time for a part, work "
        "of others beside it included. Runs: of a part a second / items (rows, replies or streams) "
        "that a run held / milliseconds that its most urgent item had waited. Memory at the end. "
        "Begun early: replies begun before their turn had ended, by whether they were used."
    )
    alone = [crowds[0], *crowds]  # each crowd with texts follows the same without
    clients = [
        _client_figures(crowd, pattern) | (_read(crowd, before, pattern) if crowd.read else {})
        for before, crowd in zip(alone, crowds, strict=False)
    ]
    tables = [_side_by_side("Conversations at a time", note, crowds, clients)]
    server = [_server_figures(crowd) for crowd in crowds]
    if any(server):
        tables.append(_side_by_side("The server meanwhile", server_note, crowds, server))
    return [*tables, _bounds(crowds, load)]


def not_measured(crowds: Sequence[Crowd]) -> list[str]:
    """What the server did not tell of itself."""
    told = [crowd.server for crowd in crowds if not crowd.refusals]
    if not told:
        return []
    if not any(each.front for each in told):
        return ["what the server spends: it gives no /metrics to these clients"]
    if not any(each.parts for each in told):
        return ["what the worker's parts spend: this server does not count it"]
    if not any(each.runs for each in told):
        return ["how much the worker's parts do in a run: this server does not count it"]
    return []


def _client_figures(crowd: Crowd, pattern: Pattern) -> dict[str, str]:
    begin = "last word" if pattern.hands_free else "commit"
    decided = {"decision to first audio, ms": "decision_to_audio_ms"} if pattern.hands_free else {}
    written = {
        f"{begin} to the text that is written first, ms": "written_ms",
        "words of an answer": "words",
    }
    timed = {
        **{label: name for label, name in written.items() if crowd.quantiles(name)},
        f"{begin} to first audio, ms": "commit_to_audio_ms",
        **decided,
        "length of the first delta, ms": "first_delta_ms",
        "gaps between deltas, ms": "gaps_ms",
        "length of answers, ms": "audio_ms",
        "length of underruns, ms": "underruns_ms",
    }
    return {
        "turns": str(len(crowd.turns)),
        "input tokens of an answer": _joined(crowd.quantiles("input_tokens"), 0),
        **{label: _joined(crowd.quantiles(name), 0) for label, name in timed.items()},
        "real-time factor": _joined(crowd.quantiles("real_time_factor"), 2),
        "turns with underruns": str(crowd.broken),
        "failed turns": str(len(crowd.failures)),
        "refused": str(len(crowd.refusals)),
        "clients' own lag, ms": _joined(crowd.lags_ms, 1),
    }


def _read(crowd: Crowd, alone: Crowd, pattern: Pattern) -> dict[str, str]:
    """What was read aloud meanwhile, and what that cost the conversations."""
    assert crowd.read
    first, before = crowd.first_audio_ms, alone.first_audio_ms
    times = f"{first[1] / before[1]:.2f} times" if first and before else NONE
    return {
        "texts: request to first sound, ms": _joined(quantiles(np.array(crowd.read.first_ms)), 0),
        "texts: seconds of sound": f"{crowd.read.audio_s:.1f}",
        f"p95 from {_begin(pattern)} to first audio, to that without texts": times,
    }


def _server_figures(crowd: Crowd) -> dict[str, str]:
    parts = {name: _joined(shares, 2) for name, shares in crowd.server.parts.items()}
    runs = {f"runs: {name}": _joined(each, 2) for name, each in crowd.server.runs.items()}
    digits = dict.fromkeys(
        ("front, MiB", "worker, MiB", "begun early, used", "begun early, dropped"), 0
    )
    front = {n: f"{value:.{digits.get(n, 2)}f}" for n, value in crowd.server.front.items()}
    card = {f"card: {name}": f"{share:.2f}" for name, share in crowd.server.card.items()}
    return parts | runs | card | front


def _side_by_side(
    title: str, note: str, crowds: Sequence[Crowd], figures: Sequence[dict[str, str]]
) -> Table:
    labels = list(dict.fromkeys(label for each in figures for label in each))
    rows = [(label, *(each.get(label, NONE) for each in figures)) for label in labels]
    return Table(title, note, ("", *(crowd.name for crowd in crowds)), rows)


def _bounds(crowds: Sequence[Crowd], load: Load) -> Table:
    bounds, begin = load.bounds, _begin(load.pattern)
    note = (
        f"Served: all let in, no turn failed, p95 from {begin} to first audio at most "
        f"{bounds.first_audio_ms:g} ms, underruns in at most {bounds.underrun_share:.1%} of turns."
    )
    rows = [(crowd.name, "; ".join(crowd.breaches(bounds)) or "served") for crowd in crowds]
    return Table("Bounds", note, ("conversations", "broken"), rows)


def _begin(pattern: Pattern) -> str:
    """From when on the bound of first audio counts: the turn's end, whoever found it."""
    return "decision" if pattern.hands_free else "commit"


def _joined(values: Sequence[float] | None, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values) if values else NONE


def verdict(crowds: Sequence[Crowd], load: Load) -> str:
    """The largest crowd that was served, and the first bound that broke beyond it, in words."""
    served = 0
    for crowd in sorted(crowds, key=lambda crowd: crowd.clients):
        if breaches := crowd.breaches(load.bounds):
            return f"{served} conversations served; at {crowd.name}: {breaches[0]}"
        served = crowd.clients
    return f"{served} conversations served; no bound broke"


def page_of(settings: dict[str, Any], crowds: Sequence[Crowd], load: Load) -> str:
    """The verdict, the curve, the tables and the settings as a page that needs nothing else."""
    label = f"{settings['device']}, weights: {settings['weights']}"
    return page(
        "Conversations at a time",
        label,
        settings,
        f"<p>{escape(verdict(crowds, load))}</p>",
        _curve(crowds, load),
        *map(table_html, tables_of(crowds, load)),
        skipped_html(not_measured(crowds)),
    )


def _curve(crowds: Sequence[Crowd], load: Load) -> str:
    """Time from commit or decision to first audio, by crowd, and the bound of its p95."""
    found = {c.name: ms for c in crowds if (ms := c.first_audio_ms)}
    lines = {f"p{each}": [ms[at] for ms in found.values()] for at, each in enumerate(QUANTILES)}
    lines["most for p95"] = [load.bounds.first_audio_ms] * len(found)
    return line_chart(
        f"Milliseconds from {_begin(load.pattern)} to first audio, by conversations",
        [*found],
        lines,
    )
