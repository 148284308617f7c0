"""Replies made without a clock are the reference's, whoever else is being answered."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from engine_rig import IDS, Task, on_every_device, random_tasks, reference, wild_model

from mosstalk.conversation import FinishReason, Row
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import CheckpointError, ContextLengthError, EngineStoppedError
from mosstalk.offline.replies import EngineReply, OfflineEngine, Step
from mosstalk.reply_options import Limits


class Owner:
    """Somebody whose conversation is kept as long as they are there."""


def begun(engine: OfflineEngine, sequence: Sequence, task: Task) -> EngineReply:
    ask = replace(task.params, whole_rows=True)
    return EngineReply(engine, sequence, list(task.rows), ask)


def steps_of(reply: EngineReply) -> Iterator[Step]:
    reply.prefill()
    reply.begin()
    while not reply.ended:
        reply.step()
        yield from reply.fresh()
    yield from reply.fresh()


@on_every_device
def test_replies_made_in_turn_are_those_of_the_reference(device: str) -> None:
    model = wild_model(device)
    engine, tasks = OfflineEngine(model, IDS), random_tasks(3, 12)
    owners = [Owner() for _ in tasks]
    first_blocks = engine.core.pool.size
    replies = [
        begun(engine, engine.open(owner), task) for owner, task in zip(owners, tasks, strict=True)
    ]
    found = [list[Step]() for _ in replies]
    for together in zip_longest(*map(steps_of, replies)):
        for steps, step in zip(found, together, strict=True):
            steps += [step] if step else []
    for reply, task, steps in zip(replies, tasks, found, strict=True):
        assert reply.reply == reference(model, task)
        rows = [(step.mode, step.row) for step in steps]
        assert rows == list(zip(reply.reply.modes, reply.reply.rows, strict=True))
        assert [step.index for step in steps] == list(range(1, len(rows) + 1))
    assert engine.core.pool.size > first_blocks, "the store grew for so many conversations"


def test_a_conversation_goes_on_from_what_was_read_though_the_store_has_grown() -> None:
    model = wild_model()
    engine, owner, others = OfflineEngine(model, IDS), Owner(), [Owner(), Owner()]
    sequence, task = engine.open(owner), random_tasks(5, 1)[0]
    first = begun(engine, sequence, task)
    list(steps_of(first))
    for other in others:
        list(steps_of(begun(engine, engine.open(other), random_tasks(6, 1)[0])))
    engine.make_room(sequence, 16 * engine.core.pool.size)
    kept = len(task.rows) + len(first.reply.rows) - 1
    sequence.free_from(kept)
    longer: list[Row] = [*task.rows, *first.reply.rows, (3, IDS.audio_pad), (4, IDS.audio_pad)]
    again = Task(longer, replace(task.params, script=None))
    second = begun(engine, sequence, again)
    assert second.prefill() == len(longer) - 1 - kept
    list(steps_of(second))
    assert second.reply == reference(model, again)


def test_blocks_of_who_is_gone_are_used_again() -> None:
    engine = OfflineEngine(wild_model(), IDS)
    first_blocks = engine.core.pool.size
    for task in random_tasks(7, 8):
        owner = Owner()
        list(steps_of(begun(engine, engine.open(owner), task)))
        del owner
    assert engine.core.pool.size == first_blocks


def test_a_cancelled_reply_hands_out_its_rows_whole_and_no_more() -> None:
    model = wild_model()
    engine, owner = OfflineEngine(model, IDS), Owner()
    task = random_tasks(3, 12)[4]
    task = Task(task.rows, ReplyParams(task.params.options, Limits(30)))
    reply = begun(engine, engine.open(owner), task)
    reply.prefill()
    reply.begin()
    for _ in range(3):
        reply.step()
    reply.cancel()
    assert reply.ended
    assert reply.reply.finish_reason is FinishReason.CANCELLED
    assert [step.row for step in reply.fresh()] == reference(model, task).rows[:3]


def test_a_step_that_fails_ends_the_replies_and_the_next_ones_are_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wild_model()
    engine, owners, task = OfflineEngine(model, IDS), [Owner(), Owner()], random_tasks(3, 1)[0]
    sequences = [engine.open(owner) for owner in owners]
    first, other = (begun(engine, sequence, task) for sequence in sequences)
    for reply in (first, other):
        reply.prefill()
        reply.begin()
    first.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.core.runner.layers, "logits", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            first.step()
    assert first.ended
    with pytest.raises(EngineStoppedError, match="out of memory"):
        other.step()
    assert engine.core.pool.in_use == 0
    for sequence in sequences:
        again = begun(engine, sequence, task)
        list(steps_of(again))
        assert again.reply == reference(model, task)


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_float64_is_drawn_from_as_the_reference_does() -> None:
    model = wild_model(dtype=torch.float64)
    engine = OfflineEngine(model, IDS)
    for task in random_tasks(11, 6):
        owner = Owner()
        reply = begun(engine, engine.open(owner), task)
        list(steps_of(reply))
        assert reply.reply == reference(model, task)


def test_a_full_context_and_damaged_weights_are_told_apart() -> None:
    model = wild_model()
    engine, owner = OfflineEngine(model, IDS), Owner()
    longest = model.config.max_position_embeddings
    rows: list[Row] = [(3, IDS.audio_pad)] * longest
    full = EngineReply(engine, engine.open(owner), rows, ReplyParams())
    with pytest.raises(ContextLengthError, match=f"{longest} rows long .* holds {longest}"):
        full.prefill()
    with torch.no_grad():
        model.text_lm_head.weight.fill_(float("nan"))
        model.audio_lm_head.weight.fill_(float("nan"))
    damaged = EngineReply(engine, engine.open(owner), rows[:9], ReplyParams(whole_rows=True))
    with pytest.raises(CheckpointError, match="logits are not finite"):
        list(steps_of(damaged))
