"""``mosstalk replay``."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

RecordingFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="A session's folder, as serve --record makes them.")
]
Live: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--live", help="At the pace of then, so that times can be compared. Default: at once."
    ),
]


def replay(
    folder: RecordingFolder,
    model: opt.Model = None,
    codec: opt.Codec = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    live: Live = False,
    json: opt.AsJson = False,
) -> None:
    """Give a recorded session's input to a fresh one, and say what is different.

    mosstalk replay recordings/20260101T120000Z-sess_1 --live

    Compared are the order of the events, the rows of the conversation, every
    sample of the replies and their text; the times of each response stand
    beside those recorded. Replies that were drawn greedily or from a seed
    (serve --temperature 0, or --seed) are the same on the same machine.

    Exit code 0: nothing differs, or replies were drawn at random. 1: it does.
    """
    with reported():
        from mosstalk.cli.replay_console import run_replay
        from mosstalk.server.messages import WorkerOptions

        options = WorkerOptions(model, codec, device, dtype, sessions=1)
        raise typer.Exit(run_replay(folder, options, live=live, as_json=json))
