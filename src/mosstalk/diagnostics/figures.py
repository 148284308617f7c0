"""Figures of an answer and of its model for documents, Chrome traces, and what a report measures.

A trace is for chrome://tracing and Perfetto. The format is Google's "Trace Event Format": times in
microseconds, complete events (``X``) for runs of stages, instant events (``i``) for moments,
metadata (``M``) for names.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mosstalk.checkpoints.restartable import sha256
from mosstalk.config import LanguageModelConfig
from mosstalk.diagnostics.report import SCRIPT, Wanted
from mosstalk.errors import ConfigError, MosstalkError
from mosstalk.files import write_document
from mosstalk.models.quantization import Quantization, precision_of
from mosstalk.models.voices import any_voice, list_voices
from mosstalk.offline.pipeline import Answer, Pipeline
from mosstalk.prepared.default_models import chosen_model
from mosstalk.reply_options import Script
from mosstalk.runtime.device import pick_device, pick_dtype
from mosstalk.runtime.timing import TurnTimings, peak_memory_mib

PROCESS = 1
TRACKS = ("turns", "listening", "language model", "speech decoder")
"""Names of the rows of the picture; a track's place, from 1, is its thread id."""
TRACK_OF = {"encode": 2, "prefill": 3, "step": 3, "hop": 4}
QUESTION = "hello"
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".txt", ".jinja")
_NO_CASES = "no golden cases were given and none are shipped: name folders with --cases"
_FAULTS = (MosstalkError, RuntimeError, MemoryError)


def stage_figures(timings: TurnTimings) -> dict[str, dict[str, float]]:
    """Of every stage: total and mean in milliseconds, count, share of all stages (0 to 1)."""
    whole = timings.total_ms
    figures = {}
    for name, runs in timings.stages.items():
        total = sum(runs, 0.0)
        figures[name] = {
            "total_ms": total,
            "count": len(runs),
            "mean_ms": total / len(runs) if runs else 0.0,
            "share": total / whole if whole else 0.0,
        }
    return figures


def answer_figures(answer: Answer) -> dict[str, Any]:
    """How an answer ended, what it took and where the time went; nothing of what it says."""
    timings = answer.timings
    return {
        # Cut off between two steps, a reply has no reason of its own yet.
        "finish_reason": str(answer.reply.finish_reason or "cancelled"),
        "rows_prefilled": timings.rows_prefilled,
        "steps": answer.steps,
        "audio_s": answer.audio_s,
        "stages": stage_figures(timings),
        "total_ms": timings.total_ms,
        "first_audio_ms": timings.first_audio_ms,
        "real_time_factor": timings.real_time_factor(answer.audio_s),
        "peak_memory_mib": peak_memory_mib(answer.chat.pipeline.model.device),
    }


def model_facts(pipeline: Pipeline) -> dict[str, Any]:
    """What computed an answer: versions, kind of weights, device, dtypes, and which path.

    The path is "fast" where the engine runs kernels, "reference" where it runs their references.
    """
    model = pipeline.model
    return {
        "mosstalk": version("mosstalk"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "weights": model.config.weights_kind,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "precision": precision_of(model.dtype, Quantization.of(model.config)),
        "codec_dtype": pipeline.decoder_dtype,
        "path": "fast" if pipeline.engine.kernels else "reference",
    }


def chrome_trace(turns: Sequence[TurnTimings], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of ``turns`` as a JSON object; time 0 is the first thing that happened.

    ``metadata`` (versions, weights kind, device) is shown by both viewers.
    """
    events = [event for number, turn in enumerate(turns, 1) for event in _turn_events(number, turn)]
    origin = min((event["ts"] for event in events), default=0.0)
    shifted = [event | {"ts": round(event["ts"] - origin, 3)} for event in events]
    return {
        "traceEvents": [*_names(), *sorted(shifted, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": dict(metadata),
    }


def write_trace(path: Path, turns: Sequence[TurnTimings], metadata: Mapping[str, Any]) -> None:
    """Write the trace of ``turns``, whole or not at all; raise OutputError where it cannot be."""
    write_document(path, chrome_trace(turns, metadata), indent=None)


def _names() -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", 0, args={"name": "mosstalk"})
    for thread, name in enumerate(TRACKS, 1):
        yield _event("M", "thread_name", thread, args={"name": name})
        yield _event("M", "thread_sort_index", thread, args={"sort_index": thread})


def _turn_events(number: int, timings: TurnTimings) -> Iterator[dict[str, Any]]:
    """Events of one turn, on the clock of ``time.perf_counter``."""
    if timings.committed_s is not None:
        yield _moment("commit", timings.committed_s, {"turn": number})
        if timings.first_audio_ms is not None:
            heard_s = timings.committed_s + timings.first_audio_ms / 1000
            since = {"turn": number, "ms_since_commit": timings.first_audio_ms}
            yield _moment("first audio", heard_s, since)
    runs = dict.fromkeys(TRACK_OF, 0)
    for stage, start_s, ms in timings.spans():
        runs[stage] += 1
        yield _event(
            "X",
            stage,
            TRACK_OF[stage],
            ts=1e6 * start_s,
            dur=round(1000 * ms, 3),
            cat="stage",
            args={"turn": number, "run": runs[stage]},
        )


def _moment(name: str, when_s: float, args: dict[str, Any]) -> dict[str, Any]:
    # Scope "p" draws the line through all tracks of the process.
    return _event("i", name, 1, ts=1e6 * when_s, s="p", cat="turn", args=args)


def _event(phase: str, name: str, thread: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": thread} | more


def measured(wanted: Wanted) -> dict[str, Any]:
    """Verdict, turn and config files as json values; faults are part of them.

    Raises:
        DeviceError: the device or dtype does not exist here.
    """
    device = pick_device(wanted.device)
    dtype = pick_dtype(wanted.dtype) if wanted.dtype else torch.float32
    document: dict[str, Any] = {"verify": _verdict(wanted.cases, device, dtype)}
    try:
        folders = chosen_model(wanted.model, wanted.codec)
    except MosstalkError as error:
        turn = {"error": _one_line(error), "weights": "unknown"}
        return document | {"turn": turn, "config_files": {}}
    roles = zip(("model", "codec"), folders, strict=True)
    return document | {
        "turn": _turn(folders, device, dtype),
        "config_files": {role: config_files(folder) for role, folder in roles},
    }


def _verdict(cases: tuple[Path, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    from mosstalk.verify.run import judge_cases  # here, since an answer's figures need none of it

    if not cases:
        return {"skipped": _NO_CASES}
    try:
        return judge_cases(cases, device, dtype, say=lambda _: None).as_dict()
    except _FAULTS as error:
        return {"error": _one_line(error)}


def _turn(folders: tuple[Path, Path], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Figures of one scripted answer to a word of our own; what it says is left out."""
    asked = {"script": f"{SCRIPT}: mode changes and length forced"}
    try:
        pipeline = Pipeline.load(*folders, device=device, dtype=dtype)
        chat = pipeline.chat(voice=any_voice(list_voices(pipeline.codec.folder / "voices")))
        chat.read(QUESTION)
        answer = chat.answer(script=Script.parse(SCRIPT))
        hops = sum(1 for _ in answer)
    except _FAULTS as error:
        return asked | {"error": _one_line(error), "weights": _weights_kind(folders[0])}
    return asked | model_facts(pipeline) | {"sounds": hops} | answer_figures(answer)


def _weights_kind(folder: Path) -> str:
    try:
        return LanguageModelConfig.from_folder(folder).weights_kind
    except ConfigError:
        return "unknown"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def config_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every small readable file below a checkpoint folder; no weights."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _CONFIG_SUFFIXES
    }
