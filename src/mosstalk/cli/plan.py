"""``mosstalk plan``."""

from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

GpuMemory: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, e.g. 24GiB or 80GB.")
]
Gpu: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CARD",
        help="rtx-4090, l4, l40s, a100, h100, h200 or all: what it could do at best. May be "
        "repeated.",
    ),
]
Precision: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="bf16|fp8",
        help="Of the language model's trunk. Default: bf16, or as the --model folder was "
        "quantised; with --gpu both.",
    ),
]
MaxSessions: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Sessions that talk at once.")
]
MaxRows: TypeAlias = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Rows of the longest conversation, 12.5 a second."),
]
VoicesS: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.0, help="Length of all voices together.")
]


def plan(
    gpu_memory: GpuMemory = None,
    gpu: Gpu = None,
    precision: Precision = None,
    max_sessions: MaxSessions = 1,
    max_rows: MaxRows = 8192,
    voices_s: VoicesS = 7.0,
    embeddings: opt.Embeddings = "device",
    model: opt.ModelAlone = None,
    codec: opt.CodecAlone = None,
    json: opt.AsJson = False,
) -> None:
    """Say what fits into a GPU, or what a card could do at best; no GPU is needed.

    mosstalk plan --gpu-memory 24GiB --precision fp8

    mosstalk plan --gpu l40s --gpu h200

    Sizes are those of the published model unless --model and --codec name
    folders, of which only the configs are read. What a card could do is
    computed from bytes, operations and its vendor's figures, not measured.

    Exit code 0: it fits. 1: it does not; what to change is printed.
    2: wrong input.
    """
    with reported():
        from mosstalk.cli.plan_console import PlanRequest, run_plan

        request = PlanRequest(
            gpu_memory, tuple(gpu or ()), precision, max_sessions, max_rows, voices_s,
            embeddings, model, codec,
        )  # fmt: skip
        if not run_plan(request, as_json=json):
            raise typer.Exit(1)
