"""Show in half a minute what the model that ships can do: what `make demo` runs after its set-up.

    .venv/bin/python scripts/demo.py [FOLDER]

It reads a sentence aloud into FOLDER (demo-output), and writes down what it hears there.
"""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = "Hello. My sister is waiting for us at the station."


def main() -> int:
    folder = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    spoken = str(shown / "spoken.wav")
    for line in (["speak", SENTENCE, "--out", spoken], ["transcribe", spoken]):
        print(f"\n$ .venv/bin/mosstalk {shlex.join(line)}", flush=True)
        run = [sys.executable, "-m", "mosstalk.cli", *line]
        code = subprocess.run(run, cwd=ROOT, check=False).returncode
        if code:
            return code
    print(
        f"""
Listen to {spoken}. A voice says: "{SENTENCE}"
The last line above is what the model understood when it listened to that.

This model is small. It reads aloud, and it understands its own voice.
It does not understand people yet, and it answers no questions.

Next: make talk
A page opens in your browser. Type a sentence there, and hear it."""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
