"""``mosstalk doctor``: what this machine has; ``mosstalk verify``: golden cases, by tensor."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import argument, option
from mosstalk.errors import OptionError
from mosstalk.verify import ComputePath


@dataclass(frozen=True, eq=False, repr=False)
class Doctor(WritesDocument):
    """Look at this machine: what is there, what is missing, and what then does not run.

    mosstalk doctor --json doctor.json

    mosstalk doctor --report report.json --cases tests/goldens/hift

    Exit code 0: questions are answered with sound here.
    1: something that it needs is broken. Optional things never change it.

    --url looks at a server that runs, here or elsewhere, in place of this
    machine: whether it lives and lets clients in, its certificate, version
    and clock, places, first audio and underruns; and says what to do. Its
    metrics need a key if clients do: MOSSTALK_API_KEY. Exit code 1:
    something is wrong with it.

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
    url: str | None = option(
        None, "Look at the server there, e.g. http://localhost:8000.", metavar="URL"
    )
    model: opt.Model = None
    codec: opt.Codec = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None

    def __post_init__(self) -> None:
        """Refuse two documents at once, and what is for a report where there is none."""
        if self.json and self.report:
            raise OptionError("--report writes its own json; leave it or --json out")
        if self.url and self.report:
            raise OptionError("--report is of this machine; leave it or --url out")
        usual = {"cases": None, "model": None, "codec": None, "device": "auto", "dtype": None}
        given = [name for name, value in usual.items() if getattr(self, name) != value]
        if given and not self.report:
            raise OptionError(f"--{given[0]} is for a report; add --report FILE or leave it out")

    def run(self) -> int:
        """Print what is here, or write it to a file; 1 where the main job does not run."""
        if self.report:
            from mosstalk.diagnostics.report import Wanted, write_report

            wanted = Wanted(
                tuple(self.cases or ()), self.model, self.codec, self.device, self.dtype
            )
            print(write_report(self.report, wanted, force=self.force))
            return 0
        if self.url:
            return self._look_at(self.url)
        from mosstalk.diagnostics.doctor import examine, printed

        with self.printing():
            diagnosis = examine()
        self.deliver(diagnosis.as_dict(), printed(diagnosis))
        return diagnosis.exit_code

    def _look_at(self, url: str) -> int:
        from mosstalk.diagnostics.served import look_at, printed

        with self.printing():
            diagnosis = look_at(url)
        self.deliver(diagnosis.as_dict(), printed(diagnosis))
        return diagnosis.exit_code


@dataclass(frozen=True, eq=False, repr=False)
class Verify(WritesDocument):
    """Run golden cases and print each tensor's largest error beside its bound.

    mosstalk verify tests/goldens/* --device cuda

    Float32 bounds: 2e-4 + 1e-5 of the largest expected magnitude; waves
    1e-3; ids exactly. In bfloat16 and float16 the relative norm of the
    error is judged, ids are only compared.

    Cases recorded from a real checkpoint hold no weights: they are read from
    the folder that the case names, or from --weights. Files of a case may be
    packed with xz, NAME.safetensors.xz.

    --path fast runs language-model cases through the engine, each run alone
    and all of them in one batch, and codec cases through what serves people:
    replies that join and leave a batch, sound as it arrives.

    The document of --json has every comparison.

    Exit code 1: something is out of bounds. 2: a folder cannot be read.
    """

    folders: list[Path] = argument("Folders that hold a case.json.", metavar="DIR...")
    device: opt.Device = "cpu"
    dtype: str = option(
        "float32", f"Compute in {opt.DTYPES_HELP}.", autocompletion=opt.offered(*opt.DTYPES)
    )
    weights: Path | None = option(
        None,
        "Read every case's weights from this folder: a model's, a codec's, or one that "
        "holds model/ and codec/. Default: where the case has or names them.",
    )
    path: ComputePath = option(
        ComputePath.REFERENCE,
        "Which way of computing: the plain reference, or the engine that serves.",
    )

    def run(self) -> int:
        """Judge every case; the exit code."""
        from mosstalk.runtime.device import pick_device, pick_dtype
        from mosstalk.verify.run import judge_cases

        with self.printing():
            where = pick_device(self.device), pick_dtype(self.dtype)
            verdict = judge_cases(self.folders, *where, self.weights, path=self.path)
        self.deliver(verdict.as_dict())
        return verdict.exit_code
