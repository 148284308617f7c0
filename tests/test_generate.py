"""The reference loop: seeds, masks, scripts, limits, cancelling, and kept turns."""

from dataclasses import replace

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk import Pipeline
from mosstalk.conversation import (
    Conversation,
    FinishReason,
    Mode,
    Reply,
    Row,
    TextSegment,
    next_mode,
    start_mode,
)
from mosstalk.errors import ContextLengthError
from mosstalk.models.generation import Generation, Step
from mosstalk.reply_options import Limits, SamplingOptions, Script

HOT = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0)
"""Random weights drawn hot visit every kind of row."""


def question(pipeline: Pipeline, *, speech: bool = True) -> Conversation:
    conversation = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    conversation.add_text("system", "Be brief.")
    conversation.add_speech("user", range(20, 32))
    conversation.open_reply(speech=speech)
    return conversation


def generation(
    pipeline: Pipeline,
    conversation: Conversation,
    options: SamplingOptions = HOT,
    limits: Limits | None = None,
    script: str | None = None,
) -> Generation:
    return Generation(
        pipeline.model,
        pipeline.model.new_cache(),
        conversation.rows,
        pipeline.ids,
        options,
        limits or Limits(40),
        Script.parse(script) if script else None,
    )


def rows_of(pipeline: Pipeline, options: SamplingOptions, limits: Limits) -> list[Row]:
    made = generation(pipeline, question(pipeline), options, limits)
    return [step.row for step in made]


def test_the_same_seed_gives_the_same_rows_and_another_gives_others(pipeline: Pipeline) -> None:
    limits = Limits(30)
    first, again, other = (rows_of(pipeline, replace(HOT, seed=seed), limits) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@given(seed=st.integers(0, 2**32), speech=st.booleans())
@examples(20)
def test_rows_obey_the_mode_machine(pipeline: Pipeline, seed: int, speech: bool) -> None:
    conversation, ids = question(pipeline, speech=speech), pipeline.ids
    last = conversation.rows[-1]
    mode = start_mode(last, ids)
    for step in generation(pipeline, conversation, replace(HOT, seed=seed)):
        mode = next_mode(mode, last, ids)
        last = step.row
        assert step.mode is mode
        assert (last[0] == ids.modality_pad) or mode is Mode.TEXT
        assert last[1] <= ids.eosp


def test_eosp_is_held_back_until_its_time(pipeline: Pipeline) -> None:
    made = generation(pipeline, question(pipeline), script="speech:30", limits=Limits(60))
    assert all(step.row[1] != pipeline.ids.eosp for step in list(made)[:30])
    held = generation(pipeline, question(pipeline), limits=Limits(200, min_new_rows=201))
    assert all(step.row[1] != pipeline.ids.eosp for step in held)


@pytest.mark.parametrize(
    ("script", "speech", "steps", "codes"),
    [
        ("speech:7", True, 9, 7),
        ("text:4", False, 5, 0),
        ("text:4,speech:7", False, 14, 7),
        ("speech:3,text:2,speech:4", True, 13, 7),
        ("text:2", True, 4, 0),
    ],
)
def test_a_script_gives_its_lengths_and_stops(
    pipeline: Pipeline, script: str, speech: bool, steps: int, codes: int
) -> None:
    conversation = question(pipeline, speech=speech)
    made = generation(pipeline, conversation, script=script, limits=Limits(100))
    assert len(list(made)) == steps
    assert made.reply.finish_reason is FinishReason.STOP
    assert len(made.reply.codes(pipeline.ids)) == codes


def test_a_script_leaves_unforced_draws_as_they_were(pipeline: Pipeline) -> None:
    free = generation(pipeline, question(pipeline), replace(HOT, seed=3), Limits(6, min_new_rows=9))
    scripted = generation(pipeline, question(pipeline), replace(HOT, seed=3), script="speech:6")
    assert [step.row for step in free] == [step.row for step in scripted][:6]


def test_the_length_limit_ends_a_reply(pipeline: Pipeline) -> None:
    made = generation(pipeline, question(pipeline), limits=Limits(5, min_new_rows=9))
    assert len(list(made)) == 5
    assert made.reply.finish_reason is FinishReason.LENGTH


def test_cancelling_ends_a_reply_before_its_next_step(pipeline: Pipeline) -> None:
    made = generation(pipeline, question(pipeline), limits=Limits(50, min_new_rows=60))
    steps = list[Step]()
    for step in made:
        steps.append(step)
        if len(steps) == 3:
            made.cancel()
    assert len(steps) == 3
    assert made.reply.finish_reason is FinishReason.CANCELLED


def test_a_prompt_that_fills_the_context_is_refused(pipeline: Pipeline) -> None:
    limit = pipeline.model.config.max_position_embeddings
    conversation = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    conversation.add_speech("user", [1] * (limit - 20))
    conversation.open_reply(speech=True)
    made = generation(pipeline, conversation)
    with pytest.raises(ContextLengthError, match=str(limit)):
        made.prefill()
    assert made.cache.rows == 0


def test_a_reply_ends_where_the_context_does(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 300
    shorter = replace(pipeline.model.config, max_position_embeddings=limit)
    monkeypatch.setattr(pipeline.model, "config", shorter)
    conversation = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    conversation.open_reply(speech=True)
    conversation.rows = conversation.rows[:1] * (limit - len(conversation.rows) - 3) + (
        conversation.rows
    )
    made = generation(pipeline, conversation, limits=Limits(50, min_new_rows=60))
    assert len(list(made)) == 3
    assert made.reply.finish_reason is FinishReason.LENGTH


def logits_after(made: Generation) -> tuple[torch.Tensor, list[Row]]:
    step = next(iter(made))
    return torch.cat([step.text_logits, step.audio_logits]), [step.row]


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 20),
    heard=st.one_of(st.none(), st.integers(0, 25)),
    ended=st.booleans(),
)
@examples(20)
def test_a_turn_from_kept_rows_equals_the_same_turn_built_afresh(
    pipeline: Pipeline, seed: int, count: int, heard: int | None, ended: bool
) -> None:
    options = replace(HOT, seed=seed)
    kept = question(pipeline)
    limits = Limits(100 if ended else count)
    first = generation(pipeline, kept, options, limits, f"speech:{count}")
    list(first)
    valid = kept.close_reply(first.reply, heard_codes=heard)
    first.cache.truncate(min(valid, first.cache.rows))
    codes = first.reply.codes(pipeline.ids)
    afresh = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    afresh.add_text("system", "Be brief.")
    afresh.add_speech("user", range(20, 32))
    afresh.add_speech("assistant", codes if heard is None else codes[:heard])
    for conversation in (kept, afresh):
        conversation.add_text("user", "Go on.")
        conversation.open_reply(speech=False)
    assert kept.rows == afresh.rows
    second = generation(pipeline, kept, options)
    second.cache = first.cache
    found, found_rows = logits_after(second)
    expected, expected_rows = logits_after(generation(pipeline, afresh, options))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert found_rows == expected_rows


def test_text_of_a_reply_leaves_special_rows_out(pipeline: Pipeline) -> None:
    ids = pipeline.ids
    reply = Reply(
        [(104, 3), (105, 9), (ids.sosp, 4), (ids.modality_pad, 6), (ids.modality_pad, ids.eosp)],
        [Mode.TEXT, Mode.TEXT, Mode.TEXT, Mode.AUDIO, Mode.AUDIO],
    )
    assert pipeline.tokenizer.decode(reply.text_ids(ids)) == "hi"
    assert reply.codes(ids) == [6]
    assert TextSegment((104, 105)).ids == tuple(reply.text_ids(ids))
