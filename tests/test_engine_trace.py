"""Random traces of the engine's bookkeeping, without a network: a driver fills the blocks.

What it writes at a place is the whole beginning of the conversation up to that row, so that
reading a place that is another's, stale or unwritten cannot go unseen.
"""

from collections.abc import Iterable
from random import Random

from conftest import examples
from engine_rig import IDS, PAD, SILENT, SOSP
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mosstalk.conversation import Row
from mosstalk.engine.block_pool import BlockPool, embedded_token
from mosstalk.engine.request import Request, State
from mosstalk.engine.scheduler import Scheduler, SchedulerLimits, Work
from mosstalk.engine.sequence import Part, Sequence, part_of
from mosstalk.errors import ContextLengthError, EngineFullError
from mosstalk.reply_options import Limits, SamplingOptions

BLOCKS, BLOCK_ROWS = 14, 3
LIMITS = SchedulerLimits(step_rows=7, slots=3, waiting=3)
ROWS = st.lists(st.sampled_from([(1, SILENT), (PAD, 4), (SOSP, SILENT)]), min_size=1, max_size=12)
STEM = [(1, SILENT), (2, SILENT), (PAD, 3)] * 3


Drawn = list[tuple[Request, int, Row]]
"""Of each draw its request, the place of the row in the sequence, and the row."""


class Driver:
    """Does what the runner and the core do, but for arithmetic; with late steps, if so asked."""

    def __init__(
        self,
        seed: int,
        limits: SchedulerLimits = LIMITS,
        blocks: int = BLOCKS,
        *,
        late: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.late = late
        self.flight: Drawn | None = None
        self.unseen: dict[int, list[Row]] = {}
        self.pool = BlockPool(blocks, BLOCK_ROWS)
        self.scheduler = Scheduler(self.pool, limits)
        self.written: list[dict[int, tuple[int, ...]]] = [{}, {}, {}]
        self.sequences: list[Sequence] = []
        self.number = 0
        self.preemptions = 0
        self.stops = 0.1

    def open(self, rows: Iterable[Row]) -> Sequence:
        self.sequences.append(Sequence(self.pool, PAD, list(rows)))
        return self.sequences[-1]

    def submit(self, sequence: Sequence, most: int, first_due_s: float) -> Request:
        self.number += 1
        request = Request(
            self.number, sequence, IDS, SamplingOptions(), Limits(most), BLOCKS * BLOCK_ROWS,
            first_due_s=first_due_s,
        )  # fmt: skip
        self.scheduler.submit(request)
        return request

    def step(self) -> list[Request]:
        before = list(self.scheduler.running)
        flight = self.launch(self.scheduler.plan()) if self.flight is None else self.flight
        self.preemptions += sum(request.state is State.WAITING for request in before)
        works = self.scheduler.plan_late() if self.late else None
        self.flight = None if works is None else self.launch(works)
        assert works is None or all(r.state is not State.WAITING for r, _, _ in flight)
        return [self.drawn(*each) for each in flight if each[0].state is State.RUNNING]

    def launch(self, works: list[Work]) -> Drawn:
        """Read and draw; what was drawn is known to the device alone."""
        require_no_inversion(self.scheduler.running, works)
        planned = sum(work.count for work in works)
        ahead = self.scheduler.read_ahead(self.scheduler.limits.step_rows - planned)
        assert planned + sum(work.count for work in ahead) <= self.scheduler.limits.step_rows
        for work in works + ahead + self.scheduler.lagging()[:1]:
            self.read(work)
        drawn: Drawn = []
        for work in works:
            if work.draws and work.request:
                stops = self.random.random() < self.stops
                text = IDS.im_end if stops else self.random.choice([1, 2, PAD, SOSP])
                row = (text, self.random.choice([SILENT, 3, IDS.eosp]))
                drawn.append((work.request, work.start + work.count, row))
                self.unseen.setdefault(id(work.sequence), []).append(row)
                work.sequence.pending += 1
        return drawn

    def read(self, work: Work) -> None:
        """Advance the trunk, and the modality block that the next draw needs."""
        sequence, end = work.sequence, work.start + work.count
        self.advance(sequence, Part.TRUNK, end)
        chosen = part_of(work.request.mode) if work.request else None
        for part in (Part.TEXT, Part.AUDIO):
            if chosen in (None, part) or self.random.random() < 0.3:
                self.advance(sequence, part, end)
        if not work.count:
            sequence.publish(end)

    def advance(self, sequence: Sequence, part: Part, end: int) -> None:
        rows = sequence.rows + self.unseen.get(id(sequence), [])
        beginning = tuple(embedded_token(row, PAD) for row in rows[:end])
        for row in range(end):
            block, inside = divmod(row, BLOCK_ROWS)
            place = sequence.table[block] * BLOCK_ROWS + inside
            if row >= sequence.read[part]:
                assert self.pool._holders[sequence.table[block]] == 1, "a shared block is written"
                self.written[part][place] = beginning[: row + 1]
            assert self.written[part].get(place) == beginning[: row + 1], "another's row is read"
        sequence.advance(part, end)

    def drawn(self, request: Request, place: int, row: Row) -> Request:
        assert place == len(request.sequence.rows)
        self.unseen[id(request.sequence)].remove(row)
        request.sequence.pending -= 1
        request.sequence.publish(place)
        request.add(row)
        request.turn_mode()
        if request.ended:
            self.end(request)
        return request

    def end(self, request: Request) -> None:
        request.finish()
        request.sequence.abandon()
        self.unseen.pop(id(request.sequence), None)
        self.scheduler.done(request)

    def close(self, sequence: Sequence) -> None:
        for request in self.scheduler.replies_of(sequence):
            self.end(request)
        self.scheduler.drop(sequence)
        self.sequences = [each for each in self.sequences if each is not sequence]

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)


def require_no_inversion(running: list[Request], works: list[Work]) -> None:
    """No reply is passed over while a later one of its kind gets rows or blocks."""
    given = {work.request: work.count for work in works}
    for first in running:
        if first.closing:
            continue
        wanted = first.sequence.unread
        for later in running:
            same_kind = (wanted == 1) == (later.sequence.unread == 1)
            if first.order < later.order and same_kind and given.get(later):
                assert given.get(first, 0) == wanted, "a later deadline went first"


class Trace(RuleBasedStateMachine):
    """Arrivals, turns, cancels, truncations and ends in any order, in a pool that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(0)

    @initialize(late=st.booleans())
    def begin(self, late: bool) -> None:
        self.driver.late = late

    @rule(seed=st.integers(0, 9))
    def other_draws(self, seed: int) -> None:
        self.driver.random.seed(seed)

    @rule(stem=st.integers(0, 9), rows=ROWS, most=st.integers(1, 20), due=st.integers(0, 9))
    def arrive(self, stem: int, rows: list[Row], most: int, due: int) -> None:
        self.ask(self.driver.open(STEM[:stem] + rows), most, due)

    @precondition(lambda self: self.driver.sequences)
    @rule(
        data=st.data(), keep=st.integers(0, 40), rows=ROWS, most=st.integers(1, 20),
        due=st.integers(0, 9),
    )  # fmt: skip
    def next_turn(
        self, data: st.DataObject, keep: int, rows: list[Row], most: int, due: int
    ) -> None:
        sequence = data.draw(st.sampled_from(self.driver.sequences))
        if not self.driver.scheduler.replies_of(sequence):
            sequence.truncate(min(keep, len(sequence.rows)))
            sequence.rows += rows
            self.ask(sequence, most, due)

    @precondition(lambda self: self.driver.sequences)
    @rule(data=st.data(), keep=st.integers(0, 40), rows=ROWS)
    def listen(self, data: st.DataObject, keep: int, rows: list[Row]) -> None:
        sequence = data.draw(st.sampled_from(self.driver.sequences))
        if not self.driver.scheduler.replies_of(sequence):
            sequence.truncate(min(keep, len(sequence.rows)))
            sequence.rows += rows
            self.driver.scheduler.prefill_ahead(sequence)

    def ask(self, sequence: Sequence, most: int, due: int) -> None:
        table, rows = list(sequence.table), len(sequence.rows)
        line = len(self.driver.scheduler.waiting) - self.driver.scheduler.free_slots
        try:
            self.driver.submit(sequence, most, float(due))
        except EngineFullError as full:
            refused = line >= LIMITS.waiting and full.retry_after_s > 0
        except ContextLengthError:
            refused = rows >= BLOCKS * BLOCK_ROWS
        else:
            return
        assert refused, "what could have run was refused"
        assert (sequence.table, len(sequence.rows)) == (table, rows)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()

    @precondition(lambda self: self.driver.busy)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        scheduler = self.driver.scheduler
        self.driver.end(data.draw(st.sampled_from(scheduler.running + scheduler.waiting)))

    @precondition(lambda self: self.driver.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.driver.close(data.draw(st.sampled_from(self.driver.sequences)))

    @invariant()
    def slots_and_blocks_add_up(self) -> None:
        scheduler = self.driver.scheduler
        assert scheduler.free_slots + len(scheduler.running) == LIMITS.slots
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        held = [block for sequence in self.driver.sequences for block in sequence.table]
        pool = self.driver.pool
        assert pool.in_use == len(set(held))
        assert all(pool._holders[block] == held.count(block) for block in set(held))
        known = {id(sequence) for sequence in self.driver.sequences}
        assert set(scheduler.idle) | set(scheduler.ahead) <= known
        assert not set(scheduler.idle) & set(scheduler.ahead)

    def teardown(self) -> None:
        """Nobody waits for ever, and in the end everything is given back."""
        driver = self.driver
        steps = 0
        while driver.busy:
            driver.step()
            steps += 1
            assert steps < 2000, "somebody starves"
        for sequence in list(driver.sequences):
            driver.close(sequence)
        assert driver.pool.in_use == 0
        assert not driver.scheduler.idle
        assert not driver.scheduler.ahead
        assert driver.scheduler.free_slots == LIMITS.slots


TestTrace = Trace.TestCase
TestTrace.settings = settings(examples(200), stateful_step_count=40)


def test_traces_preempt_and_share() -> None:
    """The traces' pool is too small on purpose; a few replies show what it leads to."""
    driver = Driver(1)
    driver.stops = 0
    requests = [
        driver.submit(driver.open(STEM + [(n, SILENT)] * 4), 25, float(n)) for n in range(3)
    ]
    while driver.busy:
        driver.step()
    assert driver.preemptions > 0
    assert max(r.preemptions for r in requests) == requests[-1].preemptions
    assert requests[0].preemptions == 0
    assert all(r.finish_reason for r in (each.reply for each in requests))


def test_newcomers_starve_no_prompt_even_where_a_step_has_one_row() -> None:
    driver = Driver(2, SchedulerLimits(step_rows=1, slots=3, waiting=99), blocks=99)
    long = driver.submit(driver.open([(1, SILENT)] * 20), 1, 0.0)
    steps = 0
    while long.state is not State.DONE:
        driver.submit(driver.open([(2, SILENT)]), 30, 0.1 + steps)
        driver.step()
        steps += 1
        assert steps < 200


def test_an_earlier_deadline_takes_blocks_from_a_later_one_and_never_the_reverse() -> None:
    driver = Driver(3, SchedulerLimits(step_rows=50, slots=3), blocks=6)
    late = driver.submit(driver.open([(1, SILENT)] * 12), 30, 50.0)
    driver.step()
    soon = driver.submit(driver.open([(2, SILENT)] * 5), 5, 0.0)
    driver.step()
    assert (soon.state, late.state) == (State.RUNNING, State.RUNNING)
    while soon.state is State.RUNNING:
        driver.step()
    assert soon.preemptions == 0
    assert late.preemptions <= 1
