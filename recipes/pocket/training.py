"""What every stage shares: a budgeted loop, a log, curves, and weights that resume."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

M = TypeVar("M", bound=nn.Module)
Tensors = tuple[Tensor, ...] | list[Tensor]
_FLOOR = 0.02
"""Learning rate at the end, as a share of its peak."""
_DECAY = 0.999
"""Share of the averaged weights that one step leaves."""


@dataclass(frozen=True)
class Budget:
    """How long a stage trains: until either is used up."""

    steps: int
    minutes: float


@dataclass
class Run:
    """One stage's training run: iterate over ``steps`` and ``learn`` or ``record`` losses.

    Its minutes begin when it is made: what is loaded after that counts too.

    ``resume``: weights of an earlier run to begin from; ``smoke``: tiny sizes; ``plain``: record no
    steps as CUDA graphs. The learning rate follows the larger of the shares of steps and of minutes
    used, so a run that is cut short by the clock still ends with a small one.
    """

    stage: str
    folder: Path
    budget: Budget
    warmup_steps: int = 200
    smoke: bool = False
    seed: int = 0
    resume: Path | None = None
    plain: bool = False
    log_every_s: float = 10.0
    step: int = 0
    _started: float = field(default_factory=time.monotonic)
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        return min(
            1.0,
            max(self.step / self.budget.steps, self.elapsed_s / (60 * self.budget.minutes)),
        )

    def learning_rate(self, peak: float) -> float:
        """Linear warm-up, then a cosine down to 2% of ``peak``."""
        warm = min(1.0, (self.step + 1) / self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return peak * warm * (_FLOOR + (1 - _FLOOR) * cosine)

    def learn(
        self, losses: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, peak: float,
        mean: "Averaged[M]", module: M,
    ) -> None:  # fmt: skip
        """One step of ``module`` down ``losses["loss"]``, and what ``follow`` does."""
        optimizer.zero_grad(set_to_none=True)
        losses["loss"].backward()
        self.follow(losses, optimizer, peak, mean, module)

    def follow(
        self, losses: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, peak: float,
        mean: "Averaged[M]", module: M,
    ) -> None:  # fmt: skip
        """One step of ``module`` along its gradients.

        The rate is this step's, the new weights count in ``mean``, and ``losses`` are logged.
        """
        self.set_rate(optimizer, peak)
        step_along(optimizer, module.parameters())
        mean.update(module)
        self.record(**losses)

    def set_rate(self, optimizer: torch.optim.Optimizer, peak: float) -> None:
        """Give every parameter group of ``optimizer`` its ``share``, if it has one, of this step's
        learning rate.
        """
        rate = self.learning_rate(peak)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)

    def steps(self) -> Iterator[int]:
        """Step numbers until the budget is used up, with a line of progress now and then."""
        last = self.elapsed_s
        while self.progress < 1:
            yield self.step
            self.step += 1
            if self.elapsed_s - last >= self.log_every_s:
                last = self.elapsed_s
                self._flush()
        self._flush()

    def record(self, **losses: Tensor) -> None:
        """Add a step's losses to the mean that is logged next; waits for no device."""
        for name, value in losses.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._count += 1

    def log(self, **values: float) -> None:
        """Write one line to the log and the screen."""
        line = {"stage": self.stage, "step": self.step, "elapsed_s": round(self.elapsed_s, 1)}
        line |= {name: round(value, 5) for name, value in values.items()}
        with (self.folder / f"{self.stage}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        where = f"{self.progress:4.0%}  step {self.step}  {self.elapsed_s:.0f} s"
        print(f"{self.stage}  {where}  {shown}", flush=True)

    def _flush(self) -> None:
        if self._count:
            self.log(**{name: float(total) / self._count for name, total in self._sums.items()})
            self._sums, self._count = {}, 0


def adamw(
    parameters: list[Any], rate: float = 1e-3, betas: tuple[float, float] = (0.9, 0.98)
) -> torch.optim.AdamW:
    """The optimiser of every stage, for parameters or groups of them."""
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    return torch.optim.AdamW(parameters, rate, betas, weight_decay=0.01, fused=first.is_cuda)


def descend(
    loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> None:
    """One step down ``loss``, as ``step_along`` takes it."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    step_along(optimizer, parameters)


def step_along(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """One step along the gradients of ``parameters``, which are cut to a norm of 1."""
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


class Averaged(Generic[M]):
    """An exponential moving average of a module's weights; buffers are those of the last update.

    The average is short at first, so that a brief run is not its random beginning.
    """

    def __init__(self, module: M) -> None:
        self._steps = 0
        self._model = AveragedModel(module, multi_avg_fn=self._average, use_buffers=False)

    @property
    def module(self) -> M:
        """The module with the averaged weights."""
        return cast(M, self._model.module)

    def update(self, module: M) -> None:
        """Let ``module``'s present weights count."""
        self._model.update_parameters(module)

    @torch.no_grad()
    def _average(self, kept: Tensors, new: Tensors, _: Tensor | int) -> None:
        self._steps += 1
        share = 1 - min(_DECAY, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(kept, new, share)


def save_weights(
    module: nn.Module, path: Path, info: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """Write weights as ``dtype`` with ``info`` as json metadata, through a temporary file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(dtype).contiguous().cpu()
        for name, value in module.state_dict().items()
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"info": json.dumps(dict(info))})
    part.replace(path)


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill ``module`` strictly from a file that ``save_weights`` wrote."""
    module.load_state_dict(load_file(path))


def fresh(module: M) -> M:
    """Fill the empty parameters that the inference modules leave uninitialised.

    Layers that torch initialises keep what they have; norms' weights and Snake's a become
    one, biases of position in attention zero.
    """
    for name, parameter in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "alpha" or (leaf == "weight" and parameter.ndim == 1):
            nn.init.ones_(parameter)
        elif leaf.startswith("pos_bias"):
            nn.init.zeros_(parameter)
    return module
