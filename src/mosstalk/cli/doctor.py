"""``mosstalk doctor``: what this machine has, to read and to send."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import option
from mosstalk.errors import OptionError


@dataclass(frozen=True, eq=False, repr=False)
class Doctor(WritesDocument):
    """Look at this machine: what is there, what is missing, and what then does not run.

    mosstalk doctor --json doctor.json

    mosstalk doctor --report report.json --cases tests/goldens/hift

    Exit code 0: the main job, a question answered with sound, runs here.
    1: something that it needs is broken. Optional things never change it.

    --report packs what helps to find a fault into one file to send, and says
    what is in it: doctor's facts, verify's results on the given cases, the
    times of one scripted turn, package versions, and hashes of config files.
    It holds no sound, no text that you typed, no weights, and of folders only
    the last part of their names. Of the options
    --cases, --model, --codec, --device and --dtype are for it alone.
    """

    report: Path | None = option(None, "Write a report to send to this file.", metavar="FILE.json")
    cases: list[Path] | None = option(
        None, "Golden case folders to verify and report on; may be repeated."
    )
    model: opt.Model = None
    codec: opt.Codec = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None

    def __post_init__(self) -> None:
        """Refuse two documents at once."""
        if self.json and self.report:
            raise OptionError("--report writes its own json; leave it or --json out")

    def run(self) -> int:
        """Print what is here, or write it to a file; 1 where the main job does not run."""
        if self.report:
            from mosstalk.diagnostics.report import Wanted, write_report

            wanted = Wanted(
                tuple(self.cases or ()), self.model, self.codec, self.device, self.dtype
            )
            print(write_report(self.report, wanted, force=self.force))
            return 0
        from mosstalk.diagnostics.doctor import examine, printed

        with self.printing():
            diagnosis = examine()
        self.deliver(diagnosis.as_dict(), printed(diagnosis))
        return diagnosis.exit_code
