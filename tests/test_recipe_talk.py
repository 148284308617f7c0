"""What a small model that answers learns from: who reads what, phones, examples, its tokenizer."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, require_program
from typer.testing import CliRunner

from mosstalk.config import LanguageModelConfig
from mosstalk.constants import INPUT_SAMPLES_PER_CODE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import SYSTEM_PROMPTS, SpecialIds, SpeechSegment, TextSegment
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from recipes.listener.__main__ import app
from recipes.listener.shards import phones_of, readers, stretched
from recipes.listener.texts import ANSWER_KIND, TEACHER_KIND, Line, read_lines, talk_lines
from recipes.pocket.data import PHONES, UNLABELLED, load_recordings, write_shard
from recipes.pocket.examples import (
    Exchange,
    Maker,
    Take,
    build,
    read_dialogues,
    train_text_tokenizer,
)
from recipes.pocket.sizes import MODEL
from recipes.pocket.tokenizer import encode_all, load_tokenizer
from recipes.pocket.voices import KOKORO, TEACHER, Clip

VOICES = ["af_heart", "af_nova", "am_adam", "bf_alice", "jf_alpha"]
SPAIN, MADRID = "What is the capital of Spain?", "The capital of Spain is Madrid."
FRANCE, PARIS = "And of France?", "The capital of France is Paris."
OX = "Ox is spelled O, X."


def clip(text: str, voice: str, codes: int) -> Clip:
    """A clip of so many codes, silent but for its length."""
    spoken = np.ones(codes * OUTPUT_SAMPLES_PER_CODE, np.int16) if voice == TEACHER else None
    return Clip(text, voice, np.ones(codes * INPUT_SAMPLES_PER_CODE, np.int16), spoken)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """The teacher has read two answers, others one of the questions."""
    write_shard(
        tmp_path / f"00-{TEACHER}-00000",
        [clip(MADRID, TEACHER, 9), clip(PARIS, TEACHER, 7)],
    )
    write_shard(tmp_path / f"00-{KOKORO}-00000", [clip(SPAIN, KOKORO, 5)])
    data = load_recordings(tmp_path, torch.device("cpu"), [0])
    assert data.teacher_clips == 2
    codes = np.arange(int(data.codes.sum()), dtype=np.int16)
    text = train_text_tokenizer([SPAIN, MADRID, FRANCE, PARIS] * 5, tmp_path / "text", MODEL)
    ids = SpecialIds.of(LanguageModelConfig.from_dict(MODEL), text.special)
    return Maker(data, [codes, codes + 100], text, ids, random.Random(0))


def test_a_dialogue_is_answered_in_writing_and_then_in_the_teachers_voice(maker: Maker) -> None:
    found = maker.dialogue([Exchange(SPAIN, MADRID), Exchange(FRANCE, PARIS)])
    assert found is not None
    ids, decode = maker.ids, maker.tokenizer.decode
    rows = [(int(text), int(audio)) for text, audio in found.rows]
    learned = [row for row, own in zip(rows, found.learned, strict=True) if own]
    ends = [place for place, (text, _) in enumerate(learned) if text == ids.im_end]
    assert len(ends) == 2
    for answer, codes, (start, end) in (
        (MADRID, range(9), (0, ends[0])),
        (PARIS, range(9, 16), (ends[0] + 1, ends[1])),
    ):
        reply = learned[start:end]
        opened = next(place for place, (text, _) in enumerate(reply) if text == ids.sosp)
        assert decode([text for text, _ in reply[:opened]]) == answer
        said = [audio for _, audio in reply[opened + 1 :]]
        hearings = [[*(code + more for code in codes), ids.eosp] for more in (0, 100)]
        assert said in hearings, "all of one hearing"
        assert {text for text, _ in reply[opened + 1 :]} == {ids.modality_pad}
    typed = decode([text for (text, _), own in zip(rows, found.learned, strict=True) if not own])
    assert SYSTEM_PROMPTS["speech"] in typed
    assert FRANCE.lower().rstrip("?") in typed.lower()


def test_questions_are_typed_or_heard_from_whoever_has_read_them(maker: Maker) -> None:
    tasks = [maker.answered(Exchange(SPAIN, MADRID)) for _ in range(200)]
    heard = [task for task in tasks if task.heard and task.heard.clip == 2]
    assert 125 < len(heard) < 175
    assert all(isinstance(task.user, SpeechSegment) for task in heard)
    typed = [task for task in tasks if task.heard is None]
    assert len(heard) + len(typed) == 200
    assert all(isinstance(task.user, TextSegment) for task in typed)


def test_an_answer_that_nobody_has_read_is_learned_in_writing(maker: Maker) -> None:
    unread = "Nobody has read this."
    maker.draw = random.Random(3)  # spoken answers are asked for
    found = maker.dialogue(
        [Exchange(SPAIN, MADRID), Exchange(FRANCE, unread), Exchange(SPAIN, MADRID)]
    )
    learned = found.rows[found.learned]
    ids = maker.ids
    (end,) = np.flatnonzero(learned[:, 0] == ids.im_end)
    written = learned[end + 1 :]
    assert maker.tokenizer.decode(written[:-1, 0].tolist()) == unread
    assert written[-1].tolist() == [ids.sosp, ids.audio_pad]
    assert found.learned[-1], "nothing follows it"


def test_a_reply_may_be_cut_short_and_the_next_turn_is_learned_all_the_same(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.pocket.examples._INTERRUPTED", 1.0)
    monkeypatch.setattr("recipes.pocket.examples._WRITTEN_ALONE", 0.0)
    ids, decode, heard = maker.ids, maker.tokenizer.decode, set[int]()
    numbered = np.repeat(np.arange(21, dtype=np.uint8)[:, None], 4, axis=1)
    maker.phones = [numbered + 30, numbered + 60]
    for _ in range(60):
        found = maker.dialogue([Exchange(FRANCE, MADRID), Exchange(FRANCE, PARIS)])
        learned = found.rows[found.learned]
        (opened,) = np.flatnonzero(learned[:, 0] == ids.sosp)
        first, last = learned[:opened], learned[opened:]
        codes = first[first[:, 0] == ids.modality_pad, 1]
        words = first[first[:, 0] != ids.modality_pad, 0]
        whole = len(maker.tokenizer.encode(MADRID))
        share = -(-whole * len(codes) // 9)
        assert decode(words[:share].tolist()) == decode(maker.tokenizer.encode(MADRID)[:share])
        assert decode(words[share:].tolist()) == PARIS, "what was cut is learned no further"
        assert codes.tolist() in [[*range(more, more + len(codes))] for more in (0, 100)]
        assert [*last[1:-2, 1]] in [[*range(9 + more, 16 + more)] for more in (0, 100)]
        (ended, _) = np.flatnonzero(found.rows[:, 1] == ids.eosp)
        assert not found.learned[ended], "the model would have spoken on"
        assert found.learned[ended + 1]
        assert found.rows[ended + 1, 0] == ids.im_end
        assert len(codes) < 9
        heard.add(len(codes))
        of_first = found.phones[found.learned][:opened][first[:, 0] == ids.modality_pad]
        assert (of_first[:, 0] - codes % 100).tolist() in [[30] * len(codes), [60] * len(codes)]
        both = found.rows[found.rows[:, 1] == ids.eosp]
        assert len(both) == 2, "speech that was cut is closed as a session closes it"
    assert {0, 8} < heard


def test_answers_may_be_asked_for_in_writing(maker: Maker) -> None:
    task = maker.answered(Exchange(SPAIN, MADRID), "text")
    assert task.prompt == SYSTEM_PROMPTS["text"]
    assert task.reply == (maker._text(MADRID),)


def test_each_reading_of_an_answer_is_learned_from(maker: Maker) -> None:
    maker.readings[MADRID].append(1)
    said = {maker.answered(Exchange(FRANCE, MADRID)).said for _ in range(60)}
    assert said == {Take(clip, hearing) for clip in (0, 1) for hearing in (0, 1)}


def test_what_the_teacher_read_is_read_aloud_or_said_again_in_a_chat(maker: Maker) -> None:
    tasks = [maker.turn(0) for _ in range(300)]
    again = [task for task in tasks if task.prompt == SYSTEM_PROMPTS["speech"]]
    assert 70 < len(again) < 135
    for task in again:
        assert task.said is not None
        assert task.said.clip == 0
        assert task.reply == (maker.written(0), maker.spoken(task.said))
        assert isinstance(task.user, TextSegment)
        asked = maker.tokenizer.decode(list(task.user.ids)).lower()
        assert MADRID.lower().rstrip(".") in asked
        assert len(asked) > len(MADRID)
    aloud = [task for task in tasks if len(task.reply) == 1 and task.said]
    assert len(aloud) > 120
    assert {task.said.clip for task in aloud if task.said} == {0}


def test_phones_stand_beside_the_codes_that_are_heard_and_those_that_are_said(
    maker: Maker,
) -> None:
    shape, size = maker.phones[0].shape, maker.phones[0].size
    maker.phones = [(np.arange(size) + many).reshape(shape).astype(np.uint8) for many in (0, 50)]
    maker.draw = random.Random(1)
    tasks = [maker.answered(Exchange(SPAIN, MADRID)) for _ in range(20)]
    task = next(task for task in tasks if task.heard and task.said == Take(0, 1))
    assert task.heard is not None
    found = maker._conversation([task])
    codes = (found.rows[:, 0] == maker.ids.modality_pad) & (found.rows[:, 1] < maker.ids.eosp)
    heard, said = codes & ~found.learned, codes & found.learned
    assert (int(heard.sum()), int(said.sum())) == (5, 9)
    heard_of = maker.phones[task.heard.hearing][maker._place(Take(2))]
    assert np.array_equal(found.phones[heard], heard_of)
    assert np.array_equal(found.phones[said], maker.phones[1][maker._place(Take(0))])
    assert (found.phones[~codes] == UNLABELLED).all()


def test_replies_end_soon_after_the_teachers_last_phone(maker: Maker) -> None:
    phones = maker.phones[0]
    phones[:] = 0  # silence
    phones[2, 1] = phones[4, 3] = 7
    assert maker.spoken(Take(0)).codes == tuple(range(6))
    assert phones[maker._spoken_place(Take(0))].shape == (6, 4)
    phones[7, 0] = UNLABELLED
    assert maker.spoken(Take(0)).codes == tuple(range(9)), "no further than the clip's end"
    assert maker.spoken(Take(1)).codes == tuple(range(9, 16)), "all of one without a phone"


def test_the_teachers_phones_move_with_the_hearing_and_the_others_do_not(maker: Maker) -> None:
    labels = torch.arange(len(maker.data.labels), dtype=torch.uint8)
    hearings = [maker.hearings[0]] * 5
    moved = Maker(replace(maker.data, labels=labels), hearings, maker.tokenizer, maker.ids)
    teachers = maker.data.teacher_codes * 4
    for hearing, frames in enumerate((0, 1, 2, 3, 0)):
        found = moved.phones[hearing].flatten()
        assert np.array_equal(found[frames:teachers], labels[: teachers - frames])
        assert np.array_equal(found[teachers:], labels[teachers:])


def test_the_teacher_begins_later_in_each_hearing_and_others_are_in_rooms(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sound = draw.integers(-9000, 9000, 8 * INPUT_SAMPLES_PER_CODE).astype(np.int16)
    spoken = np.ones(8 * OUTPUT_SAMPLES_PER_CODE, np.int16)
    late = np.concatenate([np.zeros(320, np.int16), sound[:-320]])
    clips = [Clip(SPAIN, TEACHER, wave, spoken) for wave in (sound, late)]
    write_shard(tmp_path / f"00-{TEACHER}-00000", clips)
    write_shard(tmp_path / f"00-{KOKORO}-00000", [Clip(SPAIN, KOKORO, sound, None)])
    data = load_recordings(tmp_path, torch.device("cpu"), [0])
    tokenizer = given_tokenizer(tmp_path)

    clean, moved = (encode_all(tokenizer, data, hearing=number) for number in (0, 1))

    assert np.array_equal(moved[:8], clean[8:16]), "what begins 20 ms later"
    assert np.array_equal(clean[16:], clean[:8])
    assert not np.array_equal(moved[:8], clean[:8])
    assert not np.array_equal(moved[16:], clean[16:])


def test_numbers_are_typed_in_digits_now_and_then(maker: Maker) -> None:
    typed = set()
    for _ in range(60):
        segment = maker._typed("What is twenty-one plus one?")
        typed.add(maker.tokenizer.decode(list(segment.ids)))
    assert {"What is twenty-one plus one?", "What is 21 plus 1?"} <= typed
    alone = {maker.tokenizer.decode(list(maker._typed("One day.").ids)) for _ in range(60)}
    assert alone == {"One day.", "one day"}, "one alone is no number"


def test_examples_hold_every_clip_and_every_dialogue_that_can_be_made(
    maker: Maker, tmp_path: Path
) -> None:
    path = tmp_path / "dialogues.jsonl"
    turns = [[(SPAIN, MADRID)], [(SPAIN, MADRID), (FRANCE, PARIS)], [(SPAIN, "Unread.")]]
    lines = [{"turns": [{"user": u, "answer": a} for u, a in each]} for each in turns]
    path.write_text("\n".join(map(json.dumps, lines)))
    talks = read_dialogues(path)
    assert talks[1] == [Exchange(SPAIN, MADRID), Exchange(FRANCE, PARIS)]
    made = build(maker, np.arange(3), torch.device("cpu"), seed=0, dialogues=talks)
    assert len(made.lengths) == 3 + 3


def test_phones_last_as_long_as_their_symbols() -> None:
    # Pad, vowel, its mark of length, question mark, pad; 25 ms a frame.
    found = phones_of("u\u02d0?", [4, 2, 3, 1, 6])
    assert [name for name, _ in found] == ["pau", "uw", "uw", "pau", "pau"]
    assert [end for _, end in found] == pytest.approx([0.1, 0.15, 0.225, 0.25, 0.4])
    assert {name for name, _ in phones_of("ab\u02c8", [1] * 5)} == {"pau", "aa", "b", ""}
    assert {"aa", "uw", "pau"} <= set(PHONES)


def test_half_of_the_clips_are_played_at_another_speed_and_their_phones_with_them() -> None:
    tone = (10_000 * np.sin(np.arange(16_000) * (2 * np.pi * 200 / 16_000))).astype(np.int16)
    clip = Clip("A.", KOKORO, tone, phones=(("aa", 0.4), ("pau", 1.0)))

    made = [stretched(clip, 0, number) for number in range(200)]

    others = [one for one in made if one is not clip]
    assert 70 <= len(others) <= 130
    factors = np.array([len(tone) / len(one.heard) for one in others])
    assert 0.875 < factors.min() < 0.9
    assert 1.12 < factors.max() < 1.145
    for one, factor in zip(others, factors, strict=True):
        assert [end * factor for _, end in one.phones] == pytest.approx([0.4, 1.0], rel=1e-3)
        crossings = int((np.diff(np.signbit(one.heard)) != 0).sum())
        assert crossings == pytest.approx(400, abs=3)  # as many periods, in another time
    number = next(number for number, one in enumerate(made) if one is not clip)
    assert np.array_equal(stretched(clip, 0, number).heard, made[number].heard)


def test_the_teacher_reads_what_is_hers_and_others_the_rest() -> None:
    lines = [Line(f"{n}", "a", "h", TEACHER_KIND if n % 2 else "train") for n in range(60)]
    halves = [list(readers(lines, VOICES, 3, part, 2)) for part in (0, 1)]
    assert sorted(number for half in halves for number, _ in half) == list(range(60))
    for number, reader in halves[0] + halves[1]:
        if number % 2:
            assert (reader.voice, reader.other, reader.speed) == (TEACHER, "", 1.0)
        else:
            assert reader.voice in VOICES


def test_answers_are_read_before_other_lines_and_at_several_speeds() -> None:
    lines = [Line(f"{n}", "a", "h", ANSWER_KIND if n < 40 else TEACHER_KIND) for n in range(200)]
    read = list(readers(lines, VOICES, 3, 0, 1))
    assert sorted(number for number, _ in read) == list(range(200))
    assert all(number < 40 for number, _ in read[:2])
    assert sum(number < 40 for number, _ in read[:60]) == 40
    speeds = {reader.speed for number, reader in read if number < 40}
    assert len(speeds) == 40
    assert 0.94 <= min(speeds) < 0.96
    assert 1.04 < max(speeds) <= 1.06
    assert {reader.voice for _, reader in read} == {TEACHER}


def test_a_word_is_spelled_slowly() -> None:
    texts = ("Cat is spelled C, A, T.", "A cat is a pet, a house animal.")
    lines = [Line(text, "a", "h", ANSWER_KIND) for text in texts * 50]
    speeds = {number: reader.speed for number, reader in readers(lines, VOICES, 3, 0, 1)}
    spelled, others = ([speeds[n] for n in range(first, 100, 2)] for first in (0, 1))
    assert 0.7 <= min(spelled) < 0.73 < 0.82 < max(spelled) <= 0.85
    assert min(others) >= 0.94


def test_answers_that_are_often_given_are_read_more_often_and_spelled_ones() -> None:
    require_program("espeak-ng")
    lines = talk_lines([], {MADRID: 1, PARIS: 25, FRANCE: 900, OX: 1}, [], 0)
    assert Counter(line.text for line in lines) == {MADRID: 1, PARIS: 3, FRANCE: 4, OX: 2}
    assert {line.kind for line in lines} == {ANSWER_KIND}


def test_lines_of_dialogues_are_spoken_by_the_right_ones(tmp_path: Path) -> None:
    require_program("espeak-ng")
    talk = {"turns": [{"user": SPAIN, "answer": MADRID}, {"user": SPAIN, "answer": PARIS}]}
    (tmp_path / "dialogues.jsonl").write_text(json.dumps(talk))
    (tmp_path / "data.noun").write_text("")
    places = {"work": tmp_path, "dialogues": tmp_path / "dialogues.jsonl", "wordnet": tmp_path}
    options = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    words = ["talk", *options, "--count", "0", "--times", "2"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    kinds = {(line.text, line.kind) for line in read_lines(tmp_path / "lines.xz")}
    assert kinds == {(SPAIN, "train"), (MADRID, ANSWER_KIND), (PARIS, ANSWER_KIND)}
    assert len(read_lines(tmp_path / "lines.xz")) == 4


def given_tokenizer(folder: Path) -> SpeechTokenizer:
    """The tokenizer that ships, as ``give`` writes it for the recipe."""
    kept = ROOT / "src/mosstalk/pocket/codec/model.safetensors"
    out = folder / "tokenizer.safetensors"
    result = CliRunner().invoke(app, ["give", str(kept), str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_tokenizer(out, torch.device("cpu"))


def test_the_tokenizer_that_ships_is_given_whole(tmp_path: Path) -> None:
    tokenizer = given_tokenizer(tmp_path)
    with torch.inference_mode():
        codes = tokenizer.encode(torch.randn(16_000, generator=torch.Generator().manual_seed(0)))
    assert len(codes) == 13
    assert len(set(codes)) > 1
