"""``mosstalk replay``: a recorded session again."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import argument, option
from mosstalk.cli.serve import require_server

if TYPE_CHECKING:
    from mosstalk.server.loading import Loaded
    from mosstalk.server.replay import Recorded, Replayed


@dataclass(frozen=True, eq=False, repr=False)
class Replay(WritesDocument):
    """Give a recorded session's input to a fresh one, and say what is different.

    mosstalk replay recordings/20260101T120000Z-sess_1 --live

    Compared are the order of the events, the rows of the conversation, every
    sample of the replies and their text; the times of each response stand
    beside those recorded. Replies that were drawn greedily or from a seed
    (serve --temperature 0, or --seed) are the same on the same machine.

    Exit code 0: nothing differs, or replies were drawn at random. 1: it does.
    """

    folder: Path = argument("A session's folder, as serve --record makes them.", metavar="DIR")
    model: opt.Model = None
    codec: opt.Codec = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    live: bool = option(
        False, "At the pace of then, so that times can be compared. Default: at once."
    )

    def run(self) -> int:
        """Replay, print what differs; the exit code.

        Raises:
            DetectorError: the recorded session had a detector of speech, and none is installed.
        """
        require_server("a replay")
        import asyncio

        from mosstalk.progress import loading
        from mosstalk.server.ipc import BY_HAND, WorkerOptions
        from mosstalk.server.loading import load
        from mosstalk.server.replay import compare, read_recording
        from mosstalk.vad.detectors import open_detector

        with self.printing():
            recorded = read_recording(self.folder)
            worker = recorded.facts["worker"]
            if worker["detector"]:
                open_detector()  # refused here: without one the session would go another way
            options = WorkerOptions(
                self.model,
                self.codec,
                self.device,
                self.dtype,
                sessions=1,
                detector="auto" if worker["detector"] else BY_HAND,
                voice=recorded.settings.voice,
            )
            with loading() as (_, tell):
                loaded = load(options, tell)
            if loaded.name != worker["model"]:
                print(f"recorded with {worker['model']}, replayed with {loaded.name}")
            comparison = compare(recorded, asyncio.run(_played(loaded, recorded, self.live)))
            if not self.live:
                print("Times are those of a session that hears everything at once; see --live.")
            print("\n".join(comparison.lines()))
        self.deliver(comparison.as_dict())
        return 0 if comparison.same or not comparison.drawn_alike else 1


async def _played(loaded: "Loaded", recorded: "Recorded", live: bool) -> "Replayed":
    from mosstalk.server.replay import play

    async with loaded.host as host:
        await host.warm_up()
        return await play(host, recorded, live=live)
