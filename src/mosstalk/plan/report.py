"""What ``mosstalk plan`` found, as tables for people and as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from mosstalk.plan.crowd import SEGMENT_S
from mosstalk.plan.fit import Plan, advice
from mosstalk.plan.limits import SOUND, TITLES, Card, Limits, limits_of
from mosstalk.plan.sizes import PRECISIONS, Configs, Peak, measured
from mosstalk.reporting.tables import NONE, Table

FORMAT = "mosstalk-plan-1"
COMPUTED = (
    "Computed, not measured: bytes over the vendor's bandwidth or operations over its dense rates, "
    "whichever take longer. Nothing can be faster, and nothing is as fast."
)
_GIB = 2**30

Best: TypeAlias = Mapping[str, Mapping[str, Limits | None]]
"""By card and precision; None where the card lacks it and nobody asked for it alone."""


def printed(
    plan: Plan | None, chosen: Sequence[Card], best: Best, serve: str, *, published: bool
) -> str:
    """All that was found, for people; ``published``: of the published model's sizes.

    ``serve``: the command that serves the model of which the plan is.
    """
    shown = _plan_tables(plan, published=published) if plan else []
    shown += [_limits_table(chosen, best), _cards_table(chosen)] if chosen else []
    verdict = f"\n\n{_verdict(plan, serve)}" if plan else ""
    return "\n\n".join(table.as_text() for table in shown) + verdict


def document_of(weights: str, plan: Plan | None, best: Best, *, published: bool) -> dict[str, Any]:
    """All that was found; ``weights``: their kind."""
    computed = {
        card: {name: asdict(limits) if limits else None for name, limits in found.items()}
        for card, found in best.items()
    }
    return {
        "format": FORMAT,
        "weights": weights,
        "plan": _plan_values(plan, published=published) if plan else None,
        "limits": {"note": COMPUTED, "cards": computed} if best else None,
    }


def best_of(configs: Configs, chosen: Sequence[Card], precision: str | None) -> Best:
    """What each card could do at best, in ``precision`` or in all."""
    return {card.name: _limits(configs, card, precision) for card in chosen}


def _limits(configs: Configs, card: Card, precision: str | None) -> dict[str, Limits | None]:
    asked = (precision,) if precision else PRECISIONS
    return {
        name: limits_of(configs, card, name)
        if precision or name == "bf16" or card.fp8_tflops
        else None
        for name in asked
    }


def _plan_tables(plan: Plan, *, published: bool) -> list[Table]:
    wish, costs = plan.wish, plan.costs
    lines = [(item.name, _gib(item.bytes), item.note) for item in plan.items]
    sources = "; ".join(
        f"{each.name}, {each.basis}: {each.source}" for each in measured().overheads
    )
    lines.append(("all of it", _gib(plan.besides_rows_bytes), f"of {_gib(wish.memory_bytes)}"))
    lines.append(("left for rows", _gib(plan.left_bytes), ""))
    kept = Table(
        f"Device memory, {wish.precision}",
        f"GiB. A row takes {costs.row / 1024:,.0f} KiB of K, V and trunk output, a reply "
        f"{costs.reply / 2**20:,.0f} MiB, a second being heard {costs.heard / 1e6:,.1f} MB, a "
        f"second of voice {costs.page / costs.page_s / 1e6:,.0f} MB. {sources}.",
        ("", "GiB", ""),
        tuple(lines),
    )
    fits = Table(
        "What fits",
        "Every 80 ms that either side speaks is a row. Sessions share the rows: what is not in "
        "use gives way, and is read again when it is needed.",
        ("", "how many"),
        (
            ("rows", f"{plan.rows:,}"),
            ("minutes of conversation, both sides", f"{plan.minutes:,.1f}"),
            (f"sessions of {wish.rows:,} rows each", f"{plan.full_sessions:,}"),
        ),
    )
    if not published:
        return [kept, fits]
    mine = (f"this plan, a conversation of {wish.rows:,} rows", _gib(plan.needed_bytes), "")
    lines = [mine, *map(_peak_line, measured().peaks)]
    return [kept, fits, Table("Beside it", "GiB, each on its own device.", ("", "GiB", ""), lines)]


def _peak_line(peak: Peak) -> tuple[str, str, str]:
    absent = "not measured" if peak.name.startswith("measured") else "not stated"
    figure = absent if peak.gib is None else f"{peak.gib:.2f}"
    return peak.name, figure, "; ".join(word for word in (peak.device, peak.command) if word)


def _limits_table(chosen: Sequence[Card], best: Best) -> Table:
    lines = []
    for name, title in TITLES.items():
        for precision in list(best[chosen[0].name])[: 1 if name in SOUND else None]:
            label = title if name in SOUND else f"{title}, {precision}"
            cells = (_cell(best[card.name][precision], name) for card in chosen)
            lines.append((label, *cells))
    note = (
        f"{COMPUTED} {NONE}: no FP8 products; no room: weights and rows are more than its memory. "
        "Flow and vocoder are float16, hearing is float32, whatever the trunk is."
    )
    return Table("Limits", note, ("", *(card.name for card in chosen)), tuple(lines))


def _cell(limits: Limits | None, name: str) -> str:
    if limits is None:
        return NONE
    value = getattr(limits, name)
    if value is None:
        return "no room"
    return f"{value:.3f}" if name == "real_time_factor" else f"{value:.2f}"


def _cards_table(chosen: Sequence[Card]) -> Table:
    lines = [
        (
            card.name,
            f"{card.memory_gb:g}",
            f"{card.bandwidth_gb_s:,}",
            f"{card.bf16_tflops:g}",
            f"{card.fp8_tflops:g}" if card.fp8_tflops else NONE,
            f"{card.fp32_tflops:g}",
        )
        for card in chosen
    ]
    sources = "; ".join(f"{card.name}: {card.source}" for card in chosen)
    columns = ("", "GB", "GB/s", "bf16", "fp8", "fp32")
    note = f"Rates in Tflop/s, dense, from the vendor. {sources}."
    return Table("Cards", note, columns, tuple(lines))


def _verdict(plan: Plan, serve: str) -> str:
    wish = plan.wish
    if plan.fits:
        kv_gib = plan.rows * plan.costs.row / _GIB
        # Cut, not rounded: a hundredth too much would be a refusal at the start.
        return (
            f"fits; {serve} --max-sessions {wish.sessions} "
            f"--codec-memory {plan.flow_memory_mib} --kv-gib {int(kv_gib * 100) / 100:.2f} "
            # Without it a start asks for room for the model's whole context.
            f"--max-rows {wish.rows}" + (" --embeddings host" if wish.embeddings == "host" else "")
        )
    lines = [
        f"does not fit: {_gib(plan.needed_bytes)} GiB are needed for one conversation of "
        f"{wish.rows:,} rows, and there are {_gib(wish.memory_bytes)}"
    ]
    return "\n".join([*lines, *(f"  change: {words}" for words in advice(plan))])


def _plan_values(plan: Plan, *, published: bool) -> dict[str, Any]:
    return plan.as_values() | {
        "reply_bytes": plan.costs.reply,
        "turn_bytes": round(SEGMENT_S * plan.costs.heard),
        "left_bytes": plan.left_bytes,
        "minutes": plan.minutes,
        "codec_memory_mib": plan.flow_memory_mib,
        "change": [] if plan.fits else advice(plan),
        "beside": [asdict(peak) for peak in measured().peaks] if published else [],
    }


def _gib(size: float) -> str:
    return f"{size / _GIB:,.2f}"
