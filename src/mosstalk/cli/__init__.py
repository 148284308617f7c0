"""The command line: parses and delegates; heavy imports happen inside the commands."""

from typing import Annotated

import typer

from mosstalk.cli import bench, checkpoint, voice
from mosstalk.cli.build import BuildEngine
from mosstalk.cli.chat import ChatCommand
from mosstalk.cli.checks import Doctor, Verify
from mosstalk.cli.command import add_command, add_moved
from mosstalk.cli.fleet import Fleet
from mosstalk.cli.plan import PlanMemory
from mosstalk.cli.replay import Replay
from mosstalk.cli.serve import Serve
from mosstalk.cli.tasks import Speak, Transcribe
from mosstalk.environment import share_the_processor

app = typer.Typer(
    name="mosstalk",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
add_command(app, "chat", ChatCommand)
add_command(app, "speak", Speak)
add_command(app, "transcribe", Transcribe)
add_command(app, "serve", Serve)
add_command(app, "fleet", Fleet)
add_command(app, "replay", Replay)
add_command(app, "verify", Verify)
add_command(app, "plan", PlanMemory)
add_command(app, "build", BuildEngine)
add_command(app, "doctor", Doctor)
add_moved(app, "report", "doctor --report FILE")
add_moved(app, "engine", "checkpoint inspect")
app.add_typer(checkpoint.app, name="checkpoint")
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
