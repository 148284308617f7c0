"""``mosstalk build``: from a checkpoint to one folder that starts at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosstalk.cli import options as opt
from mosstalk.errors import CheckpointError, OptionError, OutputError

if TYPE_CHECKING:
    from mosstalk.build.make import BuildRequest

_USUAL_ROWS = 8192
_GIB = 2**30
_TERMINATED = 143
_USAGE = "give MODEL CODEC OUT; pocket OUT or synthetic OUT; or --random-weights full OUT"


@dataclass(frozen=True, eq=False, repr=False)
class BuildEngine:
    """Make one folder that starts at once: weights converted, kernels compiled, all checked.

    mosstalk build MOSS-Speech MOSS-Speech-Codec engine --precision fp8

    Then: mosstalk serve --model engine

    It converts or quantises the model, copies the codec, tunes the kernels for
    this GPU (--no-tune: takes the package's tiles) and compiles them into the
    folder, holds engine and codec against the plain reference, plans the
    memory, and writes engine.json. OUT is there whole or not at all. On a CPU
    there is nothing to tune or to compile. Printed are the time of every step,
    and the most memory taken of the host and of the GPU.
    """

    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL CODEC OUT",
            help="The model's and the codec's folders, or pocket or synthetic for both, and a new "
            "folder. With --random-weights OUT alone.",
        ),
    ]
    precision: Annotated[
        str, typer.Option(metavar="bf16|fp8", help="Of the language model; fp8: its shared block.")
    ] = "bf16"
    max_sessions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sessions that talk at once.")
    ] = 64
    max_rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows of the longest conversation, 12.5 a second. Default: 8192, or the model's "
            "context where that is less.",
        ),
    ] = None
    voices_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Length of all voices together.")
    ] = 40.0
    random_weights: Annotated[
        str | None,
        typer.Option(
            metavar="full|tiny",
            help="Random weights of the published (full) or of tiny sizes in place of MODEL and "
            "CODEC, to measure with.",
        ),
    ] = None
    tune: Annotated[
        bool,
        typer.Option(
            "--tune/--no-tune",
            help="Time divisions of the language model's products on this GPU, and keep those that "
            "are faster than the package's own.",
        ),
    ] = True
    embeddings: opt.Embeddings = "device"
    device: opt.Device = "auto"
    json: opt.AsJson = False

    def run(self) -> None:
        """Build as asked, and print each step.

        Raises:
            OptionError: a word means nothing, or there are too many or too few.
            OutputError: OUT exists.
            Others as ``Build.run``.
        """
        from mosstalk.build.make import Build, at_work, clear_leftovers
        from mosstalk.files import as_text, human_text_on_stderr, new_folder
        from mosstalk.progress import progress_bar

        out = self.folders[-1]
        request = self._request()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"{out}: exists already; remove it or choose another name")
        clear_leftovers(out)
        with (
            human_text_on_stderr(self.json),
            _ended_in_order(),
            new_folder(out) as part,
            at_work(part),
            progress_bar() as tell,
        ):
            values = Build(request, part, out, tell, _say).run()
        with human_text_on_stderr(self.json):
            _print(out, values)
        if self.json:
            print(as_text(values), end="")

    def _request(self) -> "BuildRequest":
        from mosstalk.build.make import BuildRequest
        from mosstalk.runtime.device import pick_device

        device = pick_device(self.device)
        model, codec = self._sources()
        return BuildRequest(
            model, codec, self.precision, self.max_sessions, self.max_rows or self._rows(model),
            self.voices_s, device, self.random_weights, self.tune, self.embeddings,
        )  # fmt: skip

    def _rows(self, model: Path | None) -> int:
        """Rows of the longest conversation where nobody says."""
        from mosstalk.config import LanguageModelConfig
        from mosstalk.synthesis.sizes import named_sizes

        if self.random_weights:
            config = LanguageModelConfig.from_dict(named_sizes(self.random_weights).model)
        else:
            assert model
            config = LanguageModelConfig.from_folder(model)
        return min(_USUAL_ROWS, config.max_position_embeddings)

    def _sources(self) -> tuple[Path | None, Path | None]:
        """The model's folder and the codec's; None for random weights."""
        from mosstalk.prepared.default_models import NAMES, chosen_codec, chosen_model

        *sources, _ = self.folders
        if self.random_weights:
            if sources:
                raise OptionError(f"--random-weights stands in place of MODEL and CODEC: {_USAGE}")
            return None, None
        if len(sources) == 1 and str(sources[0]) in NAMES:
            return chosen_model(sources[0], None)
        if len(sources) != 2:
            raise OptionError(_USAGE)
        model, codec = sources
        for folder in (model, chosen_codec(codec)):
            if not folder.is_dir():
                raise CheckpointError(f"{folder}: no such folder; {_USAGE}")
        return model, chosen_codec(codec)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM unwind, so that nothing half-written stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, flush=True)


def _print(out: Path, values: dict[str, Any]) -> None:
    for check in values["checks"]:
        print(f"  {check['name']:<36} {check['error']:.2e} of {check['bound']:.2e} {check['note']}")
    peaks = values["peaks_bytes"]
    device = peaks["device"]
    plan = values["plan"]
    needed = f"{plan['needed_bytes'] / _GIB:.2f} GiB planned on a GPU for one conversation of "
    print(f"{needed}{plan['wish']['rows']:,} rows and {plan['wish']['sessions']} sessions")
    print(
        f"{out}: {values['precision']}, {values['weights']} weights, built in "
        f"{values['times_s']['all']:.1f} s; peak host memory {_gib(peaks['host'])}, "
        f"peak device memory {_gib(device) if device else '- (no GPU)'}"
    )
    print(f"try: mosstalk serve --model {out}")


def _gib(size: int | None) -> str:
    return "not told" if size is None else f"{size / _GIB:.2f} GiB"
