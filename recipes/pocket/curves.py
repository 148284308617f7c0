"""Curves of a training, drawn from the stages' logs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.reporting.svg import COLOURS, GROUND, INK, drawing, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[str, Any]
LOGS = Path(__file__).parent / "logs"
"""Logs of the training that the shipped weights are from."""
MOST_TRAINING_LINES = 150
_HELD_OUT = ("held", "mel_error")


class Panel:
    """One diagram: curves' labels, their names in the log of training, and on held-out data.

    A name is empty where there is none.
    """

    def __init__(self, title: str, *curves: tuple[str, str, str], logarithmic: bool = True) -> None:
        self.title, self.curves, self.logarithmic = title, curves, logarithmic


PANELS = {
    "tokenizer": (
        Panel(
            "loss",
            ("phones, cross-entropy", "phone", "held_out_phone"),
            ("mel, L1", "mel", "held_out_mel"),
        ),
        Panel(
            "share that is right, or stays what it was",
            ("phones of 20 ms", "right", "held_out_right"),
            ("codes of the teacher", "", "same_clean"),
            ("codes of another throat", "", "same_heard"),
            logarithmic=False,
        ),
        Panel(
            "error of the hidden state, share of its variance",
            ("as the map tells it", "told", ""),
            ("other voices, from what is told", "followed", ""),
        ),
    ),
    "flow": (
        Panel("loss", ("flow matching", "flow", ""), ("mu to mel / 4, L1", "mu", "")),
        Panel(
            "held-out error of the log mel",
            ("decoded, streamed", "", "mel_error"),
            ("mu alone", "", "mu_error"),
            logarithmic=False,
        ),
    ),
    "vocoder": (
        Panel(
            "distance of spectra", ("log mels", "mel", "held_mel"), ("STFT", "stft", "held_stft")
        ),
        Panel(
            "pitch error, Hz",
            ("all frames", "f0", ""),
            ("where both find a voice", "", "held_f0_hz"),
        ),
    ),
    "language_model": (
        Panel(
            "cross-entropy",
            ("written", "text", "held_out_text"),
            ("spoken", "audio", "held_out_audio"),
            ("phones heard", "phones", "held_out_phones"),
        ),
        Panel(
            "share of rows guessed right",
            ("written", "right_text", "held_out_right_text"),
            ("spoken", "right_audio", "held_out_right_audio"),
            logarithmic=False,
        ),
    ),
}


def read_log(path: Path) -> list[Line]:
    """Lines of a stage's log with ``minutes``; runs that went on from each other are joined."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before_s = previous_s = 0.0
    for line in lines:
        if line["elapsed_s"] < previous_s:
            before_s += previous_s
        previous_s = line["elapsed_s"]
        line["minutes"] = (before_s + previous_s) / 60
    return lines


def of_held_out(line: Line) -> bool:
    """Whether a line has figures of held-out data."""
    return any(name.startswith(_HELD_OUT) for name in line)


def thinned(lines: Sequence[str]) -> list[str]:
    """A log's lines: all of held-out data, and ``MOST_TRAINING_LINES`` others, evenly spread."""
    most = MOST_TRAINING_LINES
    training = [n for n, line in enumerate(lines) if not of_held_out(json.loads(line))]
    kept = {training[n * len(training) // most] for n in range(most)} if training else set()
    kept |= set(range(len(lines))) - set(training)
    return [lines[n] for n in sorted(kept)]


def keep_logs(work: Path, logs: Path) -> None:
    """Copy the stages' logs from ``work``, thinned."""
    logs.mkdir(parents=True, exist_ok=True)
    for stage in PANELS:
        lines = (work / f"{stage}.jsonl").read_text().splitlines()
        (logs / f"{stage}.jsonl").write_text("\n".join(thinned(lines)) + "\n")


def draw(logs: Path, out: Path) -> list[Path]:
    """Write ``out/pocket-STAGE.svg`` for every stage; return their paths.

    Raises:
        FileNotFoundError: a stage's log is missing.
        OptionError: matplotlib is not installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for stage, panels in PANELS.items():
        lines = read_log(logs / f"{stage}.jsonl")
        path = out / f"pocket-{stage.replace('_', '-')}.svg"
        with drawing(path, 4.4 * len(panels), 3.4, stage) as figure:
            for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
                _draw_panel(axes, panel, lines)
        paths.append(path)
    return paths


def _draw_panel(axes: "Axes", panel: Panel, lines: list[Line]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain(axes, panel.title)
    axes.set_xlabel("minutes")
    axes.grid(alpha=0.25, which="both")
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for colour, (label, training, held_out) in zip(COLOURS, panel.curves, strict=False):
        for name, style, kind in ((training, "-", "training"), (held_out, "o-", "held out")):
            points = [(line["minutes"], line[name]) for line in lines if name in line]
            if not points:
                continue
            shown = f"{label}, {kind}" if label else kind
            alpha, size = (0.5, 0.0) if kind == "training" else (1.0, 3.5)
            axes.plot(*zip(*points, strict=True), style, color=colour, alpha=alpha,
                      markersize=size, linewidth=1.5, label=shown)  # fmt: skip
    axes.legend(fontsize=9, framealpha=0.8, facecolor=GROUND, labelcolor=INK)
