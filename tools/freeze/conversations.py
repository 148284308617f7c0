"""Servers that have the corpus' conversations, and what their recordings hold and replay to."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from .commands import BIGVGAN, DEEP, printed
from .jobs import Job, Recorder
from .results import masked
from .server import Server, answers, metrics, serving
from .transcript import transcript
from .wire import Client, converse, corpus

_ALIKE = ("--temperature", "0", "--seed", "0")
SERVERS: dict[str, tuple[str, ...]] = {
    "pocket": (*_ALIKE, "--vad", "silero"),
    "deep": (*_ALIKE, *DEEP, "--vad", "webrtc", "--script", "speech:150"),
    "bigvgan": (*_ALIKE, *BIGVGAN, "--voice", "made/ada.safetensors", "--vad", "none"),
    "built": (*_ALIKE, "--model", "made/built", "--vad", "none"),
}
"""Each has the conversations of the folder of its name, one after the other.

None writes down what is said, as ``Subject.untranscribed`` explains.
"""
_RECORDED = "pocket"


def recorded_job() -> Job:
    """The server that records its sessions; it reads nothing that was made."""
    return Job(f"wire/{_RECORDED}", _serve, (_RECORDED,))


def server_jobs() -> Iterator[Job]:
    """One job for each other server."""
    for name in SERVERS:
        if name != _RECORDED:
            yield Job(f"wire/{name}", _serve, (name,))


def replay_jobs(recorder: Recorder) -> Iterator[Job]:
    """One job for each recording that was made by this subject or by another."""
    for folder in sorted((recorder.subject.made / "recordings").iterdir()):
        yield Job(f"replay/{folder.name}", _replay, (folder.name,))


def _serve(recorder: Recorder, name: str) -> None:
    words = (*SERVERS[name], *recorder.subject.untranscribed)
    recordings = recorder.subject.fresh / "recordings"
    if name == _RECORDED:
        words = (*words, "--record", str(recordings))
    sessions: dict[str, str] = {}
    with serving(recorder.subject, *words) as server:
        for each, steps in corpus(name).items():
            try:
                client = converse(server.port, steps, recorder.subject.work / "in")
            except RuntimeError as error:
                raise RuntimeError(f"{each}: {error}") from None
            recorder.add(f"wire/{name}/{each}", _told(recorder, client))
            if client.events:
                sessions[each] = client.events[0]["session"]["id"]
        _other_answers(recorder, name, server)
    if name == _RECORDED:
        for each, session in sessions.items():
            found = next(recordings.glob(f"*{session}"))
            found.rename(recordings / each)
            recorder.add(f"recording/{each}", _recording(recorder, recordings / each))


def _told(recorder: Recorder, client: Client) -> dict[str, Any]:
    events = transcript(client.events, recorder.results, client.heard_samples)
    return {"closed": client.close, "events": events}


def _other_answers(recorder: Recorder, name: str, server: Server) -> None:
    recorder.add(f"http/{name}", answers(server))
    recorder.add(f"metrics/{name}", metrics(server))


def _recording(recorder: Recorder, folder: Path) -> dict[str, Any]:
    """Rows, sound, commands, and the order of events; times and ids left out."""
    lines = [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]
    facts = json.loads((folder / "session.json").read_text())
    output = folder / "output-24000.wav"
    samples = soundfile.read(output, dtype="int16")[0] if output.exists() else np.zeros(0, np.int16)
    commands = json.dumps([line["command"] for line in lines if "command" in line])
    kinds = [line["event"]["type"] for line in lines if "event" in line]
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "format": facts["format"], "settings": facts["settings"], "facts": sorted(facts),
        "rows": json.loads((folder / "rows.json").read_text()),
        "sound": recorder.results.sound(samples, 24_000),
        "commands": json.loads(re.sub(r"\b(item|resp|sess|event)_[0-9a-f]{8,}", r"\1#", commands)),
        "events": [kind for kind in kinds if not kind.endswith("Delta")],
    }  # fmt: skip


def _replay(recorder: Recorder, name: str) -> None:
    run = recorder.subject.mosstalk("replay", f"made/recordings/{name}", "--json")
    value = printed(recorder, run)
    value |= {
        "out": masked(recorder.subject.document(run.out), ("timings",)),
        "err": _untimed(value["err"]),
    }
    recorder.add(f"replay/{name}", value)


def _untimed(lines: list[str]) -> list[str]:
    """Without the table of times."""
    return [line for line in lines if not re.match(r"\s+\d+\s\s[a-z_]+_(ms|factor)\b", line)]
