"""Who computes what in the next step: earliest playback deadline first.

A step has room for a number of rows. Conversations that only have their latest row to read
come first, prompts fill what is left, in chunks; both by deadline. When blocks run out, idle
conversations lose theirs (the one unused for longest first), then those in line, then the
running reply whose deadline is the last. K and V that were lost are computed again later;
rows are never lost. Replies in the background are due last and have at most half of the slots, so
that others need not wait for one. What requests leave of a step goes to conversations that asked
to have their rows read ahead; for these only idle conversations lose blocks.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import ContextLengthError, EngineFullError, OptionError

_GUESSED_STEP_S = 0.08
_FIRST_ROWS = 16
"""A reply's rows until its first sound, about."""
_MOST_SAT_OUT = 16
"""Steps in a row that replies in the background leave to others' first rows."""
_BACKGROUND_ROWS = 64
"""Most rows of a prompt in the background in one step: nobody else waits long for its end."""


class _PreemptionDueError(Exception):
    """A late step cannot be planned: a running reply would lose its blocks."""


@dataclass(frozen=True)
class SchedulerLimits:
    """How much runs at once: ``step_rows`` a step, ``slots`` replies, ``waiting`` in line."""

    step_rows: int = 512
    slots: int = 64
    waiting: int = 256

    def __post_init__(self) -> None:
        """Raise OptionError where nothing could ever run."""
        for name, least in (("step_rows", 1), ("slots", 1), ("waiting", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True)
class Work:
    """Rows ``start`` .. ``start`` + ``count`` - 1 of a sequence that the trunk reads in a step.

    ``request`` is None where an idle conversation's lagging modality blocks catch up
    (``count`` 0). ``draws`` says that the next row is drawn from the last one's output; it may
    have been read before (``count`` 0), by a late step that drew nothing. The last row may be
    one that the host has not seen.
    """

    sequence: Sequence
    request: Request | None
    start: int
    count: int
    draws: bool


@dataclass
class Scheduler:
    """Requests in line and at work, conversations without one, and the blocks they share.

    A conversation without a request is in ``ahead`` while it has rows to be read before any
    reply asks for them, and in ``idle`` as long as it holds blocks; in both the one unused for
    longest comes first.
    """

    pool: BlockPool
    limits: SchedulerLimits
    share_prefixes: bool = True
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    idle: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    ahead: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    step_s: float = _GUESSED_STEP_S
    _slots: list[int] = field(default_factory=list)
    _sat_out: int = 0

    def __post_init__(self) -> None:
        self._slots = list(range(self.limits.slots))[::-1]

    def submit(self, request: Request) -> None:
        """Take a request in line; those for whom a slot is free do not count as waiting.

        Raises:
            ContextLengthError: it could never run, however long it waited.
            EngineFullError: the line is full; says when to come back.
        """
        assert not self.replies_of(request.sequence), "a reply of this conversation is under way"
        rows = len(request.sequence.rows)
        room = self.pool.size * self.pool.rows
        if request.most_rows < 1 or rows + 1 > room:
            raise ContextLengthError(
                f"the conversation is {rows} rows long, the model's context holds "
                f"{request.longest_rows} and the engine's pool {room}: shorten it, or begin anew"
            )
        line = sum(each.background is request.background for each in self.waiting)
        free = self._free_in_background if request.background else self.free_slots
        if line >= self.limits.waiting + free:
            raise EngineFullError(
                f"{len(self.running)} replies are being made and {line} wait: the "
                f"engine is full; come back in {self.retry_after_s:.1f} s",
                self.retry_after_s,
            )
        self._take_out(request.sequence)
        self.waiting.append(request)

    def prefill_ahead(self, sequence: Sequence) -> None:
        """Have the rows of a conversation without a request read where steps leave room."""
        assert not self.replies_of(sequence), "a reply of this conversation is under way"
        self._take_out(sequence)
        self.ahead[id(sequence)] = sequence

    @property
    def retry_after_s(self) -> float:
        """Seconds until a running reply will have ended, at the pace of late."""
        left = [r.most_rows - len(r.reply.rows) for r in self.running]
        steps_a_row = -(-len(self.running) // self.limits.step_rows)
        return max(1, min(left, default=1) * steps_a_row) * self.step_s

    @property
    def free_slots(self) -> int:
        """Replies that can be taken up at once."""
        return len(self._slots)

    @property
    def _free_in_background(self) -> int:
        """The same of replies in the background, which may have half of the slots."""
        most = max(1, self.limits.slots // 2)
        return min(len(self._slots), most - sum(each.background for each in self.running))

    def plan(self) -> list[Work]:
        """The next step's work; admits who waits and takes blocks as needed.

        Blocks are given strictly by deadline. Of the rows, one is set aside for every reply
        that has just its latest row to read and prompts share the rest; where that leaves
        prompts nothing, all rows are given strictly by deadline, so that nobody starves.
        """
        return self._planned(late=False)

    def plan_late(self) -> list[Work] | None:
        """``plan`` while rows are pending, which are read unseen.

        None if a running reply would have to go back in line: that needs its rows to be known.
        """
        try:
            return self._planned(late=True)
        except _PreemptionDueError:
            return None

    def _planned(self, *, late: bool) -> list[Work]:
        self._admit()
        ordered = sorted((r for r in self.running if not r.closing), key=lambda r: r.order)
        if self._background_waits():
            ordered = [request for request in ordered if not request.background]
        aside = sum(r.sequence.unread == 1 for r in ordered)
        left = self.limits.step_rows
        if aside >= left:
            aside = 0
        planned: list[Work] = []
        for request in ordered:
            if request.state is not State.RUNNING:
                continue
            unread = request.sequence.unread
            if unread == 1 and aside:
                aside -= 1
                count = 1
            else:
                most = _BACKGROUND_ROWS if request.background else left
                count = min(unread, left - aside, most)
            if unread and not count:
                continue
            work = self._place(request, count, late=late)
            if work:
                planned.append(work)
                left -= count
        return planned

    def _background_waits(self) -> bool:
        """Whether replies in the background sit a step out, as another's first rows are due.

        They do not for many steps in a row, since in a crowd there may always be such a reply.
        """
        begun = (r for r in self.running if not r.background)
        first = any(len(request.reply.rows) < _FIRST_ROWS for request in begun)
        self._sat_out = self._sat_out + 1 if first and self._sat_out < _MOST_SAT_OUT else 0
        return self._sat_out > 0

    def leave_unread(self, sequence: Sequence) -> None:
        """Read no more of a conversation ahead; its blocks may be taken like any idle one's."""
        if self.ahead.pop(id(sequence), None):
            self._rest(sequence)

    def read_ahead(self, room: int) -> list[Work]:
        """At most ``room`` rows of work for conversations that listen, after ``plan``.

        One for which there are no blocks is given up: its next reply reads its rows.
        """
        for key, sequence in list(self.ahead.items()):
            if not sequence.unread:
                self._rest(self.ahead.pop(key))
        works: list[Work] = []
        for key, sequence in list(self.ahead.items()):
            if room <= 0:
                break
            if self.share_prefixes:
                sequence.match_prefix()
            start, count = sequence.read[Part.TRUNK], min(sequence.unread, room)
            while not sequence.make_room(start + count):
                if not self._evict(self.idle):
                    self._rest(self.ahead.pop(key))
                    break
            else:
                works.append(Work(sequence, None, start, count, False))
                room -= count
        return works

    def lagging(self) -> list[Work]:
        """Idle conversations whose modality blocks have rows to catch up with."""
        behind = (s for s in self.idle.values() if s.lagging)
        return [Work(s, None, s.read[Part.TRUNK], 0, False) for s in behind]

    def done(self, request: Request) -> None:
        """Take a request out, wherever it is; its conversation's blocks stay for the next."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            self._give_back_slot(request)
        self._rest(request.sequence)

    def replies_of(self, sequence: Sequence) -> list[Request]:
        """Requests on a conversation that have not ended: one at most."""
        return [r for r in (*self.running, *self.waiting) if r.sequence is sequence]

    def drop(self, sequence: Sequence) -> None:
        """Forget an idle conversation and give its blocks back."""
        self._take_out(sequence)
        sequence.free_from(0)

    def _take_out(self, sequence: Sequence) -> None:
        self.idle.pop(id(sequence), None)
        self.ahead.pop(id(sequence), None)

    def _rest(self, sequence: Sequence) -> None:
        if sequence.table:
            self.idle[id(sequence)] = sequence

    def _admit(self) -> None:
        self.waiting.sort(key=lambda r: r.order)
        while self.waiting and self._slots:
            request = self.waiting[0]
            if request.background and self._free_in_background <= 0:
                return  # who comes after it is in the background as well
            sequence = request.sequence
            # What was put off can be made up only from rows read by this request itself.
            if self.share_prefixes and not request.deferred_draws:
                sequence.match_prefix()
            resting = (*self.idle.values(), *self.ahead.values())
            others = [*resting, *(later.sequence for later in self.waiting[1:])]
            reclaimable = sum(len(other.table) for other in others)
            needed = sequence.blocks_needed(len(sequence.rows) + 1)
            if needed > self.pool.available + reclaimable and self.running:
                return
            self.waiting.pop(0)
            request.slot, request.state = self._slots.pop(), State.RUNNING
            self.running.append(request)

    def _place(self, request: Request, count: int, *, late: bool) -> Work | None:
        """Work for ``count`` rows once they have blocks; None if they must wait."""
        sequence = request.sequence
        start = sequence.read[Part.TRUNK]
        while not sequence.make_room(start + count):
            if not (
                self._evict(self.idle)
                or self._evict(self.ahead)
                or self._evict_waiting()
                or self._preempt_after(request, late=late)
            ):
                return None
        return Work(sequence, request, start, count, count == sequence.unread)

    def _evict(self, resting: OrderedDict[int, Sequence]) -> bool:
        """Take the blocks of the conversation that was unused for longest."""
        while resting:
            _, sequence = resting.popitem(last=False)
            if sequence.table:
                sequence.free_from(0)
                return True
        return False

    def _evict_waiting(self) -> bool:
        """Take the blocks that the last in line still holds."""
        for request in sorted(self.waiting, key=lambda r: r.order, reverse=True):
            if request.sequence.table:
                request.sequence.free_from(0)
                return True
        return False

    def _preempt_after(self, request: Request, *, late: bool) -> bool:
        """Put the running reply with the last deadline back in line, if it is later than this."""
        victim = max(self.running, key=lambda r: r.order)
        if victim.order <= request.order:
            return False
        if late:
            raise _PreemptionDueError
        assert not victim.sequence.pending, "what comes next may depend on rows that are pending"
        self.running.remove(victim)
        self._give_back_slot(victim)
        victim.sequence.free_from(0)
        victim.state = State.WAITING
        victim.preemptions += 1
        self.waiting.append(victim)
        return True

    def _give_back_slot(self, request: Request) -> None:
        assert request.slot is not None
        self._slots.append(request.slot)
        request.slot = None
