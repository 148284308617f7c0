"""The command line: parses and delegates; heavy imports happen inside the commands."""

from typing import Annotated

import typer

from mosstalk.cli import (
    bench,
    build,
    chat,
    checkpoint,
    engine,
    machine,
    plan,
    replay,
    serve,
    tasks,
    verify,
    voice,
)
from mosstalk.cli.command import add_command
from mosstalk.environment import share_the_processor

app = typer.Typer(
    name="mosstalk",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("chat", cls=chat.OrderedTurns)(chat.chat)
app.command("speak")(tasks.speak)
app.command("transcribe")(tasks.transcribe)
add_command(app, "serve", serve.Serve)
app.command("replay")(replay.replay)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("build")(build.build)
app.command("doctor")(machine.doctor)
app.command("report")(machine.report)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(engine.app, name="engine")
app.add_typer(voice.app, name="voice")
app.add_typer(bench.app, name="bench")


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

    Begin with: mosstalk speak "Good morning." --out morning.wav

    Then: mosstalk transcribe morning.wav

    And: mosstalk chat --speech question.wav --out answer.wav
    """


def main() -> None:
    """Entry point of the ``mosstalk`` command."""
    share_the_processor()
    app()
