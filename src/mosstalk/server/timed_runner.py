"""An engine's steps as they are run: how long each takes, and faults for the tests."""

import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

from mosstalk.engine.engine_core import EngineCore
from mosstalk.engine.model_runner import InFlightStep, ModelRunner, Outcome

_MOST_KEPT = 10_000


class Faults:
    """What shall go wrong, for tests: files in a folder, each of which works once.

    ``step``: the next step raises. ``poison``: its first reply is not finite. ``stuck``: it never
    ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, name: str) -> bool:
        """Whether it was asked for."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True


class TimedRunner:
    """A ``ModelRunner`` that notes how long its steps take.

    A step that was launched while the one before it ran begins when that one has ended.
    """

    def __init__(self, runner: ModelRunner, faults: Faults | None = None) -> None:
        self._runner, self._faults = runner, faults
        self._steps_s: list[float] = []
        self._ended_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def collect(self, flight: InFlightStep) -> list[Outcome]:
        """See ``ModelRunner.collect``."""
        outcomes = self._runner.collect(flight)
        begun_s, self._ended_s = max(flight.launched_s, self._ended_s), time.perf_counter()
        if len(self._steps_s) < _MOST_KEPT:
            self._steps_s.append(self._ended_s - begun_s)
        return self._spoilt(outcomes) if self._faults else outcomes

    def taken_s(self) -> tuple[float, ...]:
        """Seconds of each step since this was last asked; from any thread."""
        taken, self._steps_s = self._steps_s, []
        return tuple(taken)

    def _spoilt(self, outcomes: list[Outcome]) -> list[Outcome]:
        faults = self._faults
        assert faults
        if faults.take("step"):
            raise RuntimeError("a fault that was asked for")
        if faults.take("stuck"):
            Event().wait()
        drawn = next((n for n, outcome in enumerate(outcomes) if outcome.row), None)
        if drawn is not None and faults.take("poison"):
            outcomes[drawn] = replace(outcomes[drawn], row=None, bad=True)
        return outcomes


def time_steps(core: EngineCore, faults: Faults | None = None) -> TimedRunner:
    """Watch an engine's steps from now on; before it is started."""
    watched = TimedRunner(core.runner, faults)
    core.runner = cast(ModelRunner, watched)
    return watched
