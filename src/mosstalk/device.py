"""Choosing a device and a precision, and making float32 mean float32."""

import torch

from mosstalk.errors import DeviceError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def pick_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is CUDA where there is a usable GPU.

    TF32 is switched off, so that float32 on a GPU means the same as on a CPU.

    Raises:
        DeviceError: the machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DeviceError(f"device {name!r} cannot be used ({reason}); try --device cpu") from None
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return device


def pick_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``; raise DeviceError naming the choices."""
    if name not in DTYPES:
        raise DeviceError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on ``device`` has run, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
