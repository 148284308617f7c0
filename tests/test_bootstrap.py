"""scripts/bootstrap.py and the Makefile's choice of Python, run as real processes, offline."""

import ast
import functools
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import bootstrap

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bootstrap.py"
MAKE = shutil.which("make")
TORCH = "7.7.7"

Result = subprocess.CompletedProcess[str]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what an outer make or a user's PYTHON would add to it."""
    dropped = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "EXTRAS", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | extra


def run(*command: str, cwd: Path = ROOT, **environment: str) -> Result:
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


# What an old or incomplete Python gets to see.


def test_parses_on_python_3_6() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))

    future = [
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "__future__"
    ]
    assert not future, "Python 3.6 has no `annotations` feature"


def test_annotations_evaluate_on_python_3_6() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    annotations = [f.returns for f in functions] + [
        a.annotation for f in functions for a in f.args.args
    ]
    for part in (part for a in annotations if a is not None for part in ast.walk(a)):
        assert not isinstance(part, ast.BinOp), ast.unparse(part)
        if isinstance(part, ast.Subscript):
            assert ast.unparse(part.value)[0].isupper(), ast.unparse(part)


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 10, 13)])
def test_old_python_is_refused_by_name(version: tuple[int, int, int]) -> None:
    with pytest.raises(bootstrap.SetupError) as refusal:
        bootstrap.check_python(version)
    message = only_line(str(refusal.value))
    assert ".".join(map(str, version)) in message
    assert "install" in message


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 13, 1), (4, 0, 0)])
def test_new_python_is_accepted(version: tuple[int, int, int]) -> None:
    bootstrap.check_python(version)


def test_old_python_ends_with_one_line_and_status_2() -> None:
    pretend = f"""
import runpy, sys
sys.version_info = (3, 9, 2, "final", 0)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    result = run(sys.executable, "-c", pretend)
    assert result.returncode == 2
    assert "found Python 3.9.2" in only_line(result.stderr)


# Where torch comes from.


@pytest.mark.parametrize(
    ("platform", "driver", "answering", "options", "words"),
    [
        ("linux", False, True, ["--no-deps", "--index-url", bootstrap.CPU_INDEX], "CPU build"),
        ("linux", False, False, [], "does not answer"),
        ("linux", True, None, [], "NVIDIA driver"),
        ("darwin", False, None, [], "this system"),
        ("win32", True, None, [], "this system"),
    ],
)
def test_torch_source(
    platform: str, driver: bool, answering: bool | None, options: list[str], words: str
) -> None:
    def ask() -> bool:
        assert answering is not None, "the index was asked for nothing"
        return answering

    source = bootstrap.torch_source(platform, driver, ask)
    assert source.options == options
    assert words in source.notice


def test_the_cuda_build_can_be_asked_for_where_no_driver_is() -> None:
    assert bootstrap.parse(["--extras", "server,vad", "--cuda"]) == ({"server", "vad"}, True)
    assert bootstrap.parse([]) == (set(), False)


def test_driver_is_found_by_its_file_or_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "version"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not bootstrap.has_nvidia_driver(version)
    add_program(tmp_path / "nvidia-smi", "exit 0")
    assert bootstrap.has_nvidia_driver(version)
    (tmp_path / "nvidia-smi").unlink()
    version.touch()
    assert bootstrap.has_nvidia_driver(version)


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_probe_accepts_an_answering_index(web_server: str) -> None:
    assert bootstrap.answers(f"{web_server}/", 5)


def test_probe_rejects_a_missing_page(web_server: str) -> None:
    assert not bootstrap.answers(f"{web_server}/nowhere", 5)


def test_probe_rejects_a_closed_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert not bootstrap.answers(f"http://127.0.0.1:{port}/", 5)


def test_probe_gives_up_on_a_silent_server() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        assert not bootstrap.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/", 0.3)
        assert time.monotonic() - began < 3


# A whole set-up, of a stand-in project that needs no network.


def add_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def write_wheel(
    folder: Path, name: str, version: str, entry_points: str = "", requires: str = ""
) -> Path:
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    asks = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": "def main() -> None: ...\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(
            f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        )
    return wheel


class Project:
    """A checkout whose build hands out a ready-made wheel, and a folder in place of an index."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.links = root / "links"
        self.programs = root / "programs"
        for folder in (self.root / "scripts", self.links, self.programs):
            folder.mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / "scripts")
        wheel = write_wheel(
            self.root, "mosstalk", "0.1", "[console_scripts]\nmosstalk=mosstalk:main\n"
        )
        (self.root / "backend.py").write_text(
            "import shutil\n"
            "def build_editable(folder, config_settings=None, metadata_directory=None):\n"
            f"    shutil.copy({str(wheel)!r}, folder)\n"
            f"    return {wheel.name!r}\n",
            encoding="utf-8",
        )
        (self.root / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
            "[project]\nname = 'mosstalk'\nversion = '0.1'\n"
            "[project.optional-dependencies]\ndev = []\nvoices = []\njudges = []\n"
            "[tool.mosstalk.installed-alone]\njudges = ['loner==1.5']\n",
            encoding="utf-8",
        )
        self.pin_torch(TORCH)
        write_wheel(self.links, "torch", TORCH)
        # With a driver in sight PyTorch's index is not asked, so nothing leaves this machine.
        add_program(self.programs / "nvidia-smi", "exit 0")
        # Whatever uv this machine has: pip has to come to the aid of one that fails.
        add_program(self.programs / "uv", "exit 1")

    def pin_torch(self, version: str) -> None:
        (self.root / "constraints.txt").write_text(f"torch=={version}\n", encoding="utf-8")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.root / "scripts" / "bootstrap.py"), *arguments]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(self.links),
            "PIP_NO_INDEX": "1",
        }

    def set_up(self, *arguments: str) -> Result:
        return run(*self.command(*arguments), cwd=self.root, **self.environment())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


# Slow: four whole set-ups take 7 s, and `make test` has just come from one.
@pytest.mark.slow
def test_set_up_fails_clearly_then_installs_then_rests(project: Project) -> None:
    project.pin_torch("9.9.9")
    failed = project.set_up()
    assert failed.returncode == 1
    assert "ERROR: " in failed.stderr
    assert "torch==9.9.9" in failed.stderr
    assert "run this again" in failed.stderr.splitlines()[-1]

    project.pin_torch(TORCH)
    installed = project.set_up("--extras", "dev")
    assert installed.returncode == 0, installed.stderr
    assert f"downloading torch {TORCH}" in installed.stdout
    assert installed.stdout.count("pip tries") == 2  # for torch and for the rest
    assert "afresh" not in installed.stdout
    assert installed.stdout.splitlines()[-1] == "ready: .venv/bin/mosstalk --help"
    assert run(str(project.root / ".venv" / "bin" / "mosstalk")).returncode == 0

    # Fewer extras than are installed is nothing to do.
    assert only_line(project.set_up().stdout).startswith("ready:")

    # More of them is, but torch stays, and so do the extras of the first time.
    more = project.set_up("--extras", "voices")
    assert "torch" not in more.stdout
    assert "installing" in more.stdout
    assert only_line(project.set_up("--extras", "dev,voices").stdout).startswith("ready:")


# Slow: a whole set-up.
@pytest.mark.slow
def test_an_image_gets_the_cuda_build_though_no_driver_is_here(project: Project) -> None:
    (project.programs / "nvidia-smi").unlink()
    installed = project.set_up("--cuda")
    assert installed.returncode == 0, installed.stderr
    assert f"downloading torch {TORCH}, the CUDA build" in installed.stdout


def test_uv_is_told_where_pip_looks_and_left_out_where_it_cannot_be() -> None:
    printed = (
        ":env:.find-links='/wheels /more'\n:env:.no-input='1'\ndownload.proxy='http://far'\n"
        "global.cert='/ca.pem'\n"
        "global.find-links='/old'\ninstall.index-url='https://own/simple'\n"
    )
    assert bootstrap.uv_variables(printed) == {
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX_URL": "https://own/simple",
        "SSL_CERT_FILE": "/ca.pem",
    }
    assert bootstrap.uv_variables("global.proxy='http://far'\n") is None


def test_uv_asks_other_indexes_after_pypi_and_none_where_pypi_is_not_asked() -> None:
    others = "global.extra-index-url='http://a/simple file:///b'\n"
    for pypi in ("", "global.index-url='https://pypi.org/simple/'\n"):
        variables = bootstrap.uv_variables(others + pypi)
        assert variables is not None
        assert variables["UV_INDEX"] == "https://pypi.org/simple http://a/simple file:///b"
        assert variables["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert bootstrap.uv_variables(f"{others}global.index-url='https://own/simple'\n") is None


# Slow: one more whole set-up; the way by pip, and to it from uv, is the test above.
@pytest.mark.slow
def test_uv_sets_up_what_pip_does(project: Project) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    (project.programs / "uv").unlink()
    (project.programs / "uv").symlink_to(uv)
    write_wheel(project.links, "loner", "1.5", requires="a-package-that-is-nowhere")
    done = project.set_up("--extras", "judges")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("torch", "mosstalk", "loner"):
        (installer,) = project.root.rglob(f"{name}-*.dist-info/INSTALLER")
        assert installer.read_text() == "uv"
    assert run(str(project.root / ".venv" / "bin" / "mosstalk")).returncode == 0


@pytest.mark.slow
def test_a_package_installed_alone_comes_without_what_it_asks_for(project: Project) -> None:
    refused = project.set_up("--extras", "judges")
    assert "loner==1.5" in refused.stderr
    assert not (project.root / ".venv" / "mosstalk-setup.json").exists()

    write_wheel(project.links, "loner", "1.5", requires="a-package-that-is-nowhere")
    done = project.set_up("--extras", "judges")
    assert done.returncode == 0, done.stderr
    packages = run(str(project.root / ".venv" / "bin" / "python"), "-m", "pip", "freeze")
    assert "loner==1.5" in packages.stdout


@pytest.mark.slow
def test_set_up_repairs_what_an_interrupted_run_left(project: Project) -> None:
    process = subprocess.Popen(
        project.command(),
        env=clean_environment(**project.environment()),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    stamp = project.root / ".venv" / "mosstalk-setup.json"
    while not stamp.exists():
        assert process.poll() is None, "set-up ended without a stamp"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    result = project.set_up()
    assert result.returncode == 0, result.stderr
    assert "afresh, because the last set-up did not finish" in result.stdout
    assert (project.root / ".venv" / "bin" / "mosstalk").exists()


def test_set_up_without_ensurepip_names_the_package(project: Project, tmp_path: Path) -> None:
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        "import sys\nsys.modules['ensurepip'] = None\n", encoding="utf-8"
    )
    environment = {**project.environment(), "PYTHONPATH": str(blocker)}
    result = run(*project.command(), cwd=project.root, **environment)
    assert result.returncode == 2
    assert "apt install python3-venv" in only_line(result.stderr)
    assert not (project.root / ".venv").exists()


def test_set_up_leaves_a_foreign_folder_alone(project: Project) -> None:
    notes = project.root / ".venv" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine", encoding="utf-8")
    result = project.set_up()
    assert result.returncode == 2
    assert "move it away" in only_line(result.stderr)
    assert notes.read_text(encoding="utf-8") == "mine"


def test_set_up_reports_what_the_file_system_refuses(project: Project) -> None:
    (project.root / ".venv").touch()
    result = project.set_up()
    assert result.returncode == 2
    assert "Not a directory" in only_line(result.stderr)


def test_unknown_extra_is_refused(project: Project) -> None:
    result = project.set_up("--extras", "dev,voice")
    assert result.returncode == 2
    assert "unknown extras voice; choose from dev, judges, voices" in only_line(result.stderr)


# The Makefile's choice of Python.


def make(path: Path, *arguments: str) -> Result:
    if MAKE is None:
        pytest.skip("make is not installed")
    return run(MAKE, *arguments, PATH=str(path))


@pytest.mark.parametrize("arguments", [["setup"], ["setup", "PYTHON="]])
def test_make_without_python_says_what_to_install(tmp_path: Path, arguments: list[str]) -> None:
    result = make(tmp_path, *arguments)
    message, failure = result.stderr.splitlines()
    assert result.returncode == 2
    assert "no Python found" in message
    assert "apt install python3" in message
    assert "Error 2" in failure


def test_make_prefers_the_first_python_that_is_new_enough(tmp_path: Path) -> None:
    add_program(tmp_path / "python3", "exit 1")
    add_program(tmp_path / "python3.12", f'exec "{sys.executable}" "$@"')
    assert 'python="python3.12"' in make(tmp_path, "-n", "setup").stdout


def test_make_falls_back_to_the_python_that_can_refuse(tmp_path: Path) -> None:
    add_program(tmp_path / "python3", 'test -z "$2"')
    assert 'python="python3"' in make(tmp_path, "-n", "setup").stdout


def test_make_lists_its_targets() -> None:
    listing = make(Path(os.environ["PATH"])).stdout
    for target in ("setup", "demo", "talk", "test", "test-all", "lint", "format", "clean"):
        assert f"make {target} " in listing
