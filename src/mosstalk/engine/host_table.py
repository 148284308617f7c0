"""The table of text embeddings in the host's memory: a step reads a few KiB of its gigabyte."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from mosstalk.errors import DeviceError
from mosstalk.models.language_model import LanguageModel


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
