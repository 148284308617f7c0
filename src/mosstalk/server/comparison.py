"""What is different between a recording and its replay, in words and as a document."""

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from mosstalk.server.replay import Recorded, Replayed
from mosstalk.session.events import ResponseDone, TextDelta

_DELTAS = ("AudioDelta", "TextDelta")
_SHOWN = (
    "commit_to_first_audio_ms", "speech_to_first_audio_ms", "vad_wait_ms",
    "commit_to_first_text_ms", "total_ms", "real_time_factor",
)  # fmt: skip
_MOST_LINES = 20


@dataclass(frozen=True)
class Comparison:
    """``timings``: of each response and figure what it was and what it is now."""

    drawn_alike: bool
    """Whether both drew the same: greedy, or from the same seed."""
    order: list[str]
    """Lines of a diff of the events' order; none if it is the same."""
    rows: tuple[int, int, int] | None
    """Recorded, now, and equal from the beginning; None if they were not recorded."""
    samples: tuple[int, int, int]
    text_same: bool
    timings: list[dict[str, tuple[float | None, float | None]]]
    waited_in_vain: int

    @property
    def same(self) -> bool:
        """Whether nothing differs but times."""
        counts = [counts for counts in (self.rows, self.samples) if counts]
        alike = all(was == now == equal for was, now, equal in counts)
        return alike and self.text_same and not self.order

    def as_dict(self) -> dict[str, Any]:
        """As a document."""
        return asdict(self) | {"same": self.same}

    def lines(self) -> list[str]:
        """In words."""
        return [*self._differences(), *self._times()]

    def _differences(self) -> list[str]:
        lines = ["events   the same, in the same order" if not self.order else "events   differ:"]
        lines += [f"         {line}" for line in self.order[:_MOST_LINES]]
        if self.rows:
            lines.append(f"rows     {_counted(self.rows)}")
        lines.append(f"samples  {_counted(self.samples)}")
        lines.append(f"text     {'the same' if self.text_same else 'differs'}")
        if self.waited_in_vain:
            lines.append(f"waited   {self.waited_in_vain} times for events that did not come")
        if not self.same and not self.drawn_alike:
            lines.append("Replies were drawn at random, without a seed: they differ by nature.")
        return lines

    def _times(self) -> list[str]:
        if not self.timings:
            return []
        lines = [f"{'response':>8}  {'':<26}{'recorded':>10}{'replayed':>10}"]
        for number, timings in enumerate(self.timings, 1):
            for name, (was, now) in timings.items():
                lines.append(f"{number:>8}  {name:<26}{_figure(was):>10}{_figure(now):>10}")
        return lines


def compare(recorded: Recorded, replayed: Replayed) -> Comparison:
    """Compare them."""
    before = [moment.event or {} for moment in recorded.events]
    now = [{"type": type(e).__name__} | asdict(e) for _, e in replayed.events]
    sampling = recorded.settings.sampling
    rows = recorded.rows
    return Comparison(
        drawn_alike=sampling.greedy or sampling.temperature == 0 or sampling.seed is not None,
        order=_order(before, now),
        rows=None if rows is None else _counts(rows, replayed.rows),
        samples=_counts(_samples(recorded.sound()), _samples(replayed.sound())),
        text_same=_text(before) == _text(now),
        timings=_timings(before, now),
        waited_in_vain=replayed.waited_in_vain,
    )


def _order(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Each event by its kind and how it ended; how many deltas there were does not matter."""
    diff = difflib.unified_diff(_named(before), _named(now), "recorded", "replayed", "", "", 1, "")
    return list(diff)


def _named(events: list[dict[str, Any]]) -> list[str]:
    names: list[str] = []
    for event in events:
        parts = [event["type"], event.get("status"), event.get("code"), event.get("reason")]
        name = " ".join(str(part) for part in parts if part)
        if event["type"] not in _DELTAS or name not in names[-1:]:
            names.append(name)
    return names


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(e["text"] for e in events if e["type"] == TextDelta.__name__)


def _timings(
    before: list[dict[str, Any]], now: list[dict[str, Any]]
) -> list[dict[str, tuple[float | None, float | None]]]:
    done = ResponseDone.__name__
    pairs = zip(
        (e["timings"] for e in before if e["type"] == done),
        (e["timings"] for e in now if e["type"] == done),
        strict=False,
    )
    return [
        {name: (was[name], is_[name]) for name in _SHOWN if (was[name], is_[name]) != (None, None)}
        for was, is_ in pairs
    ]


def _samples(pcm: bytes) -> list[bytes]:
    return [pcm[place : place + 2] for place in range(0, len(pcm), 2)]


def _counts(was: list[Any], now: list[Any]) -> tuple[int, int, int]:
    pairs = enumerate(zip(was, now, strict=False))
    equal = next((place for place, (a, b) in pairs if a != b), min(len(was), len(now)))
    return len(was), len(now), equal


def _counted(counts: tuple[int, int, int]) -> str:
    was, now, equal = counts
    if was == now == equal:
        return f"{was}, all the same"
    return f"{was} recorded, {now} replayed, the same up to number {equal}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 10 else f"{value:.1f}"
