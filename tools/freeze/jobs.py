"""What is recorded, as jobs that two workers share."""

import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from .results import Results
from .subject import Subject


@dataclass(frozen=True)
class Job:
    """Something to record; ``work`` is called with the recorder and ``words``."""

    name: str
    work: Callable[..., None]
    words: tuple[Any, ...] = ()


@dataclass
class Recorder:
    """Runs jobs against a subject and keeps what they find."""

    subject: Subject
    results: Results
    only: str
    failed: list[str] = field(default_factory=list)
    _done: int = 0

    def add(self, name: str, value: Any) -> None:
        """Keep an item."""
        self.results.add(name, value)

    def run(self, jobs: Iterable[Job]) -> None:
        """Do jobs whose names match ``only``, two at a time; say so as they end."""
        chosen = [job for job in jobs if fnmatch(job.name, self.only)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._try, chosen))

    def _try(self, job: Job) -> None:
        begun_s = time.monotonic()
        try:
            job.work(self, *job.words)
        except Exception:  # one job's trouble is told, and the others are recorded
            self.failed.append(job.name)
            print(traceback.format_exc(), flush=True)
        self._done += 1
        took_s = time.monotonic() - begun_s
        failed = "  FAILED" if job.name in self.failed else ""
        print(f"  {self._done:>3}  {job.name:<40} {took_s:5.1f} s{failed}", flush=True)
