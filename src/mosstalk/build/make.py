"""``mosstalk build``: every step from two checkpoints to one folder, in order."""

import asyncio
import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from mosstalk.build.check import (
    a_voice,
    as_values,
    check_codec,
    check_language,
    plain_hops,
    require,
)
from mosstalk.build.report import architecture, dtypes, engine_facts
from mosstalk.build.tune import tune_into
from mosstalk.checkpoints.convert import convert_model
from mosstalk.checkpoints.quantize import Source, Writer, digest_of
from mosstalk.checkpoints.restartable import copy_folder, digests
from mosstalk.codec.speech_decoder import DecoderOptions, SpeechDecoder
from mosstalk.config import LanguageModelConfig
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.engine.kv_store import bytes_per_row
from mosstalk.engine.layers import takes_kernels
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.errors import CheckpointError, DeviceError, OptionError
from mosstalk.files import as_text
from mosstalk.models.checkpoint import open_published
from mosstalk.models.codec_folder import Codec
from mosstalk.models.language_model import FUSED, LAYOUT_KEY, LanguageModel
from mosstalk.models.quantization import Quantization
from mosstalk.models.voices import Voice, list_voices, save_voice
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.offline.pipeline import Pipeline
from mosstalk.ops.linear_tiles import use_tuned
from mosstalk.plan.fit import PLACES, Plan, Wish, advice, plan_of
from mosstalk.plan.sizes import PRECISIONS
from mosstalk.prepared.default_models import CACHE, CODEC, ENGINE_FILE, ENGINE_FORMAT, MODEL
from mosstalk.prepared.machine import Peaks, machine_of
from mosstalk.prepared.start import configs_of, kernels_apart, kernels_in, relocate, use_kernels
from mosstalk.prepared.tiles import describe
from mosstalk.progress import Progress
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import fit_threads
from mosstalk.session.host import Host, HostOptions
from mosstalk.synthesis.sizes import named_sizes
from mosstalk.synthesis.weights import Synthesis, synthesize
from mosstalk.verify.compare import Check

_NORM = "model.text_norm.weight"
_LOCK = ".building"
Say = Callable[[str], None]
_SOURCE = ".source"
_GIB = 2**30
_CHECK_BLOCKS = 64
_DEFAULT = "default"


def check_source(model: Path, precision: str) -> LanguageModelConfig:
    """The config of a model that can be built in ``precision``.

    Raises:
        OptionError: it is quantised, and is asked for in bf16.
        CheckpointError, ConfigError: it is none, or was converted to another precision.
    """
    if not model.is_dir():
        raise CheckpointError(f"{model}: no such folder; give the one that holds config.json")
    config = LanguageModelConfig.from_folder(model)
    record = Quantization.of(config, str(model / "config.json"))
    if record and precision == "bf16":
        raise OptionError(
            f"{model}: is quantised ({record.describe()}); build it with --precision fp8, or build "
            "the checkpoint that it was made of"
        )
    if config.extra.get(LAYOUT_KEY) == FUSED and _dtype_of(model, config) != "bfloat16":
        raise CheckpointError(
            f"{model}: is converted to {_dtype_of(model, config)}; build the published checkpoint"
        )
    return config


def write_model(source: Path, out: Path, precision: str, tell: Progress) -> str:
    """Write the model of ``source`` to ``out`` in ``precision``; return what was done.

    In bf16 matrices are fused. FP8 is that of ``mosstalk checkpoint quantize`` without
    calibration: the shared block, inputs scaled row by row; what is quantised is copied.

    Raises:
        OptionError, ConfigError: see ``check_source``.
        CheckpointError: the source is damaged, or changes meanwhile.
        OutputError: the disk has no room.
    """
    config = check_source(source, precision)
    ready = _dtype_of(source, config) == "bfloat16"
    if Quantization.of(config) or (precision == "bf16" and config.extra.get(LAYOUT_KEY) == FUSED):
        copy_folder(source, out, tell)
        return "copied"
    if precision == "bf16":
        convert_model(source, out, torch.bfloat16, tell)
        return "converted"
    if ready:
        _quantize(source, out, tell)
        return "quantised"
    between = out.with_name(f".{out.name}-bf16")
    convert_model(source, between, torch.bfloat16, tell)
    _quantize(between, out, tell)
    shutil.rmtree(between)
    return "converted, then quantised"


def _quantize(source: Path, out: Path, tell: Progress) -> None:
    opened = Source.open(source)
    hashes = opened.hashes(tell)
    out.mkdir()
    Writer(opened, Quantization(source_sha256=digest_of(hashes)), hashes, {}, tell).write(out)


def _dtype_of(folder: Path, config: LanguageModelConfig) -> str:
    """Of what is never quantised."""
    store = open_published(folder, config)
    return store[_NORM].dtype if _NORM in store else "absent"


@contextmanager
def at_work(part: Path) -> Iterator[None]:
    """Mark the folder ``part`` as being written, for as long as the block runs."""
    lock = part / _LOCK
    with lock.open("w") as file:
        _taken(file)
        yield
    lock.unlink()


def clear_leftovers(out: Path) -> int:
    """Remove what killed builds of ``out`` left beside it; return how many there were."""
    found = [part for part in out.absolute().parent.glob(f".{out.name}.*.part") if _dead(part)]
    for part in found:
        shutil.rmtree(part, ignore_errors=True)
    return len(found)


def _dead(part: Path) -> bool:
    lock = part / _LOCK
    if not lock.is_file():
        return False
    with lock.open() as file:
        return _taken(file)


def _taken(file: IO[str]) -> bool:
    """Take a file's lock, unless another process has it; whether it was taken."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class BuildRequest:
    """What to build, for whom: ``model`` and ``codec`` are None where ``random`` names sizes."""

    model: Path | None
    codec: Path | None
    precision: str
    sessions: int
    rows: int
    voices_s: float
    device: torch.device
    random: str | None = None
    tune: bool = True
    embeddings: str = "device"

    def __post_init__(self) -> None:
        """Raise OptionError for what means nothing."""
        if self.precision not in PRECISIONS:
            raise OptionError(f"--precision {self.precision}: choose of {', '.join(PRECISIONS)}")
        if self.embeddings not in PLACES:
            raise OptionError(f"--embeddings {self.embeddings}: choose of {', '.join(PLACES)}")
        if self.random is not None:
            named_sizes(self.random)


@dataclass
class Build:
    """One build into the empty folder ``part``, which is going to be called ``out``."""

    request: BuildRequest
    part: Path
    out: Path
    tell: Progress
    say: Say
    times_s: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    _fast: bool = False
    _tiles: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Do every step; what ``engine.json`` says.

        Raises:
            OptionError, ConfigError, CheckpointError: the sources cannot be built so.
            DeviceError: the device lacks FP8, or memory; says what to change.
            BuildError: what was built does not compute what it must.
            OutputError: the disk cannot take it.
        """
        self._peaks = Peaks(self.request.device)
        started = time.perf_counter()
        model, codec = self._sources()
        plan = self._planned(model, codec)
        with self._step(f"weights in {self.request.precision}"):
            how = write_model(model, self.part / MODEL, self.request.precision, self.tell)
            copy_folder(codec, self.part / CODEC, self.tell)
            shutil.rmtree(self.part / _SOURCE, ignore_errors=True)
        self.say(f"  model {how}, codec copied")
        self._compile_and_check(plan)
        with self._step("hashes"):
            files = {name: digests(self.part / name, self.tell) for name in (MODEL, CODEC)}
        self.times_s["all"] = time.perf_counter() - started
        for lent in self.part.glob(".*.safetensors"):
            lent.unlink()
        values = self._values(plan, files)
        relocate(self.part / CACHE, self.out.resolve() / CACHE)
        (self.part / ENGINE_FILE).write_text(as_text(values))
        return values

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self.tell(name, 0, 1)
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self.times_s[name] = took
        self._peaks.look()
        self.say(f"{name:<24} {took:8.1f} s")

    def _sources(self) -> tuple[Path, Path]:
        request = self.request
        if request.precision == "fp8":
            require_fp8(request.device)
        if request.random:
            drawn = self.part / _SOURCE
            with self._step("random weights"):
                drawn.mkdir()
                sizes = named_sizes(request.random)
                synthesize(drawn, Synthesis(sizes, tell=self.tell, device=request.device))
            if request.device.type == "cuda":
                torch.cuda.empty_cache()
            return drawn / MODEL, drawn / CODEC
        assert request.model, "folders or random weights"
        assert request.codec, "folders or random weights"
        return request.model, request.codec

    def _planned(self, model: Path, codec: Path) -> Plan:
        """What it is going to take; on a GPU it must fit before anything is written.

        Raises:
            DeviceError: it does not fit.
        """
        request = self.request
        config = check_source(model, request.precision)
        if request.rows > config.max_position_embeddings:
            raise OptionError(
                f"--max-rows {request.rows}: the model's context is "
                f"{config.max_position_embeddings} rows"
            )
        memory = 0
        if request.device.type == "cuda":
            memory = torch.cuda.get_device_properties(request.device).total_memory
        wish = Wish(
            memory, request.precision, request.sessions, request.rows, request.voices_s,
            request.embeddings,
        )  # fmt: skip
        plan = plan_of(configs_of(model, codec), wish)
        if memory and not plan.fits:
            raise DeviceError(
                f"does not fit: {plan.needed_bytes / _GIB:.1f} GiB are needed and the GPU has "
                f"{memory / _GIB:.1f}: change {'; or '.join(advice(plan))}"
            )
        return plan

    def _compile_and_check(self, plan: Plan) -> None:
        """Load what was written as a start does, run all of it once, and hold it to the plain."""
        request = self.request
        on_gpu = request.device.type == "cuda"
        if on_gpu:
            use_kernels(self.part / CACHE)
        else:
            (self.part / CACHE).mkdir()
            self.say("  on a CPU there are no kernels to compile, and none to tune")
        with self._step("loading"):
            pipeline = Pipeline.load(
                self.part / MODEL, self.part / CODEC, device=request.device,
                dtype=None if on_gpu else torch.float32, progress=self.tell,
                embeddings=request.embeddings,
            )  # fmt: skip
            codec = pipeline.codec
            parts = (pipeline.model, codec.tokenizer, codec.flow, codec.vocoder)
            fit_threads(request.device, parts)
        if on_gpu:
            with self._step("tuning"):
                self._tune(pipeline.model)
        voice = a_voice(codec)
        options = host_options(request, plan, self._voices(codec, voice))
        decoder = SpeechDecoder(codec, options.decoder)
        with self._step("check of the codec"):
            self.checks += check_codec(decoder, codec, voice, plain_hops(codec, voice))
            require(self.checks)
        decoder.release_float32()
        with self._step("check of the model"):
            self._check_model(pipeline)
        with self._step("compiling" if on_gpu else "a first reply"):
            host = Host.around(
                pipeline, options, memory_bytes=self._budget(pipeline), decoder=decoder
            )
            asyncio.run(_warmed(host))
            layers = host.engine.core.runner.layers
            self._fast = layers.kernels
        if on_gpu:
            self._say_compiled(layers.graph_count)

    def _tune(self, model: LanguageModel) -> None:
        """Before anything is checked, so that what was found is checked too."""
        use_tuned({})
        if self.request.tune and takes_kernels(model.text_lm_head.weight):
            with kernels_apart((self.part / CACHE).resolve()):
                self._tiles = tune_into(self.part, model, self.tell, self.say)
        self.say(f"  tiles: {describe(self._tiles)}")

    def _voices(self, codec: Codec, voice: Voice) -> dict[str, Path]:
        """A voice to warm up with where the codec has no default one, as the published codec."""
        if _DEFAULT in list_voices(codec.folder / "voices"):
            return {}
        lent = self.part / f".{_DEFAULT}.safetensors"
        save_voice(voice, lent)
        return {_DEFAULT: lent}

    def _check_model(self, pipeline: Pipeline) -> None:
        """In a small pool of its own: what a start sizes would leave the plain network no room."""
        limits = SchedulerLimits(slots=self.request.sessions)
        options = EngineOptions(blocks=_CHECK_BLOCKS, limits=limits)
        self.checks += check_language(EngineCore(pipeline.model, pipeline.ids, options))
        require(self.checks)
        if self.request.device.type == "cuda":
            gc.collect()  # the pool that it was checked with
            torch.cuda.empty_cache()

    def _budget(self, pipeline: Pipeline) -> int | None:
        """On a CPU as much as was asked for; on a GPU what is left is measured."""
        if self.request.device.type == "cuda":
            return None
        row = bytes_per_row(pipeline.model.config, pipeline.model.dtype)
        return (self.request.rows + 2 * EngineOptions.block_rows) * row

    def _say_compiled(self, graphs: int) -> None:
        found = kernels_in(self.part / CACHE)
        self.say(
            f"  {found.count} kernels, {found.bytes / 2**20:.1f} MiB with all that belongs to "
            f"them; {graphs} graphs of the model captured"
        )

    def _values(self, plan: Plan, files: dict[str, dict[str, str]]) -> dict[str, Any]:
        request, on_gpu = self.request, self.request.device.type == "cuda"
        configs = configs_of(self.part / MODEL, self.part / CODEC)
        kind = configs.model.weights_kind
        return {
            "format": ENGINE_FORMAT,
            "built": datetime.now(UTC).isoformat(timespec="seconds"),
            "weights": kind,
            "precision": request.precision,
            "machine": machine_of(request.device, kind),
            "architecture": architecture(configs.model),
            "dtypes": dtypes(self.part, request.device),
            "engine": engine_facts(fast=self._fast),
            "settings": {
                "max_sessions": request.sessions,
                "max_rows": request.rows,
                "voices_s": request.voices_s,
                "embeddings": request.embeddings,
                "codec_memory_mib": plan.flow_memory_mib if on_gpu else None,
            },
            "plan": plan.as_values(),
            "checked_in": "as stored" if on_gpu else "float32",
            "checks": as_values(self.checks),
            "kernels": asdict(kernels_in(self.part / CACHE)),
            "tiles": self._tiles,
            "times_s": self.times_s,
            "peaks_bytes": self._peaks.as_values(),
            "digests": {name: digest_of(each) for name, each in files.items()},
            "files": files,
        }


def host_options(request: BuildRequest, plan: Plan, voices: dict[str, Path]) -> HostOptions:
    """As a start from the folder has them."""
    memory = plan.flow_memory_mib if request.device.type == "cuda" else None
    sound = DecoderOptions.of(SoundRequest(memory_mib=memory), request.device, plan.replies)
    engine = EngineOptions(limits=SchedulerLimits(slots=request.sessions))
    return HostOptions(
        request.sessions, context_rows=request.rows, engine=engine, decoder=sound, voices=voices
    )


async def _warmed(host: Host) -> None:
    """Have the host do all that makes a first reply slow; it is started and stopped for that."""
    async with host:
        await host.warm_up()
