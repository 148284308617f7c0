"""The one place that reads and sets environment variables; and keys, by variable or file."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from mosstalk.errors import OptionError

_BYTE_ORDER_MARK = "\ufeff"


def cache_folder() -> Path:
    """Where generated files that can be made again are kept (``MOSSTALK_CACHE``).

    Raises:
        OptionError: nothing says where, and this user has no home, as in some containers.
    """
    chosen = os.environ.get("MOSSTALK_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "mosstalk"
    try:
        return Path.home() / ".cache" / "mosstalk"
    except RuntimeError:
        raise OptionError(
            "this user has no home folder to keep generated files in: set MOSSTALK_CACHE to one"
        ) from None


def share_the_processor() -> None:
    """Let torch's idle threads spin briefly, then sleep; call before torch is imported.

    GNU OpenMP spins for long by default: two threads on a core that another process also
    uses make a hop fourteen times slower. Sleeping at once makes a hop twice as slow on an
    idle machine. A policy that the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "500")


def environment_of_a_child() -> dict[str, str]:
    """What a process with models starts with: two arenas of memory for all of its threads.

    GNU libc gives each thread an arena of its own, up to eight for each core, and none of them
    gives back what others could use: a server with talking sessions grew by 0.9 GiB an hour.
    Read at the start of a process alone. What the user has set stays.
    """
    return {"MALLOC_ARENA_MAX": "2"} | os.environ


def keep_kernels_in(folder: Path) -> None:
    """Have Triton keep compiled kernels there, in this process and its children."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def triton_was_asked_for() -> bool:
    """Whether kernels are to be interpreted (1) or compiled (0) where torch knows no GPU."""
    return "TRITON_INTERPRET" in os.environ


def threads_were_chosen() -> bool:
    """Whether the user said how many threads torch shall use."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def api_keys() -> list[str] | None:
    """Keys that clients of a server must show, separated by commas (``MOSSTALK_API_KEY``).

    None where the variable is not set, [] where it is set and holds no key.
    """
    chosen = os.environ.get("MOSSTALK_API_KEY")
    if chosen is None:
        return None
    return [key.strip() for key in chosen.split(",") if key.strip()]


def twilio_auth_token() -> str | None:
    """What Twilio signs calls with (``MOSSTALK_TWILIO_AUTH_TOKEN``); None if it is not set."""
    return os.environ.get("MOSSTALK_TWILIO_AUTH_TOKEN")


def store_url() -> str | None:
    """Where a server keeps conversations (``MOSSTALK_STORE``); None if it is not set."""
    return os.environ.get("MOSSTALK_STORE") or None


def stated_commit() -> str | None:
    """The commit that benchmarks name where there is no git (``MOSSTALK_COMMIT``)."""
    return os.environ.get("MOSSTALK_COMMIT") or None


def faults_folder() -> Path | None:
    """For tests: where files ask a server's worker to go wrong (``MOSSTALK_FAULTS``)."""
    chosen = os.environ.get("MOSSTALK_FAULTS")
    return Path(chosen) if chosen else None


def install_command(extra: str) -> str:
    """What installs an extra, or with "" the package, where it is: make in a clone, else pip."""
    if (Path(__file__).parents[2] / "scripts" / "bootstrap.py").is_file():
        return f"make setup EXTRAS={extra}" if extra else "make setup"
    return f"pip install 'mosstalk[{extra}]'" if extra else "pip install mosstalk"


def this_command() -> str:
    """What runs the ``mosstalk`` command of this installation, to be typed from here."""
    if shutil.which("mosstalk"):
        return "mosstalk"
    script = Path(sys.executable).with_name("mosstalk")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m mosstalk.cli"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def read_keys(path: Path) -> list[str]:
    """Keys of a file, one a line; empty lines and comments, which begin with #, are none.

    Spaces around a key, and the byte order mark that some editors write, are no part of it.

    Raises:
        OptionError: the file cannot be read or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").replace(_BYTE_ORDER_MARK, "").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as a file of keys in UTF-8 ({error})") from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise OptionError(f"{path}: holds no key; write one a line")
    return keys


def set_unless_set(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children; what the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def unset_among(variables: Iterable[str]) -> list[str]:
    """Those that this process was started without."""
    return [name for name in variables if name not in os.environ]
