"""``mosstalk plan``: what fits into a GPU, and what a card could do at best."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import one_of
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.plan.fit import Wish
    from mosstalk.plan.sizes import Configs

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


@dataclass(frozen=True, eq=False, repr=False)
class PlanMemory:
    """Say what fits into a GPU, or what a card could do at best; no GPU is needed.

    mosstalk plan --gpu-memory 24GiB --precision fp8

    mosstalk plan --gpu l40s --gpu h200

    Sizes are those of the published model unless --model and --codec name
    folders, of which only the configs are read. What a card could do is
    computed from bytes, operations and its vendor's figures, not measured.

    Exit code 0: it fits. 1: it does not; what to change is printed.
    2: wrong input.
    """

    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, e.g. 24GiB or 80GB.")
    ] = None
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD",
            help="rtx-4090, l4, l40s, a100, h100, h200 or all: what it could do at best. May be "
            "repeated.",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp8",
            help="Of the language model's trunk. Default: bf16, or as the --model folder was "
            "quantised; with --gpu both.",
        ),
    ] = None
    max_sessions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sessions that talk at once.")
    ] = 1
    max_rows: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Rows of the longest conversation, 12.5 a second."),
    ] = 8192
    voices_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Length of all voices together.")
    ] = 7.0
    embeddings: opt.Embeddings = "device"
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the language model, or pocket or synthetic. Default: the published "
            "model's sizes."
        ),
    ] = None
    codec: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the codec, or pocket or synthetic. Default: the published codec's "
            "sizes."
        ),
    ] = None
    json: opt.AsJson = False

    def run(self) -> int:
        """Print what is asked for; 1 where it does not fit.

        Raises:
            OptionError: nothing was asked for, or an option means nothing.
            DeviceError: FP8 for a card without it.
            ConfigError, CheckpointError: see ``configs_of``.
        """
        from mosstalk.files import as_text
        from mosstalk.plan.fit import plan_of
        from mosstalk.plan.limits import cards
        from mosstalk.plan.report import best_of, document_of, printed
        from mosstalk.prepared.start import configs_of

        self._check()
        chosen = cards(self.gpu or [])
        memory = memory_of(self.gpu_memory) if self.gpu_memory else None
        configs = configs_of(self.model, self.codec)
        published = self.model is None and self.codec is None
        plan = plan_of(configs, self._wish(configs, memory)) if memory else None
        best = best_of(configs, chosen, self.precision)
        if self.json:
            weights = configs.model.weights_kind if self.model else "none"
            print(as_text(document_of(weights, plan, best, published=published)), end="")
        else:
            print(printed(plan, chosen, best, published=published))
        return 0 if plan is None or plan.fits else 1

    def _check(self) -> None:
        from mosstalk.plan.fit import PLACES
        from mosstalk.plan.sizes import PRECISIONS

        if self.precision not in (None, *PRECISIONS):
            raise OptionError(f"--precision {self.precision}: choose of {', '.join(PRECISIONS)}")
        one_of("--embeddings", self.embeddings, *PLACES)
        if not self.gpu_memory and not self.gpu:
            raise OptionError(
                "give --gpu-memory SIZE, --gpu CARD or both; see mosstalk plan --help"
            )

    def _wish(self, configs: "Configs", memory: int) -> "Wish":
        from mosstalk.plan.fit import Wish

        quantized = "quantization" in configs.model.extra
        precision = self.precision or ("fp8" if quantized else "bf16")
        return Wish(
            memory, precision, self.max_sessions, self.max_rows, self.voices_s, self.embeddings
        )


def memory_of(words: str) -> int:
    """Bytes of ``24GiB``, ``80 GB`` or ``24564MiB``.

    Raises:
        OptionError: it says something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)", words.strip())
    if not found or not float(found[1]):
        raise OptionError(f"--gpu-memory {words}: give something like 24GiB, 80GB or 24564MiB")
    return int(float(found[1]) * _UNITS[found[2]])
