"""What an engine's memory holds: how many blocks fit, and text embeddings kept on the host."""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mosstalk.conversation import SpecialIds
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.engine.kv_store import blocks_that_fit
from mosstalk.engine.model_runner import ModelRunner
from mosstalk.engine.request import Request
from mosstalk.engine.scheduler import Work
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import DeviceError
from mosstalk.models.language_model import LanguageModel
from mosstalk.reply_options import Limits, SamplingOptions

MARGIN = 0.03
"""Share of a GPU's memory left free: what other libraries and fragments take."""


def sized(
    model: LanguageModel,
    ids: SpecialIds,
    options: EngineOptions,
    *,
    memory_bytes: int | None = None,
    context_rows: int | None = None,
    spare_bytes: int = 0,
) -> EngineOptions:
    """``options`` with as many blocks as fit into ``memory_bytes``.

    Without a budget, on a GPU, all that its largest step leaves, but for ``spare_bytes``: the
    step is run once, with conversations of ``context_rows`` (the model's context unless given),
    and measured.

    Raises:
        DeviceError: not one conversation fits, or no budget was given on a CPU.
    """
    if memory_bytes is None:
        memory_bytes = free_bytes(model, ids, options, context_rows) - spare_bytes
    blocks = blocks_that_fit(
        model.config, model.dtype, options.block_rows, memory_bytes, context_rows
    )
    return replace(options, blocks=blocks)


def free_bytes(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, context_rows: int | None = None
) -> int:
    """Bytes of a GPU's memory that its largest step leaves, but for a margin.

    Raises:
        DeviceError: the model is on no GPU.
    """
    if model.device.type != "cuda":
        raise DeviceError(f"memory is measured on a GPU; on {model.device} name a budget in bytes")
    trial = largest_step(model, ids, options, context_rows)
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    trial.run()
    torch.cuda.synchronize(model.device)
    taken = torch.cuda.max_memory_allocated(model.device) - before
    taken += trial.runner.layers.fixed_bytes  # there before the step, and no longer after it
    del trial
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return free - taken - int(MARGIN * total)


def largest_step(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, context_rows: int | None = None
) -> "Trial":
    """A step of full size: ``slots`` single rows and ``step_rows`` rows of a prompt.

    They lie at the end of the longest contexts, a modality block catches up, and everyone has
    a text token sampled: that vocabulary is the larger one.
    """
    rows = context_rows or model.config.max_position_embeddings
    limits = options.limits
    pool = BlockPool(-(-rows // options.block_rows), options.block_rows)
    runner = ModelRunner(
        model, ids, pool, limits.slots + 1,
        pass_rows=limits.step_rows, deferral=options.deferral,
        layers=options.layers(limits.slots + 1),
    )  # fmt: skip
    works = []
    for slot in range(limits.slots + 1):
        count = min(limits.step_rows, rows) if slot == limits.slots else 1
        # All share the same blocks: what is written there is nobody's.
        sequence = Sequence(pool, ids.modality_pad, [(0, ids.audio_pad)] * rows)
        sequence.table = list(range(pool.size))
        read = 0 if count > 1 else rows - 1
        sequence.read = [rows - count, read, read]
        request = Request(slot, sequence, ids, SamplingOptions(), Limits(1), rows + 1, slot=slot)
        works.append(Work(sequence, request, rows - count, count, True))
    return Trial(runner, works)


@dataclass
class Trial:
    """A runner of its own and the step to run on it."""

    runner: ModelRunner
    works: list[Work]

    def run(self) -> None:
        """Run the step."""
        self.runner.step(self.works)


# The table of text embeddings in the host's memory: a step reads a few KiB of its gigabyte.


def keep_table_on_host(model: LanguageModel) -> None:
    """Move the text embeddings (vocab_size, hidden_size) from a GPU to pinned memory of the host.

    Kernels go on reading them where they are, over the bus, by unified addressing. On a CPU
    nothing is done.

    Raises:
        DeviceError: the system pins no memory of that size.
    """
    owner, device = model.model.embed_tokens, model.device
    if device.type != "cuda":
        return
    host = owner.weight.detach().to("cpu", copy=True)
    owner.weight = nn.Parameter(_seen_from(device, host), requires_grad=False)
    torch.cuda.empty_cache()


class _Bytes:
    """Memory of the host, described as a GPU's for torch to take as it is."""

    def __init__(self, host: Tensor) -> None:
        self.host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.host.nbytes,),
            "typestr": "|u1",
            "data": (self.host.data_ptr(), False),
        }


def _seen_from(device: torch.device, host: Tensor) -> Tensor:
    """The same memory as a tensor of ``device``, pinned for as long as it is used.

    Torch's own pinned memory comes in powers of two, nearly twice of what is needed here.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if failed:
            raise DeviceError(
                f"--embeddings host: the system pins no {host.nbytes / 2**30:.1f} GiB of memory "
                f"(CUDA error {failed}): raise `ulimit -l`, or leave them on the device"
            )
        described = _Bytes(host)
        # The tensor that torch makes keeps `described` alive, and that the memory.
        weakref.finalize(described, runtime.cudaHostUnregister, host.data_ptr())
        found = torch.as_tensor(described, device=device)
    if found.data_ptr() != host.data_ptr():
        raise DeviceError("--embeddings host: this GPU does not address the host's memory")
    return found.view(host.dtype).view(host.shape)
