"""Scores of a resynthesis against the recording that it came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mosstalk.audio.sound import Samples
from mosstalk.bench.readings import Reading
from mosstalk.bench.sound_scores import aligned, log_spectral_distance, pesq, stoi
from mosstalk.bench.spread import Spread, spread
from mosstalk.errors import BenchError
from mosstalk.progress import Progress

_Score = Callable[[Samples, Samples], float | None]
_SCORES: dict[str, _Score] = {"pesq": pesq, "stoi": stoi, "lsd_db": log_spectral_distance}


@dataclass(frozen=True)
class CodecRow:
    """Wide-band PESQ, STOI and log-spectral distance in dB; None where a package is missing.

    A score has fewer values than sounds where it found no speech to judge.
    """

    name: str
    pesq: Spread | None
    stoi: Spread | None
    lsd_db: Spread | None


def codec_rows(
    recordings: Reading, others: Sequence[Reading], tell: Progress
) -> tuple[list[CodecRow], list[str]]:
    """A row for each of ``others``, aligned with the recordings, and what was skipped."""
    skipped = dict[str, str]()
    rows = []
    for other in others:
        scores = dict[str, list[float]]()
        for place, sounds in enumerate(zip(recordings.sounds, other.sounds, strict=True)):
            tell(f"comparing {other.name}", place, len(other))
            pair = aligned(*sounds)
            for name in _SCORES.keys() - skipped:
                try:
                    score = _SCORES[name](*pair)
                except BenchError as error:
                    skipped[name] = f"{name}: {error}"
                    continue
                scores.setdefault(name, []).extend([] if score is None else [score])
        spreads = {name: spread(scores[name]) for name in scores}
        rows.append(CodecRow(other.name, *(spreads.get(name) for name in _SCORES)))
    return rows, list(skipped.values())
