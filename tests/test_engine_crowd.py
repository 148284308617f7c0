"""Random traces of conversations with a network: whatever happens around them, rows stay theirs."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from engine_rig import (
    CONFIG,
    EOSP,
    GREEDY,
    HOT,
    IDS,
    PAD,
    SILENT,
    SOSP,
    Forced,
    Task,
    as_known,
    engine_core,
    penalised_tokens,
    random_ask,
    reference,
    require_idle,
    require_same,
    wild_model,
)

from mosstalk.conversation import Conversation, FinishReason, Row
from mosstalk.engine.async_engine import CachedConversation
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.errors import ContextLengthError, EngineFullError
from mosstalk.reply_options import Limits, SamplingOptions

MODEL = wild_model(config=replace(CONFIG, max_position_embeddings=140))
N = None


def small_core(
    *, deferral: bool = True, blocks: int = 30, slots: int = 4, late: bool = True
) -> EngineCore:
    """A pool that holds one conversation at its longest, and little besides."""
    return engine_core(
        MODEL, blocks=blocks, block_rows=5, step_rows=24, slots=slots, waiting=3,
        deferral=deferral, late=late,
    )  # fmt: skip


@dataclass
class Crowd:
    """Conversations that come, talk, are interrupted and go, at random."""

    core: EngineCore
    random: Random
    talks: list[CachedConversation] = field(default_factory=list)
    open: list[tuple[CachedConversation, Request, Task]] = field(default_factory=list)
    checked: int = 0
    refused: int = 0
    preempted: int = 0

    def come(self) -> None:
        conversation = Conversation(IDS, lambda text: [ord(letter) % 20 for letter in text])
        conversation.add_text("system", self.random.choice(["be brief", "sing"]))
        self.talks.append(CachedConversation(conversation, self.core.open()))

    def ask(self) -> None:
        free = [cached for cached in self.talks if not cached.conversation.reply_is_open]
        if not free:
            return self.come()
        cached = self.random.choice(free)
        if self.random.random() < 0.7:
            codes = [self.random.randrange(EOSP) for _ in range(self.random.randint(0, 30))]
            cached.conversation.add_speech("user", codes)
        params = replace(random_ask(self.random), first_due_s=self.random.random())
        before = list(cached.conversation.rows)
        try:
            with cached.reply_opened(speech=self.random.random() < 0.5):
                request = self.core.submit(cached.sequence, params)
        except (EngineFullError, ContextLengthError) as error:
            self.refused += 1
            assert cached.conversation.rows == before
            if isinstance(error, ContextLengthError):
                self.leave(cached)
            return None
        self.open.append((cached, request, Task(list(cached.conversation.rows), params)))
        return None

    def leave(self, cached: CachedConversation) -> None:
        self.core.close(cached.sequence)
        self.talks.remove(cached)
        self.open = [each for each in self.open if each[0] is not cached]

    def cancel(self) -> None:
        if self.open:
            self.core.cancel(self.random.choice(self.open)[1])

    def settle(self) -> None:
        """Check every reply that has ended, and close it, cut or whole."""
        for cached, request, task in [each for each in self.open if each[1].state is State.DONE]:
            self.open.remove((cached, request, task))
            self.preempted += request.preemptions
            self.check(request, task)
            cached.close_reply(request, self.random.choice([None, 0.0, 79.0, 400.0]))
            if self.random.random() < 0.5:
                cached.truncate(self.random.choice([1.0, 250.0, 9e9]))

    def check(self, request: Request, task: Task) -> None:
        self.checked += 1
        expected = reference(MODEL, task)
        if request.reply.finish_reason is not FinishReason.CANCELLED:
            return require_same(request, expected)
        made = len(request.reply.rows)
        assert request.reply.modes == expected.modes[:made]
        found, wanted = (as_known(reply, whole=False) for reply in (request.reply, expected))
        assert found == wanted[:made]
        return None

    def live(self, steps: int) -> None:
        for _ in range(steps):
            what = self.random.random()
            if what < 0.05:
                self.come()
            elif what < 0.45:
                self.ask()
            elif what < 0.5:
                self.cancel()
            elif what < 0.52 and self.talks:
                self.leave(self.random.choice(self.talks))
            self.core.step()
            self.settle()
        self.core.run()
        self.settle()


@pytest.mark.parametrize(
    ("seed", "deferral", "late"),
    [
        # Slow: other crowds, and without what the first has: draws put off, steps that are late.
        pytest.param(n, n < 5, n < 3, marks=[] if n == 0 else [pytest.mark.slow])
        for n in range(7)
    ],
)
def test_rows_in_a_crowd_equal_those_computed_alone(seed: int, deferral: bool, late: bool) -> None:
    crowd = Crowd(small_core(deferral=deferral, late=late), Random(seed))
    crowd.live(200)
    assert crowd.checked > 20
    assert crowd.refused > 0
    assert crowd.preempted > 0
    for cached in list(crowd.talks):
        crowd.leave(cached)
    require_idle(crowd.core)


def test_all_rows_of_a_first_sound_are_due_at_once() -> None:
    core = small_core(late=False)
    limits = Limits(6, min_new_rows=99)
    core.submit(core.open([(1, SILENT)]), ReplyParams(GREEDY, limits, None, 5.0, first_rows=4))
    due_s = list[float]()
    while core.busy:
        due_s.append(core.due_s)
        core.step()
    assert due_s == pytest.approx([5.0] * 4 + [5.08, 5.16])


ONLY_CODES: list[Row] = [(PAD, 3), (PAD, 4), (PAD, EOSP)]
"""No row of this prompt has audio_pad: were a put-off draw counted as one, it would show."""


@pytest.mark.parametrize("options", [GREEDY, replace(HOT, seed=3)], ids=["greedy", "sampled"])
def test_a_reply_put_back_in_line_makes_up_its_draws_all_the_same(
    options: SamplingOptions,
) -> None:
    rows = (*((n, N) for n in range(20)), (SOSP, N), (N, N), (N, N), (N, EOSP))
    params = ReplyParams(options, Limits(40), Forced(rows=rows), first_due_s=9e9)
    core = small_core(blocks=28)
    late = core.submit(core.open(ONLY_CODES), params)
    for _ in range(8):
        core.step()
    assert len(late.deferred_draws) == 8
    urgent = ReplyParams(GREEDY, Limits(50, min_new_rows=99), first_due_s=0.0)
    soon = core.submit(core.open([(1, SILENT)] * 124), urgent)
    while late.state is State.RUNNING:
        core.step()
    assert len(late.deferred_draws) > 8
    core.run()
    assert (late.preemptions, soon.preemptions) == (1, 0)
    expected = reference(MODEL, Task(ONLY_CODES, params))
    require_same(late, expected)
    assert late.reply.rows[:21] == expected.rows[:21]  # the opened speech had them made up


def test_a_reply_put_back_in_line_adopts_nothing_that_its_put_off_draws_need() -> None:
    core = small_core(blocks=27)
    said: list[Row] = [*ONLY_CODES, *((n, SILENT) for n in range(20))]
    other = core.open(said)
    core.submit(other, ReplyParams(GREEDY, Limits(1)))
    core.run()
    while core.has_work:
        core.step()
    rows = (*((n, N) for n in range(20)), (SOSP, N), (N, N), (N, EOSP))
    params = ReplyParams(
        replace(HOT, seed=8), Limits(30), Forced(rows=rows), first_due_s=9e9, whole_rows=True
    )
    late = core.submit(core.open(ONLY_CODES), params)
    for _ in range(7):
        core.step()
    other.rows += [(1, SILENT)] * 100
    core.submit(other, ReplyParams(GREEDY, Limits(5, 99), first_due_s=0.0))
    core.run()
    assert late.preemptions == 1
    require_same(late, reference(MODEL, Task(ONLY_CODES, params)))


def test_put_off_draws_are_not_in_the_penalty_of_a_reply_that_resumes() -> None:
    core = small_core()
    late = core.submit(
        core.open(ONLY_CODES),
        ReplyParams(GREEDY, Limits(30), Forced(rows=((1, N), (2, N), (3, N)))),
    )
    for _ in range(3):
        core.step()
    core.runner.begin(late)
    assert penalised_tokens(core, late) == ({PAD, 1, 2, 3}, {3, 4, EOSP})


def test_a_reply_cancelled_in_line_keeps_what_it_said() -> None:
    core = small_core(blocks=28, slots=2)
    params = ReplyParams(
        GREEDY, Limits(60), Forced(rows=tuple((n, N) for n in range(12))), first_due_s=9e9
    )
    late = core.submit(core.open(ONLY_CODES), params)
    for _ in range(7):
        core.step()
    soon = core.submit(
        core.open([(1, SILENT)] * 129), ReplyParams(GREEDY, Limits(11, 99), first_due_s=0)
    )
    while late.state is State.RUNNING:
        core.step()
    core.cancel(late)
    assert [text for text, _ in late.reply.rows[:8]] == list(range(8))
    assert late.reply.finish_reason is FinishReason.CANCELLED
    core.run()
    require_same(
        soon, reference(MODEL, Task([(1, SILENT)] * 129, ReplyParams(GREEDY, Limits(11, 99))))
    )


def test_conversations_that_begin_alike_are_read_once() -> None:
    core = engine_core(MODEL, block_rows=5)
    stem: list[Row] = [(n % 20, SILENT) for n in range(62)]
    first = core.submit(core.open([*stem, (SOSP, SILENT)]), ReplyParams(GREEDY, Limits(4, 9)))
    core.run()
    while core.has_work:
        core.step()
    second = core.submit(core.open([*stem, (3, SILENT)]), ReplyParams(GREEDY, Limits(4, 9)))
    (work,) = core.scheduler.plan()
    assert (work.start, work.count) == (60, 3)
    shared = set(first.sequence.table) & set(second.sequence.table)
    assert len(shared) == 12


def test_blocks_of_a_conversation_that_has_gone_are_found_until_they_are_needed() -> None:
    core = engine_core(MODEL, block_rows=5, blocks=28)
    rows: list[Row] = [(n % 20, SILENT) for n in range(60)]
    core.submit(core.open(rows), ReplyParams(GREEDY, Limits(4, 9)))
    core.run()
    while core.has_work:
        core.step()
    (sequence,) = core.scheduler.idle.values()
    core.close(sequence)
    require_idle(core)
    again = core.open([*rows, (1, SILENT)])
    assert again.match_prefix() == 60
    core.close(again)
    core.submit(core.open([(7, SILENT)] * 130), ReplyParams(GREEDY, Limits(4, 9)))
    core.run()
    assert core.open([*rows, (1, SILENT)]).match_prefix() < 60
