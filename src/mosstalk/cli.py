"""The command line: parses and delegates; heavy imports happen inside the commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mosstalk import options as opt
from mosstalk.errors import MosstalkError, OptionError
from mosstalk.settings import share_the_processor

app = typer.Typer(
    name="mosstalk",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")


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
    """Talk with MOSS-Speech: a spoken question in, a spoken answer out.

    Begin with: mosstalk chat --speech question.wav --out answer.wav
    """


@app.command(cls=OrderedTurns)
def chat(
    ctx: typer.Context,
    speech: opt.Speech = None,
    text: opt.Text = None,
    reply: opt.ReplyKind = "speech",
    out: opt.Out = Path("answer.wav"),
    model: opt.Model = None,
    codec: opt.Codec = None,
    voice: opt.VoiceName = "default",
    system: opt.System = None,
    temperature: opt.Temperature = 0.6,
    top_k: opt.TopK = 20,
    top_p: opt.TopP = 0.95,
    repetition_penalty: opt.RepetitionPenalty = 1.1,
    seed: opt.Seed = 0,
    max_rows: opt.MaxRows = 1024,
    script: opt.ReplyScript = None,
    show_rows: opt.ShowRows = False,
    channel: opt.Channel = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
) -> None:
    """Answer spoken or typed turns, in the order given, with speech or text.

    mosstalk chat --speech question.wav --out answer.wav

    mosstalk chat --text "Good morning" --speech question.wav --reply text

    The answer grows hop by hop in OUT.part, which is renamed at the end.
    Printed are the input's length, rows, steps, the time of every stage with
    its share, the time from the end of the turn to the first sound, the
    real-time factor and the peak memory.
    """
    with reported():
        from mosstalk.console import ChatRequest, run_chat
        from mosstalk.model.generate import Limits
        from mosstalk.model.sampling import SamplingOptions
        from mosstalk.script import Script

        queues = {"speech": iter(map(str, speech or [])), "text": iter(text or [])}
        request = ChatRequest(
            turns=tuple((kind, next(queues[kind])) for kind in ctx.meta["turns"]),
            reply=_one_of("--reply", reply, "speech", "text"),
            out=out,
            model=model,
            codec=codec,
            voice=voice,
            system=system,
            options=SamplingOptions(temperature, top_k, top_p, repetition_penalty, seed),
            limits=Limits(max_rows),
            script=Script.parse(script) if script is not None else None,
            device=device,
            dtype=dtype,
            channel=channel,
            show_rows=show_rows,
        )
        run_chat(request)


def _one_of(option: str, value: str, *choices: str) -> str:
    if value not in choices:
        raise OptionError(f"{option} must be {' or '.join(choices)}, not {value!r}")
    return value


@app.command()
def verify(
    folders: opt.CaseFolders,
    device: opt.Device = "cpu",
    dtype: opt.CaseDtype = "float32",
) -> None:
    """Run golden cases and print each tensor's largest error beside its bound.

    mosstalk verify tests/goldens/* --device cuda

    Float32 bounds: 2e-4 + 1e-5 of the largest expected magnitude; waves
    1e-3; ids exactly. In bfloat16 and float16 the relative norm of the
    error is judged, ids are only compared.

    Exit code 1: something is out of bounds. 2: a folder cannot be read.
    """
    with reported():
        from mosstalk.device import pick_device, pick_dtype
        from mosstalk.verify.run import run_cases

        code = run_cases(folders, pick_device(device), pick_dtype(dtype))
        raise typer.Exit(code)


@checkpoint_app.command("synthesize")
def checkpoint_synthesize(
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


def main() -> None:
    """Entry point of the ``mosstalk`` command."""
    share_the_processor()
    app()


if __name__ == "__main__":
    main()
