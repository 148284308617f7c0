"""Work handed from one thread to another."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Job(Generic[_T]):
    """Work for another thread, and what came of it."""

    work: Callable[[], _T]
    done: Future[_T] = field(default_factory=Future)

    def run(self) -> None:
        """Do the work, unless whoever asked has gone."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.work())
            except Exception as error:
                self.done.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """End the job undone."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)
