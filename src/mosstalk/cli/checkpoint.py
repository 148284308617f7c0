"""``mosstalk checkpoint``: commands that read and write checkpoint folders."""

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)


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
