"""Calibrating and measuring: which conversations, which figures, what the command refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Checkpoint, Run
from typer.testing import CliRunner

from mosstalk import Pipeline
from mosstalk.checkpoints.prompts import Speaker, lay_out, read_prompts, sentences
from mosstalk.cli import app
from mosstalk.conversation import SpecialIds, TextSegment, Turn
from mosstalk.errors import OptionError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.offline.defaults import Choices

CPU = torch.device("cpu")


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def command(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def conversations(folder: Path, count: int = 12) -> Path:
    lines = [
        {
            "turns": [
                {"role": "system", "text": "Answer."},
                {"role": "user", "codes": [place, 7, 300 + place]},
                {"role": "assistant", **({"text": "Yes."} if place % 2 else {"codes": [5, 9]})},
            ]
        }
        for place in range(count)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_the_command_calibrates_measures_and_writes_a_report(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    out, html, js = tmp_path / "out", tmp_path / "fp8.html", tmp_path / "fp8.json"
    given = ("--calibrate", conversations(tmp_path), "--html", html, "--json", js)
    run = command("checkpoint", "quantize", tiny.model.parent, out, "--blocks", "all", *given)
    assert run.exit_code == 0, run.output
    assert "warning: only 11 prompts to calibrate on; 500 or more" in run.output
    assert "random" in run.output
    document = json.loads(js.read_text())
    assert document["weights"] == "synthetic"
    assert document["settings"]["measured on"] == "1"
    assert document["quantization"]["calibration"] == {"prompts": 11, "statistic": "largest"}
    assert len(document["products"]) == 7 * 8
    for product in document["products"]:
        assert 0.01 < product["weight"] < 0.04
        assert all(0.005 < error < 0.3 for error in product["outputs"].values())
    heads = {(each["head"], each["way"]): each for each in document["heads"]}
    assert set(heads) == {
        (head, way)
        for head in ("text",)
        for way in ("row", "calibrated, largest", "calibrated, p99.99")
    }
    assert all(0 < each["kl"] <= each["kl_max"] < 1 for each in heads.values())
    page = html.read_text()
    assert page.count("<figure") == 4
    assert "<script" not in page
    assert "These weights are random" in page
    assert "default-src 'none'" in page
    pipeline = Pipeline.load(out / "model", out / "codec", device="cpu")
    chat = pipeline.chat(speech=False)
    chat.read("hello")
    list(chat.answer(speech=False, limits=Choices(max_new_rows=3).limits()))
    assert len(chat.conversation.rows) > 3


def test_activations_by_row_need_no_run_of_the_model(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    del here
    run = command("checkpoint", "quantize", tiny.model, tmp_path / "out")
    assert run.exit_code == 0, run.output
    assert "fp8 (E4M3), shared block, activations by row; 28 of 94 tensors" in run.output
    again = command("checkpoint", "quantize", tiny.model, tmp_path / "out")
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_a_json_document_alone_goes_to_standard_output(tiny: Checkpoint, tmp_path: Path) -> None:
    given = ("--calibrate", conversations(tmp_path), "--activations", "row", "--json", "-")
    run = command("checkpoint", "quantize", tiny.model, tmp_path / "out", *given)
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["quantization"]["activations"] == "row"
    assert "warning" in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scheme", "int4"), "--scheme must be fp8"),
        (("--blocks", "text"), "--blocks must be shared or all"),
        (("--activations", "token"), "--activations must be row or calibrated"),
        (("--statistic", "mean"), "--statistic must be largest or p99.99"),
        (("--calibrate", "nowhere.jsonl"), "cannot be read"),
        (("--json", "nowhere/x.json"), "no such folder"),
    ],
)
def test_options_that_mean_nothing_are_refused_and_nothing_is_written(
    tiny: Checkpoint, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    run = command("checkpoint", "quantize", tiny.model, tmp_path / "out", *words)
    assert run.exit_code == 2
    assert message in run.output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def talker(tiny: Checkpoint) -> Speaker:
    model = load_language_model(tiny.model, device=CPU, dtype=torch.float32)
    tokenizer = TextTokenizer.from_folder(tiny.model, model.config.vocab_size)
    return Speaker(
        model, SpecialIds.of(model.config, tokenizer.special), tokenizer.encode, Choices()
    )


def test_figures_are_taken_where_the_assistant_draws(talker: Speaker, tmp_path: Path) -> None:
    ids, encode = talker.ids, talker.encode
    prompts = read_prompts(conversations(tmp_path), ids, encode, 500)
    assert (len(prompts.calibrated), len(prompts.measured)) == (11, 1)
    spoken, written = prompts.calibrated[0], prompts.calibrated[1]
    # Two codes and eosp are the audio head's, the end of the turn the text head's.
    assert [spoken.rows[place + 1][1] for place in spoken.audio] == [5, 9, ids.eosp]
    assert [spoken.rows[place + 1][0] for place in spoken.text] == [ids.im_end]
    assert written.audio == ()
    drawn = [written.rows[place + 1][0] for place in written.text]
    assert drawn == [*encode("Yes."), ids.im_end]
    nobody = lay_out([Turn("user", (TextSegment((65, 66)),))], ids, encode)
    assert len(nobody.text) == len(nobody.rows) - 1


def test_a_line_of_a_file_ends_where_json_ends_it(talker: Speaker, tmp_path: Path) -> None:
    path = conversations(tmp_path, 1)
    line = path.read_text().splitlines()[0]
    turns = {"turns": [{"role": "user", "text": "One\u2028two\x85three."}]}
    path.write_text(f"{line}\r\n{json.dumps(turns, ensure_ascii=False)}\n", encoding="utf-8")
    prompts = read_prompts(path, talker.ids, talker.encode, 500)
    assert (len(prompts.calibrated), len(prompts.measured)) == (1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"line 2: give"),
        ("{", r"line 2: no JSON"),
        ('{"turns": [{"role": "user"}]}', r"line 2: a turn has a role"),
        ('{"turns": [{"role": "user", "text": "a", "codes": [1]}]}', r"line 2: a turn has"),
        ('{"turns": [{"role": "robot", "text": "a"}]}', r"line 2: a turn has a role"),
        ('{"turns": [{"role": "user", "codes": [1024]}]}', r"codes numbers from 0 to 1023"),
        ('{"turns": [{"role": "user", "text": "' + "a" * 90 + '"}]}', r"context holds 80"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(
    talker: Speaker, tmp_path: Path, line: str, message: str
) -> None:
    path = conversations(tmp_path, 1)
    path.write_text(f"{path.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(OptionError, match=message):
        read_prompts(path, talker.ids, talker.encode, 80)


def test_the_default_conversations_are_four_of_each_text(talker: Speaker) -> None:
    assert len(set(sentences(135))) == 135
    short = replace(talker, longest_rows=6)
    kinds = short.conversations(["Hello.", "Is it late?"], quiet)
    assert [len(kind) for kind in kinds] == [2, 2, 2, 2]
    for kind, speech in zip(kinds, (True, False, False, True), strict=True):
        assert all(bool(prompt.audio) is speech for prompt in kind)
        assert all(len(prompt.rows) < 400 for prompt in kind)
