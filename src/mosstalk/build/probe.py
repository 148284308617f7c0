"""A start in a process of its own, timed: ``python -m mosstalk.build.probe FOLDER DEVICE SINCE``.

Prints one line of json: seconds of every part, from SINCE, when the process was asked for (on
``time.time``), to the first sound of a reply.
"""

import time

_FIRST_LINE = time.time(), time.perf_counter()

import asyncio  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


def main() -> None:
    """Start as ``mosstalk serve`` does, ask once, and say what it took."""
    from mosstalk.models.voices import any_voice, list_voices
    from mosstalk.prepared.default_models import BuiltEngine
    from mosstalk.prepared.machine import Peaks
    from mosstalk.prepared.start import kernels_in
    from mosstalk.runtime.device import pick_device
    from mosstalk.server.ipc import BY_HAND, WorkerOptions, as_built
    from mosstalk.server.loading import load

    folder, device = Path(sys.argv[1]), sys.argv[2]
    engine = BuiltEngine.read(folder)
    cache = engine.cache
    before, marks = kernels_in(cache).count, [("imports", time.perf_counter())]
    voice = any_voice(list_voices(engine.codec / "voices"))
    options = WorkerOptions(model=folder, device=device, detector=BY_HAND, voice=voice)
    peaks = Peaks(pick_device(device))
    loaded = load(as_built(options, None, None, 1), lambda *_: None)
    marks.append(("weights", time.perf_counter()))
    first_reply_ms = asyncio.run(_first_audio(loaded.host, marks))
    peaks.look()
    parts_s = {"process": _FIRST_LINE[0] - float(sys.argv[3])} | _parts(marks)
    found: dict[str, Any] = {
        "parts_s": parts_s,
        "first_audio_s": sum(parts_s.values()),
        "commit_to_first_audio_ms": first_reply_ms,
        "compiled": kernels_in(cache).count - before,
        "peaks_bytes": peaks.as_values(),
    }
    print(json.dumps(found))


async def _first_audio(host: Any, marks: list[tuple[str, float]]) -> float:
    """Warm up, ask, and wait for sound; milliseconds from asking to it."""
    from mosstalk.session.commands import CreateResponse, CreateText, ReplyLimits, SessionSettings
    from mosstalk.session.events import AudioDelta, ErrorRaised, ResponseDone

    async with host:
        await host.warm_up()
        marks.append(("warming up", time.perf_counter()))
        kind = host.engine.core.model.config.weights_kind
        settings = SessionSettings(
            turn_detection=None,
            voice=host.options.voice,
            limits=ReplyLimits(longest_s=2.0),
            script="speech:25" if kind == "synthetic" else None,
        )
        async with await host.open(settings) as session:
            asked = time.perf_counter()
            session.do(CreateText("user", "Good morning."))
            session.do(CreateResponse())
            async for event in session:
                if isinstance(event, ErrorRaised):
                    raise SystemExit(f"no reply: {event.message}")
                if isinstance(event, ResponseDone):
                    raise SystemExit("the model ended its reply without a sound")
                if isinstance(event, AudioDelta):
                    break
            marks.append(("first audio", time.perf_counter()))
    return 1000 * (marks[-1][1] - asked)


def _parts(marks: list[tuple[str, float]]) -> dict[str, float]:
    parts, last = {}, _FIRST_LINE[1]
    for name, at in marks:
        parts[name] = at - last
        last = at
    return parts


if __name__ == "__main__":
    main()
