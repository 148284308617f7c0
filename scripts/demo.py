"""Show what mosstalk does in under a minute: read aloud, write down, answer.

    .venv/bin/python scripts/demo.py [FOLDER]

Sound files go to FOLDER (demo-output). Each command is shown before it is run, and what to
listen to is said in plain words at the end.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from mosstalk import default_model
from mosstalk.config import LanguageModelConfig

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = "Hello. My sister is waiting for us at the station."
SAID = "He was not an ill disposed young man."
EXPECTED = {
    "synthetic": (
        "noise: the weights are random",
        "signs without meaning: the weights are random",
        "noise: the weights are random",
    ),
    "pocket": (
        f'a voice that says "{SENTENCE}"',
        f'that sentence or nearly; of "{SAID}", a person whom it never heard, little',
        "the voice with words like the question's: it repeats what it understands, and does "
        "not answer",
    ),
}
"""What is to be heard in spoken.wav, read in the transcript, and heard in answer.wav."""


def main() -> int:
    folder = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    spoken, answer = shown / "spoken.wav", shown / "answer.wav"
    started = time.perf_counter()
    for words in (
        ("speak", SENTENCE, "--out", spoken),
        ("transcribe", spoken, "assets/librivox.flac"),
        ("chat", "--speech", "assets/question.flac", "--out", answer),
    ):
        line = [str(word) for word in words]
        print(f"\n$ mosstalk {shlex.join(line)}", flush=True)
        run = [sys.executable, "-m", "mosstalk.cli", *line]
        code = subprocess.run(run, cwd=ROOT, check=False).returncode
        if code:
            return code
    kind = LanguageModelConfig.from_folder(default_model()[0]).weights_kind
    heard, read, answered = EXPECTED.get(kind, EXPECTED["pocket"])
    print(f"\nAll that took {time.perf_counter() - started:.0f} s. Now listen, and compare:")
    print(f"  {spoken}: {heard}")
    print(f"  the lines of `mosstalk transcribe` above: {read}")
    print(f"  {answer}, to the question assets/question.flac: {answered}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
