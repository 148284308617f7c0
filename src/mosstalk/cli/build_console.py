"""``mosstalk build`` on the terminal: what is asked for, and what is printed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mosstalk.build.leftovers import at_work, clear_leftovers
from mosstalk.build.make import Build, BuildRequest
from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError, OptionError, OutputError
from mosstalk.files import as_text, human_text_on_stderr, new_folder
from mosstalk.prepared.default_models import NAMES, chosen_codec, chosen_model
from mosstalk.progress import progress_bar
from mosstalk.runtime.device import pick_device
from mosstalk.synthesis.sizes import named_sizes

_USUAL_ROWS = 8192
_GIB = 2**30
_TERMINATED = 143
_USAGE = "give MODEL CODEC OUT; pocket OUT or synthetic OUT; or --random-weights full OUT"


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    folders: tuple[Path, ...]
    precision: str
    sessions: int
    rows: int | None
    voices_s: float
    random: str | None
    device: str
    tune: bool
    embeddings: str


def run_build(asked: Asked, *, as_json: bool) -> None:
    """Build as asked, and print each step.

    Raises:
        OptionError: a word means nothing, or there are too many or too few.
        OutputError: OUT exists.
        Others as ``Build.run``.
    """
    out = asked.folders[-1]
    request = _request(asked)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out}: exists already; remove it or choose another name")
    clear_leftovers(out)
    with (
        human_text_on_stderr(as_json),
        _ended_in_order(),
        new_folder(out) as part,
        at_work(part),
        progress_bar() as tell,
    ):
        values = Build(request, part, out, tell, _say).run()
    with human_text_on_stderr(as_json):
        _print(out, values)
    if as_json:
        print(as_text(values), end="")


def _request(asked: Asked) -> BuildRequest:
    device = pick_device(asked.device)
    model, codec = _sources(asked)
    request = BuildRequest(
        model, codec, asked.precision, asked.sessions, asked.rows or _USUAL_ROWS, asked.voices_s,
        device, asked.random, asked.tune, asked.embeddings,
    )  # fmt: skip
    if asked.rows:
        return request
    if asked.random:
        config = LanguageModelConfig.from_dict(named_sizes(asked.random).model)
    else:
        assert model
        config = LanguageModelConfig.from_folder(model)
    rows = min(_USUAL_ROWS, config.max_position_embeddings)
    return BuildRequest(**(vars(request) | {"rows": rows}))


def _sources(asked: Asked) -> tuple[Path | None, Path | None]:
    *sources, _ = asked.folders
    if asked.random:
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
