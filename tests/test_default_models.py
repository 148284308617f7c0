"""Which model a command uses: the one that ships where it is there, and whichever is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUESTION, ROOT, SYNTHETIC, Checkpoint, Run, command_environment, refused

import mosstalk as library
from mosstalk.default_models import chosen_codec, chosen_model, synthetic_model
from mosstalk.errors import ConfigError


def installed(site: Path, cache: Path) -> Run:
    """``mosstalk`` as a process whose package is the one in ``site``."""

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "mosstalk.cli", *map(str, words)],
            cwd=site.parent,
            env=command_environment(cache) | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package as it is without weights of its own."""
    target = tmp_path / "site" / "mosstalk"
    ignored = shutil.ignore_patterns("pocket", "__pycache__")
    shutil.copytree(ROOT / "src" / "mosstalk", target, ignore=ignored)
    return target.parent


@pytest.fixture
def pocket(site: Path, tiny: Checkpoint) -> Path:
    """The folder of a model that ships with that package: its config says that it is trained."""
    folder = site / "mosstalk" / "pocket"
    tiny.copy(folder)
    config = folder / "model" / "config.json"
    values = json.loads(config.read_text()) | {"mosstalk_weights": "pocket"}
    config.write_text(json.dumps(values))
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def document(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.usefixtures("pocket")
def test_a_model_that_ships_is_the_default_of_every_task_and_nothing_is_forced(
    site: Path, cache_folder: Path
) -> None:
    run = installed(site, cache_folder)
    for words in (("speak", "Hi."), ("transcribe", QUESTION), ("chat", "--text", "hi")):
        ran = run(*words, "--max-rows", "6", "--json")
        found = document(ran)
        assert (found["weights"], found["script"]) == ("pocket", None)
        assert ran.stderr.lstrip().startswith("The weights are mosstalk-pocket's, a small model")


@pytest.mark.usefixtures("pocket")
def test_the_synthetic_model_is_there_by_its_name(site: Path, cache_folder: Path) -> None:
    found = document(installed(site, cache_folder)("speak", "Hi.", "--json", *SYNTHETIC))
    assert (found["weights"], found["script"]) == ("synthetic", "speech:75")


def test_a_voice_made_with_a_codec_that_ships_stays_out_of_the_package(
    pocket: Path, site: Path, cache_folder: Path
) -> None:
    run, before = installed(site, cache_folder), names(pocket)
    listed = document(run("voice", "list", "--json"))
    assert Path(listed["folder"]) == pocket / "codec" / "voices"
    created = run("voice", "create", "ada", QUESTION)
    assert created.returncode == 0, created.stderr
    assert "-> ada.safetensors" in created.stdout
    assert names(pocket) == before
    words = created.stdout.partition("try: mosstalk ")[2].split()
    assert run(*words, "--max-rows", "6").returncode == 0


@pytest.mark.usefixtures("pocket")
def test_with_a_model_that_ships_no_cache_is_needed(site: Path) -> None:
    run = installed(site, Path("/proc/no-cache"))
    doctor = run("doctor")
    assert doctor.returncode == 0
    assert "without it: --model synthetic does not run" in doctor.stdout
    assert run("speak", "Hi.", "--max-rows", "6").returncode == 0


def test_without_one_the_synthetic_model_is_the_default(site: Path, cache_folder: Path) -> None:
    run = installed(site, cache_folder)
    found = document(run("speak", "Hi.", "--json", "--script", "speech:5"))
    assert found["weights"] == "synthetic"
    assert "holds no pocket model" in refused(run("transcribe", QUESTION, "--model", "pocket"))


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
