"""``mosstalk checkpoint synthesize``: sizes from words, progress, what was written."""

import time
from pathlib import Path

from mosstalk.environment import install_command, this_command
from mosstalk.files import new_folder
from mosstalk.models.x_vector import X_VECTOR_FILE
from mosstalk.progress import progress_bar
from mosstalk.runtime.device import pick_dtype
from mosstalk.synthesis.sizes import parse_sizes
from mosstalk.synthesis.write import Synthesis, synthesize


def run_synthesize(
    out: Path, words: list[str], seed: int, dtype: str, tokenizer: Path | None
) -> None:
    """Write a synthetic checkpoint to ``out`` and print what it is."""
    sizes = parse_sizes([part for word in words for part in word.split(",")])
    started = time.perf_counter()
    with progress_bar() as tell, new_folder(out) as part:
        synthesize(part, Synthesis(sizes, seed, pick_dtype(dtype), tokenizer, tell))
    files = [path for path in out.rglob("*") if path.is_file()]
    size_mib = sum(path.stat().st_size for path in files) / 2**20
    print(
        f"{out}: {len(files)} files, {size_mib:.1f} MiB of random weights (seed {seed}) "
        f"in {time.perf_counter() - started:.1f} s"
    )
    if not (out / "codec" / "flow" / X_VECTOR_FILE).exists():
        print(
            f"without codec/flow/{X_VECTOR_FILE}, which voices are made with: "
            f"to get it: {install_command('voices')}"
        )
    print(
        f"try: {this_command()} chat --model {out / 'model'} --codec {out / 'codec'} "
        "--text hello --script speech:25"
    )
