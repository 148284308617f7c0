"""The engine without threads: take requests, step, hand out rows."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.layers import LayerOptions
from mosstalk.engine.model_runner import InFlightStep, ModelRunner, Outcome
from mosstalk.engine.request import DeferredDraw, Request, State
from mosstalk.engine.sampler import Draw
from mosstalk.engine.scheduler import Scheduler, SchedulerLimits, Work
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import (
    EngineInputError,
    EngineStoppedError,
    MosstalkError,
    OptionError,
    PoisonedError,
)
from mosstalk.models.language_model import LanguageModel
from mosstalk.reply_options import Limits, SamplingOptions, Script
from mosstalk.runtime.busy import BusyPart, at_work, on_card

Clock = Callable[[], float]
_STEP_SMOOTHING = 0.1


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and switches of an engine.

    ``blocks`` of ``block_rows`` rows make the pool; ``deferral`` puts off modality blocks,
    heads and draws that no coming row needs; ``share_prefixes`` reads equal beginnings once.
    ``late`` launches a step before the rows of the one before it are known (with deferral only);
    None: where the model is on a GPU, which then never waits for the host.
    ``kernels``: own kernels where they run, captured in ``graphs``; their references otherwise.
    ``batch_invariant``: a row is computed in the same order of sums whoever shares its step.
    ``poison`` fills new blocks with NaN, for tests: what is read unwritten cannot go unseen.
    """

    blocks: int = 256
    block_rows: int = 16
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    deferral: bool = True
    share_prefixes: bool = True
    poison: bool = False
    late: bool | None = None
    kernels: bool = True
    graphs: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Raise OptionError for a pool that holds nothing."""
        if min(self.blocks, self.block_rows) < 1:
            raise OptionError(f"a pool of {self.blocks} blocks of {self.block_rows} rows is none")

    def layers(self, slots: int) -> LayerOptions:
        """How layers compute for so many replies at once."""
        return LayerOptions(
            self.limits.step_rows + slots,
            slots,
            self.graphs,
            invariant=True if self.batch_invariant else None,
            kernels=None if self.kernels else False,
        )


@dataclass(frozen=True)
class ReplyParams:
    """What is asked of the engine for one reply; see ``Request`` for what is not plain."""

    options: SamplingOptions = field(default_factory=SamplingOptions)
    limits: Limits = field(default_factory=Limits)
    script: Script | None = None
    first_due_s: float | None = None
    whole_rows: bool = False
    background: bool = False
    first_rows: int = 1

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
        self.runner = ModelRunner(
            model, ids, self.pool, self.options.limits.slots,
            pass_rows=self.options.limits.step_rows, deferral=self.options.deferral,
            layers=self.options.layers(self.options.limits.slots),
        )  # fmt: skip
        if self.options.batch_invariant and not self.batch_invariant:
            raise OptionError(
                f"--batch-invariant in {model.dtype} needs the engine's kernels, and on "
                f"{model.device} they do not run: take --dtype float32, or an NVIDIA GPU of "
                "compute capability 8.0 or more with Triton installed"
            )
        late = self.options.late
        on_gpu = model.device.type == "cuda"
        self._late = self.options.deferral and (on_gpu if late is None else late)
        self._in_flight: InFlightStep | None = None
        self._asked = 0
        self._begun: dict[int, int] = {}

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's sums are in one order whoever shares its step; see ``Layers``.

        Without kernels a matmul of few rows may still differ in last bits from one of more.
        """
        return self.runner.layers.invariant

    def open(self, rows: list[Row] | None = None) -> Sequence:
        """A new conversation's sequence, with its first rows."""
        return Sequence(self.pool, self.ids.modality_pad, list(rows or []))

    def grow(self, blocks: int) -> None:
        """Have a pool of ``blocks`` blocks; K and V of all that was read stay.

        For whoever knows how long a reply can become only when it is asked for: on a GPU it
        costs the graphs that were captured.
        """
        self.pool.grow(blocks)
        self.runner.grow()

    def submit(self, sequence: Sequence, params: ReplyParams | None = None) -> Request:
        """Ask for a reply to the sequence's rows.

        Raises:
            EngineInputError: a row has a token that the model has no embedding of.
            ContextLengthError, EngineFullError: see ``Scheduler.submit``.
        """
        params = params or ReplyParams()
        self._require_known_tokens(sequence.rows[sequence.read[Part.TRUNK] :])
        if not sequence.unread:  # it was read ahead, and the next row is drawn from its last one
            sequence.free_from(len(sequence.rows) - 1)
        longest = min(self.model.config.max_position_embeddings, self.pool.size * self.pool.rows)
        self._asked += 1
        request = Request(
            self._asked, sequence, self.ids, params.options, params.limits, longest,
            self.clock(), params.first_due_s, params.whole_rows, params.script,
            background=params.background, first_rows=params.first_rows,
        )  # fmt: skip
        self.scheduler.submit(request)
        return request

    def prefill_ahead(self, sequence: Sequence) -> None:
        """Read the rows of a conversation ahead of its next reply, in room that steps leave.

        One that has outgrown the model's context is left unread: no reply can follow its rows.

        Raises:
            EngineInputError: a row has a token that the model has no embedding of.
        """
        self._require_known_tokens(sequence.rows[sequence.read[Part.TRUNK] :])
        if len(sequence.rows) <= self.model.config.max_position_embeddings:
            self.scheduler.prefill_ahead(sequence)
        else:
            self.scheduler.leave_unread(sequence)

    def cancel(self, request: Request) -> None:
        """End a reply here and now, between two steps; harmless if it has ended."""
        if request.state is State.DONE:
            return
        if request.whole_rows and request.can_resolve_deferred:
            self._resolve_deferred([request])
        if request.error is None:
            request.cancelled = True
            self._end(request)

    def fail(self, failure: Exception) -> None:
        """End all replies after a step that raised, and read all conversations anew.

        What such a step has left of K and V is not known. Rows stay, and others can be asked for.
        """
        why = f"a step of the engine failed: {type(failure).__name__}: {failure}"
        self._in_flight = None
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self._end(request, EngineStoppedError(why))
        for sequence in (*self.scheduler.idle.values(), *self.scheduler.ahead.values()):
            sequence.invalidate()
        self.scheduler.idle.clear()

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

    def step(self, waited_s: float = 0.0) -> list[Request]:
        """Run one step; return the requests that got a row or ended.

        ``waited_s`` is for how long others were first, to be counted with it.
        If steps are launched late, the next one is on the device before this one is waited for.
        """
        started = self.clock()
        with at_work(BusyPart.STEP, 0, waited_s) as work:
            if self._in_flight and not self._in_flight.live:
                self.runner.collect(self._in_flight)
                self._in_flight = None
            in_flight = self._in_flight or self._launched(self.scheduler.plan())
            if in_flight is None:
                return []
            work.part, work.items = in_flight.part, in_flight.items
            self._in_flight = self._launched(self.scheduler.plan_late()) if self._late else None
            touched = self._landed(in_flight)
        pace = self.clock() - started
        self.scheduler.step_s += _STEP_SMOOTHING * (pace - self.scheduler.step_s)
        return touched

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.busy:
            self.step()

    def _launched(self, works: list[Work] | None) -> InFlightStep | None:
        """A step on its way: requests' works, and what else there is room for."""
        if works is None:
            return None
        limit = self.options.limits.step_rows
        works += self.scheduler.read_ahead(limit - sum(work.count for work in works))
        works += self._catching_up(sum(work.count for work in works))
        if not works:
            return None
        if self.options.poison:
            for work in works:
                self.runner.store.poison(work.sequence.table[-(-work.start // self.pool.rows) :])
        running = self.scheduler.running
        fresh = [r for r in running if self._begun.get(r.number) != r.preemptions]
        in_flight = self.runner.launch(works, fresh)
        self._begun |= {request.number: request.preemptions for request in fresh}
        for work in works:
            if work.request is None and not work.count:
                # What was read ahead is not known to be sound before something is drawn from it.
                work.sequence.publish(len(work.sequence.rows))
        return in_flight

    def _landed(self, in_flight: InFlightStep) -> list[Request]:
        """Wait for a step and do what follows from it, perhaps while the next one runs."""
        outcomes = self.runner.collect(in_flight)
        touched = [each.draw.request for each in outcomes if self._take(each)]
        self._resolve_deferred([r for r in touched if r.audio_due_now])
        pending = self._in_flight.draws if self._in_flight else []
        late = {draw.request.number: draw for draw in pending}
        for request in touched:
            self._turn(request, late.get(request.number))
        return touched

    def _take(self, outcome: Outcome) -> bool:
        """Append a drawn row, or end the request whose logits were not finite.

        False if there is nothing: the reply has ended, or the draw was missed.
        """
        draw, request = outcome.draw, outcome.draw.request
        if request.state is not State.RUNNING:
            return False
        if draw.missed:
            assert outcome.row is None, "a row was drawn in a mode that had ended"
            return False
        request.sequence.pending -= 1
        if outcome.bad:
            self._poisoned(request)
            return True
        assert outcome.row is not None, "no row was drawn, and no mode had ended"
        request.sequence.publish(draw.place)
        if request.mode is Mode.TEXT and self.options.deferral:
            request.deferred_draws.append(DeferredDraw(draw.place, draw.step, draw.rule))
        request.add(outcome.row)
        return True

    def _resolve_deferred(self, requests: list[Request]) -> None:
        """Make up put-off draws that the next row, or the asker, needs."""
        if not requests:
            return
        with on_card(BusyPart.STEP, self.runner.device):
            found = self.runner.resolve_deferred(requests)
        for request, bad in found:
            if bad:
                self._poisoned(request)

    def _turn(self, request: Request, late: Draw | None) -> None:
        """End a request that needs no further row, or set the mode of its next one.

        Its ``late`` draw is on the device: if the mode is another one, nothing is drawn there.
        """
        if request.state is not State.RUNNING:
            return
        if request.ended:
            self._end(request)
            return
        request.turn_mode()
        if late and (late.mode is not request.mode or self._halted(request, late)):
            late.missed = True
            request.sequence.pending -= 1

    def _halted(self, request: Request, late: Draw) -> bool:
        """Whether a row of text keeps a late draw in the same mode from being made."""
        if late.mode is Mode.AUDIO or not request.halts_late:
            return False
        if request.sequence.rows[-1][0] == self.ids.modality_pad:
            # It is embedded by its audio token, which had not been drawn when it was read.
            request.sequence.free_from(len(request.sequence.rows) - 1)
        return True

    def _poisoned(self, request: Request) -> None:
        request.sequence.invalidate()
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
        request.sequence.abandon()
        if self._in_flight and not self._in_flight.live:
            self._in_flight = None
        self._begun.pop(request.number, None)
        self.scheduler.done(request)

    def _require_known_tokens(self, rows: list[Row]) -> None:
        """On a GPU an unknown token would take down every conversation, not just this one."""
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
