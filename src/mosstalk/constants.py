"""Audio constants of MOSS-Speech, derived by exact division in this one place.

A code is 80 ms: 1280 samples of what the model hears (16 kHz), 1920 samples of what it
says (24 kHz), four mel frames of 20 ms each.
"""

CODE_MS = 80
CODES_PER_SECOND = 12.5

INPUT_RATE = 16_000
"""Sample rate in Hz that the speech tokenizer hears."""
INPUT_SAMPLES_PER_CODE = INPUT_RATE * CODE_MS // 1000

OUTPUT_RATE = 24_000
"""Sample rate in Hz that the vocoder speaks."""
OUTPUT_SAMPLES_PER_CODE = OUTPUT_RATE * CODE_MS // 1000

MEL_FRAMES_PER_CODE = 4
MEL_FRAME_SAMPLES = OUTPUT_SAMPLES_PER_CODE // MEL_FRAMES_PER_CODE
"""Samples at 24 kHz between two mel frames of the flow decoder (20 ms)."""


def codes_in(samples: int) -> int:
    """Number of codes that ``samples`` at 16 kHz become: the last one is zero-padded."""
    return -(-samples // INPUT_SAMPLES_PER_CODE)


def codes_heard(played_ms: float) -> int:
    """Number of codes of a reply that a listener has begun to hear after ``played_ms``."""
    whole = int(played_ms // CODE_MS)
    return whole + (whole * CODE_MS < played_ms)
