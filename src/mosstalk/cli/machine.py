"""``mosstalk doctor`` and ``mosstalk report``: what this machine has, to read and to send."""

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported


def doctor(json: opt.AsJson = False) -> None:
    """Look at this machine: what is there, what is missing, and what then does not run.

    mosstalk doctor --json

    Exit code 0: the main job, a question answered with sound, runs here.
    1: something that it needs is broken. Optional things never change it.
    """
    with reported():
        from mosstalk.diagnostics.doctor import examine, printed
        from mosstalk.files import as_text

        diagnosis = examine()
        typer.echo(as_text(diagnosis.as_dict()) if json else printed(diagnosis), nl=False)
        raise typer.Exit(diagnosis.exit_code)


def report(
    out: opt.ReportFile,
    cases: opt.ReportCases = None,
    model: opt.Model = None,
    codec: opt.Codec = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    force: opt.Force = False,
) -> None:
    """Pack what helps to find a fault into one file to send, and say what is in it.

    mosstalk report report.json --cases tests/goldens/hift

    It holds doctor's facts, verify's results on the given cases, the times of
    one scripted turn, package versions, and hashes of config files. It holds
    no sound, no text that you typed, no weights, and of folders only the
    last part of their names.
    """
    with reported():
        from mosstalk.diagnostics.report import Wanted, write_report

        wanted = Wanted(tuple(cases or ()), model, codec, device, dtype)
        typer.echo(write_report(out, wanted, force=force))
