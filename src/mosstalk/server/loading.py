"""What a worker loads: folders, device, detector, host, and a runner that times its steps."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch

from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.config import LanguageModelConfig
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.engine.kv_store import bytes_per_row
from mosstalk.engine.model_runner import InFlightStep, ModelRunner, Outcome
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.environment import faults_folder
from mosstalk.errors import DetectorError, DeviceError
from mosstalk.models.quantization import Quantization
from mosstalk.plan.crowd import replies_at_once
from mosstalk.plan.fit import BLOCK_ROWS, Plan, Wish, advice, plan_of
from mosstalk.plan.sizes import Configs
from mosstalk.prepared.default_models import chosen_model, is_shipped, name_of
from mosstalk.prepared.machine import device_name
from mosstalk.prepared.start import configs_of, take_kernels
from mosstalk.progress import Progress
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype
from mosstalk.server.ipc import BY_HAND, WorkerInfo, WorkerOptions
from mosstalk.session.host import Host, HostOptions
from mosstalk.vad.detectors import Detector, open_detector

_GIB = 2**30
_VOICES_S = 3.0
"""The shortest voices that are of use: what is refused before anything is read cannot fit."""
_SESSIONS_AN_EAR, _PROCESSORS_AN_EAR = 64, 4
"""There is a process that looks for speech for every so many sessions, and at most for every so
many processors: clients, the front and the engine need theirs."""
_SERVED = {
    "--precision fp8": "an FP8 checkpoint (mosstalk build --precision fp8)",
    "--voices-s": "a smaller --codec-memory",
}
"""A plan's settings by what a start has in their place."""
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
        core, usual = self.host.engine.core, self.host.options.voice
        return WorkerInfo(
            weights_kind=self.config.weights_kind,
            model=self.name,
            device=str(core.model.device),
            dtype=str(core.model.dtype).removeprefix("torch."),
            voices=tuple(sorted(self.host.voice_names, key=lambda name: (name != usual, name))),
            detector=self.detector.description if self.detector else None,
            context_rows=self.host.context_rows,
            blocks=core.pool.size,
            block_rows=core.pool.rows,
            warm_up_s=warm_up_s,
            text=self.host.pipeline.defaults.text,
            device_name=device_name(core.model.device),
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
        decoder=DecoderOptions.of(options.sound, device, replies_at_once(options.sessions)),
        voices=options.voices,
        voice=options.voice,
        ear_processes=_ear_processes(options, device),
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


def _ear_processes(options: WorkerOptions, device: torch.device) -> int:
    if options.ear_processes is not None:
        return options.ear_processes
    if device.type == "cpu":
        return 0  # models and ears would share its processors anyway
    wanted = -(-options.sessions // _SESSIONS_AN_EAR)
    return min(wanted, (os.cpu_count() or 1) // _PROCESSORS_AN_EAR)


# A start against what there is.


def require_room(
    options: WorkerOptions,
    model: Path,
    codec: Path,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Refuse what cannot fit whatever is measured later, before any weights are read.

    Raises:
        DeviceError: ``memory_bytes`` does not hold one conversation, or what is certain (weights,
            one conversation, sound of all sessions) is more than a GPU has free.
    """
    config = LanguageModelConfig.from_folder(model)
    rows = options.context_rows or config.max_position_embeddings
    if options.memory_bytes is not None:
        _require_budget(options.memory_bytes, rows, bytes_per_row(config, dtype or torch.bfloat16))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        refusal = room_refusal(options, configs_of(model, codec), free)
        if refusal:
            raise DeviceError(refusal)


def room_refusal(options: WorkerOptions, configs: Configs, free_bytes: int) -> str | None:
    """Why a start in ``free_bytes`` of a GPU cannot work, with settings to change; None if it can.

    What cannot be computed (graphs, libraries' workspaces) counts as nothing here.
    """
    plan = _certain(options, configs, free_bytes)
    if plan.fits:
        return None
    return (
        f"{free_bytes / _GIB:.1f} GiB of the GPU are free, and weights, one conversation of "
        f"{plan.wish.rows} rows and the sound of {plan.wish.sessions} sessions take "
        f"{plan.needed_bytes / _GIB:.1f} GiB at least: change {_choices(plan)}"
    )


@contextmanager
def settings_named(
    options: WorkerOptions, model: Path, codec: Path, device: torch.device
) -> Iterator[None]:
    """Turn a start that ran out of memory into a refusal that names settings.

    Raises:
        DeviceError: it did not fit.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceError(
            f"the GPU's {total / _GIB:.1f} GiB are used up while starting: change "
            f"{_choices(_certain(options, configs_of(model, codec), free))}"
        ) from None
    except DeviceError as error:
        if "one conversation" not in str(error):
            raise
        raise DeviceError(
            f"{error}. Settings: a smaller --max-rows, --max-sessions or --codec-memory"
            + ("" if options.memory_bytes is None else ", a larger --kv-gib")
        ) from None


def _require_budget(memory_bytes: int, rows: int, row_bytes: int) -> None:
    held = memory_bytes // row_bytes
    if held < rows:
        needed = -(-rows // BLOCK_ROWS) * BLOCK_ROWS * row_bytes / _GIB
        raise DeviceError(
            f"--kv-gib {memory_bytes / _GIB:.4g} holds {held} rows of {row_bytes / 1024:,.1f} KiB, "
            f"and one conversation may have {rows}: give --kv-gib {_up(needed)}"
            + (f", or --max-rows {held}" if held else "")
        )


def _up(gib: float) -> str:
    """Rounded up, so that what is advised is enough."""
    return f"{gib * 1.005 + 0.0005:.3f}"


def _certain(options: WorkerOptions, configs: Configs, free_bytes: int) -> Plan:
    """Without what nobody can compute: graphs, libraries' workspaces, a margin."""
    precision = "fp8" if Quantization.of(configs.model) else "bf16"
    rows = options.context_rows or configs.model.max_position_embeddings
    wish = Wish(free_bytes, precision, options.sessions, rows, _VOICES_S, options.embeddings)
    plan = plan_of(configs.with_steps(options.sound.steps), wish)
    return Plan(plan.wish, replace(plan.costs, overheads=(), margin=0.0))


def _choices(plan: Plan) -> str:
    words = []
    for choice in advice(plan):
        known = next((said for said in _SERVED if choice.startswith(said)), None)
        words.append(_SERVED[known] if known else choice)
    return "; or ".join(words)
