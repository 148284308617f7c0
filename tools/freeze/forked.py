"""Run by the checkout that is recorded: commands one after the other, each in a process of its own.

    python forked.py MODULE FUNCTION

Importing torch takes longer than most commands do. So that is done once, and each command runs in a
fork that has it. A request is a line of json on standard input (words, folder, and files for what
is read and printed), the answer a line with the exit code.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence

_SLOW = (
    "torch", "torch.nn.functional", "numpy", "safetensors.torch", "tokenizers", "soundfile", "soxr",
    "wetext", "typer", "rich.console", "pydantic", "fastapi", "uvicorn",
)  # fmt: skip
"""What commands import of others and starts no thread (onnxruntime does): what another thread
holds at a fork is never let go. What is not there is left out."""


def become(entry: Sequence[str], words: Sequence[str], folder: str, files: Sequence[str]) -> None:
    """Be the command with the entry point (module, function), these arguments, this folder, and
    these files for standard input, output and error.
    """
    for number, path in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    sys.stdin, sys.argv = os.fdopen(0, closefd=False), ["mosstalk", *words]
    module, function = entry
    getattr(importlib.import_module(module), function)()


def main() -> None:
    for name in _SLOW:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    if len(threads) > 1:
        sys.exit(f"forked.py: {len(threads)} threads after the imports; leave out who starts them")
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        if not (child := os.fork()):
            become(sys.argv[1:], **asked)
            sys.exit()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
