"""A reply's whole life in one record."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from mosstalk.constants import CODE_MS
from mosstalk.conversation import (
    FinishReason,
    Mode,
    Reply,
    Row,
    SpecialIds,
    next_mode,
    start_mode,
)
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import MosstalkError
from mosstalk.reply_options import Limits, SamplingOptions, Script, StepRule

_FREE = StepRule()
FIRST_SOUND_S = 0.2
"""When the first sound of a reply is due after it was asked for, unless said otherwise: before the
next sound of those that play already."""
BACKGROUND_S = 3600.0
"""How much later all is due of a reply in the background: what others need goes first."""


class State(StrEnum):
    """Where a request is; what ends it is its ``finish_reason`` or ``error``."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass
class DeferredDraw:
    """An audio draw of a text row that was put off.

    ``place`` is the sequence's row it belongs to, ``step`` its number within the reply; its
    logits follow row ``place`` - 1.
    """

    place: int
    step: int
    rule: StepRule


@dataclass(eq=False)
class Request:
    """One reply: what was asked, where it stands, and what came of it.

    ``asked_s`` and ``due_s`` are on the engine's clock; ``due_s`` is when the listener runs
    out of sound if no row comes. The ``first_rows`` that the first sound needs are due at once,
    and every later row 80 ms after the one before. With ``whole_rows``
    no row is handed out before its audio token is drawn; a reply that ends before its time, in
    line or by an error, may still end with ``audio_pad`` for draws that were put off. One in the
    ``background`` gets what others leave: all that it needs is due ``BACKGROUND_S`` later.
    """

    number: int
    sequence: Sequence
    ids: SpecialIds
    options: SamplingOptions
    limits: Limits
    longest_rows: int
    asked_s: float = 0.0
    first_due_s: float | None = None
    whole_rows: bool = False
    script: Script | None = None
    state: State = State.WAITING
    reply: Reply = field(default_factory=Reply)
    error: MosstalkError | None = None
    cancelled: bool = False
    slot: int | None = None
    prompt_rows: int = 0
    preemptions: int = 0
    deferred_draws: list[DeferredDraw] = field(default_factory=list)
    mode: Mode = Mode.TEXT
    background: bool = False
    first_rows: int = 1
    _rules: list[StepRule] | None = None

    def __post_init__(self) -> None:
        last = self.sequence.rows[-1]
        self.prompt_rows = len(self.sequence.rows)
        self.mode = next_mode(start_mode(last, self.ids), last, self.ids)
        self._rules = self.script.rules(self.mode, self.ids) if self.script else None

    @property
    def step(self) -> int:
        """Number of the next row to be drawn within the reply, from 1."""
        return len(self.reply.rows) + self.sequence.pending + 1

    @property
    def most_rows(self) -> int:
        """Rows of the reply at most: its own limit, or what the context leaves."""
        return min(self.limits.max_new_rows, self.longest_rows - self.prompt_rows)

    @property
    def due_s(self) -> float:
        """The playback deadline that orders work."""
        return self._due_s(len(self.reply.rows))

    @property
    def order(self) -> tuple[float, int]:
        """Who goes first: the earlier deadline of the next row to draw, then who asked first."""
        return self._due_s(len(self.reply.rows) + self.sequence.pending), self.number

    def _due_s(self, rows: int) -> float:
        """When the row after so many is due."""
        first = self.asked_s + FIRST_SOUND_S if self.first_due_s is None else self.first_due_s
        later_s = BACKGROUND_S if self.background else 0.0
        return first + later_s + max(0, rows + 1 - self.first_rows) * CODE_MS / 1000

    @property
    def rule(self) -> StepRule:
        """What the script imposes on the next row."""
        return self._rules[self.step - 1] if self._rules else _FREE

    @property
    def closing(self) -> bool:
        """Whether a pending row is the last one, whatever it will be."""
        rules = math.inf if self._rules is None else len(self._rules)
        return self.sequence.pending > 0 and self.step > min(self.most_rows, rules)

    @property
    def halts_late(self) -> bool:
        """Whether a late step draws nothing after the last row of text.

        The mode or the row's embedding then depend on an audio draw that was put off.
        """
        return self.sequence.rows[-1][0] in (self.ids.sosp, self.ids.modality_pad)

    @property
    def audio_due_now(self) -> bool:
        """Whether put-off audio draws are needed before the next row can be read.

        They are once the mode or the embedding can depend on them: after a text draw of
        sosp or modality_pad, in audio mode, and at the end if whole rows were asked for.
        """
        if not self.deferred_draws or self.state is not State.RUNNING:
            return False
        return self.halts_late or self.mode is Mode.AUDIO or (self.whole_rows and self.ended)

    @property
    def can_resolve_deferred(self) -> bool:
        """Whether the rows are read that put-off audio draws follow."""
        if not self.deferred_draws or self.state is not State.RUNNING:
            return False
        return self.sequence.read[Part.TRUNK] >= self.deferred_draws[-1].place

    @property
    def ready(self) -> int:
        """Leading rows of the reply that can be handed out."""
        if self.whole_rows and self.deferred_draws and self.state is not State.DONE:
            return self.deferred_draws[0].place - self.prompt_rows
        return len(self.reply.rows)

    @property
    def ended(self) -> bool:
        """Whether the reply needs no further row."""
        rows = self.reply.rows
        return bool(rows) and (rows[-1][0] in self.ids.stop or len(rows) >= self.most_rows)

    def add(self, row: Row) -> None:
        """Append a drawn row; a put-off audio token stands as ``audio_pad`` until then."""
        self.reply.rows.append(row)
        self.reply.modes.append(self.mode)
        self.sequence.rows.append(row)

    def resolve_deferred(self, codes: list[int]) -> None:
        """Fill in the put-off audio tokens, the oldest first."""
        for due, code in zip(self.deferred_draws, codes, strict=True):
            row = (self.sequence.rows[due.place][0], code)
            self.sequence.rows[due.place] = row
            self.reply.rows[due.place - self.prompt_rows] = row
        self.deferred_draws.clear()

    def turn_mode(self) -> None:
        """Set the mode of the next row from the last one."""
        self.mode = next_mode(self.mode, self.sequence.rows[-1], self.ids)

    def finish(self, error: MosstalkError | None = None) -> None:
        """End the request and say why."""
        rows = self.reply.rows
        if self.cancelled:
            reason = FinishReason.CANCELLED
        elif rows and rows[-1][0] in self.ids.stop:
            reason = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH
        self.reply.finish_reason = FinishReason.CANCELLED if error else reason
        self.error = error
        self.state = State.DONE
