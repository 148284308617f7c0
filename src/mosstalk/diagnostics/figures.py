"""The figures of an answer and of its model as plain values, for JSON documents."""

import platform
from importlib.metadata import version
from typing import Any

from mosstalk.models.quantization import Quantization, precision_of
from mosstalk.offline.pipeline import Answer, Pipeline
from mosstalk.runtime.timing import TurnTimings, peak_memory_mib


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
