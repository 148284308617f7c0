"""``mosstalk checkpoint``: commands that read and write checkpoint folders."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)

QuantizedSource: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="A model folder, published or converted; one that holds model/ and codec/; or pocket "
        "or synthetic.",
    ),
]
QuantizedFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="OUT", help="A new folder for the quantised checkpoint.")
]
Scheme: TypeAlias = Annotated[
    str, typer.Option(help="fp8: E4M3, with a float32 scale for each output channel.")
]
Blocks: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="shared|all", help="The shared block's products, or both modality blocks' too."
    ),
]
Activations: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="row|calibrated",
        help="Scale a product's input row by row as it comes, or by one number found beforehand. "
        "Default: calibrated with --calibrate, else row.",
    ),
]
CalibrationPrompts: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="PROMPTS.jsonl",
        help="Conversations to calibrate and measure on, one a line; every tenth is measured on. "
        "Default, where any are needed: 600 made with the model itself.",
    ),
]
Statistic: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="largest|p99.99",
        help="What a calibrated scale is made of: the largest magnitude, or that of all but 1 in "
        "10,000.",
    ),
]
QuantizeJson: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Measure, and write every figure; - is stdout."),
]
QuantizeHtml: TypeAlias = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Measure, and write one page with charts."),
]


@app.command("synthesize")
def synthesize(
    out: opt.NewFolder,
    size: opt.Size = None,
    seed: opt.WeightsSeed = 0,
    dtype: opt.WeightsDtype = "bfloat16",
    tokenizer: opt.TokenizerFile = None,
) -> None:
    """Write random weights in the published layout: model, codec, voice and tokenizer.

    mosstalk checkpoint synthesize random --size tiny,hidden_size=256

    What such a model says is noise. It serves to measure speed, memory and
    exactness on real shapes. A full one takes 20 GiB, codec included.
    """
    with reported():
        from mosstalk.synthesis.command import run_synthesize

        run_synthesize(out, size or ["tiny"], seed, dtype, tokenizer)


@app.command("inspect")
def inspect(
    folder: opt.CheckpointFolder, hashes: opt.Hashes = True, json: opt.AsJson = False
) -> None:
    """Say what a checkpoint holds, and name what is missing or does not fit.

    mosstalk checkpoint inspect MOSS-Speech

    Exit code 1: it has problems. 2: it is no checkpoint at all.
    """
    with reported():
        from mosstalk.checkpoint.commands import run_inspect

        raise typer.Exit(run_inspect(folder, hashes=hashes, as_json=json))


@app.command("convert")
def convert(
    folder: opt.CheckpointFolder,
    out: opt.ConvertedFolder,
    dtype: opt.ConvertDtype = "bf16",
    shard_gib: opt.ShardGib = 2.0,
) -> None:
    """Write a checkpoint in one dtype, matrices fused, with a manifest of hashes.

    mosstalk checkpoint convert MOSS-Speech converted --dtype bf16

    The language model's q, k, v and gate, up become one matrix each; the
    codec's .pt files become safetensors beside configs that say their sizes.
    One shard is in memory at a time. Killed, it goes on where it stopped.
    """
    with reported():
        from mosstalk.checkpoint.commands import run_convert

        run_convert(folder, out, dtype, shard_gib)


@app.command("quantize")
def quantize(
    folder: QuantizedSource,
    out: QuantizedFolder,
    scheme: Scheme = "fp8",
    blocks: Blocks = "shared",
    activations: Activations = None,
    calibrate: CalibrationPrompts = None,
    statistic: Statistic = "largest",
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    json: QuantizeJson = None,
    html: QuantizeHtml = None,
) -> None:
    """Write a checkpoint whose products are in 8 bits, and say what that costs.

    mosstalk checkpoint quantize MOSS-Speech MOSS-Speech-FP8 --html fp8.html

    Embeddings, norms and heads stay as stored, as do both modality blocks
    unless --blocks all. The model is run only to calibrate, and for --json
    and --html: errors of every product, and how far each head's distribution
    moves, on conversations that were not calibrated on. A tensor at a time is
    in memory while it writes; OUT is there whole or not at all.
    """
    with reported():
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.cli.quantize_console import Running, run_quantize
        from mosstalk.cli.quantize_console import Scheme as Asked

        run_quantize(
            folder,
            out,
            Asked(scheme, blocks, activations, statistic, calibrate),
            Running(device, dtype),
            Outputs(json, html),
        )
