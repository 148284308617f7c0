"""Which model a command uses: the one that ships where it is there, and whichever is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from conftest import QUESTION, ROOT, SYNTHETIC, Checkpoint, Run, command_environment, refused

import mosstalk as library
from mosstalk.errors import ConfigError
from mosstalk.prepared.default_models import (
    NO_WEIGHTS,
    chosen_codec,
    chosen_model,
    synthetic_model,
)

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from mosstalk.cli import app

for line in sys.stdin:
    words, cache = json.loads(line)
    ran = CliRunner().invoke(app, words, env={"MOSSTALK_CACHE": cache}, catch_exceptions=False)
    print(json.dumps([ran.exit_code, ran.stdout, ran.stderr]), flush=True)
"""
"""Runs command after command, because a process each would import torch each time."""


@contextmanager
def installed(site: Path, usual_cache: Path) -> Iterator[Run]:
    """``mosstalk`` in a process whose package is the one in ``site``."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS],
        cwd=site.parent,
        env=command_environment(usual_cache) | {"PYTHONPATH": str(site)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(
            *words: str | Path, cache: Path = usual_cache
        ) -> "subprocess.CompletedProcess[str]":
            assert process.stdin
            assert process.stdout
            line = [str(word) for word in words]
            print(json.dumps((line, str(cache))), file=process.stdin, flush=True)
            return subprocess.CompletedProcess(line, *json.loads(process.stdout.readline()))

        yield run


def bare_site(folder: Path) -> Path:
    """A folder with the package as it is without weights of its own."""
    ignored = shutil.ignore_patterns("pocket")
    shutil.copytree(ROOT / "src" / "mosstalk", folder / "site" / "mosstalk", ignore=ignored)
    return folder / "site"


@pytest.fixture(scope="module")
def bare(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The commands of a package without a model."""
    with installed(bare_site(tmp_path_factory.mktemp("bare")), cache_folder) as run:
        yield run


@pytest.fixture(scope="module")
def pocket(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that ships with a package: its config says that it is trained."""
    folder = bare_site(tmp_path_factory.mktemp("shipped")) / "mosstalk" / "pocket"
    tiny.copy(folder)
    config = folder / "model" / "config.json"
    values = json.loads(config.read_text()) | {"mosstalk_weights": "pocket"}
    config.write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def shipped(pocket: Path, cache_folder: Path) -> Iterator[Run]:
    """The commands of a package with that model."""
    with installed(pocket.parent.parent, cache_folder) as run:
        yield run


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def document(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_model_that_ships_is_the_default_of_every_task_and_nothing_is_forced(
    shipped: Run,
) -> None:
    for words in (("speak", "Hi."), ("transcribe", QUESTION), ("chat", "--text", "hi")):
        ran = shipped(*words, "--max-rows", "6", "--json")
        found = document(ran)
        assert (found["weights"], found["script"]) == ("pocket", None)
        assert ran.stderr.lstrip().startswith("The weights are mosstalk-pocket's, a small model")


def test_the_synthetic_model_is_there_by_its_name(shipped: Run) -> None:
    found = document(shipped("speak", "Hi.", "--json", "--force", "--max-rows", "6", *SYNTHETIC))
    assert (found["weights"], found["script"]) == ("synthetic", "speech:75")


def test_a_voice_made_with_a_codec_that_ships_stays_out_of_the_package(
    pocket: Path, shipped: Run
) -> None:
    before = names(pocket)
    listed = document(shipped("voice", "list", "--json"))
    assert Path(listed["folder"]) == pocket / "codec" / "voices"
    created = shipped("voice", "create", "ada", QUESTION)
    assert created.returncode == 0, created.stderr
    assert "-> ada.safetensors" in created.stdout
    assert names(pocket) == before
    words = created.stdout.partition("try: ")[2].partition(" chat ")[2].split()
    assert shipped("chat", *words, "--max-rows", "6", "--force").returncode == 0


def test_with_a_model_that_ships_no_cache_is_needed(shipped: Run) -> None:
    nowhere = Path("/proc/no-cache")
    doctor = shipped("doctor", cache=nowhere)
    assert doctor.returncode == 0
    assert "without it: --model synthetic does not run" in doctor.stdout
    assert shipped("speak", "Hi.", "--max-rows", "6", "--force", cache=nowhere).returncode == 0


# Slow: a process with a package without weights, as one has who installed the sdist.
@pytest.mark.slow
def test_without_weights_every_command_says_where_they_are(bare: Run) -> None:
    asked = [
        ("speak", "Hi."),
        ("transcribe", QUESTION, "--model", "pocket"),
        ("chat", "--text", "hi"),
        ("voice", "list"),
        ("checkpoint", "inspect", "pocket"),
        ("bench", "step"),
        ("bench", "serve"),
    ]
    for words in asked:
        assert refused(bare(*words)) == f"error: {NO_WEIGHTS}", words
    named = ("speak", "Hi.", "--json", "--script", "speech:5", *SYNTHETIC)
    assert document(bare(*named))["weights"] == "synthetic"
    doctor = bare("doctor")
    assert doctor.returncode == 0
    assert "the wheel (mosstalk-VERSION-py3-none-any.whl)" in doctor.stdout
    assert "chat --model synthetic --text hello" in doctor.stdout.splitlines()[-1]


# Names and folders.


@pytest.fixture
def _own_cache(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSSTALK_CACHE", str(cache_folder))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_own_cache")
def test_folders_are_taken_as_given_and_names_stand_for_theirs() -> None:
    one, other = Path("one"), Path("other")
    assert chosen_model(one, other) == (one, other)
    assert chosen_codec(other) == other
    assert chosen_model(Path("synthetic"), None) == synthetic_model()
    assert chosen_codec(Path("synthetic")) == synthetic_model()[1]


def test_two_that_write_the_synthetic_model_at_once_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSSTALK_CACHE", str(tmp_path))
    together = Barrier(2)

    def first_use() -> Path:
        together.wait(60)
        return synthetic_model()[0]

    with ThreadPoolExecutor(2) as pool:
        folders = [pool.submit(first_use) for _ in range(2)]
    assert {folder.result() for folder in folders} == {synthetic_model()[0]}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("_own_cache")
def test_one_folder_alone_is_refused_and_a_folder_comes_before_a_name(tmp_path: Path) -> None:
    for pair in ((Path("one"), None), (None, Path("other")), (None, Path("synthetic"))):
        with pytest.raises(ConfigError, match="belong together"):
            chosen_model(*pair)
    (tmp_path / "synthetic").mkdir()
    with pytest.raises(ConfigError, match="belong together"):
        chosen_model(Path("synthetic"), None)
    assert chosen_codec(Path("synthetic")) == Path("synthetic")


@pytest.mark.parametrize("name", library.__all__)
def test_what_the_package_offers_is_the_same_however_often_it_is_asked(name: str) -> None:
    # A module of the same name would take its place on the second look.
    first, second = getattr(library, name), getattr(library, name)
    assert first is second
    assert callable(first)
