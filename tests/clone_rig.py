"""What tests of the documents share: a clone after its set-up, a reader of pages, and a shell."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from conftest import ROOT, command_environment

_FENCE, _HEADING, _INDENTED = "```", re.compile(r"#+ (.+)"), re.compile(r"    \S")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_CHANGES = ("export ", "source ")
"""Commands that change the shell itself."""


def sections(text: str) -> dict[str, list[str]]:
    """The commands that a page shows below each of its headings, by the heading's anchor.

    They stand in blocks that are indented, or fenced as ``sh``.
    """
    found: dict[str, list[str]] = {}
    below, fence = found.setdefault("", []), ""
    for line in text.splitlines():
        if line.startswith(_FENCE):
            fence = "" if fence else line
        elif not fence and (heading := _HEADING.fullmatch(line)):
            anchor = re.sub(r"[^\w -]", "", heading.group(1)).lower().replace(" ", "-")
            below = found.setdefault(anchor, [])
        elif fence == f"{_FENCE}sh" or (not fence and _INDENTED.match(line)):
            below.append(line.strip())
    return found


def commands(text: str) -> list[str]:
    """All commands that a page shows, in their order."""
    return [command for below in sections(text).values() for command in below]


class Reader:
    """Somebody who knows nothing but the documents, from the front page on."""

    def __init__(self) -> None:
        self._linked: set[str] = set()
        self._read("docs/index.md")

    def follow(self, place: str) -> list[str]:
        """The commands below a heading, PAGE#ANCHOR, of a page to which one read before links."""
        page, _, anchor = place.partition("#")
        assert page in self._linked, f"no page that was read links to {page}"
        return self._read(page)[anchor]

    def _read(self, page: str) -> dict[str, list[str]]:
        text, folder = (ROOT / page).read_text(), Path(page).parent
        self._linked |= {os.path.normpath(folder / link) for link in _LINK.findall(text)}
        return sections(text)


def make_clone(
    clone: Path, programs: Mapping[str, str] | None = None, without: tuple[str, ...] = ()
) -> None:
    """What a clone holds, after its set-up: the tracked files, and programs in ``.venv/bin``.

    Those of the set-up are the ones that run the test; ``programs`` are further ones, by the
    line of a shell that each is. Files whose path begins with one of ``without`` are left out.
    """
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if not name.startswith(without or "\0") and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (clone / ".venv" / "bin").mkdir(parents=True)
    modules = {"mosstalk": "mosstalk.cli", "pip": "pip", "pytest": "pytest"}
    lines = {name: f'exec {sys.executable} -m {module} "$@"' for name, module in modules.items()}
    lines["python"] = f'exec {sys.executable} "$@"'
    for name, line in (lines | dict(programs or {})).items():
        program = clone / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    activate = clone / ".venv" / "bin" / "activate"
    activate.write_text(f'export PATH="{clone}/.venv/bin:$PATH"\n')


@dataclass(frozen=True)
class Shell:
    """A shell in a clone, in which commands are typed as documents show them."""

    folder: Path
    env: dict[str, str]

    @classmethod
    def of(cls, clone: Path, cache: Path) -> "Shell":
        """That of somebody who has set the clone up; its code runs, and not the test's."""
        env = command_environment(cache) | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{clone / 'src'}:{clone}",
        }
        env.pop("MOSSTALK_API_KEY", None)
        return cls(clone, env)

    def another(self) -> "Shell":
        """A further one, as this one is now."""
        return replace(self, env=dict(self.env))

    def run(self, command: str) -> str:
        """Run a command to its end, which has to be a good one, and return what it printed."""
        changes = command.startswith(_CHANGES)
        code, out, errors = self.end_of(f"{command}\nenv -0" if changes else command)
        assert code == 0, f"{command}\n{out}\n{errors}"
        if not changes:
            return out
        self.env.update(line.partition("=")[::2] for line in out.split("\0") if line)
        return ""

    def end_of(self, command: str) -> tuple[int, str, str]:
        """Run a command to its end: exit code, and what it printed to both."""
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    @contextmanager
    def running(self, command: str) -> "Iterator[subprocess.Popen[str]]":
        """A command that lasts until Ctrl-C, which the block's end gives."""
        with subprocess.Popen(
            ["bash", "-ec", f"exec {command}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
                os.killpg(process.pid, signal.SIGINT)
                # make ends as its caller told it to, once what it runs has ended.
                assert process.wait(60) in (0, -signal.SIGINT, 130)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def await_ready(server: "subprocess.Popen[str]") -> list[str]:
    """Wait until a server lets clients in; the lines that it printed until then."""
    assert server.stdout
    lines: list[str] = []
    for line in server.stdout:
        lines.append(line.rstrip())
        if line.startswith("ready: "):
            return lines
    raise AssertionError(("it has ended", lines))
