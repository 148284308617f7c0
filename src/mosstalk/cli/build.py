"""``mosstalk build``: from a checkpoint to one folder that starts at once."""

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import argument, option
from mosstalk.environment import this_command
from mosstalk.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from mosstalk.build.make import BuildRequest

_USUAL_ROWS = 8192
_GIB = 2**30
_SHOW_CURSOR = b"\x1b[?25h"
_USAGE = "give MODEL CODEC OUT; pocket OUT or synthetic OUT; or --random-weights full OUT"


@dataclass(frozen=True, eq=False, repr=False)
class BuildEngine(WritesDocument):
    """Make one folder that starts at once: weights converted, kernels compiled, all checked.

    mosstalk build MOSS-Speech MOSS-Speech-Codec engine --precision fp8

    Then: mosstalk serve --model engine

    It converts or quantises the model, copies the codec, tunes the kernels for
    this GPU (--no-tune: takes the package's tiles) and compiles them into the
    folder, holds engine and codec against the plain reference, plans the
    memory, and writes engine.json. OUT is there whole or not at all. On a CPU
    there is nothing to tune or to compile. Printed is the most memory taken of
    the host and of the GPU; the time of every step goes to stderr.
    """

    folders: list[Path] = argument(
        "The model's and the codec's folders, or pocket or synthetic for both, and a new "
        "folder. With --random-weights OUT alone.",
        metavar="MODEL CODEC OUT",
        autocompletion=opt.offered_models,
    )
    precision: str = option(
        "bf16", "Of the language model; fp8: its shared block.", metavar="bf16|fp8"
    )
    max_sessions: int = option(64, "Sessions that talk at once.", metavar="N", min=1)
    max_rows: int | None = option(
        None,
        "Rows of the longest conversation, 12.5 a second. Default: 8192, or the model's "
        "context where that is less.",
        metavar="N",
        min=1,
    )
    voices_s: float = option(40.0, "Length of all voices together.", metavar="SECONDS", min=0.0)
    random_weights: opt.RandomWeights = None
    tune: bool = option(
        True,
        "Time divisions of the language model's products on this GPU, and keep those that "
        "are faster than the package's own.",
    )
    embeddings: opt.Embeddings = "device"
    device: opt.Device = "auto"

    def run(self) -> None:
        """Build as asked, and print each step.

        Raises:
            OptionError: a word means nothing, or there are too many or too few.
            OutputError: OUT exists.
            Others as ``Build.run``.
        """
        from mosstalk.build.make import Build, at_work, clear_leftovers
        from mosstalk.files import new_folder
        from mosstalk.progress import progress_bar

        out = self.folders[-1]
        request = self._request()
        clear_leftovers(out)
        with (
            self.printing(),
            _ended_in_order() as unfinished,
            new_folder(out) as part,
            at_work(part),
            progress_bar() as tell,
        ):
            unfinished.append(part)
            values = Build(
                request, part, out, tell, partial(print, file=sys.stderr, flush=True)
            ).run()
        self.deliver(values, _text_of(out, values))

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
def _ended_in_order() -> Iterator[list[Path]]:
    """Yield a list; on SIGTERM the folders in it are removed, and the process leaves with 143.

    The handler itself does both. An exception that it raised could come up inside a call of
    torch, which may catch it and raise another one, or none.
    """
    unfinished: list[Path] = []
    if threading.current_thread() is not threading.main_thread():
        yield unfinished
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # the progress bar hides it
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield unfinished
    finally:
        signal.signal(signal.SIGTERM, before)


def _text_of(out: Path, values: dict[str, Any]) -> str:
    """What was built, for people."""
    plan, peaks = values["plan"], values["peaks_bytes"]
    lines = [
        f"  {check['name']:<36} {check['error']:.2e} of {check['bound']:.2e} {check['note']}"
        for check in values["checks"]
    ]
    lines += [
        f"{_gib(plan['needed_bytes'])} planned on a GPU for one conversation of "
        f"{plan['wish']['rows']:,} rows and {plan['wish']['sessions']} sessions",
        f"{out}: {values['precision']}, {values['weights']} weights, built in "
        f"{values['times_s']['all']:.1f} s; peak host memory {_gib(peaks['host'])}, "
        f"peak device memory {_gib(peaks['device']) if peaks['device'] else '- (no GPU)'}",
        f"try: {this_command()} serve --model {out}{_voice_to_name(out)}",
    ]
    return "\n".join(lines) + "\n"


def _voice_to_name(out: Path) -> str:
    """The option without which a server would look for a voice that is not there."""
    from mosstalk.models.voices import any_voice, list_voices
    from mosstalk.prepared.default_models import CODEC

    voice = any_voice(list_voices(out / CODEC / "voices"))
    return "" if voice == "default" else f" --voice {shlex.quote(voice)}"


def _gib(size: int | None) -> str:
    return "not told" if size is None else f"{size / _GIB:.2f} GiB"
