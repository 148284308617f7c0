"""What every streaming vocoder offers: many replies' mel frames in, their sound out.

A vocoder keeps what a reply leaves from one call to the next in one slot of tensors that are
allocated once. A slot is reset without touching another, so replies join and leave a running
batch. Shapes: T mel frames, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mosstalk.errors import CodecFullError

RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class VocoderReply:
    """One reply's place in a vocoder: its slot, and how many frames it has taken so far."""

    slot: int
    frames: int = 0
    """Mel frames taken so far."""
    ended: bool = False
    """Whether its last frames were taken, or it was closed."""
    closed: bool = False
    """Whether its slot was given back, and may be another reply's by now."""


Work = tuple[VocoderReply, Tensor, bool]
"""A reply, its new mel frames (80, T), and whether they are its last."""


@dataclass(frozen=True)
class VocoderFigures:
    """Sizes of a vocoder in bytes on its device, and how many slots there are and are taken."""

    slots: int
    slots_used: int
    weight_bytes: int
    state_bytes: int
    graph_bytes: int = 0
    graphs: int = 0


class StreamingVocoder(Protocol):
    """Turns mel frames into sound for many replies at once."""

    def open(self, seed: int = 0) -> VocoderReply:
        """Begin a reply; what is random in its sound depends on ``seed`` alone.

        Raises:
            CodecFullError: all slots are taken.
        """

    def push(self, work: Sequence[Work]) -> list[Tensor]:
        """Take new frames of several replies, each at most once; return what is now settled.

        One (n,) float32 on the vocoder's device for each entry, in order. Sound that later
        frames would change is held back until they come or the reply ends.
        """

    def close(self, reply: VocoderReply) -> None:
        """Give the reply's slot back; closing twice does nothing."""

    def warm(self) -> None:
        """Do ahead of time what would make the first calls slow."""

    def figures(self) -> VocoderFigures:
        """How much memory there is and is used."""


@dataclass
class Slots:
    """A vocoder's places for ``count`` replies, numbered from 1; number 0 is never given out."""

    count: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.count, 0, -1))

    @property
    def used(self) -> int:
        """How many places are taken."""
        return self.count - len(self.free)

    def take(self) -> int:
        """A free place.

        Raises:
            CodecFullError: there is none.
        """
        if not self.free:
            raise CodecFullError(
                f"all {self.count} places of the vocoder are taken; end a reply, or give it "
                "more places",
                RETRY_AFTER_S,
            )
        return self.free.pop()

    def give(self, place: int) -> None:
        """Give a place back."""
        assert 0 < place <= self.count
        assert place not in self.free, "a place is given back once"
        self.free.append(place)


def check_work(work: Sequence[Work], bins: int, first_frames: int = 1) -> None:
    """Assert that ``work`` is what ``push`` takes: open replies, each once, mels (bins, T).

    A reply that does not end at once must begin with ``first_frames`` frames.
    """
    assert len({reply.slot for reply, _, _ in work}) == len(work), "a reply comes once a call"
    for reply, mel, final in work:
        assert not reply.ended, "the reply has ended"
        assert mel.ndim == 2, "a mel has two dimensions"
        assert mel.shape[0] == bins, f"a mel has {bins} bands"
        enough = final or reply.frames > 0 or mel.shape[1] >= first_frames
        assert enough, f"a first call needs at least {first_frames} frames"
