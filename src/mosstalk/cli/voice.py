"""``mosstalk voice``: making voices and looking at them."""

from pathlib import Path
from typing import Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

app = typer.Typer(help="Make voices from recordings, and look at them.", no_args_is_help=True)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The new voice's name, such as ada.")],
    sample: Annotated[
        Path, typer.Argument(help="1 to 30 s of one person speaking; best 3 to 15 s.")
    ],
    codec: opt.CodecAlone = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write this .safetensors file instead of CODEC/voices/NAME. With the codec that "
            "ships with mosstalk: NAME.safetensors here."
        ),
    ] = None,
    channel: opt.Channel = None,
    device: opt.Device = "auto",
    force: opt.Force = False,
) -> None:
    """Make a voice from a recording, for replies to be spoken in.

    mosstalk voice create ada sample.wav --codec MOSS-Speech-Codec

    mosstalk voice create ada sample.wav --out ada.safetensors

    mosstalk chat --text hello --voice ada.safetensors

    It becomes codes, mel and x-vector in CODEC/voices, and fits that codec
    alone. Needs: pip install 'mosstalk\\[voices]'

    A voice made from someone's speech needs that person's permission.
    """
    with reported():
        from mosstalk.cli.voice_console import CreateRequest, run_create

        run_create(CreateRequest(name, sample, codec, out, channel, device, force))


@app.command("list")
def list_(codec: opt.CodecAlone = None, json: opt.AsJson = False) -> None:
    """List a codec's voices: name, codes, seconds, and what each was made from.

    mosstalk voice list --codec MOSS-Speech-Codec
    """
    with reported():
        from mosstalk.cli.voice_console import run_list

        run_list(codec, as_json=json)


@app.command("inspect")
def inspect(
    voice: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A voice, or a voice file.")],
    codec: opt.CodecAlone = None,
    json: opt.AsJson = False,
) -> None:
    """Say what a voice holds, and whether it fits the codec.

    mosstalk voice inspect ada

    Exit code 1: it was made for another codec. 2: it cannot be read.
    """
    with reported():
        from mosstalk.cli.voice_console import run_inspect

        raise typer.Exit(run_inspect(voice, codec, as_json=json))
