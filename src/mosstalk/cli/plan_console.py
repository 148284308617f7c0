"""``mosstalk plan``: what is asked for, and what is printed."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosstalk.bench.tables import NONE, Table
from mosstalk.cli.common import one_of
from mosstalk.errors import OptionError
from mosstalk.files import as_text
from mosstalk.plan.cards import Card, cards
from mosstalk.plan.fit import PLACES, Plan, Wish, advice
from mosstalk.plan.limits import SOUND, TITLES, Limits, limits_of
from mosstalk.plan.make import plan_of
from mosstalk.plan.measured import Peak, measured
from mosstalk.plan.sizes import PRECISIONS, Configs

FORMAT = "mosstalk-plan-1"
COMPUTED = (
    "Computed, not measured: bytes over the vendor's bandwidth or operations over its dense rates, "
    "whichever take longer. Nothing can be faster, and nothing is as fast."
)
_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_GIB = 2**30
_QUANTIZATION_KEY = "quantization"


@dataclass(frozen=True)
class PlanRequest:
    """What the command line says."""

    gpu_memory: str | None
    gpus: Sequence[str]
    precision: str | None
    sessions: int
    rows: int
    voices_s: float
    embeddings: str
    model: Path | None
    codec: Path | None


def memory_of(words: str) -> int:
    """Bytes of ``24GiB``, ``80 GB`` or ``24564MiB``.

    Raises:
        OptionError: it says something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)", words.strip())
    if not found or not float(found[1]):
        raise OptionError(f"--gpu-memory {words}: give something like 24GiB, 80GB or 24564MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def run_plan(request: PlanRequest, *, as_json: bool) -> bool:
    """Print what is asked for; whether it fits.

    Raises:
        OptionError: nothing was asked for, or an option means nothing.
        DeviceError: FP8 for a card without it.
        ConfigError, CheckpointError: see ``Configs.of``.
    """
    if request.precision not in (None, *PRECISIONS):
        raise OptionError(f"--precision {request.precision}: choose of {', '.join(PRECISIONS)}")
    one_of("--embeddings", request.embeddings, *PLACES)
    if not request.gpu_memory and not request.gpus:
        raise OptionError("give --gpu-memory SIZE, --gpu CARD or both; see mosstalk plan --help")
    chosen = cards(list(request.gpus))
    memory = memory_of(request.gpu_memory) if request.gpu_memory else None
    configs = Configs.of(request.model, request.codec)
    plan = plan_of(configs, _wish(request, configs, memory)) if memory else None
    best = {card.name: _limits(configs, card, request.precision) for card in chosen}
    if as_json:
        print(as_text(_document(configs, request, plan, best)), end="")
    else:
        shown = _plan_tables(plan, published=_published(request)) if plan else []
        shown += [_limits_table(chosen, best), _cards_table(chosen)] if chosen else []
        print("\n\n".join(table.as_text() for table in shown))
        if plan:
            print(f"\n{_verdict(plan)}")
    return plan is None or plan.fits


def _published(request: PlanRequest) -> bool:
    return request.model is None and request.codec is None


def _wish(request: PlanRequest, configs: Configs, memory: int) -> Wish:
    quantized = _QUANTIZATION_KEY in configs.model.extra
    precision = request.precision or ("fp8" if quantized else "bf16")
    return Wish(
        memory, precision, request.sessions, request.rows, request.voices_s, request.embeddings
    )


def _limits(configs: Configs, card: Card, precision: str | None) -> dict[str, Limits | None]:
    """By precision; None where the card lacks it and nobody asked for it alone."""
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
    sources = "; ".join(f"{room.name}, {room.basis}: {room.source}" for room in measured().rooms)
    lines.append(("all of it", _gib(plan.besides_rows_bytes), f"of {_gib(wish.memory_bytes)}"))
    lines.append(("left for rows", _gib(plan.left_bytes), ""))
    kept = Table(
        f"Device memory, {wish.precision}",
        f"GiB. A row takes {costs.row / 1024:,.0f} KiB of K, V and trunk output, a reply "
        f"{costs.reply / 2**20:,.0f} MiB, a turn being heard {costs.turn / 2**20:,.0f} MiB, a "
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
    return [kept, fits, *([_peaks_table(plan)] if published else [])]


def _peaks_table(plan: Plan) -> Table:
    """The plan's need beside what others stated and what was measured."""
    mine = (f"this plan, a conversation of {plan.wish.rows:,} rows", _gib(plan.needed_bytes), "")
    lines = [mine, *(_peak_line(peak) for peak in measured().peaks)]
    return Table("Beside it", "GiB, each on its own device.", ("", "GiB", ""), tuple(lines))


def _peak_line(peak: Peak) -> tuple[str, str, str]:
    absent = "not measured" if peak.name.startswith("measured") else "not stated"
    figure = absent if peak.gib is None else f"{peak.gib:.2f}"
    return peak.name, figure, "; ".join(word for word in (peak.device, peak.command) if word)


def _limits_table(chosen: Sequence[Card], best: dict[str, dict[str, Limits | None]]) -> Table:
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


def _verdict(plan: Plan) -> str:
    wish = plan.wish
    if plan.fits:
        kv_gib = plan.rows * plan.costs.row / _GIB
        # Cut, not rounded: a hundredth too much would be a refusal at the start.
        return (
            f"fits; mosstalk serve --max-sessions {wish.sessions} "
            f"--codec-memory {plan.flow_memory_mib} --kv-gib {int(kv_gib * 100) / 100:.2f}"
            + (" --embeddings host" if wish.embeddings == "host" else "")
        )
    lines = [
        f"does not fit: {_gib(plan.needed_bytes)} GiB are needed for one conversation of "
        f"{wish.rows:,} rows, and there are {_gib(wish.memory_bytes)}"
    ]
    return "\n".join([*lines, *(f"  change: {words}" for words in advice(plan))])


def _document(
    configs: Configs,
    request: PlanRequest,
    plan: Plan | None,
    best: dict[str, dict[str, Limits | None]],
) -> dict[str, Any]:
    computed = {
        card: {name: asdict(limits) if limits else None for name, limits in found.items()}
        for card, found in best.items()
    }
    return {
        "format": FORMAT,
        "weights": configs.model.weights_kind if request.model else "none",
        "plan": _plan_values(plan, published=_published(request)) if plan else None,
        "limits": {"note": COMPUTED, "cards": computed} if best else None,
    }


def _plan_values(plan: Plan, *, published: bool) -> dict[str, Any]:
    return {
        "wish": asdict(plan.wish),
        "items": [asdict(item) for item in plan.items],
        "row_bytes": plan.costs.row,
        "reply_bytes": plan.costs.reply,
        "turn_bytes": plan.costs.turn,
        "left_bytes": plan.left_bytes,
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "rows": plan.rows,
        "minutes": plan.minutes,
        "sessions": plan.full_sessions,
        "codec_memory_mib": plan.flow_memory_mib,
        "change": [] if plan.fits else advice(plan),
        "beside": [asdict(peak) for peak in measured().peaks] if published else [],
    }


def _gib(size: float) -> str:
    return f"{size / _GIB:,.2f}"
