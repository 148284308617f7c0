"""``mosstalk build``."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

Folders: TypeAlias = Annotated[
    list[Path],
    typer.Argument(
        metavar="MODEL CODEC OUT",
        help="The model's and the codec's folders, or pocket or synthetic for both, and a new "
        "folder. With --random-weights OUT alone.",
    ),
]
Precision: TypeAlias = Annotated[
    str, typer.Option(metavar="bf16|fp8", help="Of the language model; fp8: its shared block.")
]
MaxSessions: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Sessions that talk at once.")
]
MaxRows: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Rows of the longest conversation, 12.5 a second. Default: 8192, or the model's "
        "context where that is less.",
    ),
]
VoicesS: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.0, help="Length of all voices together.")
]
RandomWeights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="full|tiny",
        help="Random weights of the published (full) or of tiny sizes in place of MODEL and "
        "CODEC, to measure with.",
    ),
]
Tune: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tune/--no-tune",
        help="Time divisions of the language model's products on this GPU, and keep those that "
        "are faster than the package's own.",
    ),
]


def build(
    folders: Folders,
    precision: Precision = "bf16",
    max_sessions: MaxSessions = 64,
    max_rows: MaxRows = None,
    voices_s: VoicesS = 40.0,
    random_weights: RandomWeights = None,
    tune: Tune = True,
    embeddings: opt.Embeddings = "device",
    device: opt.Device = "auto",
    json: opt.AsJson = False,
) -> None:
    """Make one folder that starts at once: weights converted, kernels compiled, all checked.

    mosstalk build MOSS-Speech MOSS-Speech-Codec engine --precision fp8

    Then: mosstalk serve --model engine

    It converts or quantises the model, copies the codec, tunes the kernels for
    this GPU (--no-tune: takes the package's tiles) and compiles them into the
    folder, holds engine and codec against the plain reference, plans the
    memory, and writes engine.json. OUT is there whole or not at all. On a CPU
    there is nothing to tune or to compile. Printed are the time of every step,
    and the most memory taken of the host and of the GPU.
    """
    with reported():
        from mosstalk.cli.build_console import Asked, run_build

        asked = Asked(
            tuple(folders),
            precision,
            max_sessions,
            max_rows,
            voices_s,
            random_weights,
            device,
            tune,
            embeddings,
        )
        run_build(asked, as_json=json)
