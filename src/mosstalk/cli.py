"""The command line: parses and delegates; heavy imports happen inside the commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mosstalk.errors import MosstalkError

app = typer.Typer(
    name="mosstalk",
    help="Talk with MOSS-Speech: a spoken question in, a spoken answer out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

DTYPE_HELP = "float32, bfloat16, float16 or float64"


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors in what we were given into one line and exit code 2."""
    try:
        yield
    except MosstalkError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except MemoryError:
        _fail("out of memory; use a machine with more, or a smaller --dtype")
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        _fail("out of memory; use a device with more, a smaller --dtype or a shorter input")


def _fail(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


class OrderedTurns(TyperCommand):
    """A command that remembers in which order --speech and --text were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; ``ctx.meta['turns']`` becomes the names of the turns in order."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta["turns"] = [p.name for p in order if p.name in ("speech", "text")]
        return super().parse_args(ctx, args)


def _version(wanted: bool) -> None:
    if wanted:
        from mosstalk import __version__

        typer.echo(f"mosstalk {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Talk with MOSS-Speech: a spoken question in, a spoken answer out."""


@app.command(cls=OrderedTurns)
def chat(
    ctx: typer.Context,
    speech: Annotated[
        list[Path] | None,
        typer.Option(help="A spoken turn: any sound file libsndfile reads. May be repeated."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A typed turn. May be repeated and mixed.")
    ] = None,
    reply: Annotated[str, typer.Option(help="Kind of the answers: speech or text.")] = "speech",
    out: Annotated[
        Path,
        typer.Option(
            help="Where spoken answers go: .wav, .flac or .ogg; of several turns, OUT-1, OUT-2 ..."
        ),
    ] = Path("answer.wav"),
    model: Annotated[
        Path | None, typer.Option(help="Folder of the language model. Default: a tiny random one.")
    ] = None,
    codec: Annotated[Path | None, typer.Option(help="Folder of the codec.")] = None,
    voice: Annotated[
        str, typer.Option(help="A voice of the codec's folder by name, or a voice file.")
    ] = "default",
    system: Annotated[
        str | None, typer.Option(help="System prompt; '' for none. Default: the public demo's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest id.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Draw among the K likeliest; 0 is off.")] = 20,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with mass P.")] = 0.95,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.1,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.")] = 0,
    max_rows: Annotated[
        int, typer.Option(help="Longest answer in rows, 80 ms of speech each.")
    ] = 1024,
    script: Annotated[
        str | None,
        typer.Option(
            help="Force mode changes and length, e.g. speech:75 or text:8,speech:20: random "
            "weights never end by themselves. All other draws stay real."
        ),
    ] = None,
    show_rows: Annotated[
        bool, typer.Option("--show-rows", help="Print step, mode, text id, audio id.")
    ] = False,
    channel: Annotated[
        int | None, typer.Option(help="Which channel to hear, from 1. Default: mix up to two.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{DTYPE_HELP}. Default: float32 on a CPU, as stored on a GPU."),
    ] = None,
) -> None:
    """Answer spoken or typed turns, in the order given, with speech or text.

    mosstalk chat --speech question.wav --out answer.wav

    mosstalk chat --text "Good morning" --speech question.wav --reply text

    The answer grows hop by hop in OUT.part, which is renamed at the end. Printed are the
    input's length, rows, steps, the time of every stage with its share, the time from the
    end of the turn to the first sound, the real-time factor and the peak memory.
    """
    with reported():
        from mosstalk.console import ChatRequest, run_chat
        from mosstalk.errors import ConfigError
        from mosstalk.model.generate import Limits
        from mosstalk.model.sampling import SamplingOptions
        from mosstalk.script import Script

        if reply not in ("speech", "text"):
            raise ConfigError(f"--reply must be speech or text, not {reply!r}")
        if max_rows < 1:
            raise ConfigError(f"--max-rows must be at least 1, not {max_rows}")
        queues = {"speech": iter(map(str, speech or [])), "text": iter(text or [])}
        request = ChatRequest(
            turns=tuple((kind, next(queues[kind])) for kind in ctx.meta["turns"]),
            reply=reply,
            out=out,
            model=model,
            codec=codec,
            voice=voice,
            system=system,
            options=SamplingOptions(temperature, top_k, top_p, repetition_penalty, seed),
            limits=Limits(max_rows),
            script=Script.parse(script) if script else None,
            device=device,
            dtype=dtype,
            channel=channel,
            show_rows=show_rows,
        )
        run_chat(request)


@app.command()
def verify(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders that hold a case.json.")
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "float32",
) -> None:
    """Run golden cases and print each tensor's largest error beside its bound.

    Float32 bounds: 2e-4 + 1e-5 of the largest expected magnitude; waves 1e-3; ids exactly.
    In bfloat16 and float16 the relative norm of the error is judged, ids are only compared.

    Exit code 1: something is out of bounds. Exit code 2: a folder cannot be read.
    """
    with reported():
        from mosstalk.device import pick_device, pick_dtype
        from mosstalk.verify.run import run_cases

        code = run_cases(folders, pick_device(device), pick_dtype(dtype))
    raise typer.Exit(code)


@checkpoint_app.command("synthesize")
def checkpoint_synthesize(
    out: Annotated[Path, typer.Argument(help="A new folder; gets OUT/model and OUT/codec.")],
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="tiny, full, or KEY=VALUE; repeat or join with commas, e.g. "
            "tiny,hidden_size=256,flow.input_size=96."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed and sizes, same bytes.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of the language model: bfloat16, float16 or float32.")
    ] = "bfloat16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json to use instead of a byte-level one.")
    ] = None,
) -> None:
    """Write random weights in the published layout: model, codec, voice and tokenizer.

    What such a model says is noise. It serves to measure speed, memory and exactness on real
    shapes. A full one takes 17 GiB for the model and 4 GiB for the codec.
    """
    with reported():
        from mosstalk.synthesis.command import run_synthesize

        run_synthesize(out, size or ["tiny"], seed, dtype, tokenizer)


def main() -> None:
    """Entry point of the ``mosstalk`` command."""
    app()


if __name__ == "__main__":
    main()
