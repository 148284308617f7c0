"""Reading aloud and writing down: what goes in comes out in the right form."""

import json
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from conftest import QUESTION, ROOT, SYNTHETIC, Checkpoint, Run, command_environment, refused

from mosstalk.audio.sound import Samples, read_audio
from mosstalk.conversation import Conversation
from mosstalk.errors import VoiceError
from mosstalk.offline.pieces import LONGEST_TEXT, text_pieces
from mosstalk.offline.pipeline import SPEAK_PROMPT, TRANSCRIBE_PROMPT, Pipeline, speak, transcribe
from mosstalk.reply_options import Limits, SamplingOptions, Script

CODE_SAMPLES = 1920
RATE = 16_000
LIBRIVOX = ROOT / "assets" / "librivox.flac"
FOUR_PIECES = " ".join(f"This is sentence {number}, and it goes on for a while." for number in
                       ("one", "two", "three", "four")) * 4  # fmt: skip
OLDER = b"from before"
NOISE = r"The weights of this model are random: what it writes is noise"


def document(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def sound(path: Path) -> Samples:
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 24_000
    return np.asarray(samples)


def said(pipeline: Pipeline, text: str, codes: int, seed: int = 0) -> Samples:
    options, script = SamplingOptions(seed=seed), Script.parse(f"speech:{codes}")
    return np.concatenate(list(speak(pipeline, text, options=options, script=script)))


def wrote(pipeline: Pipeline, samples: Samples, tokens: int) -> str:
    answer = transcribe(pipeline, samples, script=Script.parse(f"text:{tokens}"))
    assert list(answer) == []
    return answer.text


def shown(text: str) -> str:
    """A text on one line, as the command prints it."""
    return " ".join("".join(s if unicodedata.category(s) != "Cc" else " " for s in text).split())


# Reading aloud.


def test_text_becomes_a_sound_file_and_says_whose_weights_spoke(
    mosstalk: Run, tmp_path: Path
) -> None:
    words = ("Good morning.", "--out", "m.wav", "--script", "speech:6", "--stats")
    run = mosstalk("speak", *words, *SYNTHETIC)
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr.startswith("The weights of this model are random: what you will hear is")
    assert "read     'Good morning.': 0.48 s, stop after 8 steps" in run.stderr
    assert "\nm.wav: 0.48 s of sound; scripted speech:6" in run.stderr
    assert "weights synthetic; model float32, codec float32" in run.stderr
    assert re.search(r"commit to first audio \d+\.\d ms", run.stderr)
    assert sound(tmp_path / "m.wav").shape == (6 * CODE_SAMPLES,)
    assert [path.name for path in tmp_path.iterdir()] == ["m.wav"]


def test_random_weights_are_ended_without_being_asked_to(here: Run, tmp_path: Path) -> None:
    found = document(here("speak", "Hi.", "--json"))
    assert (found["script"], found["weights"]) == ("speech:75", "synthetic")
    assert found["audio_s"] == 6.0
    assert len(sound(tmp_path / "spoken.wav")) == 75 * CODE_SAMPLES


def test_the_command_says_what_the_library_does(
    here: Run, pipeline: Pipeline, tmp_path: Path
) -> None:
    words = ("--script", "speech:8", "--seed", "3")
    assert here("speak", "Good morning.", *words, "--out", "m.wav").returncode == 0
    spoken = said(pipeline, "Good morning.", 8, seed=3)
    np.testing.assert_allclose(sound(tmp_path / "m.wav"), spoken, atol=2 / 32768)


@pytest.mark.parametrize(("system", "prompt"), [(None, SPEAK_PROMPT), ("Sing.", "Sing.")])
def test_the_prompt_is_the_tasks_and_the_text_a_typed_turn(
    pipeline: Pipeline, system: str | None, prompt: str
) -> None:
    answer = speak(pipeline, "Good morning.", system=system)
    expected = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    expected.add_text("system", prompt)
    expected.add_text("user", "Good morning.")
    expected.open_reply(speech=True)
    assert answer.chat.conversation.rows == expected.rows


def test_long_text_is_one_file_of_its_pieces_in_order(
    here: Run, pipeline: Pipeline, tmp_path: Path
) -> None:
    pieces = text_pieces(FOUR_PIECES)
    assert len(pieces) >= 4
    assert max(map(len, pieces)) <= LONGEST_TEXT
    run = here("speak", FOUR_PIECES, "--script", "speech:6", "--stats")
    assert run.returncode == 0
    assert run.stderr.count("  read     ") == len(pieces)
    parts = [said(pipeline, piece, 6) for piece in pieces]
    assert not np.array_equal(parts[0], parts[1])
    whole = sound(tmp_path / "spoken.wav")
    np.testing.assert_allclose(whole, np.concatenate(parts), atol=2 / 32768)


def test_a_document_has_every_piece_and_figures_that_agree(here: Run) -> None:
    found = document(here("speak", FOUR_PIECES, "--script", "speech:3", "--json", "--seed", "2"))
    pieces = found["pieces"]
    assert [piece["text"] for piece in pieces] == text_pieces(FOUR_PIECES)
    assert {len(piece["codes"]) for piece in pieces} == {3}
    assert sum(piece["audio_s"] for piece in pieces) == pytest.approx(found["audio_s"])
    assert all(piece["stages"]["step"]["count"] == piece["steps"] == 5 for piece in pieces)
    wanted = {"task": "speak", "seed": 2, "out": "spoken.wav", "interrupted": False}
    assert wanted.items() <= found.items()


def test_text_comes_as_a_word_from_standard_input_or_from_a_file(here: Run, tmp_path: Path) -> None:
    text, script = "Grüße,\nund guten Morgen.\n", ("--script", "speech:8")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8-sig")
    here("speak", text, *script, "--out", "word.wav")
    assert here("speak", "-", *script, "--out", "in.wav", stdin=text.encode()).returncode == 0
    assert here("speak", "--file", "text.txt", *script, "--out", "file.wav").returncode == 0
    here("speak", "Something else.", *script, "--out", "other.wav")
    word, stdin, file, other = (
        (tmp_path / f"{name}.wav").read_bytes() for name in ("word", "in", "file", "other")
    )
    assert word == stdin == file != other


@pytest.mark.slow  # ``test_chat`` has what is in them
@pytest.mark.parametrize("suffix", [".flac", ".ogg"])
def test_other_formats_are_written(here: Run, tmp_path: Path, suffix: str) -> None:
    run = here("speak", "Hi.", "--script", "speech:4", "--out", f"a{suffix}")
    assert run.returncode == 0
    assert len(sound(tmp_path / f"a{suffix}")) == 4 * CODE_SAMPLES


def test_the_same_seed_says_the_same_and_another_something_else(here: Run, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        here("speak", "Hi.", "--script", "speech:4", "--seed", seed, "--out", f"{name}.wav")
    a, b, c = ((tmp_path / f"{name}.wav").read_bytes() for name in "abc")
    assert a == b != c


def test_a_reply_that_is_cut_off_says_so(here: Run, tmp_path: Path) -> None:
    run = here("speak", "Hi.", "--max-rows", "5")
    assert run.returncode == 0
    assert "note: piece 1 of 1 was cut off; --max-rows N gives it more\n" in run.stderr
    assert "spoken.wav: 0.40 s of sound" in run.stderr
    assert len(sound(tmp_path / "spoken.wav")) == 5 * CODE_SAMPLES


def test_a_model_that_says_nothing_is_told_and_the_older_file_stays(
    here: Run, tmp_path: Path
) -> None:
    (tmp_path / "spoken.wav").write_bytes(OLDER)
    run = here("speak", "Hi.", "--script", "text:3", "--force")
    assert run.returncode == 1
    assert "NOTHING was spoken" in run.stderr
    assert (tmp_path / "spoken.wav").read_bytes() == OLDER


def test_a_trace_has_a_turn_for_every_piece(here: Run, tmp_path: Path) -> None:
    here("speak", FOUR_PIECES, "--script", "speech:3", "--trace", "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    turns = {event["args"]["turn"] for event in events if event["ph"] == "X"}
    assert turns == set(range(1, len(text_pieces(FOUR_PIECES)) + 1))


# Slow: a process of its own; ``test_chat`` interrupts one, which ends the same way.
@pytest.mark.slow
def test_ctrl_c_keeps_what_was_read_and_the_older_file(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "spoken.wav").write_bytes(OLDER)
    asked = ("--script", "speech:10", "--force", "--stats")
    words = ("speak", FOUR_PIECES * 20, *asked, *SYNTHETIC)
    with subprocess.Popen(
        [sys.executable, "-m", "mosstalk.cli", *words],
        cwd=tmp_path,
        env=command_environment(cache_folder) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("  read "):
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=200)
    assert (process.returncode, stdout) == (130, "")
    assert "interrupted: what was spoken so far is in spoken.wav.part" in stderr
    assert len(sound(tmp_path / "spoken.wav.part")) >= 10 * CODE_SAMPLES
    assert (tmp_path / "spoken.wav").read_bytes() == OLDER


# Writing down.


def test_the_text_alone_goes_to_stdout_and_figures_aside(mosstalk: Run, pipeline: Pipeline) -> None:
    run = mosstalk("transcribe", QUESTION, "--script", "text:9", "--stats", *SYNTHETIC)
    assert run.returncode == 0
    text = wrote(pipeline, read_audio(QUESTION, RATE).samples, 9)
    assert run.stdout == f"{shown(text)}\n"
    assert re.search(NOISE, run.stderr)
    assert "0.00 to    2.87 s  stop after 10 steps" in run.stderr
    assert "wrote down 2.87 s of sound; scripted text:9: mode changes and length forced" in (
        run.stderr
    )
    assert "weights synthetic; model float32, codec float32" in run.stderr


def test_the_prompt_is_the_tasks_and_the_sound_a_spoken_turn(pipeline: Pipeline) -> None:
    samples = read_audio(QUESTION, RATE).samples
    answer = transcribe(pipeline, samples.astype(np.float64))
    expected = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    expected.add_text("system", TRANSCRIBE_PROMPT)
    expected.add_speech("user", pipeline.chat().hear(samples))
    expected.open_reply(speech=False)
    assert answer.chat.conversation.rows == expected.rows


def test_of_several_files_every_line_begins_with_its_files_name(here: Run) -> None:
    alone = [here("transcribe", path, "--script", "text:9").stdout for path in (QUESTION, LIBRIVOX)]
    assert alone[0] != alone[1]
    both = here("transcribe", QUESTION, LIBRIVOX, "--script", "text:9")
    assert both.stdout == f"{QUESTION}: {alone[0]}{LIBRIVOX}: {alone[1]}"


def test_a_document_takes_the_place_of_the_text(here: Run) -> None:
    words = ("transcribe", QUESTION, LIBRIVOX, "--script", "text:9")
    lines = here(*words).stdout.splitlines()
    found = document(here(*words, "--json"))
    assert [f"{file['file']}: {file['text']}" for file in found["files"]] == lines
    assert [file["seconds"] for file in found["files"]] == pytest.approx([2.87, 2.99], abs=0.01)
    assert (found["task"], found["weights"], found["script"]) == (
        "transcribe",
        "synthetic",
        "text:9",
    )
    for file in found["files"]:
        (piece,) = file["pieces"]
        assert shown(piece["text"]) == file["text"]
        assert (piece["start_s"], piece["end_s"]) == (0, file["seconds"])
        assert piece["steps"] == 10


def test_what_would_steer_a_terminal_is_not_printed(here: Run) -> None:
    words = ("transcribe", QUESTION, "--script", "text:60")
    (file,) = document(here(*words, "--json"))["files"]
    signs = {unicodedata.category(sign) for sign in file["pieces"][0]["text"]}
    assert "Cc" in signs  # random weights do write such signs
    printed = here(*words).stdout
    assert printed.count("\n") == 1
    assert "Cc" not in {unicodedata.category(sign) for sign in printed.removesuffix("\n")}


def speech(seconds: float) -> Samples:
    return np.resize(read_audio(QUESTION, RATE).samples, round(seconds * RATE))


def recording(path: Path, samples: Samples, rate: int = RATE) -> Path:
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


def test_a_long_recording_is_a_line_for_every_piece(
    here: Run, pipeline: Pipeline, tmp_path: Path
) -> None:
    samples = speech(70)
    path = recording(tmp_path / "long.wav", samples)
    run = here("transcribe", path, "--script", "text:12", "--stats")
    spans = [
        (float(start), float(end))
        for start, end in re.findall(r"^ +(\d+\.\d\d) to +(\d+\.\d\d) s  stop", run.stderr, re.M)
    ]
    assert f"heard as {len(spans)} pieces of at most 30 s, cut at pauses" in run.stderr
    assert (spans[0][0], spans[-1][1]) == (0, 70)
    assert all(end - start <= 30 for start, end in spans)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    texts = [
        wrote(pipeline, samples[round(start * RATE) : round(end * RATE)], 12)
        for start, end in spans
    ]
    assert len(set(texts)) == len(texts)
    assert run.stdout.splitlines() == [shown(text) for text in texts]


def test_a_long_silence_is_left_out(here: Run, tmp_path: Path) -> None:
    quiet = np.zeros(70 * RATE, np.float32)
    path = recording(tmp_path / "gap.wav", np.concatenate([speech(3), quiet, speech(3)]))
    run = here("transcribe", path, "--script", "text:5", "--stats")
    assert run.returncode == 0
    assert len(run.stdout.splitlines()) == 2
    assert run.stderr.count("s  silent, left out") >= 1


def test_stereo_is_heard_like_mono(here: Run, tmp_path: Path) -> None:
    mono = speech(3)
    one = recording(tmp_path / "one.wav", mono)
    two = recording(tmp_path / "two.wav", np.stack([mono, mono], 1))
    unlike = recording(tmp_path / "unlike.wav", np.stack([mono, np.roll(mono, 9000)], 1))
    texts = [here("transcribe", path, "--script", "text:20").stdout for path in (one, two, unlike)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    # Slow: other rates are resampled by the same library, whose results ``test_audio`` has.
    "rate",
    [8_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (24_000, 44_100, 48_000))],
)
def test_other_rates_are_heard_at_their_length(here: Run, tmp_path: Path, rate: int) -> None:
    wide = np.asarray(soxr.resample(speech(3), RATE, rate), np.float32)
    path = recording(tmp_path / "wide.wav", wide, rate)
    words = ("--script", "text:1", "--json")
    plain = document(here("transcribe", recording(tmp_path / "a.wav", speech(3)), *words))
    found = document(here("transcribe", path, *words))
    (heard,), (file,) = plain["files"], found["files"]
    assert (file["source_rate"], file["seconds"]) == (rate, pytest.approx(3, abs=1e-3))
    rows = "rows_prefilled"
    assert file["pieces"][0][rows] == heard["pieces"][0][rows]


def test_writing_down_needs_no_voice_and_reading_aloud_does(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    at = tiny.copy(tmp_path)
    shutil.rmtree(at.codec / "voices")
    folders = ("--model", at.model, "--codec", at.codec)
    assert here("transcribe", QUESTION, "--script", "text:5", *folders).returncode == 0
    run = here("speak", "Hi.", "--script", "speech:5", *folders)
    assert "unknown voice 'default'" in refused(run)
    with pytest.raises(VoiceError, match="unknown voice"):
        speak(Pipeline.load(at.model, at.codec, device="cpu"), "Hi.")


# As the checkpoint wants it.


# Slow: six commands; the library's tasks, which they run, are shown to below.
@pytest.mark.slow
def test_every_task_is_drawn_as_the_checkpoint_says_for_it(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    at = tiny.copy(tmp_path)
    own = {"speak": {"top_k": 3, "max_new_tokens": 4}, "transcribe": {"do_sample": False}}
    (at.model / "generation_config.json").write_text(json.dumps({"top_k": 7, "mosstalk": own}))
    folders = ("--model", at.model, "--codec", at.codec, "--json")

    spoken = document(here("speak", "Hi.", *folders))
    assert spoken["sampling"] == {
        "temperature": 0.6,
        "top_k": 3,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    assert [piece["finish_reason"] for piece in spoken["pieces"]] == ["length"]
    assert spoken["audio_s"] == 4 * 0.08
    written = document(here("transcribe", QUESTION, *folders))
    greedy = document(here("transcribe", QUESTION, "--temperature", "0", "--json"))
    drawn = document(here("transcribe", QUESTION, *folders, "--temperature", "0.6"))
    assert written["files"][0]["text"] == greedy["files"][0]["text"]
    assert written["files"][0]["text"] != drawn["files"][0]["text"]
    assert drawn["sampling"]["temperature"] == 0.6
    asked = document(here("chat", "--text", "hi", "--script", "speech:3", *folders))
    assert asked["sampling"]["top_k"] == 7


def test_the_librarys_tasks_are_drawn_so_too_unless_told_otherwise(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    at = tiny.copy(tmp_path)
    own = {"speak": {"max_new_tokens": 4}, "transcribe": {"do_sample": False}}
    (at.model / "generation_config.json").write_text(json.dumps({"mosstalk": own}))
    pipeline, samples = Pipeline.load(at.model, at.codec, device="cpu"), speech(1)
    assert speak(pipeline, "Hi.").generation.params.limits == Limits(4)
    assert speak(pipeline, "Hi.", limits=Limits(9)).generation.params.limits == Limits(9)
    assert transcribe(pipeline, samples).generation.params.options.temperature == 0
    warm = SamplingOptions(temperature=1)
    assert transcribe(pipeline, samples, options=warm).generation.params.options == warm
