"""The engine without threads: take requests, step, hand out rows."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from mosstalk.conversation import Row, SpecialIds
from mosstalk.engine.blocks import BlockPool
from mosstalk.engine.request import Request, State
from mosstalk.engine.runner import Outcome, Runner
from mosstalk.engine.scheduler import Scheduler, SchedulerLimits, Work
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import EngineInputError, MosstalkError, OptionError, PoisonedError
from mosstalk.model.generate import Limits
from mosstalk.model.network import LanguageModel
from mosstalk.model.sampling import SamplingOptions
from mosstalk.script import Script

Clock = Callable[[], float]
_STEP_SMOOTHING = 0.1


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and switches of an engine.

    ``blocks`` of ``block_rows`` rows make the pool; ``deferral`` puts off modality blocks,
    heads and draws that no coming row needs; ``share_prefixes`` reads equal beginnings once.
    ``poison`` fills new blocks with NaN, for tests: what is read unwritten cannot go unseen.
    """

    blocks: int = 256
    block_rows: int = 16
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    deferral: bool = True
    share_prefixes: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        """Raise OptionError for a pool that holds nothing."""
        if min(self.blocks, self.block_rows) < 1:
            raise OptionError(f"a pool of {self.blocks} blocks of {self.block_rows} rows is none")


@dataclass(frozen=True)
class Ask:
    """What is asked of the engine for one reply; see ``Request`` for times and whole rows."""

    options: SamplingOptions = field(default_factory=SamplingOptions)
    limits: Limits = field(default_factory=Limits)
    script: Script | None = None
    first_due_s: float | None = None
    whole_rows: bool = False

    def __post_init__(self) -> None:
        """Raise OptionError for a time that orders nothing."""
        if self.first_due_s is not None and not math.isfinite(self.first_due_s):
            raise OptionError(f"first_due_s must be a time in seconds, not {self.first_due_s}")


class EngineCore:
    """Requests in, rows out, one ``step`` at a time; everything on the caller's thread."""

    def __init__(
        self,
        model: LanguageModel,
        ids: SpecialIds,
        options: EngineOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.options = options or EngineOptions()
        self.model, self.ids, self.clock = model, ids, clock
        self.pool = BlockPool(self.options.blocks, self.options.block_rows)
        self.scheduler = Scheduler(self.pool, self.options.limits, self.options.share_prefixes)
        self.runner = Runner(
            model, ids, self.pool, self.options.limits.slots,
            pass_rows=self.options.limits.step_rows, deferral=self.options.deferral,
        )  # fmt: skip
        self._asked = 0
        self._begun: dict[int, int] = {}

    def open(self, rows: list[Row] | None = None) -> Sequence:
        """A new conversation's sequence, with its first rows."""
        return Sequence(self.pool, self.ids.modality_pad, list(rows or []))

    def submit(self, sequence: Sequence, ask: Ask | None = None) -> Request:
        """Ask for a reply to the sequence's rows.

        Raises:
            EngineInputError: a row has an id that the model has no embedding of.
            ContextLengthError, EngineFullError: see ``Scheduler.submit``.
        """
        ask = ask or Ask()
        self._require_known_ids(sequence.rows[sequence.read[Part.TRUNK] :])
        if not sequence.unread:  # it was read ahead, and the next row is drawn from its last one
            sequence.forget(len(sequence.rows) - 1)
        longest = min(self.model.config.max_position_embeddings, self.pool.size * self.pool.rows)
        self._asked += 1
        request = Request(
            self._asked, sequence, self.ids, ask.options, ask.limits, longest,
            self.clock(), ask.first_due_s, ask.whole_rows, ask.script,
        )  # fmt: skip
        self.scheduler.submit(request)
        return request

    def listen(self, sequence: Sequence) -> None:
        """Read the rows of a conversation ahead of its next reply, in room that steps leave.

        Raises:
            EngineInputError: a row has an id that the model has no embedding of.
        """
        self._require_known_ids(sequence.rows[sequence.read[Part.TRUNK] :])
        self.scheduler.listen(sequence)

    def cancel(self, request: Request) -> None:
        """End a reply here and now, between two steps; harmless if it has ended."""
        if request.state is State.DONE:
            return
        if request.whole_rows and request.can_make_up:
            self._make_up([request])
        if request.error is None:
            request.cancelled = True
            self._end(request)

    def close(self, sequence: Sequence) -> list[Request]:
        """Forget a conversation; its blocks are free again.

        Returns its reply if one was under way: it has been cancelled.
        """
        replies = self.scheduler.replies_of(sequence)
        for request in replies:
            self.cancel(request)
        self.scheduler.drop(sequence)
        return replies

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def due_s(self) -> float:
        """When the next row of any reply is due; infinity if there is none to make."""
        asked = (*self.scheduler.running, *self.scheduler.waiting)
        return min((request.due_s for request in asked), default=math.inf)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a request, or rows to read ahead or catch up with."""
        return self.busy or bool(self.scheduler.ahead or self._catching_up(0))

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a row or ended."""
        started = self.clock()
        works = self._planned()
        works += self._read_ahead(sum(work.count for work in works))
        works += self._catching_up(sum(work.count for work in works))
        if not works:
            return []
        touched = [self._take(outcome) for outcome in self.runner.step(works)]
        for work in works:
            if work.request is None and not work.count:
                # What was read ahead is not known to be sound before something is drawn from it.
                work.sequence.publish()
        self._make_up([r for r in touched if r.audio_due_now])
        for request in touched:
            self._turn(request)
        pace = self.clock() - started
        self.scheduler.step_s += _STEP_SMOOTHING * (pace - self.scheduler.step_s)
        return touched

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.busy:
            self.step()

    def _planned(self) -> list[Work]:
        before = {id(r.sequence): len(r.sequence.table) for r in self.scheduler.running}
        works = self.scheduler.plan()
        for request in self.scheduler.running:
            if self._begun.get(request.number) != request.preemptions:
                self._begun[request.number] = request.preemptions
                self.runner.begin(request)
        self._poison(works, before)
        return works

    def _read_ahead(self, planned_rows: int) -> list[Work]:
        works = self.scheduler.read_ahead(self.options.limits.step_rows - planned_rows)
        self._poison(works, {})
        return works

    def _poison(self, works: list[Work], before: dict[int, int]) -> None:
        """Fill blocks that are new with NaN; ``before``: how many a sequence had."""
        if self.options.poison:
            for work in works:
                known = before.get(id(work.sequence), -(-work.start // self.pool.rows))
                self.runner.store.poison(work.sequence.table[known:])

    def _take(self, outcome: Outcome) -> Request:
        """Append a drawn row, or end the request whose logits were not finite."""
        request = outcome.request
        if outcome.bad:
            self._poisoned(request)
        else:
            request.sequence.publish()
            request.add(outcome.row)
        return request

    def _make_up(self, requests: list[Request]) -> None:
        """Make up put-off draws that the next row, or the asker, needs."""
        if not requests:
            return
        for outcome in self.runner.make_up(requests):
            if outcome.bad:
                self._poisoned(outcome.request)

    def _turn(self, request: Request) -> None:
        """End a request that needs no further row, or set the mode of its next one."""
        if request.state is not State.RUNNING:
            return
        if request.ended:
            self._end(request)
        else:
            request.turn_mode()

    def _poisoned(self, request: Request) -> None:
        request.sequence.discard()
        self._end(
            request,
            PoisonedError(
                f"request {request.number}: the model's logits are not finite at row "
                f"{len(request.sequence.rows)}: its weights are damaged or its arithmetic "
                "overflows; try --dtype float32"
            ),
        )

    def _end(self, request: Request, error: MosstalkError | None = None) -> None:
        request.finish(error)
        self._begun.pop(request.number, None)
        self.scheduler.done(request)

    def _require_known_ids(self, rows: list[Row]) -> None:
        """On a GPU an unknown id would take down every conversation, not just this one."""
        config = self.model.config
        for text, audio in rows:
            if not (0 <= text < config.vocab_size and 0 <= audio < config.audio_vocab_size):
                raise EngineInputError(
                    f"row ({text}, {audio}) has an id that the model does not know: it has "
                    f"{config.vocab_size} text ids and {config.audio_vocab_size} audio ids"
                )

    def _catching_up(self, planned_rows: int) -> list[Work]:
        """An idle conversation whose modality blocks can catch up in the room a step has left.

        Only then can its blocks be shared. A longer lag waits for a step with nothing else.
        """
        if not (self.options.deferral and self.options.share_prefixes):
            return []
        room = self.options.limits.step_rows - planned_rows if planned_rows else None
        fitting = (
            w for w in self.scheduler.lagging() if room is None or w.sequence.lagging <= room
        )
        return list(islice(fitting, 1))
