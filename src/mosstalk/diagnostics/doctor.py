"""What this machine has of what mosstalk needs, and what does not run without the rest.

Nothing heavy is imported before it is looked at: a broken package is a finding here, where
anywhere else it would be a traceback.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mosstalk.environment import cache_folder, install_command, this_command
from mosstalk.prepared.default_models import NO_WEIGHTS, shipped_model

OLDEST_PYTHON = (3, 11)
KV_ROWS = 8192
"""Rows of context that the memory estimate has room for: eleven minutes of speech."""
_GIB = 2**30
_CACHE_BYTES = 64 * 2**20
"""More than the synthetic model and codec take in the cache."""
_PATIENCE_S = 20
_STATES = {"ok": "ok", "missing": "missing", "unusable": "cannot be used"}


@dataclass(frozen=True)
class Finding:
    """One thing: ``state`` is ok, missing or unusable; ``needed`` by the main job or not.

    ``install``: the command that brings it, where one does.
    """

    name: str
    purpose: str
    without: str
    needed: bool
    state: str
    detail: str
    install: str = ""

    @property
    def broken(self) -> bool:
        """Whether the main job does not run because of this."""
        return self.needed and self.state != "ok"


@dataclass(frozen=True)
class Diagnosis:
    """All findings, what runs here, and the command to type next."""

    findings: list[Finding] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    next_command: str = ""

    @property
    def exit_code(self) -> int:
        """0 when the main job runs, 1 when something that it needs is broken."""
        return 1 if any(finding.broken for finding in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        """Everything as json values."""
        return asdict(self) | {"exit_code": self.exit_code}


def examine() -> Diagnosis:
    """Look at everything, and import what the main job needs; takes seconds, raises nothing."""
    findings = _findings()
    broken = [finding for finding in findings if finding.broken]
    runs = ["Runs here: answering questions with sound, in float32 on the CPU (exact and slow)"]
    if broken:
        names = ", ".join(finding.name for finding in broken)
        runs = [f"Cannot answer with sound here: {names}"]
    if all(finding.name != "torch" for finding in broken):
        runs += _gpu_lines()
    return Diagnosis(findings, runs, _next_command(broken))


def printed(diagnosis: Diagnosis) -> str:
    """The diagnosis as people read it."""
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{_STATES[finding.state]:<15} {finding.name:<18} {finding.detail}")
        lines.append(f"{'':<15} for {finding.purpose}")
        if finding.state != "ok":
            lines.append(f"{'':<15} without it: {finding.without}")
            if finding.install:
                lines.append(f"{'':<15} to get it: {finding.install}")
    lines += ["", *diagnosis.runs, f"Next: {diagnosis.next_command}"]
    return "\n".join(lines) + "\n"


def _found(
    name: str,
    purpose: str,
    without: str,
    look: Callable[[], tuple[str, str]],
    needed: bool = True,
    extra: str | None = None,
) -> Finding:
    """What ``look`` says, (state, detail); it may raise anything.

    ``extra``: the package's extra that brings it, "" for the package itself, None for neither.
    """
    try:
        state, detail = look()
    except Exception as error:  # a broken package can raise anything on import
        state, detail = "unusable", _reason(error)
    install = "" if extra is None or state == "ok" else install_command(extra)
    return Finding(name, purpose, without, needed, state, detail, install)


def _reason(error: Exception) -> str:
    """The first line of what an error says, else its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _findings() -> list[Finding]:
    nothing = "nothing runs"
    no_sound = "no sound can be read or written: chat does not run"
    no_voices, no_server = "voices cannot be made, only used", "no server"
    serve = "mosstalk serve"
    return [
        _found("system", "everything", nothing, _system),
        _found("Python", "everything", nothing, _python),
        _found("mosstalk", "everything", nothing, lambda: ("ok", version("mosstalk"))),
        _found("torch", "the model and the codec", "no model runs", _torch, extra=""),
        _package("numpy", "samples of sound", no_sound),
        _package("safetensors", "reading weights", "no model runs"),
        _package("tokenizers", "typed text", "no model runs"),
        _found("libsndfile", "sound files", no_sound, _libsndfile, extra=""),
        _package("soxr", "recordings that are not at 16 kHz", no_sound),
        _found("small model", "commands without --model", NO_WEIGHTS, _weights, needed=False),
        _found(
            "cache folder",
            "the synthetic model",
            "--model synthetic does not run",
            _cache,
            needed=False,
        ),
        _found("memory and cores", "the model on the CPU", "unknown", _memory, needed=False),
        _found("GPU", "full-size models", "everything runs on the CPU, slower", _gpu, needed=False),
        _optional(
            "wetext", "numbers in text that is read aloud", "mosstalk-pocket reads no numbers"
        ),
        _optional("triton", "fast kernels on a GPU", "plain torch operations are used", "gpu"),
        _optional("onnxruntime", "making voices (x-vector)", no_voices, "voices"),
        _optional("kaldi-native-fbank", "making voices (features)", no_voices, "voices"),
        _optional("fastapi", serve, no_server, "server"),
        _optional("uvicorn", serve, no_server, "server"),
        _optional("websockets", serve, no_server, "server"),
        _optional("prometheus-client", f"{serve}: metrics", no_server, "server"),
        _optional(
            "silero-vad",
            "hands-free turns",
            "webrtcvad stands in, which noise misleads; without both, push to talk",
            "vad",
        ),
        _optional("aiortc", "WebRTC calls from browsers", "browsers use WebSockets", "webrtc"),
        _optional(
            "faster-whisper",
            "transcripts of what users say",
            "none are sent; the model hears as well as before",
            "transcribe",
        ),
        _optional("redis", f"{serve} --store", "a server keeps its own conversations", "redis"),
        _optional("ray", "mosstalk fleet", "one server, with mosstalk serve", "fleet"),
    ]


def _package(name: str, purpose: str, without: str) -> Finding:
    """A package that the main job imports."""
    return _found(name, purpose, without, lambda: _imported(name), extra="")


def _optional(package: str, purpose: str, without: str, extra: str = "") -> Finding:
    """A package that is found without being imported."""

    def look() -> tuple[str, str]:
        if find_spec(package.replace("-", "_")) is None:
            return "missing", "not installed"
        try:
            return "ok", f"{version(package)} (found, not imported)"
        except PackageNotFoundError:
            return "ok", "of unknown version (found, not imported)"

    return _found(package, purpose, without, look, needed=False, extra=extra)


def _imported(package: str) -> tuple[str, str]:
    if find_spec(package) is None:
        return "missing", "not installed"
    import_module(package)
    return "ok", version(package)


def _system() -> tuple[str, str]:
    return "ok", f"{platform.system()} {platform.release()} {platform.machine()}"


def _python() -> tuple[str, str]:
    state = "ok" if sys.version_info[:2] >= OLDEST_PYTHON else "unusable"
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return state, f"{platform.python_version()} (needs {wanted} or newer)"


def _torch() -> tuple[str, str]:
    state, found = _imported("torch")
    if state != "ok":
        return state, found
    import torch

    torch.ones(1).sum().item()
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return "ok", f"{torch.__version__}, {build}"


def _libsndfile() -> tuple[str, str]:
    if find_spec("soundfile") is None:
        return "missing", "soundfile is not installed"
    import soundfile

    formats = sorted(soundfile.available_formats())
    return "ok", f"{soundfile.__libsndfile_version__}, reads {', '.join(formats)}"


def _weights() -> tuple[str, str]:
    return ("ok", "mosstalk-pocket") if shipped_model() else ("missing", "not installed")


def _cache() -> tuple[str, str]:
    folder = cache_folder()
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(nearest).free
    detail = f"{folder}, {free / _GIB:.1f} GiB free on its disk"
    if not os.access(nearest, os.W_OK):
        return "unusable", f"{detail}, but it cannot be written; set MOSSTALK_CACHE to another"
    if free < _CACHE_BYTES:
        return "unusable", f"{detail}: too little; set MOSSTALK_CACHE to another"
    return "ok", detail


def _memory() -> tuple[str, str]:
    cores = f"{os.cpu_count() or '?'} cores"
    if not hasattr(os, "sysconf"):  # Windows
        return "ok", f"{cores}; memory unknown"
    page = os.sysconf("SC_PAGE_SIZE")
    return "ok", f"{page * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB, {cores}"


def _gpu() -> tuple[str, str]:
    driver = _nvidia_driver()
    import torch

    if not torch.cuda.is_available():
        if driver is None:
            return "missing", "no NVIDIA GPU or no driver"
        why = "torch cannot use it" if torch.version.cuda else "torch is a CPU build"
        return "unusable", f"driver {driver}, but {why}"
    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        size = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        cards.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {size}")
    return "ok", f"{'; '.join(cards)}; driver {driver or 'unknown'}"


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, as its own tool says it; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = (tool, "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        run = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = run.stdout.split()
    return lines[0] if run.returncode == 0 and lines else None


def _gpu_lines() -> list[str]:
    """Whether a GPU can be used, and whether the full-size model would fit."""
    import torch

    try:
        model, codec, kv = full_size_bytes()
    except Exception as error:  # a package that sizes are counted with is broken
        return [f"What MOSS-Speech at full size needs is unknown here: {_reason(error)}"]
    whole = model + codec + kv
    needs = (
        f"{whole / _GIB:.1f} GiB (model in bf16 {model / _GIB:.1f}, codec in float32 "
        f"{codec / _GIB:.1f}, {KV_ROWS} rows of context {kv / _GIB:.1f}; an estimate from bytes, "
        "without working memory)"
    )
    if not torch.cuda.is_available():
        return [f"No GPU that torch can use: MOSS-Speech at full size needs one with {needs}"]
    free, _ = torch.cuda.mem_get_info()
    fits = "would fit" if free > whole else "would NOT fit"
    return [
        "The GPU can be used, by the same path, with --device cuda",
        f"MOSS-Speech at full size {fits} into {free / _GIB:.1f} GiB free: it needs {needs}",
    ]


def full_size_bytes() -> tuple[int, int, int]:
    """Bytes of the published language model in bf16, its codec in float32, and of its KV rows.

    Counted from the shapes of all tensors; nothing is allocated.
    """
    from mosstalk.plan.sizes import codec_on_meta, codec_parts, language_parts
    from mosstalk.prepared.start import configs_of

    configs = configs_of()
    config = configs.model
    model = sum(part.bytes for part in language_parts(config, "bf16"))
    codec = sum(part.weights for part in codec_parts(codec_on_meta(configs)))
    row = 2 * config.num_kv_layers * config.num_key_value_heads * config.head_dim
    return model, 4 * codec, 2 * row * KV_ROWS


def _next_command(broken: list[Finding]) -> str:
    if not broken:
        model = "" if shipped_model() else "--model synthetic "
        return f"{this_command()} chat {model}--text hello"
    packages = ["soundfile" if thing.name == "libsndfile" else thing.name for thing in broken]
    again = "--force-reinstall " if any(thing.state == "unusable" for thing in broken) else ""
    return f"{Path(sys.executable).name} -m pip install {again}{' '.join(packages)}"
