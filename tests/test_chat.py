"""The main job: turns in, an answer out, with its figures, as a process and from Python."""

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import unicodedata
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
from conftest import QUESTION, SYNTHETIC, Checkpoint, Run, command_environment
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mosstalk import AudioWriter, Pipeline
from mosstalk.cli import app

CODE_SAMPLES = 1920
MIXED_TURNS = ("--text", "a", "--speech", QUESTION, "--text", "b")
COMMAND = (sys.executable, "-m", "mosstalk.cli")
FIRST_LINE = "The weights of this model are random: what you will hear is noise, not speech."


class MainJob(NamedTuple):
    """What the one full run printed, and the answer it wrote."""

    lines: list[str]
    answer: Path

    def numbers(self, pattern: str) -> list[float]:
        """The groups of the one line that matches ``pattern``."""
        found = [match for line in self.lines if (match := re.fullmatch(pattern, line.strip()))]
        assert len(found) == 1, (pattern, self.lines)
        return [float(group) for group in found[0].groups()]


@pytest.fixture(scope="module")
def main_job(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MainJob:
    """``mosstalk chat --speech question.flac --stats`` with random weights."""
    folder = tmp_path_factory.mktemp("main-job")
    run = subprocess.run(
        [*COMMAND, "chat", "--speech", str(QUESTION), "-o", "answer.wav", "--stats", *SYNTHETIC],
        cwd=folder,
        env=command_environment(cache_folder),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == ""
    return MainJob(run.stderr.splitlines(), folder / "answer.wav")


@pytest.fixture
def chat(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``mosstalk chat`` with the tiny checkpoint in this process, to save starting one."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        folders = ("--model", tiny.model, "--codec", tiny.codec)
        line = [str(word) for word in ("chat", *words, *folders)]
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return subprocess.CompletedProcess(line, 0, result.stdout, result.stderr)

    return run


# What the main job prints and writes.


def test_that_weights_are_random_is_said_before_anything_else(main_job: MainJob) -> None:
    assert main_job.lines[0].startswith(FIRST_LINE)
    assert "--model" in main_job.lines[0]


def test_the_input_is_shown_with_its_length_and_codes(main_job: MainJob) -> None:
    info = soundfile.info(QUESTION)
    said = rf"heard {re.escape(str(QUESTION))}: (\S+) s \((\d+) Hz, (\d+) ch\) = (\d+) codes"
    seconds, rate, channels, codes = main_job.numbers(said.replace("heard ", r"heard\s+"))
    assert seconds == pytest.approx(info.duration, abs=0.006)
    assert (rate, channels) == (info.samplerate, info.channels)
    assert codes == -(-info.frames // 1280)


def test_rows_and_steps_are_counted(main_job: MainJob) -> None:
    # 74 rows of system prompt, the turn "user\n" with 36 codes, the opening "assistant\n":
    # one id a byte, plus the marks. 75 codes take a step each, eosp and im_end two more.
    rows, steps = main_job.numbers(r"rows prefilled (\d+), steps (\d+)")
    prompt = "You are a helpful voice assistant. Answer the user's questions with spoken responses."
    system = len("system\n") + len(prompt) + len("\n") + 2
    user = len("user\n") + len("\n") + 36 + 2 + 2
    assert (rows, steps) == (system + user + len("assistant\n") + 2, 75 + 2)


def test_every_stage_has_its_time_and_share(main_job: MainJob) -> None:
    stages = {}
    for name in ("encode", "prefill", "step", "hop"):
        times = rf"{name}\s+(\S+) ms\s+(\S+)%\s+(\d+) x\s+(\S+) ms"
        total, share, count, mean = main_job.numbers(times)
        assert total == pytest.approx(count * mean, abs=0.01 * count + 0.05)
        stages[name] = (total, share, count)
    assert sum(share for _, share, _ in stages.values()) == pytest.approx(100, abs=0.3)
    whole = sum(total for total, _, _ in stages.values())
    assert stages["hop"][1] == pytest.approx(100 * stages["hop"][0] / whole, abs=0.1)
    assert [count for _, _, count in stages.values()] == [1, 1, 77, 15]
    factor, printed = main_job.numbers(r"real-time factor (\S+) \(all stages (\d+) ms\)")
    assert printed == pytest.approx(whole, abs=0.8)
    assert factor == pytest.approx(whole / 6000, abs=0.001)


def test_first_sound_and_memory_are_shown(main_job: MainJob) -> None:
    (first,) = main_job.numbers(r"commit to first audio (\S+) ms")
    total = main_job.numbers(r"real-time factor \S+ \(all stages (\d+) ms\)")[0]
    assert 0 < first < total
    assert main_job.numbers(r"peak memory (\d+) MiB host")[0] > 50
    assert any("weights synthetic; model float32" in line for line in main_job.lines)


def test_a_scripted_answer_is_labelled(main_job: MainJob) -> None:
    label = "ended    stop after 77 steps; scripted speech:75: mode changes and length forced"
    assert label in map(str.strip, main_job.lines)


def test_the_answer_is_24_khz_mono_1920_samples_a_code(main_job: MainJob) -> None:
    samples, rate = soundfile.read(main_job.answer, always_2d=True)
    assert (rate, samples.shape) == (24_000, (75 * CODE_SAMPLES, 1))
    assert soundfile.info(main_job.answer).subtype == "PCM_16"
    assert np.abs(samples).max() <= 1
    loudness = [np.sqrt(np.mean(part**2)) for part in np.split(samples, 75)]
    assert min(loudness) > 1e-3


def test_the_same_seed_gives_the_same_bytes_in_another_process(
    main_job: MainJob, mosstalk: Run, tmp_path: Path
) -> None:
    again = mosstalk("chat", "--speech", QUESTION, "--seed", "0", *SYNTHETIC)
    assert again.returncode == 0
    assert (tmp_path / "answer.wav").read_bytes() == main_job.answer.read_bytes()


def test_another_seed_gives_another_answer(chat: Run, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        chat("--text", "hi", "--script", "speech:5", "--seed", seed, "--out", f"{seed}.wav")
    assert (tmp_path / "0.wav").read_bytes() != (tmp_path / "1.wav").read_bytes()


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    # Slow: one other format is enough here.
    [pytest.param(".flac", "PCM_16", marks=pytest.mark.slow), (".ogg", "VORBIS")],
)
def test_other_formats_hold_the_same_sound(
    chat: Run, tmp_path: Path, suffix: str, subtype: str
) -> None:
    words = ("--text", "hi", "--script", "speech:10")
    chat(*words, "--out", f"answer{suffix}")
    chat(*words, "--out", "answer.wav")
    assert soundfile.info(tmp_path / f"answer{suffix}").subtype == subtype
    other, rate = soundfile.read(tmp_path / f"answer{suffix}")
    plain, _ = soundfile.read(tmp_path / "answer.wav")
    assert (rate, other.shape) == (24_000, (10 * CODE_SAMPLES,))
    assert np.corrcoef(other, plain)[0, 1] > 0.9


# Turns.


def test_turns_are_answered_in_the_order_given(chat: Run, tmp_path: Path) -> None:
    run = chat(*MIXED_TURNS, "--script", "text:4,speech:9", "--system", "", "--stats")
    kinds = re.findall(r"^(?:  )?(read|heard|answer)[ -]", run.stderr, re.MULTILINE)
    assert kinds == ["read", "answer", "heard", "answer", "read", "answer"]
    assert run.stderr.index("'a'") < run.stderr.index("36 codes") < run.stderr.index("'b'")
    assert run.stdout.count("\n") == 3  # what was written before each was spoken
    for number in (1, 2, 3):
        assert soundfile.info(tmp_path / f"answer-{number}.wav").frames == 9 * CODE_SAMPLES


def test_a_later_turn_prefills_only_what_is_new(chat: Run) -> None:
    run = chat(*MIXED_TURNS, "--script", "text:4,speech:9", "--system", "", "--stats")
    rows = [int(count) for count in re.findall(r"rows prefilled (\d+)", run.stderr)]
    opening, closing = len("user\n") + 1, len("\n") + 1
    reply = len("assistant\n") + 2
    # The last answer's im_end was drawn but never read, and a newline follows it.
    unread = 2
    typed, spoken = opening + 1 + closing + reply, opening + 36 + 2 + closing + reply
    assert rows == [typed, unread + spoken, unread + typed]


def test_a_written_reply_has_text_and_no_sound(chat: Run, tmp_path: Path) -> None:
    run = chat("--speech", QUESTION, "--reply", "text", "--script", "text:6", "--stats")
    assert run.stdout.strip()
    assert run.stdout.count("\n") == 1
    assert "of sound" not in run.stderr
    assert "first audio" not in run.stderr
    assert "real-time factor" not in run.stderr
    assert list(tmp_path.iterdir()) == []


class Grid(NamedTuple):
    sosp: int
    eosp: int
    pad: int
    im_end: int


def grid(tiny: Checkpoint) -> Grid:
    config = json.loads((tiny.model / "config.json").read_text())
    tokens = json.loads((tiny.model / "tokenizer.json").read_text())["added_tokens"]
    im_end = next(token["id"] for token in tokens if token["content"] == "<|im_end|>")
    pad = config["modality_pad_token_id"]
    return Grid(config["sosp_token_id"], config["eosp_token_id"], pad, im_end)


def shown_rows(stdout: str) -> list[tuple[int, str, int, int]]:
    rows = re.findall(r"^  row +(\d+) (audio|text) +(\d+) +(\d+)$", stdout, re.MULTILINE)
    return [(int(step), mode, int(text), int(audio)) for step, mode, text, audio in rows]


@pytest.mark.parametrize(
    ("reply", "script", "modes"),
    [
        # Speech replies begin in audio mode: eosp leaves it, sosp comes back to it.
        ("speech", "speech:6", "aaaaaa a t"),
        ("speech", "text:4,speech:9", "a tttt t aaaaaaaaa a t"),
        ("speech", "speech:2,text:3", "aa a ttt t"),
        ("text", "text:3", "ttt t"),
        ("text", "speech:2", "t aa a t"),
    ],
)
def test_shown_rows_follow_the_modes(
    chat: Run, tiny: Checkpoint, reply: str, script: str, modes: str
) -> None:
    ids = grid(tiny)
    words = ("--text", "hi", "--reply", reply, "--script", script)
    run = chat(*words, "--show-rows", "--stats")
    rows = shown_rows(run.stdout)
    assert "".join(mode[0] for _, mode, _, _ in rows) == modes.replace(" ", "")
    assert [step for step, *_ in rows] == list(range(1, len(rows) + 1))
    assert f"steps {len(rows)}\n" in run.stderr
    for _, mode, text, audio in rows:
        assert (text == ids.pad) is (mode == "audio")
        assert audio <= ids.eosp
    for (_, mode, text, audio), (_, following, _, _) in itertools.pairwise(rows):
        opened = mode == "audio" or text == ids.sosp
        assert following == ("audio" if opened and audio != ids.eosp else "text")
    assert [text for _, _, text, _ in rows].index(ids.im_end) == len(rows) - 1


MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|empty|>")


@given(parts=st.lists(st.text(max_size=8) | st.sampled_from(MARKS), min_size=1))
def test_a_typed_turn_is_its_bytes_between_the_marks_of_a_turn(
    pipeline: Pipeline, parts: list[str]
) -> None:
    text = "!" + "".join(parts)
    chat = pipeline.chat(system="")
    chat.read(text)
    ids = [text_id for text_id, _ in chat.conversation.rows]
    opening, closing = len("user\n") + 1, len("\n") + 1
    typed = ids[opening:-closing]
    assert len(typed) == len(unicodedata.normalize("NFC", text).encode())
    assert max(typed) < min(pipeline.tokenizer.special.values())


# The answer while it is made.


HOP = (0.5 * np.sin(np.arange(9600) / 9)).astype(np.float32)


def test_the_part_is_playable_and_grows_with_every_write(tmp_path: Path) -> None:
    target = tmp_path / "answer.wav"
    target.write_bytes(b"older")
    writer = AudioWriter(target, 24_000)
    for hops in (1, 2, 3):
        writer.write(HOP)
        samples, rate = soundfile.read(tmp_path / "answer.wav.part", dtype="float32")
        assert (rate, len(samples)) == (24_000, hops * len(HOP))
        with wave.open(str(tmp_path / "answer.wav.part")) as strict:
            assert strict.getnframes() == hops * len(HOP)
        np.testing.assert_allclose(samples[-len(HOP) :], HOP, atol=2 / 32768)
        assert target.read_bytes() == b"older"
    writer.close()
    assert soundfile.info(target).frames == 3 * len(HOP)
    assert [path.name for path in tmp_path.iterdir()] == ["answer.wav"]


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
def test_an_abandoned_part_stays_playable_under_its_own_name(tmp_path: Path, suffix: str) -> None:
    writer = AudioWriter(tmp_path / f"answer{suffix}", 24_000)
    writer.write(HOP)
    assert writer.abandon() == tmp_path / f"answer{suffix}.part"
    assert [path.name for path in tmp_path.iterdir()] == [f"answer{suffix}.part"]
    assert soundfile.info(tmp_path / f"answer{suffix}.part").frames == len(HOP)


def test_a_discarded_part_is_gone_and_the_older_answer_is_not(tmp_path: Path) -> None:
    target = tmp_path / "answer.wav"
    target.write_bytes(b"older")
    writer = AudioWriter(target, 24_000)
    writer.write(HOP)
    writer.discard()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"answer.wav": b"older"}


@contextlib.contextmanager
def speaking(folder: Path, cache: Path, rows: int) -> Iterator["subprocess.Popen[str]"]:
    """A chat that has printed ``rows`` of its 400 rows, with an older answer in its way."""
    (folder / "answer.wav").write_bytes(b"older")
    asked = ("--script", "speech:400", "--show-rows", "--force")
    words = ("chat", "--text", "hi", *asked, *SYNTHETIC)
    with subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        # Lines must come as they are printed: reading them is how the test keeps in step.
        env=command_environment(cache) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith(f"  row {rows:5}"):
                break
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_keeps_what_was_spoken_in_the_part(cache_folder: Path, tmp_path: Path) -> None:
    with speaking(tmp_path, cache_folder, rows=40) as process:
        assert soundfile.info(tmp_path / "answer.wav.part").frames >= 30 * CODE_SAMPLES
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert stderr.startswith(FIRST_LINE)
    assert stderr.endswith("\ninterrupted: what was spoken so far is in answer.wav.part\n")
    samples, rate = soundfile.read(tmp_path / "answer.wav.part")
    assert rate == 24_000
    assert 30 * CODE_SAMPLES <= len(samples) < 400 * CODE_SAMPLES
    assert np.abs(samples).max() > 1e-3
    assert (tmp_path / "answer.wav").read_bytes() == b"older"


# Slow: a process of its own; an interrupted one leaves it as well, as shown above.
@pytest.mark.slow
def test_a_killed_chat_leaves_the_older_answer(cache_folder: Path, tmp_path: Path) -> None:
    with speaking(tmp_path, cache_folder, rows=40) as process:
        process.kill()
        process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "answer.wav").read_bytes() == b"older"
    assert soundfile.info(tmp_path / "answer.wav.part").frames >= 30 * CODE_SAMPLES
