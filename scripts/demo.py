"""Show in half a minute what the model that ships can do: what `make demo` runs after its set-up.

    .venv/bin/python scripts/demo.py [FOLDER]

It reads a sentence aloud into FOLDER (demo-output), and writes down what it hears there.
"""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = "Good morning. The train to the city leaves in ten minutes."
END = """
Listen to {spoken}. It says: {sentence}
The model listened to it too, and wrote: {written}

This model is small. It reads aloud, and it understands its own voice.
It does not understand people yet, and it answers no questions.

Next: make talk
A page opens in your browser. Type a sentence there, and hear it."""


def main() -> int:
    folder = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spoken.wav").unlink(missing_ok=True)  # of an earlier demo
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    spoken, written = str(shown / "spoken.wav"), ""
    for line in (["speak", SENTENCE, "--out", spoken], ["transcribe", spoken]):
        print(f"\n$ .venv/bin/mosstalk {shlex.join(line)}", flush=True)
        run = subprocess.run(
            [sys.executable, "-m", "mosstalk.cli", *line],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(run.stdout, end="", flush=True)
        if run.returncode:
            return run.returncode
        written = run.stdout.strip()
    print(END.format(spoken=spoken, sentence=SENTENCE, written=written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
