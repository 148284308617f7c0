"""How large the inputs of each product get: what a fixed scale is made of."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mosstalk.errors import CheckpointError
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.layout import IN_LAYER
from mosstalk.models.quantization import LINEARS, WEIGHT, plain_linear
from mosstalk.numerics.fp8 import E4M3_MAX
from mosstalk.progress import Progress
from mosstalk.quantize.prompts import Prompt

SHARE = 0.9999
"""Of an input's numbers that statistic ``p99.99`` does not clip."""
_CUT_BITS = 23 - 6
_KEPT_BITS = 31 - _CUT_BITS
_SAME_INPUT = {
    name.removesuffix(f".{WEIGHT}"): names[0].removesuffix(f".{WEIGHT}")
    for names in IN_LAYER.values()
    for name in names
}
"""Products by the first one that reads the same input: k and v by q, up by gate."""


@dataclass
class Magnitudes:
    """The largest magnitude of an input, and how often each 64th of an octave occurred.

    A float32's exponent and the first 6 bits of its mantissa number these 64ths in order.
    """

    largest: Tensor = field(default_factory=lambda: torch.zeros(()))
    counts: Tensor = field(default_factory=lambda: torch.zeros(1 << _KEPT_BITS, dtype=torch.int64))

    def add(self, x: Tensor) -> None:
        """Count an input of any shape."""
        sizes = x.detach().float().abs().flatten()
        self.largest = torch.maximum(self.largest.to(sizes.device), sizes.max())
        bins = torch.bincount(sizes.view(torch.int32) >> _CUT_BITS, minlength=len(self.counts))
        self.counts = self.counts.to(sizes.device) + bins

    def scale(self, statistic: str) -> Tensor:
        """The float32 scale () by ``largest``, or by the magnitude that ``SHARE`` do not exceed."""
        top = float(self.largest)
        if statistic != "largest":
            below = self.counts.cumsum(0) >= SHARE * self.counts.sum()
            end = (below.long().argmax() + 1) << _CUT_BITS
            top = min(top, float(end.int().view(torch.float32)))
        return torch.tensor(max(top / E4M3_MAX, torch.finfo(torch.float32).tiny))


@torch.inference_mode()
def calibrate(
    model: LanguageModel, names: Sequence[str], prompts: Sequence[Prompt], tell: Progress
) -> dict[str, Magnitudes]:
    """Run prompts through a plain model; the magnitudes of each product's input, by its name.

    Raises:
        CheckpointError: an input is not finite.
    """
    watched = {first_of(name): Magnitudes() for name in names}
    with _watching(model, watched):
        for place, prompt in enumerate(prompts):
            tell("calibrating", place, len(prompts))
            model(grid(prompt, model), model.new_cache(), last_only=True)
    for name, magnitudes in watched.items():
        if not bool(torch.isfinite(magnitudes.largest)):
            raise CheckpointError(
                f"inputs of {name} are not finite: the weights are damaged or overflow "
                f"{model.dtype}; try --dtype float32"
            )
    return {name: watched[first_of(name)] for name in names}


def first_of(name: str) -> str:
    """The first product that reads the same input as this one."""
    product = next(product for product in LINEARS if name.endswith(f".{product}"))
    return name.removesuffix(product) + _SAME_INPUT[product]


def grid(prompt: Prompt, model: LanguageModel) -> Tensor:
    """The rows of a prompt as the model takes them: (1, T, 2)."""
    return torch.tensor([list(prompt.rows)], device=model.device)


@contextmanager
def _watching(model: LanguageModel, watched: Mapping[str, Magnitudes]) -> Iterator[None]:
    def hook_of(magnitudes: Magnitudes) -> object:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            magnitudes.add(inputs[0])

        return hook

    handles = [
        plain_linear(model, name).register_forward_pre_hook(hook_of(magnitudes))  # type: ignore[arg-type]
        for name, magnitudes in watched.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
