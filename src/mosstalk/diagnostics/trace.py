"""Chrome traces of a conversation, for chrome://tracing and Perfetto.

The format is Google's "Trace Event Format": times in microseconds, complete events (``X``)
for runs of stages, instant events (``i``) for moments, metadata (``M``) for names.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.files import write_document

if TYPE_CHECKING:  # timing needs torch, and nothing here does
    from mosstalk.runtime.timing import TurnTimings

PROCESS = 1
TRACKS = ("turns", "listening", "language model", "speech decoder")
"""Names of the rows of the picture; a track's place, from 1, is its thread id."""
TRACK_OF = {"encode": 2, "prefill": 3, "step": 3, "hop": 4}


def chrome_trace(turns: Sequence["TurnTimings"], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of ``turns`` as a JSON object; time 0 is the first thing that happened.

    ``metadata`` (versions, weights kind, device) is shown by both viewers.
    """
    events = [event for number, turn in enumerate(turns, 1) for event in _turn(number, turn)]
    origin = min((event["ts"] for event in events), default=0.0)
    shifted = [event | {"ts": round(event["ts"] - origin, 3)} for event in events]
    return {
        "traceEvents": [*_names(), *sorted(shifted, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": dict(metadata),
    }


def write_trace(path: Path, turns: Sequence["TurnTimings"], metadata: Mapping[str, Any]) -> None:
    """Write the trace of ``turns``, whole or not at all; raise OutputError where it cannot be."""
    write_document(path, chrome_trace(turns, metadata), indent=None)


def _names() -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", 0, args={"name": "mosstalk"})
    for thread, name in enumerate(TRACKS, 1):
        yield _event("M", "thread_name", thread, args={"name": name})
        yield _event("M", "thread_sort_index", thread, args={"sort_index": thread})


def _turn(number: int, timings: "TurnTimings") -> Iterator[dict[str, Any]]:
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
