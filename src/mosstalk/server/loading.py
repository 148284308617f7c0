"""What a worker loads: folders, device, detector, host, and a runner that times its steps."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, cast

from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.config import LanguageModelConfig
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.engine.model_runner import InFlightStep, ModelRunner, Outcome
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.environment import faults_folder
from mosstalk.errors import DetectorError
from mosstalk.prepared.default_models import chosen_model, is_shipped, name_of
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import Progress
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype
from mosstalk.server.fitting import require_room, settings_named
from mosstalk.server.ipc import BY_HAND, WorkerInfo, WorkerOptions
from mosstalk.session.host import Host, HostOptions
from mosstalk.vad.frames import Detector
from mosstalk.vad.opening import open_detector

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


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A host that was not started, and what is to be said of it."""

    host: Host
    steps: TimedRunner
    config: LanguageModelConfig
    name: str
    detector: Detector | None

    def info(self, warm_up_s: float) -> WorkerInfo:
        """To be asked once the host was started."""
        core = self.host.engine.core
        longest = min(self.config.max_position_embeddings, core.pool.size * core.pool.rows)
        return WorkerInfo(
            weights_kind=self.config.weights_kind,
            model=self.name,
            device=str(core.model.device),
            dtype=str(core.model.dtype).removeprefix("torch."),
            voices=tuple(self.host.voice_names),
            detector=self.detector.description if self.detector else None,
            context_rows=longest,
            blocks=core.pool.size,
            block_rows=core.pool.rows,
            warm_up_s=warm_up_s,
        )


def load(options: WorkerOptions, progress: Progress) -> Loaded:
    """Read everything; raises as ``chosen_model``, ``pick_device`` and ``Host.load`` do.

    A folder that ``mosstalk build`` made brings its compiled kernels.

    Raises:
        DeviceError: it cannot fit; says which settings to change.
    """
    model, codec = chosen_model(options.model, options.codec)
    device = pick_device(options.device)
    take_kernels(options.model, device)
    dtype = pick_dtype(options.dtype) if options.dtype else None
    if dtype is None and device.type == "cpu":
        dtype = pick_dtype("float32")
    require_room(options, model, codec, device, dtype)
    detector = _detector(options.detector)
    engine = EngineOptions(
        limits=SchedulerLimits(slots=options.sessions),
        graphs=options.sound.graphs,
        batch_invariant=options.batch_invariant,
    )
    settings = HostOptions(
        options.sessions,
        context_rows=options.context_rows,
        engine=engine,
        decoder=DecoderOptions.of(options.sound, device, options.sessions),
        voices=options.voices,
    )
    with settings_named(options, model, codec, device):
        host = Host.load(
            model,
            codec,
            settings,
            device=device,
            dtype=dtype,
            memory_bytes=options.memory_bytes,
            detector=detector,
            progress=progress,
            embeddings=options.embeddings,
        )
    fit_threads(device, [host.engine.core.model])
    faults = faults_folder()
    steps = time_steps(host.engine.core, Faults(faults) if faults else None)
    config = LanguageModelConfig.from_folder(model)
    return Loaded(host, steps, config, _name_of(model, codec), detector)


def _name_of(model: Path, codec: Path) -> str:
    if is_shipped(codec):
        return "mosstalk-pocket"
    return name_of(model)


def _detector(kind: str) -> Detector | None:
    if kind == BY_HAND:
        return None
    try:
        return open_detector(kind)
    except DetectorError as error:
        if kind != "auto":
            raise
        _LOG.warning("%s; until then clients must commit their turns by hand", error)
        return None
