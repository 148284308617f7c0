"""Play a reply while it is still being computed: its sound goes to standard output, hop by hop.

    .venv/bin/python examples/stream.py "Good morning." | aplay -f S16_LE -r 24000
    .venv/bin/python examples/stream.py "Good morning." > spoken.raw

The sound is raw PCM: 16 bit, mono, 24 kHz. When each hop came is written to standard error.
"""

import argparse
import sys
import time

import numpy as np

import mosstalk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="what is read aloud")
    text = parser.parse_args().text
    pipeline = mosstalk.Pipeline.load()
    began = time.perf_counter()
    reply = mosstalk.speak(pipeline, text)
    for samples in reply:  # float32 (n,) in [-1, 1], as soon as each hop is made
        pcm = np.clip(samples * 32767, -32768, 32767).astype("<i2")
        sys.stdout.buffer.write(pcm.tobytes())
        sys.stdout.buffer.flush()
        waited = time.perf_counter() - began
        print(f"after {waited:.2f} s: {reply.audio_s:.2f} s of sound", file=sys.stderr)


if __name__ == "__main__":
    main()
