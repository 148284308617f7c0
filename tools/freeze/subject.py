"""A checkout of mosstalk that is run: its commands, in a folder of its own, with set inputs."""

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The checkout that this tool is part of; recordings to be heard are taken from it."""
HERE = Path(__file__).resolve().parent
_LONGEST_S = 120
_MOVED = Path("src/mosstalk/cli/command.py")
"""Checkouts that have it know ``engine inspect`` as ``checkpoint inspect``."""
_MEASURED = re.compile(
    r"(?<![\w.])-?\d[\d.,]*(e[+-]?\d+)? ?(%|(ms|s|MiB|GiB|MB)\b)"
    r"|(?<=real-time factor )[\d.]+|\d\.\d\de[+-]\d\d"
)


@dataclass(frozen=True)
class Run:
    """A command that has ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def _asked(runner: "subprocess.Popen[str]", request: str) -> int:
    """Have a command run to its end, or be ended after too long; its exit code."""
    assert runner.stdin
    assert runner.stdout
    late = threading.Timer(_LONGEST_S, runner.kill)
    late.start()
    try:
        print(request, file=runner.stdin, flush=True)
        return int(runner.stdout.readline())
    finally:
        late.cancel()


@dataclass(frozen=True)
class Subject:
    """The checkout at ``checkout``, run in the folder ``work``."""

    checkout: Path
    work: Path
    _runners: "queue.SimpleQueue[subprocess.Popen[str]]" = field(default_factory=queue.SimpleQueue)

    @property
    def fresh(self) -> Path:
        """What its commands made."""
        return self.work / "fresh"

    @property
    def made(self) -> Path:
        """What commands read: the same, or what another subject made."""
        return self.work / "made"

    def prepare(self, made: Path | None) -> None:
        """Make the folder and its inputs; ``made`` by another, if it shall read that.

        Raises:
            RuntimeError: the environment would run another mosstalk.
        """
        (self.work / "in").mkdir(parents=True)
        self.fresh.mkdir()
        self.made.symlink_to(made or self.fresh)
        for name in ("question.flac", "librivox.flac"):
            shutil.copy(ROOT / "assets" / name, self.work / "in" / name)
        probe = self.python("-c", "import mosstalk; print(mosstalk.__file__)")
        if not Path(probe.out.strip()).is_relative_to(self.checkout / "src"):
            raise RuntimeError(f"{self.checkout} is not what runs, but {probe.out}{probe.err}")

    @cached_property
    def _entry(self) -> tuple[str, str]:
        """Module and function of the command, as the checkout declares them."""
        project = tomllib.loads((self.checkout / "pyproject.toml").read_text())["project"]
        module, _, function = project["scripts"]["mosstalk"].partition(":")
        return module, function

    def command(self, *words: str) -> list[str]:
        """The words that run ``mosstalk``."""
        module, function = self._entry
        code = (
            f"import sys; from {module} import {function} as main; sys.argv[0] = 'mosstalk'; main()"
        )
        return [sys.executable, "-c", code, *words]

    @property
    def environment(self) -> dict[str, str]:
        """What every process starts with; nothing of the caller's but PATH."""
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.work), "LANG": "C.UTF-8",
            "PYTHONPATH": str(self.checkout / "src"), "MOSSTALK_CACHE": str(self.work / "cache"),
            "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

    def mosstalk(self, *words: str, stdin: str = "", folder: str = ".") -> Run:
        """Run a command to its end, in a folder below ``work``; by its new name where it moved."""
        if words[:2] == ("engine", "inspect") and (self.checkout / _MOVED).exists():
            words = ("checkpoint", *words[1:])
        with tempfile.TemporaryDirectory(dir=self.work) as name:
            files = [Path(name) / each for each in ("in", "out", "err")]
            files[0].write_text(stdin)
            runner = self._idle()
            asked = {
                "words": words,
                "folder": str(self.work / folder),
                "files": list(map(str, files)),
            }
            code = _asked(runner, json.dumps(asked))
            self._runners.put(runner)
            return Run(code, *(file.read_text() for file in files[1:]))

    @cached_property
    def untranscribed(self) -> tuple[str, ...]:
        """Options with which its server writes down nothing of what is said.

        A process that yields to all others does that, so when its words come depends on what else
        the machine does. Checkouts that refuse these options do it only where they are asked to.
        """
        words = ("--transcriber", "none")
        asked = self.command("serve", *words, "--vad", "none", "--print-config")
        run = self.python(*asked[1:])
        return () if run.code and " ".join(words) in run.err else words

    def python(self, *words: str) -> Run:
        """Run Python to its end, where ``import mosstalk`` is this checkout's."""
        run = subprocess.run(
            [sys.executable, *words], cwd=self.work, env=self.environment, capture_output=True,
            text=True, timeout=_LONGEST_S, check=False,
        )  # fmt: skip
        return Run(run.returncode, run.stdout, run.stderr)

    def close(self) -> None:
        """End what runs commands."""
        while not self._runners.empty():
            with self._runners.get() as runner:
                runner.communicate()

    def _idle(self) -> "subprocess.Popen[str]":
        """Something that runs commands, and none at the moment."""
        try:
            return self._runners.get_nowait()
        except queue.Empty:
            return subprocess.Popen(
                [sys.executable, str(HERE / "forked.py"), *self._entry], cwd=self.work,
                env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip

    def plain(self, text: str) -> list[str]:
        """Lines of what was printed, without places on this machine and what was measured."""
        lines = (_MEASURED.sub("#", line.rstrip()) for line in self._placeless(text).splitlines())
        return [re.sub(r"(?<=\S) {2,}", "  ", line) for line in lines]

    def document(self, text: str) -> Any:
        """A json document that was printed, without places on this machine."""
        return json.loads(self._placeless(text))

    def _placeless(self, text: str) -> str:
        for folder, name in ((self.work, "WORK"), (self.checkout, "CHECKOUT")):
            text = text.replace(str(folder), name)
        return text
