"""``import mosstalk`` for those who program: names, help, types, and what objects say they are."""

import os
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import soundfile
from conftest import QUESTION, ROOT

import mosstalk
from mosstalk import Pipeline, Script


def test_dir_and_help_show_the_public_names_and_no_others() -> None:
    shown = {name for name in dir(mosstalk) if not name.startswith("__")}
    assert shown == set(mosstalk.__all__)
    text = pydoc.plain(pydoc.render_doc(mosstalk))
    for name in mosstalk.__all__:
        assert f"{name}" in text.partition("\nDATA")[0], name
    assert "import_module" not in text


def test_import_costs_nothing_until_a_name_is_used() -> None:
    probe = (
        "import sys, mosstalk; dir(mosstalk); before = 'torch' in sys.modules\n"
        "mosstalk.Pipeline; print(before, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'mosstalk' has no attribute 'Pipelines'"):
        _ = mosstalk.Pipelines


@pytest.mark.slow  # mypy reads all that the package imports
def test_type_checkers_read_the_package(tmp_path: Path) -> None:
    package = ROOT / "src" / "mosstalk"
    assert (package / "py.typed").is_file()
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "src/mosstalk" in built["targets"]["wheel"]["packages"], "py.typed goes with it"
    program = tmp_path / "program.py"
    program.write_text("import mosstalk\n\nreveal_type(mosstalk.Pipeline.load().chat().answer)\n")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "mosstalk.offline.pipeline.Answer" in run.stdout, run.stdout


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    written, chat = run.stdout.splitlines()
    assert written
    assert chat.startswith("<Chat: ")
    assert soundfile.info(tmp_path / "spoken.wav").duration > 0.5


def test_a_pipeline_needs_no_arguments() -> None:
    usual = Pipeline.load(device="cpu")
    assert usual.model.config.weights_kind == "pocket"
    assert usual.codec.folder == mosstalk.default_model()[1]
    assert repr(Pipeline.load()).startswith("<Pipeline: pocket weights, ")


def test_public_objects_say_what_they_are_in_one_line(pipeline: Pipeline, tmp_path: Path) -> None:
    recording = mosstalk.read_audio(QUESTION, 16_000)
    writer = mosstalk.AudioWriter(tmp_path / "sound.wav", 24_000)
    chat = pipeline.chat()
    chat.hear(recording.samples)
    answer = chat.answer(script=Script.parse("speech:10"))
    begun = repr(answer)
    seconds = sum(map(len, answer)) / 24_000
    assert repr(recording) == "<Recording: 2.87 s at 16000 Hz, was 16000 Hz, channels: 1>"
    assert repr(pipeline) == "<Pipeline: synthetic weights, float32 on cpu>"
    assert repr(chat) == f"<Chat: {len(chat.conversation.rows)} rows, voice 'default', {pipeline}>"
    assert begun == "<Answer: not begun, 0 rows, 0.00 s of sound>"
    assert repr(answer) == f"<Answer: stop, {answer.steps} rows, {seconds:.2f} s of sound>"
    assert repr(chat.voice).startswith("<Voice: ")
    assert repr(writer) == f"<AudioWriter: {writer.path}, 24000 Hz, grows as sound.wav.part>"
    writer.close()
    assert "closed" in repr(writer)
    others = (Script.parse("text:3"), mosstalk.SamplingOptions(), mosstalk.Limits())
    for each in (pipeline, chat, answer, chat.voice, recording, writer, *others):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 200
