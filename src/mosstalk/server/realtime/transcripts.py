"""What someone beside the model has written down of what was said."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transcript:
    """Text of an item's sound, which lasted ``audio_s``; ``failed`` says why there is none."""

    item_id: str
    text: str = ""
    audio_s: float = 0.0
    failed: str | None = None
