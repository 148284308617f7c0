"""One model and codec without a clock: answers, reading aloud, writing down, voices."""
