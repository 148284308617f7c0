"""``mosstalk bench``: every number that the project publishes."""

import typer

from mosstalk.cli.bench_codec import BenchCodec
from mosstalk.cli.bench_compare import BenchCompare
from mosstalk.cli.bench_quality import BenchQuality
from mosstalk.cli.bench_report import BenchReport
from mosstalk.cli.bench_serve import BenchServe
from mosstalk.cli.bench_start import BenchStart
from mosstalk.cli.bench_step import BenchStep
from mosstalk.cli.bench_vad import BenchVad
from mosstalk.cli.command import add_command, add_moved

app = typer.Typer(help="Measure what the project publishes.", no_args_is_help=True)
add_command(app, "compare", BenchCompare)
add_command(app, "report", BenchReport)
add_command(app, "serve", BenchServe)
add_command(app, "start", BenchStart)
add_command(app, "step", BenchStep)
add_command(app, "quality", BenchQuality)
add_command(app, "vad", BenchVad)
add_command(app, "codec", BenchCodec)
add_moved(app, "bench prefill", "bench step --prefill")
add_moved(app, "bench judges", "bench quality --judges")
