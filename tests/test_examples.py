"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from conftest import QUESTION, ROOT, Checkpoint, command_environment
from server_rig import serving

from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE

EXAMPLES = ROOT / "examples"
Done = subprocess.CompletedProcess[bytes]


def example(name: str, *words: str | Path, cache: Path) -> Done:
    """Run an example as a program, to its end."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, *words],
        env=command_environment(cache) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    return run


def test_each_example_has_its_test() -> None:
    tested = re.findall(r'example\(\s*"(\w+\.py)"', Path(__file__).read_text())
    assert sorted(tested) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_ask_gets_an_answer_and_goes_on_talking(
    tiny: Checkpoint, cache_folder: Path, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.wav"
    folders = ("--model", tiny.model, "--codec", tiny.codec)
    printed = example("ask.py", QUESTION, answer, *folders, cache=cache_folder).stdout.decode()
    assert soundfile.info(answer).frames == 40 * OUTPUT_SAMPLES_PER_CODE
    assert "3.20 s of sound" in printed
    assert re.search(r"\d+ new rows read, answer: '", printed)


def test_stream_writes_sound_before_the_reply_is_whole(cache_folder: Path) -> None:
    run = example("stream.py", "Good morning.", cache=cache_folder)
    lengths = [float(length) for length in re.findall(rb"([\d.]+) s of sound", run.stderr)]
    assert lengths == sorted(set(lengths))
    assert len(lengths) > 1
    assert len(run.stdout) // 2 / 24_000 == pytest.approx(lengths[-1], abs=0.01)


def test_conversations_are_all_answered(cache_folder: Path) -> None:
    printed = example("conversations.py", "3", cache=cache_folder).stdout.decode()
    assert len(re.findall(r" -> [\d.]+ s, the first after \d+ ms", printed)) == 3
    assert "3 conversations: " in printed


@pytest.mark.slow  # a server starts, and a microphone has its own pace
def test_an_agent_hears_the_user_and_plays_the_answer(cache_folder: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer.wav"
    with serving("--temperature", "0", "--seed", "0", cache=cache_folder) as server:
        words = (QUESTION, answer, "--url", f"{server.url}/v1")
        printed = example("agent.py", *words, cache=cache_folder).stdout.decode()
    assert "the user speaks" in printed
    assert "the answer is completed" in printed
    assert soundfile.info(answer).duration > 0.5
