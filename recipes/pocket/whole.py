"""The whole training by one command: all stages on the cards there are, ended by the clock.

Each stage is a process of its own. It begins when the stages before it have ended and the files
that it reads are there. One that ended well leaves a mark, so that another call goes on from there.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mosstalk.environment import environment_of_a_child

MARKS = "whole"
"""Folder in WORK of each stage's log and mark."""
VOCABULARY = "text"
"""Folder in WORK of the text tokenizer."""
_ROOT = Path(__file__).parents[2]
_TRAIN_UNTIL = 0.97
"""Share of the time at which all training ends."""
_READ_UNTIL, _FLOW_UNTIL = 0.22, 0.52
"""Shares at which reading and the flow end on a single card."""
_FIRST_READ_UNTIL, _FIRST_FLOW_UNTIL, _OTHERS_READ_UNTIL = 0.15, 0.8, 0.54
"""The same where there are others beside it: flow and vocoder need less data than the language
model, and more steps, the flow most: of what is heard wrong, nearly all is lost between codes and
mel (docs/quality.md)."""
_MODEL_READ_UNTIL = 0.4
"""Share at which reading ends on every card, where the language model alone is trained."""
_HELD_UNTIL, _OTHER_TEXTS = 0.36, "12000"
"""Share of the time at which the tokenizer has heard other programs' voices, and their texts."""
_READERS = 3
"""Processes that read at once on one card."""
_HEARINGS = "6"
"""Of each clip: in all but one somebody else's throat, microphone and room."""
_LEARNING = ("--passes", "4", "--steps", "24000")
"""Of the language model; no training has made so many steps yet."""
_LOOK_EVERY_S, _TELL_EVERY_S = 0.5, 30.0
_LEAST_MINUTES = 0.1
_TAIL_LINES = 12


class WholeError(RuntimeError):
    """A stage failed, or waits for a file that nothing makes."""


@dataclass(frozen=True)
class Job:
    """One stage: ``python -m`` ``argv`` on ``card``, after other jobs, once ``files`` are there.

    ``until`` is the share of the whole time at which it ends; None if it ends by itself. ``part``
    is the one that a reader reads; None for other jobs.
    """

    name: str
    argv: tuple[str, ...]
    card: int = 0
    after: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    until: float | None = None
    part: int | None = None


@dataclass(frozen=True)
class OtherVoices:
    """What the tokenizer is to hear besides Kokoro: programs in ``root``, as bring-voices.sh packs
    them. ``whisper``, the listener's file of Whisper's weights, tells it of them.
    """

    root: Path
    whisper: Path


@dataclass(frozen=True)
class Whole:
    """A training in ``work`` on ``cards`` cards, to begin from a ``kept`` tokenizer.

    ``dialogues`` are files of recipes.answers; ``resume`` is a folder of earlier weights. With
    ``others`` the tokenizer is trained too: held, as its stage says, while it hears them. With
    ``model_alone`` only the language model is; it hears ``others`` if there are any, and ships
    with the codec that ``kept`` lies in. With ``speaking_alone`` as well, only its audio block is.
    """

    work: Path
    kept: Path
    dialogues: Sequence[Path]
    cards: int = 1
    resume: Path | None = None
    smoke: bool = False
    others: OtherVoices | None = None
    model_alone: bool = False
    speaking_alone: bool = False

    def jobs(self) -> list[Job]:
        """Readers, encoders, then the language model beside flow and vocoder, then the package.

        Flow and vocoder learn from what the first card reads, and do not wait for the others.
        """
        parts, one_card = range(_READERS * self.cards), self.cards == 1
        made = [self._reader(part, len(parts)) for part in parts]
        first, encoders, hold = parts[:: self.cards], list[Job](), list[Job]()
        given = self.work / "tokenizer.safetensors"
        if self.others:
            hold.append(self._voices(self.others, first))
        if self.others and not self.model_alone:
            hold.append(self._tokenizer(self.others, made, first))
            given = self._given
        give = ("recipes.listener", "give", str(self.kept), str(given))
        heard = ("give", *(job.name for job in hold))
        for card in range(self.cards):
            argv = self._stage("encode", parts[card :: self.cards], "--hearings", _HEARINGS)
            after = (*heard, *(reader.name for reader in made if reader.card == card))
            encoders.append(Job(f"encode-{card}", argv, card, after))
        made += [Job("give", give, files=(self.kept,)), *hold, *encoders]
        encoded = tuple(job.name for job in encoders)
        talks = [text for path in self.dialogues for text in ("--dialogues", str(path))]
        alone = ["--speaking-alone"] if self.speaking_alone else []
        learn = self._stage("language-model", parts, *_LEARNING, *alone, *talks)
        files = tuple(self.dialogues)
        model = Job("language-model", learn, self.cards - 1, encoded, files, _TRAIN_UNTIL)
        package = self._stage("package", None, "--out", str(self.work / "package"))
        if self.model_alone:
            package += ("--kept-codec", str(self.kept.parent))
            return [*made, model, Job("package", package, 0, ("language-model",))]
        return [
            *made,
            model,
            Job("flow", self._stage("flow", first), 0, encoded[:1], (),
                _FLOW_UNTIL if one_card else _FIRST_FLOW_UNTIL),
            Job("predict", self._stage("predict", first), 0, ("flow",)),
            Job("vocoder", self._stage("vocoder", first, "--mels"), 0, ("predict",), (),
                _TRAIN_UNTIL),
            Job("package", package, 0, ("vocoder", "language-model")),
        ]  # fmt: skip

    @property
    def _given(self) -> Path:
        return self.work / "given.safetensors"

    def _voices(self, others: OtherVoices, first: range) -> Job:
        """Other programs read into the first card's first part."""
        on = ("--work", str(self.work), "--speech-root", str(others.root), "--part", str(first[0]))
        read = ("recipes.pocket", "data", *on, "--texts", _OTHER_TEXTS)
        return Job("voices", read, files=(others.root,))

    def _tokenizer(self, others: OtherVoices, readers: Sequence[Job], first: range) -> Job:
        """The tokenizer, held, hears all that was read on the first card."""
        argv = self._stage("tokenizer", first, "--hold", "--whisper", str(others.whisper))
        heard = (*(reader.name for reader in readers if reader.card == 0), "voices", "give")
        return Job("tokenizer", argv, 0, heard, (others.whisper,), _HELD_UNTIL)

    def _reader(self, part: int, parts: int) -> Job:
        on = ("--work", str(self.work), "--part", str(part), "--parts", str(parts))
        argv, lines = ("recipes.listener", "shards", *on), (self.work / "lines.xz",)
        until = _READ_UNTIL if self.cards == 1 else _OTHERS_READ_UNTIL
        if self.cards > 1 and part % self.cards == 0:
            until = _FIRST_READ_UNTIL
        if self.model_alone:
            until = _MODEL_READ_UNTIL
        return Job(f"read-{part}", argv, part % self.cards, (), lines, until, part)

    def _stage(self, stage: str, parts: range | None, *options: str) -> tuple[str, ...]:
        argv = ["recipes.pocket", stage, "--work", str(self.work), *options]
        argv += [] if parts is None else ["--parts", ",".join(map(str, parts))]
        return (*argv, "--smoke") if self.smoke else tuple(argv)

    def earlier(self, stage: str) -> Path | None:
        """Weights to go on from: what a call before left in ``work``, else those of ``resume``.

        The tokenizer goes on from what ``kept`` has: it is held by that.
        """
        if stage == "tokenizer":
            return self._given
        name = f"{stage.replace('-', '_')}.safetensors"
        folders = [self.work, *([self.resume] if self.resume else [])]
        return next((folder / name for folder in folders if (folder / name).exists()), None)


@dataclass
class Runner:
    """Runs the jobs of ``whole`` until all have ended, within ``minutes``."""

    whole: Whole
    minutes: float
    _began: float = field(default_factory=time.monotonic)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _again: set[str] = field(default_factory=set)
    """Training stages that failed, and run a second time without CUDA graphs."""

    def run(self) -> None:
        """Run every job that has no mark; raise WholeError where one fails or can never begin.

        A training stage fails once it has failed twice. Whatever ends this, as Ctrl-C does, ends
        the stages that run.
        """
        try:
            self._run()
        finally:
            for process in self._running.values():
                process.terminate()

    def _run(self) -> None:
        (self.whole.work / MARKS).mkdir(parents=True, exist_ok=True)
        self._bring_vocabulary()
        jobs, told, failed = self.whole.jobs(), 0.0, list[str]()
        while True:
            failed += self._ended(jobs)
            waiting = [job for job in jobs if not self._mark(job.name).exists()]
            for job in waiting:
                if job.name not in self._running and job.name not in failed and self._ready(job):
                    self._start(job)
            if not self._running:
                self._tell_why(jobs, failed)
                return
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                self._tell()
            time.sleep(_LOOK_EVERY_S)

    def _bring_vocabulary(self) -> None:
        """Weights that are gone on from keep the ids of their words."""
        resume, own = self.whole.resume, self.whole.work / VOCABULARY
        if resume and (resume / VOCABULARY).exists() and not own.exists():
            shutil.copytree(resume / VOCABULARY, own)

    def _mark(self, name: str) -> Path:
        return self.whole.work / MARKS / f"{name}.done"

    def _log(self, name: str) -> Path:
        return self.whole.work / MARKS / f"{name}.log"

    def _ready(self, job: Job) -> bool:
        return all(path.exists() for path in (*map(self._mark, job.after), *job.files))

    def _start(self, job: Job) -> None:
        argv = [sys.executable, "-m", *job.argv, *self._limits(job)]
        environment = environment_of_a_child() | {"CUDA_VISIBLE_DEVICES": str(job.card)}
        with self._log(job.name).open("ab") as log:
            self._running[job.name] = subprocess.Popen(
                argv, cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._say(f"{job.name} begins: {' '.join(argv[2:])}")

    def _limits(self, job: Job) -> list[str]:
        if job.until is None:
            return []
        left = max(_LEAST_MINUTES, job.until * self.minutes - self._elapsed_s / 60)
        if job.part is not None:
            return ["--seconds", f"{60 * left:.1f}"]
        weights = self.whole.earlier(job.name)
        more = [] if weights is None else ["--resume", str(weights)]
        more += ["--plain"] if job.name in self._again and job.name != "tokenizer" else []
        return ["--minutes", f"{left:.3f}", *more]

    def _ended(self, jobs: list[Job]) -> list[str]:
        """Forget who has ended, and mark whoever ended well; return the names of the others."""
        failed = []
        for job in jobs:
            status = self._running[job.name].poll() if job.name in self._running else None
            if status is None:
                continue
            del self._running[job.name]
            self._say(f"{job.name} has ended, status {status}")
            if not status or self._has_read(job):
                self._mark(job.name).touch()
            elif job.until is None or job.part is not None or job.name in self._again:
                failed.append(job.name)
            else:
                self._again.add(job.name)
        return failed

    def _has_read(self, job: Job) -> bool:
        """Whether there are shards of a reader: what it has read before it fell is whole."""
        data = self.whole.work / "data"
        return job.part is not None and any(data.glob(f"{job.part:02}-*.json"))

    def _tell_why(self, jobs: list[Job], failed: list[str]) -> None:
        """Raise for what is left, if anything is."""
        left = [job for job in jobs if not self._mark(job.name).exists()]
        if failed:
            tails = [self._log(name).read_text(errors="replace").splitlines() for name in failed]
            told = [f"{n}: {line}" for n, t in zip(failed, tails, strict=True)
                    for line in t[-_TAIL_LINES:]]  # fmt: skip
            raise WholeError("\n".join([f"failed: {', '.join(failed)}", *told]))
        missing = [path for job in left for path in job.files if not path.exists()]
        if missing:
            raise WholeError(f"{missing[0]}: no stage makes this file, and one waits for it")

    def _tell(self) -> None:
        for name in self._running:
            lines = self._log(name).read_text(errors="replace").splitlines()
            if lines:
                self._say(f"{name}: {lines[-1][:150]}")

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str) -> None:
        print(f"{self._elapsed_s:6.0f} s  {text}", flush=True)
