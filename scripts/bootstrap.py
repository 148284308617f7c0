"""Create .venv and install mosstalk into it: scripts/bootstrap.py [--extras dev,...] [--cuda].

Needs nothing but Python. So that an old Python can say that it is too old, this file keeps to
the grammar of Python 3.6, and annotations that such a Python cannot evaluate are quoted.
"""

import argparse
import ast
import hashlib
import http.client
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "mosstalk-setup.json"
OLDEST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3.0
UNFINISHED = {"unfinished": True}
UV_VARIABLES = {
    "index-url": "UV_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip that say where packages come from, and the variables that tell uv so."""
PYPI = "https://pypi.org/simple"
OF_NO_MATTER = {
    *("config-file", "disable-pip-version-check", "no-color", "no-input", "progress-bar"),
    *("quiet", "require-virtualenv", "retries", "root-user-action", "verbose"),
}


class SetupError(Exception):
    """Something for the user to put right; the text is one line that says how."""


class PipError(SetupError):
    """pip ended with an error, which it has already explained."""


class TorchSource(NamedTuple):
    options: List[str]
    notice: str


class Uv(NamedTuple):
    """The program uv, and the variables that tell it pip's settings."""

    program: str
    variables: Dict[str, str]


def main(arguments: "Sequence[str] | None" = None) -> int:
    try:
        check_python(sys.version_info[:3])
        set_up(*parse(arguments))
    except SetupError as error:
        say(str(error), sys.stderr)
        return 1 if isinstance(error, PipError) else 2
    except OSError as error:
        say(f"{error}; put that right, then run this again", sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted; run this again to finish", sys.stderr)
        return 130
    print(f"ready: {venv_program('mosstalk').relative_to(ROOT)} --help")
    return 0


def say(line: str, stream: Any = None) -> None:
    print(f"bootstrap: {line}", file=stream, flush=True)


def check_python(version: "Sequence[int]") -> None:
    if tuple(version[:2]) >= OLDEST_PYTHON:
        return
    found = ".".join(map(str, version))
    raise SetupError(
        f"found Python {found}, but mosstalk needs 3.11 or newer; install one (for example "
        "`apt install python3.11-venv`, `brew install python@3.13`, or from python.org) "
        "and run `python3.11 scripts/bootstrap.py`"
    )


def check_venv_modules() -> None:
    # Debian splits ensurepip off, and venv then fails only after a half-made directory.
    try:
        importlib.import_module("ensurepip")
        importlib.import_module("venv")
    except ImportError as error:
        raise SetupError(
            f"this Python cannot make virtual environments ({error}); on Debian or Ubuntu run "
            "`apt install python3-venv`, elsewhere install Python from python.org, "
            "then run this again"
        ) from None


def parse(arguments: "Sequence[str] | None") -> "Tuple[Set[str], bool]":
    """The chosen extras, and whether torch's CUDA build is wanted in any case."""
    parser = argparse.ArgumentParser(description="Create .venv and install mosstalk into it.")
    parser.add_argument("--extras", default="", help="comma-separated, for example dev,server")
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="install torch's CUDA build though no driver is here, as where an image is built",
    )
    given = parser.parse_args(arguments)
    chosen = {name for name in given.extras.split(",") if name}
    # Here, because the Pythons that only get as far as the message lack it.
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project.get("optional-dependencies", {}))
    if chosen - known:
        raise SetupError(
            f"unknown extras {', '.join(sorted(chosen - known))}; "
            f"choose from {', '.join(sorted(known))}"
        )
    return chosen, given.cuda


def set_up(extras: Set[str], cuda: bool) -> None:
    stamp = read_stamp()
    extras = extras | set(stamp.get("extras", ()))
    wanted = describe(extras)
    if stamp == wanted and all(venv_program(name).exists() for name in ("python", "mosstalk")):
        return
    prepare_venv(stamp, wanted)
    try:
        uv = find_uv()
        install_torch(uv, cuda)
        target = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
        size = "over 400" if "quality" in extras else "under 100"
        say(f"installing the other packages ({size} MB to download)")
        install(["--editable", target], uv)
        install_alone(extras, uv)
    except PipError:
        # pip fetches everything before it installs anything, so .venv is fit for another try.
        STAMP.unlink()
        raise
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")


def install_alone(extras: Set[str], uv: "Uv | None") -> None:
    """Install the packages that pyproject.toml wants without what they ask for."""
    import tomllib

    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {})
    table = tool.get("mosstalk", {}).get("installed-alone", {})
    wanted = [package for extra in sorted(extras) for package in table.get(extra, ())]
    if wanted:
        install(["--no-deps", *wanted], uv)


def describe(extras: Set[str]) -> Dict[str, Any]:
    inputs = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        inputs.update((ROOT / name).read_bytes())
    return {
        "python": "{}.{}".format(*sys.version_info),
        "root": str(ROOT),
        "inputs": inputs.hexdigest(),
        "extras": sorted(extras),
    }


def read_stamp() -> Dict[str, Any]:
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        return UNFINISHED
    return stamp if isinstance(stamp, dict) else UNFINISHED


def prepare_venv(stamp: Dict[str, Any], wanted: Dict[str, Any]) -> None:
    if VENV.exists():
        flaw = find_flaw(stamp, wanted)
        if flaw:
            remove_venv(flaw, ours=bool(stamp))
    new = not VENV.exists()
    if new:
        check_venv_modules()
        VENV.mkdir()
    STAMP.write_text(json.dumps(UNFINISHED), encoding="utf-8")
    if new:
        run([sys.executable, "-m", "venv", str(VENV)], "could not make .venv")


def find_flaw(stamp: Dict[str, Any], wanted: Dict[str, Any]) -> str:
    """Why .venv cannot be built upon; empty when it can."""
    if stamp == UNFINISHED:
        return "the last set-up did not finish"
    if stamp and stamp.get("root") != wanted["root"]:
        return "the project has moved"
    test = "import sys, pip; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run([str(venv_program("python")), "-c", test], capture_output=True)
    except OSError:
        return "its Python does not start"
    if done.returncode:
        return "its pip does not start"
    found = done.stdout.decode().strip()
    return "" if found == wanted["python"] else f"it holds Python {found}"


def remove_venv(flaw: str, ours: bool) -> None:
    if VENV.is_symlink() or not (ours or is_empty(VENV)):
        raise SetupError(
            f"{VENV} was not made by this script and does not serve ({flaw}); "
            "move it away, then run this again"
        )
    say(f"making .venv afresh, because {flaw}")
    shutil.rmtree(str(VENV))


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def venv_program(name: str) -> Path:
    if sys.platform == "win32":
        return VENV / "Scripts" / f"{name}.exe"
    return VENV / "bin" / name


def install_torch(uv: "Uv | None", cuda: bool) -> None:
    version = pinned_version("torch", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    if installed_version("torch").split("+")[0] == version:
        return
    source = torch_source(
        sys.platform,
        cuda or has_nvidia_driver(Path("/proc/driver/nvidia/version")),
        lambda: answers(f"{CPU_INDEX}/torch/", PROBE_SECONDS),
    )
    say(f"downloading torch {version}, {source.notice}")
    # Pinned and alone: left to resolve a range, pip may prefer a newer CUDA build.
    install([*source.options, f"torch=={version}"], uv)


def pinned_version(name: str, constraints: str) -> str:
    match = re.search(rf"^{re.escape(name)}==(\S+)", constraints, re.MULTILINE)
    if match is None:
        raise SetupError(f"constraints.txt does not pin {name}; restore that line")
    return match.group(1)


def installed_version(name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([str(venv_program("python")), "-c", code], capture_output=True)
    return done.stdout.decode().strip()


def torch_source(platform: str, driver: bool, cpu_index: Callable[[], bool]) -> TorchSource:
    """Where pip takes torch from; `cpu_index` is asked only when its answer matters."""
    if platform != "linux":
        return TorchSource([], "the build for this system (100 to 200 MB)")
    if driver:
        return TorchSource(
            [], "the CUDA build (several GB), as for a machine with an NVIDIA driver"
        )
    if cpu_index():
        # That index lacks the pinned versions of torch's own requirements; they come later.
        return TorchSource(
            ["--no-deps", "--index-url", CPU_INDEX],
            f"the CPU build (about 200 MB) from {CPU_INDEX}: no NVIDIA driver found",
        )
    return TorchSource(
        [],
        f"the build pip finds (200 MB for a CPU build, several GB for CUDA), since {CPU_INDEX} "
        "does not answer",
    )


def has_nvidia_driver(version_file: Path) -> bool:
    return version_file.exists() or shutil.which("nvidia-smi") is not None


def answers(url: str, seconds: float) -> bool:
    replies: List[int] = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                replies.append(reply.status)
        except (OSError, ValueError, http.client.HTTPException):
            pass

    # urlopen's own timeout does not cover looking up the host name.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(replies)


def find_uv() -> "Uv | None":
    """uv, which installs in a quarter of pip's time; None where pip has to do it.

    It is the one on PATH, or the one that constraints.txt pins.
    """
    settings = subprocess.run([*pip_command(), "config", "list"], capture_output=True)
    variables = uv_variables(settings.stdout.decode())
    if settings.returncode or variables is None:
        return None
    program = shutil.which("uv") or str(venv_program("uv"))
    if not Path(program).exists():
        pin = re.search(r"^uv==\S+", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
        if pin is None:
            return None
        get = [*pip_command(), "install", "--quiet", "--no-deps", pin.group()]
        if subprocess.run(get, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return None
    return Uv(program, variables)


def uv_variables(printed: str) -> "Dict[str, str] | None":
    """Variables for uv from what ``pip config list`` printed; uv reads none of pip's settings.

    None where there is one that it cannot be told of here, as of a proxy: then pip installs.

    Of one version uv takes what the first index has, if only a wheel for any platform without its
    libraries, where pip takes the best wheel of all indexes. So others come after PyPI, which has
    a version whole, and are not told of where something else stands in PyPI's place.
    """
    settings = {}  # type: Dict[str, str]
    for section in ("global.", "install.", ":env:."):  # each overrides those before it
        for line in printed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                settings[key[len(section) :]] = str(ast.literal_eval(value))
    others = settings.pop("extra-index-url", "").split()
    elsewhere = settings.get("index-url", PYPI).rstrip("/") != PYPI
    if set(settings) - set(UV_VARIABLES) - OF_NO_MATTER or (others and elsewhere):
        return None
    variables = {}  # type: Dict[str, str]
    if others:
        variables["UV_INDEX"] = " ".join([PYPI, *others])
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # the newest version, as pip
    for name, value in settings.items():
        if name in UV_VARIABLES:
            between = "," if name == "find-links" else " "
            variables[UV_VARIABLES[name]] = between.join(value.split())
    return variables


def install(arguments: List[str], uv: "Uv | None") -> None:
    """Install packages by uv; where there is none, or it fails, by pip, which says why not."""
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    if uv:
        begin = [uv.program, "pip", "install", "--python", str(venv_program("python"))]
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            # As pip does. Else each start would compile torch anew, which takes seconds.
            begin.append("--compile-bytecode")
        command = [*begin, *constraints, *arguments]
        hidden = None if sys.stdout.isatty() else subprocess.DEVNULL
        done = subprocess.run(
            command,
            env={**os.environ, **uv.variables},
            stdin=subprocess.DEVNULL,
            stdout=hidden,
            stderr=hidden,
        )
        if done.returncode == 0:
            return
        say("uv could not do that; pip tries")
    run(
        [*pip_command(), "install", *constraints, *arguments],
        "pip failed as shown above; check the network and pip's settings (`pip config list`), "
        "then run this again",
    )


def pip_command() -> List[str]:
    return [str(venv_program("python")), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run(command: List[str], complaint: str) -> None:
    # At a terminal pip's progress is worth seeing; in a log only its errors are.
    hidden = None if sys.stdout.isatty() else subprocess.PIPE
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=hidden, stderr=hidden and subprocess.STDOUT
    )
    if done.returncode == 0:
        return
    if done.stdout:
        sys.stderr.write(done.stdout.decode(errors="replace"))
    if done.returncode < 0:
        raise SetupError(f"{command[2]} was killed by signal {-done.returncode}; run this again")
    raise PipError(complaint)


if __name__ == "__main__":
    sys.exit(main())
