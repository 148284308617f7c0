"""Replies by the engine, without its threads: one store and one loop for all who speak.

Whoever waits for a reply makes the engine step until that reply has its next row. Several
may be made in turn, as generators are; rows that others get meanwhile wait for them.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event, RLock

from mosstalk.conversation import FinishReason, Mode, Reply, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import CheckpointError, PoisonedError
from mosstalk.models.generation import NOT_FINITE, require_room
from mosstalk.models.language_model import LanguageModel

_BLOCK_ROWS = 16
_FIRST_ROWS = 2048
"""Rows that the store has room for at first, if the context has as many: those of a prompt and of
the longest reply that nobody has asked to be longer."""
_LIMITS = SchedulerLimits(slots=4)
"""Replies at once: an abandoned one may not be gone yet."""


@dataclass(frozen=True)
class Step:
    """One generated row: ``index`` counts from 1 within the reply."""

    index: int
    mode: Mode
    row: Row


class OfflineEngine:
    """The engine of one model whose store grows with the conversations that are kept.

    Safe from any thread, one step at a time. Prefixes are not shared: a conversation is read
    in the same order whatever came before it.
    """

    def __init__(self, model: LanguageModel, ids: SpecialIds) -> None:
        rows = min(_FIRST_ROWS, model.config.max_position_embeddings)
        blocks = -(-rows // _BLOCK_ROWS)
        options = EngineOptions(blocks, _BLOCK_ROWS, _LIMITS, share_prefixes=False)
        self.core = EngineCore(model, ids, options)
        layers = self.core.runner.layers
        # Kernels of a row alone, compiled side by side; prompts' sizes wait for the prompts.
        layers.warm([layers.limits.one_row()])
        self.lock = RLock()
        self._dropped: deque[Sequence] = deque()

    @property
    def kernels(self) -> bool:
        """Whether kernels compute, not their references."""
        return self.core.runner.layers.kernels

    def open(self, owner: object) -> Sequence:
        """A sequence for ``owner``'s conversation; its blocks are free once ``owner`` is gone."""
        sequence = self.core.open()
        # The collector may call at any time, so no more is done than to note it.
        weakref.finalize(owner, self._dropped.append, sequence)
        return sequence

    def step(self) -> None:
        """Run one step; one that fails ends all replies that are being made, and is raised."""
        with self.lock:
            try:
                self.core.step()
            except Exception as error:
                self.core.fail(error)
                raise

    def make_room(self, sequence: Sequence, rows: int) -> None:
        """See that ``sequence`` can have ``rows`` rows while all others keep what they have."""
        while self._dropped:
            self.core.close(self._dropped.popleft())
        pool = self.core.pool
        missing = sequence.blocks_needed(rows) - pool.available
        if missing > 0:
            # Doubled at least: a conversation that goes on does not grow the store at each turn.
            self.core.grow(1 << (pool.size + missing - 1).bit_length())


@dataclass
class EngineReply:
    """Makes one reply after ``rows``, of which ``sequence`` holds K and V of the first ones.

    ``prefill``, ``begin``, then ``step`` until it has ``ended``; ``reply`` grows along and has its
    finish reason at the end. A row of text is handed out by ``fresh`` once its audio id is drawn,
    which is put off until it is needed.
    ``cancel`` may be called from any thread and takes effect before the next step.
    """

    engine: OfflineEngine
    sequence: Sequence
    rows: list[Row]
    params: ReplyParams
    reply: Reply = field(default_factory=Reply)
    _request: Request | None = None
    _handed_out: int = 0
    _cancelled: Event = field(default_factory=Event)

    def cancel(self) -> None:
        """End the reply before its next step, with finish reason ``cancelled``."""
        self._cancelled.set()

    def prefill(self) -> int:
        """Read the rows that have not been read, but the last; return how many.

        The first step reads the last row. Raises ContextLengthError when the rows leave no
        room for a reply.
        """
        model = self.engine.core.model
        require_room(self.rows, model)
        with self.engine.lock:
            longest = model.config.max_position_embeddings
            most = min(longest, len(self.rows) + self.params.limits.max_new_rows)
            self.engine.make_room(self.sequence, most)
            self.sequence.rows = self.rows[:-1]
            unread = self.sequence.unread
            self.engine.core.prefill_ahead(self.sequence)
        while self.sequence.unread and not self._cancelled.is_set():
            self.engine.step()
        return unread

    def begin(self) -> None:
        """Ask the engine for the reply; to be prefilled before.

        Raises:
            ScriptError: see ``Script.rules``.
        """
        with self.engine.lock:
            self.sequence.rows = list(self.rows)
            self._request = self.engine.core.submit(self.sequence, self.params)
        self.reply = self._request.reply

    @property
    def ended(self) -> bool:
        """Whether no row comes any more; a reply that was cancelled ends here."""
        if self._cancelled.is_set():
            self.end()
        return self._asked.state is State.DONE

    def step(self) -> None:
        """Have one more row drawn.

        Raises:
            CheckpointError: the logits are not finite.
            EngineStoppedError: a step that another reply asked for failed.
        """
        request = self._asked
        drawn = len(request.reply.rows)
        while request.state is not State.DONE and len(request.reply.rows) == drawn:
            self.engine.step()
        if isinstance(request.error, PoisonedError):
            raise CheckpointError(NOT_FINITE)
        if request.error is not None:
            raise request.error

    def fresh(self) -> Iterator[Step]:
        """Rows that are whole and were not handed out yet."""
        reply = self.reply
        while self._handed_out < self._asked.ready:
            place = self._handed_out
            self._handed_out += 1
            yield Step(place + 1, reply.modes[place], reply.rows[place])

    def end(self) -> None:
        """End the reply here and now, with finish reason ``cancelled`` unless it has ended."""
        if self._request is None:
            self.reply.finish_reason = FinishReason.CANCELLED
            return
        with self.engine.lock:
            self.engine.core.cancel(self._request)

    @property
    def _asked(self) -> Request:
        assert self._request, "a reply is begun before its rows are asked for"
        return self._request
