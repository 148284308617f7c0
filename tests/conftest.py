"""Shared pieces of the tests: a tiny synthetic checkpoint, the command line, skips."""

import asyncio
import gc
import lzma
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from typer.testing import CliRunner

from mosstalk.environment import share_the_processor

share_the_processor()  # before torch is imported: other processes may be using the cores
os.environ.setdefault("TRITON_INTERPRET", "0")  # kernels are looked at where there is no GPU too

import torch  # noqa: E402

from mosstalk import Pipeline  # noqa: E402
from mosstalk.cli import app  # noqa: E402
from mosstalk.files import new_folder  # noqa: E402
from mosstalk.synthesis.sizes import TINY  # noqa: E402
from mosstalk.synthesis.weights import Synthesis, synthesize  # noqa: E402

if TYPE_CHECKING:
    from resume_rig import Store

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
QUESTION = ROOT / "assets" / "question.flac"
SYNTHETIC = ("--model", "synthetic")
"""Asks a command for the tiny random model, whatever the default one is."""

# How long an example takes depends on what else the machine does; tests that hang are ended anyway.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("quick", parent=settings.get_profile("patient"), max_examples=25)
settings.load_profile("quick")  # `make test-faults` asks for the patient one


def examples(count: int) -> settings:
    """So many in the patient profile, and a quarter of them in the quick one."""
    return settings(max_examples=max(3, count * settings().max_examples // 100))


def plain_copy(case: Path, target: Path) -> Path:
    """A copy of a golden case whose tensors are not packed, so that a test can change them."""
    shutil.copytree(case, target)
    for packed in target.glob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        packed.unlink()
    return target


def pytest_configure() -> None:
    """Let Ctrl-C end what tests start, in the background of a shell too, where it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; begin with files that may take long.

    A file goes to one process. Were such a one the last, the other processes would wait for it.
    """
    longest_s: dict[Path, float] = defaultdict(float)
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            longest_s[item.path] = max(longest_s[item.path], limit.args[0])
    items.sort(key=lambda item: -longest_s[item.path])
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what a test on a GPU left, which other processes' tests need."""
    yield
    if "gpu" in request.keywords and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Checkpoint:
    """Folders of a checkpoint that tests may read but not change."""

    model: Path
    codec: Path

    def copy(self, folder: Path) -> "Checkpoint":
        """A copy that a test may damage."""
        for part in (self.model, self.codec):
            shutil.copytree(part, folder / part.name)
        return Checkpoint(folder / self.model.name, folder / self.codec.name)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that command-line runs use, shared so that the synthetic model is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Store"]:
    """A Redis of the module's own, for servers that keep conversations in one place."""
    from resume_rig import Store

    with Store.running(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny synthetic checkpoint, seed 0."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    with new_folder(folder) as part:
        synthesize(part, Synthesis(TINY))
    return Checkpoint(folder / "model", folder / "codec")


@pytest.fixture(scope="session")
def pipeline(tiny: Checkpoint) -> Pipeline:
    """The tiny checkpoint loaded in float32 on the CPU; nothing in it is changed by use."""
    return Pipeline.load(tiny.model, tiny.codec, device="cpu")


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def process(cache_folder: Path, tmp_path: Path) -> Run:
    """Run the ``mosstalk`` command as a real process in ``tmp_path``.

    Starting one takes seconds: for what only a process shows. ``mosstalk`` says the rest.
    """

    def run(*words: str | Path, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "mosstalk.cli", *map(str, words)],
            cwd=tmp_path,
            env=command_environment(cache_folder),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def mosstalk(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the ``mosstalk`` command in this process, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    for name, value in command_environment(cache_folder).items():
        monkeypatch.setenv(name, value)

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        line = [str(word) for word in words]
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        return subprocess.CompletedProcess(line, result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def here(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, to save starting one, in ``tmp_path``.

    Where no model is named, the tiny checkpoint is.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
        given = () if "--model" in words else ("--model", tiny.model, "--codec", tiny.codec)
        line = [str(word) for word in (*words, *given)]
        result = CliRunner().invoke(app, line, input=stdin, catch_exceptions=False)
        return subprocess.CompletedProcess(line, result.exit_code, result.stdout, result.stderr)

    return run


def command_environment(cache: Path) -> dict[str, str]:
    """Environment of command-line runs: their own cache, plain output of a fixed width."""
    return os.environ | {
        "MOSSTALK_CACHE": str(cache),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def refused(run: "subprocess.CompletedProcess[str]") -> str:
    """Check that a command refused its input as it should, and return its one line."""
    assert run.returncode == 2, (run.returncode, run.stdout, run.stderr)
    assert "Traceback" not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: "), run.stderr
    return lines[0]


def require_program(name: str) -> str:
    """The path of a program from scripts/system-packages.txt.

    Where it is missing, the test is skipped by name on a laptop and fails where CI=true.
    """
    found = shutil.which(name)
    if found is None:
        lacking(f"needs the program {name}; install what scripts/system-packages.txt names")
    return found


def require_package(module: str, extra: str) -> None:
    """Skip or fail, as ``require_program`` does, where an extra of pyproject.toml is missing."""
    if find_spec(module) is None:
        lacking(f"needs the package {module}; run: make setup EXTRAS={extra}")


def lacking(reason: str) -> NoReturn:
    """Skip the test on a laptop, fail it where CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def run(main: Coroutine[Any, Any, None], most_s: float = 200) -> None:
    """Run a test's coroutine; what hangs fails."""

    async def soon() -> None:
        await asyncio.wait_for(main, most_s)

    asyncio.run(soon())
