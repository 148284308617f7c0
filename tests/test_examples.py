"""The examples run as their first lines say."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
from conftest import QUESTION, ROOT, Checkpoint, command_environment
from server_rig import serving

from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE

EXAMPLES = ROOT / "examples"
Done = Callable[..., tuple[bytes, bytes]]


@pytest.fixture
def example(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Done:
    """Run an example to its end, in this process, which has imported torch; what it prints."""

    def run(name: str, *words: str | Path) -> tuple[bytes, bytes]:
        for variable, value in command_environment(cache_folder).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfdbinary.readouterr()

    return run


def test_each_example_has_its_test() -> None:
    tested = re.findall(r'example\(\s*"(\w+\.py)"', Path(__file__).read_text())
    assert sorted(tested) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_example_says_what_it_takes(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: {path.name} [-h]" in said
    assert f"examples/{path.name} " in said, "a line to copy"


def test_ask_gets_an_answer_and_goes_on_talking(
    example: Done, tiny: Checkpoint, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.wav"
    folders = ("--model", tiny.model, "--codec", tiny.codec)
    printed = example("ask.py", QUESTION, answer, *folders)[0].decode()
    assert soundfile.info(answer).frames == 40 * OUTPUT_SAMPLES_PER_CODE
    assert "3.20 s of sound" in printed
    assert re.search(r"\d+ new rows read, answer: '", printed)


def test_stream_writes_sound_before_the_reply_is_whole(example: Done) -> None:
    sound, printed = example("stream.py", "Good morning.")
    lengths = [float(length) for length in re.findall(rb"([\d.]+) s of sound", printed)]
    assert lengths == sorted(set(lengths))
    assert len(lengths) > 1
    assert len(sound) // 2 / 24_000 == pytest.approx(lengths[-1], abs=0.01)


def test_conversations_are_all_answered(example: Done) -> None:
    printed = example("conversations.py", "3")[0].decode()
    assert len(re.findall(r" -> [\d.]+ s, the first after \d+ ms", printed)) == 3
    assert "3 conversations: " in printed


@pytest.mark.slow  # a server starts, and a microphone has its own pace
def test_an_agent_hears_the_user_and_plays_the_answer(
    example: Done, cache_folder: Path, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.wav"
    with serving("--temperature", "0", "--seed", "0", cache=cache_folder) as server:
        words = (QUESTION, answer, "--url", f"{server.url}/v1")
        printed = example("agent.py", *words)[0].decode()
    assert "the user speaks" in printed
    assert "the answer is completed" in printed
    assert soundfile.info(answer).duration > 0.5
