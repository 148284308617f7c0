"""Whether a model, its codec and so many conversations fit, and what to change where not.

Plain arithmetic on sizes that ``sizes`` and ``measured`` give.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from mosstalk.constants import CODES_PER_SECOND
from mosstalk.engine.memory import MARGIN
from mosstalk.plan.crowd import heard_s, replies_at_once
from mosstalk.plan.sizes import (
    MIB,
    Configs,
    Part,
    Rates,
    codec_on_meta,
    codec_parts,
    language_parts,
    measured,
    text_table_bytes,
)

BLOCK_ROWS = 16
"""Rows in a block of the engine's pool: K and V are given out in whole ones."""
SHORTEST_VOICE_S = 3.0
SHORTEST_CONVERSATION_ROWS = 1024
PLACES = ("device", "host")
"""Where the table of text embeddings may be."""
_GIB = 2**30


@dataclass(frozen=True)
class Item:
    """A line of a plan."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Wish:
    """What shall fit: ``rows`` of the longest conversation, ``voices_s`` seconds of all voices.

    ``embeddings``: "host" where those of text are in the host's memory, else "device".
    """

    memory_bytes: int
    precision: str = "bf16"
    sessions: int = 1
    rows: int = 8192
    voices_s: float = 7.0
    embeddings: str = "device"


@dataclass(frozen=True, kw_only=True)
class Costs(Rates):
    """Bytes of what there is once, by name, and of what grows with use.

    ``margin``: share of the memory that is left to others. ``trunk_saved``: bytes that an FP8
    trunk would take less. ``text_table``: bytes of the text embeddings, while they are counted.
    """

    weights: tuple[Item, ...]
    overheads: tuple[Item, ...]
    margin: float
    trunk_saved: int = 0
    text_table: int = 0

    @property
    def reply(self) -> int:
        """Bytes of a reply on its way to sound."""
        return self.reply_pages * self.page + self.vocoder_state


@dataclass(frozen=True)
class Plan:
    """What ``wish`` takes, and what is left for rows."""

    wish: Wish
    costs: Costs

    @property
    def items(self) -> list[Item]:
        """Everything besides rows."""
        wish, costs = self.wish, self.costs
        replies, heard = self.replies, heard_s(wish.sessions)
        return [
            *costs.weights,
            *costs.overheads,
            Item("left free", self._margin, f"{costs.margin:.0%} of it"),
            Item("replies", replies * costs.reply, f"{replies} at once"),
            Item("turns being heard", round(heard * costs.heard), f"{heard:,.0f} s of sound"),
            Item("voices", self.voice_pages * costs.page, f"{wish.voices_s:g} s"),
        ]

    @property
    def replies(self) -> int:
        """Replies that may be on their way to sound at once."""
        return replies_at_once(self.wish.sessions)

    @property
    def _margin(self) -> int:
        return math.ceil(self.costs.margin * self.wish.memory_bytes)

    @property
    def voice_pages(self) -> int:
        """Pages of the flow that voices take."""
        return math.ceil(self.wish.voices_s / self.costs.page_s - 1e-9)

    @property
    def besides_rows_bytes(self) -> int:
        """All that is not rows."""
        return sum(item.bytes for item in self.items)

    @property
    def left_bytes(self) -> int:
        """Left for rows; below 0 where even the rest does not fit."""
        return self.wish.memory_bytes - self.besides_rows_bytes

    @property
    def rows(self) -> int:
        """Rows that fit, of all conversations together."""
        return max(0, self.left_bytes) // (self.costs.row * BLOCK_ROWS) * BLOCK_ROWS

    @property
    def minutes(self) -> float:
        """Speech of both sides that fits: every 80 ms of either is a row."""
        return self.rows / CODES_PER_SECOND / 60

    @property
    def needed_bytes(self) -> int:
        """With one conversation of the wished length: what must be there for a start."""
        return self.besides_rows_bytes + self._conversation_bytes

    @property
    def _conversation_bytes(self) -> int:
        """K, V and trunk output of one conversation of the wished length."""
        return math.ceil(self.wish.rows / BLOCK_ROWS) * BLOCK_ROWS * self.costs.row

    @property
    def fits(self) -> bool:
        """Whether an engine would start: one conversation of the longest length has room."""
        return self.rows >= self.wish.rows

    @property
    def full_sessions(self) -> int:
        """Sessions that fit if each holds a conversation of the longest length."""
        memory_bytes, each = self.wish.memory_bytes, self._conversation_bytes

        def needed(sessions: int) -> int:
            crowd = replace(self, wish=replace(self.wish, sessions=sessions))
            return crowd.besides_rows_bytes + sessions * each

        return bisect_right(range(1, memory_bytes // each + 1), memory_bytes, key=needed)

    @property
    def flow_memory_mib(self) -> int:
        """Memory of the flow for replies and voices, as ``serve --codec-memory`` takes it."""
        pages = self.replies * self.costs.reply_pages + self.voice_pages
        return math.ceil(pages * self.costs.page / MIB)

    def as_values(self) -> dict[str, Any]:
        """For documents; without a GPU's memory nothing is said to fit or not to."""
        known = bool(self.wish.memory_bytes)
        return {
            "wish": asdict(self.wish),
            "items": [asdict(item) for item in self.items],
            "row_bytes": self.costs.row,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits if known else None,
            "rows": self.rows if known else None,
            "sessions": self.full_sessions if known else None,
        }


def with_fp8(plan: Plan) -> Plan:
    """The same with an FP8 trunk."""
    weights = _without(plan.costs, "trunk", plan.costs.trunk_saved)
    costs = replace(plan.costs, weights=weights, trunk_saved=0)
    return Plan(replace(plan.wish, precision="fp8"), costs)


def with_table_on_host(plan: Plan) -> Plan:
    """The same with the text embeddings in the host's memory."""
    weights = _without(plan.costs, "embeddings", plan.costs.text_table, "; the text's elsewhere")
    costs = replace(plan.costs, weights=weights, text_table=0)
    return Plan(replace(plan.wish, embeddings="host"), costs)


def _without(costs: Costs, name: str, saved: int, note: str = "") -> tuple[Item, ...]:
    return tuple(
        replace(item, bytes=item.bytes - saved, note=item.note + note)
        if item.name == name
        else item
        for item in costs.weights
    )


def advice(plan: Plan) -> list[str]:
    """Settings that alone would make it fit; where none would, all together or the need."""
    alone = [words for words, changed in _changes(plan) if changed.fits]
    if alone:
        return alone
    least = _least(plan)
    if least.fits:
        wish = least.wish
        return [
            f"--precision {wish.precision} --embeddings {wish.embeddings} "
            f"--max-sessions {wish.sessions} --max-rows {wish.rows} "
            f"--voices-s {wish.voices_s:g}, all together"
        ]
    # The margin is a share of the memory in which it fits.
    memory = (least.needed_bytes - least._margin) / (1 - least.costs.margin)
    return [
        f"a GPU with more memory: at least {memory / _GIB:.1f} GiB with "
        f"--precision {least.wish.precision} --embeddings {least.wish.embeddings}, one session of "
        f"{least.wish.rows} rows and {least.wish.voices_s:g} s of voices"
    ]


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    wish = plan.wish
    if plan.costs.text_table:
        yield "--embeddings host", with_table_on_host(plan)
    if plan.costs.trunk_saved:
        yield "--precision fp8", with_fp8(plan)
    fewer = [replace(plan, wish=replace(wish, sessions=n)) for n in range(wish.sessions - 1, 0, -1)]
    most = next((each for each in fewer if each.fits), None)
    if most:
        yield f"--max-sessions {most.wish.sessions}", most
    if plan.rows >= SHORTEST_CONVERSATION_ROWS:
        shorter = replace(plan, wish=replace(wish, rows=plan.rows))
        yield f"--max-rows {plan.rows}", shorter
    if wish.voices_s > SHORTEST_VOICE_S:
        short = replace(plan, wish=replace(wish, voices_s=SHORTEST_VOICE_S))
        yield f"--voices-s {SHORTEST_VOICE_S:g}", short


def _least(plan: Plan) -> Plan:
    smallest = with_fp8(plan) if plan.costs.trunk_saved else plan
    smallest = with_table_on_host(smallest) if smallest.costs.text_table else smallest
    wish = smallest.wish
    voices = min(wish.voices_s, SHORTEST_VOICE_S)
    rows = min(wish.rows, SHORTEST_CONVERSATION_ROWS)
    return replace(smallest, wish=replace(wish, sessions=1, rows=rows, voices_s=voices))


def plan_of(configs: Configs, wish: Wish) -> Plan:
    """What ``wish`` takes of a GPU, with this model and codec."""
    plan = Plan(wish, _costs(configs))
    plan = with_fp8(plan) if wish.precision == "fp8" else plan
    return with_table_on_host(plan) if wish.embeddings == "host" else plan


@cache
def _costs(configs: Configs) -> Costs:
    language = language_parts(configs.model, "bf16")
    saved = sum(part.bytes for part in language) - sum(
        part.bytes for part in language_parts(configs.model, "fp8")
    )
    parts = [*language, *codec_parts(codec_on_meta(configs))]
    overheads = tuple(Item(each.name, each.bytes, each.basis) for each in measured().overheads)
    return Costs(
        weights=tuple(map(_item, parts)),
        overheads=overheads,
        **vars(Rates.of(configs)),
        margin=MARGIN,
        trunk_saved=saved,
        text_table=text_table_bytes(configs.model),
    )


def _item(part: Part) -> Item:
    return Item(part.name, part.bytes, f"{part.weights / 1e6:,.1f} M weights")
