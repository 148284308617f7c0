"""``mosstalk replay`` on the terminal."""

import asyncio
from dataclasses import replace
from pathlib import Path

from mosstalk.files import as_text, human_text_on_stderr
from mosstalk.progress import loading
from mosstalk.server.comparison import compare
from mosstalk.server.loading import Loaded, load
from mosstalk.server.messages import BY_HAND, WorkerOptions
from mosstalk.server.replay import Recorded, Replayed, play, read_recording


def run_replay(folder: Path, options: WorkerOptions, *, live: bool, as_json: bool) -> int:
    """Replay, print what differs; the exit code."""
    with human_text_on_stderr(as_json):
        recorded = read_recording(folder)
        worker = recorded.facts["worker"]
        options = replace(options, detector="auto" if worker["detector"] else BY_HAND)
        with loading() as (_, tell):
            loaded = load(options, tell)
        if loaded.name != worker["model"]:
            print(f"recorded with {worker['model']}, replayed with {loaded.name}")
        comparison = compare(recorded, asyncio.run(_played(loaded, recorded, live=live)))
        if not live:
            print("Times are those of a session that hears everything at once; see --live.")
        print("\n".join(comparison.lines()))
    if as_json:
        print(as_text(comparison.as_dict()), end="")
    return 0 if comparison.same or not comparison.drawn_alike else 1


async def _played(loaded: Loaded, recorded: Recorded, *, live: bool) -> Replayed:
    async with loaded.host as host:
        await host.warm_up()
        return await play(host, recorded, live=live)
