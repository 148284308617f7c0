"""``mosstalk plan``: what fits into a GPU, and what a card could do at best."""

import re
from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import option
from mosstalk.environment import this_command
from mosstalk.errors import OptionError

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}

_CARDS = ("rtx-4090", "l4", "l40s", "a100", "h100", "h200")
"""``plan.limits.CARDS``, which imports torch."""


@dataclass(frozen=True, eq=False, repr=False)
class PlanMemory(WritesDocument):
    """Say what fits into a GPU, or what a card could do at best; no GPU is needed.

    mosstalk plan --gpu-memory 24GiB --precision fp8

    mosstalk plan --gpu l40s --gpu h200

    Sizes are those of the published model unless --model and --codec name
    folders, of which only the configs are read. What a card could do is
    computed from bytes, operations and its vendor's figures, not measured.

    Exit code 0: it fits. 1: it does not; what to change is printed.
    2: wrong input.
    """

    gpu_memory: str | None = option(None, "Memory of the GPU, e.g. 24GiB or 80GB.", metavar="SIZE")
    gpu: list[str] | None = option(
        None,
        f"{', '.join(_CARDS)} or all: what it could do at best. May be repeated.",
        metavar="CARD",
        autocompletion=opt.offered(*_CARDS, "all"),
    )
    precision: str | None = option(
        None,
        "Of the language model's trunk. Default: bf16, or as the --model folder was "
        "quantised; with --gpu both.",
        metavar="bf16|fp8",
    )
    max_sessions: int = option(1, "Sessions that talk at once.", metavar="N", min=1)
    max_rows: int = option(
        8192, "Rows of the longest conversation, 12.5 a second.", metavar="N", min=1
    )
    voices_s: float = option(7.0, "Length of all voices together.", metavar="SECONDS", min=0.0)
    embeddings: opt.Embeddings = "device"
    flow_steps: opt.FlowSteps = None
    model: Path | None = option(
        None,
        "Folder of the language model, or pocket or synthetic. Default: the published "
        "model's sizes.",
        autocompletion=opt.offered_models,
    )
    codec: Path | None = option(
        None,
        "Folder of the codec, or pocket or synthetic. Default: the published codec's sizes.",
        autocompletion=opt.offered_models,
    )

    def __post_init__(self) -> None:
        """Refuse a plan of nothing: neither a size of memory nor a card is given."""
        if not self.gpu_memory and not self.gpu:
            raise OptionError(
                "give --gpu-memory SIZE, --gpu CARD or both; see mosstalk plan --help"
            )

    def run(self) -> int:
        """Print what is asked for; 1 where it does not fit.

        Raises:
            OptionError: nothing was asked for, or an option means nothing.
            DeviceError: FP8 for a card without it.
            ConfigError, CheckpointError: see ``configs_of``.
        """
        from mosstalk.plan.fit import Wish, plan_of
        from mosstalk.plan.limits import cards
        from mosstalk.plan.report import best_of, document_of, printed
        from mosstalk.prepared.start import configs_of

        chosen = cards(self.gpu or [])
        memory = memory_of(self.gpu_memory) if self.gpu_memory else None
        with self.printing():
            configs = configs_of(self.model, self.codec).with_steps(self.flow_steps)
        published = self.model is None and self.codec is None
        quantized = "quantization" in configs.model.extra
        wish = Wish(
            memory or 0, self.precision or ("fp8" if quantized else "bf16"), self.max_sessions,
            self.max_rows, self.voices_s, self.embeddings,
        )  # fmt: skip
        plan = plan_of(configs, wish) if memory else None
        best = best_of(configs, chosen, self.precision)
        weights = configs.model.weights_kind if self.model else "none"
        self.deliver(
            document_of(weights, plan, best, published=published),
            printed(plan, chosen, best, self._serve(), published=published) + "\n",
        )
        return 0 if plan is None or plan.fits else 1

    def _serve(self) -> str:
        """The command that serves the model of which the plan is."""
        from mosstalk.prepared.default_models import NAMES, is_built

        command = f"{this_command()} serve"
        if self.flow_steps:
            command += f" --flow-steps {self.flow_steps}"
        if self.model and (str(self.model) in NAMES or is_built(self.model)):
            return f"{command} --model {self.model}"
        return f"{command} --model {self.model or 'MODEL'} --codec {self.codec or 'CODEC'}"


def memory_of(words: str) -> int:
    """Bytes of ``24GiB``, ``80 GB`` or ``24564MiB``.

    Raises:
        OptionError: it says something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)", words.strip())
    if not found or not float(found[1]):
        raise OptionError(f"--gpu-memory {words}: give something like 24GiB, 80GB or 24564MiB")
    return int(float(found[1]) * _UNITS[found[2]])
