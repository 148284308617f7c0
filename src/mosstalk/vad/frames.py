"""What a detector of speech gives, and what it is: probabilities of frames on the sample clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.errors import AudioError


class Frame(NamedTuple):
    """Samples from ``start_samples`` to before ``end_samples``, and how likely they hold speech."""

    start_samples: int
    end_samples: int
    speech: float


@dataclass(frozen=True)
class Frames:
    """Frames of one length, side by side from ``start_samples`` on; ``speech`` (n,) in [0, 1].

    Positions count samples of a stream at 16 kHz.
    """

    start_samples: int
    frame_samples: int
    speech: Samples

    def __len__(self) -> int:
        return len(self.speech)

    def __iter__(self) -> Iterator[Frame]:
        start, length = self.start_samples, self.frame_samples
        for place, speech in enumerate(self.speech.tolist()):
            yield Frame(start + place * length, start + (place + 1) * length, speech)

    @property
    def end_samples(self) -> int:
        """Where the last frame ends; the start, if there is none."""
        return self.start_samples + len(self) * self.frame_samples


class Detector(Protocol):
    """Finds speech in many streams at once; what it knows of a stream is a value of its own.

    A state may be given to ``push`` once: with some detectors the new one holds what is inside
    the old one.

    Attributes:
        name: ``silero`` or ``webrtc``.
        description: the name, the package's version and its settings, for logs and tables.
        frame_samples: length of every frame.
        minimum_speech_ms: what looks like speech for less than this is as likely a click.
    """

    name: str
    description: str
    frame_samples: int
    minimum_speech_ms: int

    def start(self) -> Any:
        """The state of a stream before its first sample."""

    def push(self, state: Any, samples: Samples) -> tuple[Any, Frames]:
        """Hear the next samples (n,) float32 in [-1, 1] at 16 kHz, any number of them.

        Returns the new state and the frames that are now whole.

        Raises:
            AudioError: a sample is NaN or infinite.
        """

    def push_many(
        self, states: Sequence[Any], sounds: Sequence[Samples]
    ) -> list[tuple[Any, Frames]]:
        """As ``push``, for one stream after another or for all in one batch."""


def finite(samples: Samples) -> Samples:
    """The samples as they are; a NaN would stay in a detector's memory for good.

    Raises:
        AudioError: a sample is NaN or infinite.
    """
    assert samples.ndim == 1, samples.shape
    assert samples.dtype == np.float32, samples.dtype
    if not np.isfinite(samples).all():
        raise AudioError("the sound holds NaN or infinite samples; check what sends it")
    return samples
