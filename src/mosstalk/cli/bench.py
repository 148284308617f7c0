"""``mosstalk bench``: every number that the project publishes."""

import typer

from mosstalk.cli.bench_codec import BenchCodec
from mosstalk.cli.bench_report import BenchReport
from mosstalk.cli.bench_serve import BenchServe
from mosstalk.cli.bench_start import BenchStart
from mosstalk.cli.bench_step import BenchStep
from mosstalk.cli.command import add_command, add_moved
from mosstalk.cli.evals import from_evals

_COMMANDS = {
    "report": BenchReport,
    "serve": BenchServe,
    "start": BenchStart,
    "step": BenchStep,
    "codec": BenchCodec,
} | (from_evals("commands", "COMMANDS") or {})

app = typer.Typer(help="Measure what the project publishes.", no_args_is_help=True)
for _name, _command in _COMMANDS.items():
    add_command(app, _name, _command)
add_moved(app, "bench prefill", "bench step --prefill")
add_moved(app, "bench judges", "bench quality --judges")
