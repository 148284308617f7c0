"""Live codes of many clips: what a push takes, which repairs are needed, when and at what cost."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from mosstalk.codec.live_codes import Change, LiveCodes
from mosstalk.codec.live_tokenizer import LiveTokenizer, Sound
from mosstalk.units import INPUT_RATE, INPUT_SAMPLES_PER_CODE


@dataclass(frozen=True)
class RepairedPush:
    """A push, or a clip's end, at which codes were encoded again.

    ``at_s`` after the clip's beginning and ``to_end_s`` before its end; ``rows_again`` rows of
    20 ms were encoded once more, ``codes_changed`` codes were taken back, and all of it took
    ``ms``. ``ending``: nothing could be done about it before the turn was over.
    """

    clip: int
    at_s: float
    to_end_s: float
    rows_again: int
    codes_changed: int
    ms: float
    ending: bool


@dataclass
class LiveFigures:
    """What live codes of some clips cost, and how many of those clips got the offline codes.

    ``push_ms`` are pushes that repaired nothing, ``finish_ms`` the clips' ends, repairs or not.
    ``rows`` counts all rows of 20 ms encoded, those of repairs too, ``ties`` the segments that
    were encoded whole at their end because rounding could choose between two codes.
    """

    clips: int = 0
    valid: int = 0
    seconds: float = 0.0
    codes: int = 0
    rows: int = 0
    ties: int = 0
    push_ms: list[float] = field(default_factory=list)
    finish_ms: list[float] = field(default_factory=list)
    repairs: list[RepairedPush] = field(default_factory=list)

    @property
    def rows_again(self) -> int:
        """Rows of 20 ms that repairs encoded again."""
        return sum(repair.rows_again for repair in self.repairs)

    @property
    def again_share(self) -> float:
        """Those rows for each row that had to be encoded anyhow; 0 where nothing was."""
        needed = self.rows - self.rows_again
        return self.rows_again / needed if needed else 0.0

    @property
    def repaired_clips(self) -> int:
        """Clips with at least one repair."""
        return len({repair.clip for repair in self.repairs})

    @property
    def late_repairs(self) -> int:
        """Repairs that were left to the clip's end, when someone waits."""
        return sum(repair.ending for repair in self.repairs)


def live_codes(
    live: LiveTokenizer,
    clips: Iterable[Sound],
    *,
    push_samples: int = INPUT_SAMPLES_PER_CODE,
    one_speaker: bool = False,
) -> LiveFigures:
    """Push each clip (n,) float at 16 kHz in pieces of ``push_samples``, and compare the codes.

    ``one_speaker``: clips are the turns of one speaker, so each begins with the maximum of the
    one before. The offline codes are computed after the clip, outside all times.
    """
    figures = LiveFigures()
    maximum: float | None = None
    for clip in clips:
        sound = torch.as_tensor(clip)
        state = live.open(maximum if one_speaker else None)
        _hear(live, state, sound, push_samples, figures)
        maximum = state.maximum
        figures.clips += 1
        figures.valid += state.codes == live.tokenizer.encode(sound)
        figures.seconds += state.seconds
        figures.codes += len(state.codes)
        figures.rows += state.rows
        figures.ties += state.ties
    return figures


def _hear(
    live: LiveTokenizer, state: LiveCodes, sound: torch.Tensor, piece: int, figures: LiveFigures
) -> None:
    calls: list[Callable[[], Change]]
    calls = [partial(live.push, state, part) for part in sound.split(piece)]
    calls.append(partial(live.finish, state))
    for call in calls:
        ending = call is calls[-1]
        codes, again = len(state.codes), state.rows_again
        start = time.perf_counter()
        change = call()
        ms = 1000 * (time.perf_counter() - start)
        if ending:
            figures.finish_ms.append(ms)
        elif not change.repaired:
            figures.push_ms.append(ms)
        if change.repaired:
            figures.repairs.append(
                RepairedPush(
                    clip=figures.clips,
                    at_s=state.seconds,
                    to_end_s=sound.shape[0] / INPUT_RATE - state.seconds,
                    rows_again=state.rows_again - again,
                    codes_changed=codes - change.kept,
                    ms=ms,
                    ending=ending,
                )
            )
