"""A recorded session once more: its input through a fresh session, and what is different.

A command is given when the session has told what it had told before it in the recording, so that
an answer is interrupted where it was, however fast this machine is.
"""

import asyncio
import difflib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import soundfile
from pydantic import TypeAdapter

from mosstalk.conversation import Row
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json
from mosstalk.server.recording import FORMAT
from mosstalk.session import commands
from mosstalk.session.commands import ReplyMode, SessionSettings
from mosstalk.session.events import AudioDelta, Closed, Event, InputPaused, ResponseDone, TextDelta
from mosstalk.session.host import Host
from mosstalk.session.session import Session
from mosstalk.session.sound import InputClock

PATIENCE_S = 20.0
"""How long the session may tell nothing before a command is given all the same."""


@dataclass(frozen=True)
class Moment:
    """A command, or an event as it was recorded, and when: seconds from the session's opening."""

    at_s: float
    command: commands.Command | None = None
    event: dict[str, Any] | None = None


@dataclass(frozen=True)
class Recorded:
    """A recording as it was read."""

    folder: Path
    facts: dict[str, Any]
    settings: SessionSettings
    moments: tuple[Moment, ...]
    closed: str | None
    rows: list[Row] | None

    @property
    def events(self) -> list[Moment]:
        """Those of the moments that have an event."""
        return [moment for moment in self.moments if moment.event is not None]

    def sound(self) -> bytes:
        """The sound of all replies in the order in which it was made: int16 at 24 kHz.

        Raises:
            OptionError: its file is damaged.
        """
        return _pcm(self.folder / "output-24000.wav")


@dataclass
class Replayed:
    """What the same input has brought this time."""

    events: list[tuple[float, Event]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    waited_in_vain: int = 0

    def sound(self) -> bytes:
        """The sound of all replies in the order in which it was made: int16 at 24 kHz."""
        return b"".join(event.pcm for _, event in self.events if isinstance(event, AudioDelta))


def read_recording(folder: Path) -> Recorded:
    """Read a folder that ``mosstalk serve --record`` has written.

    Raises:
        OptionError: it is none, or of another version.
    """
    try:
        facts = parse_json((folder / "session.json").read_text("utf-8"))
        if facts["format"] not in (1, FORMAT):
            raise OptionError(
                f"{folder}: a recording of format {facts['format']}, and this mosstalk reads 1 to "
                f"{FORMAT}"
            )
        text = (folder / "session.jsonl").read_text("utf-8")
        lines = [parse_json(line) for line in text.split("\n") if line]
        settings = TypeAdapter(SessionSettings).validate_python(facts["settings"])
        moments = tuple(_paused_as_then(list(_moments(lines, folder)), settings.input_rate))
        rows_file = folder / "rows.json"
        rows = parse_json(rows_file.read_text()) if rows_file.exists() else None
    except OSError as error:
        raise OptionError(f"{folder}: no recording can be read there ({error})") from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise OptionError(f"{folder}: a damaged recording ({error})") from None
    closed = next((line["closed"] for line in lines if "closed" in line), None)
    conversation = None if rows is None else [(text, audio) for text, audio in rows]
    return Recorded(folder, facts, settings, moments, closed, conversation)


async def play(host: Host, recorded: Recorded, *, live: bool = False) -> Replayed:
    """Give a session of a started host what was recorded; ``live`` at the pace of then."""
    session = await host.open(recorded.settings)
    player = _Player(session)
    listening = asyncio.create_task(player.listen())
    begun_s = time.monotonic()
    progress = _Progress()
    for moment in recorded.moments:
        if moment.command is None:
            progress.add(moment.event or {})
            continue
        await player.wait(progress)
        if live:
            await asyncio.sleep(max(0.0, begun_s + moment.at_s - time.monotonic()))
        session.do(moment.command)
    await player.wait(progress)
    player.replayed.rows = session.conversation_rows()
    await session.close(recorded.closed or "client")
    await listening
    return player.replayed


@dataclass
class _Progress:
    """How far a session has come: events but for sound, and sound of the latest response."""

    events: int = 0
    samples: int = 0

    def add(self, event: dict[str, Any]) -> None:
        if event["type"] == AudioDelta.__name__:
            self.samples += event["samples"]
        elif event["type"] not in ("TextDelta", Closed.__name__):
            self.events += 1
            if event["type"] == ResponseDone.__name__:
                self.samples = 0

    def reached(self, goal: "_Progress") -> bool:
        return self.events > goal.events or (
            self.events == goal.events and self.samples >= goal.samples
        )


class _Player:
    def __init__(self, session: Session) -> None:
        self.replayed = Replayed()
        self._session, self._progress = session, _Progress()
        self._news = asyncio.Event()
        self._over = False

    async def listen(self) -> None:
        begun_s = time.monotonic()
        async for event in self._session:
            self.replayed.events.append((time.monotonic() - begun_s, event))
            samples = event.samples if isinstance(event, AudioDelta) else 0
            self._progress.add({"type": type(event).__name__, "samples": samples})
            self._news.set()
        self._over = True
        self._news.set()

    async def wait(self, goal: _Progress) -> None:
        """Until the session has come as far, or tells nothing any more."""
        while not self._over and not self._progress.reached(goal):
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), PATIENCE_S)
            except TimeoutError:
                self.replayed.waited_in_vain += 1
                return


def _moments(lines: list[dict[str, Any]], folder: Path) -> Iterator[Moment]:
    sounds = _Sounds(folder)
    for line in lines:
        if "event" in line:
            yield Moment(line["t"], event=line["event"])
        elif "command" in line:
            yield Moment(line["t"], command=_command(dict(line["command"]), sounds))


class _Sounds:
    """The input of a recording, by its rate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pcm: dict[int, bytes] = {}

    def part(self, kept: dict[str, Any]) -> commands.Sound:
        """The sound at ``at``, of so many ``bytes``, in the file of a ``rate``."""
        rate, start = kept["rate"], 2 * kept["at"]
        if rate not in self._pcm:
            self._pcm[rate] = _pcm(self._folder / f"input-{rate}.wav")
        return commands.Sound(self._pcm[rate][start : start + kept["bytes"]], rate)

    def message(self, kept: dict[str, Any]) -> commands.Message:
        """A message with its sound."""
        parts = (part if isinstance(part, str) else self.part(part) for part in kept["parts"])
        return commands.Message(kept["role"], tuple(parts))


def _paused_as_then(moments: list[Moment], rate: int) -> Iterator[Moment]:
    """Pauses of the microphone put where they were: this machine's clock says nothing of then."""
    events = [moment.event for moment in moments if moment.event]
    pauses = {e["clock"]: e["seconds"] for e in events if e["type"] == InputPaused.__name__}
    clock = InputClock(rate)
    for moment in moments:
        command = moment.command
        if isinstance(command, commands.Push):
            command = replace(command, paused_s=pauses.pop(clock.samples, 0.0))
            clock.add(command.samples, command.rate or rate)
            moment = replace(moment, command=command)
        yield moment


def _command(fields: dict[str, Any], sounds: _Sounds) -> commands.Command:
    name = fields.pop("type")
    kind = getattr(commands, name, None)
    if not (isinstance(kind, type) and issubclass(kind, commands.Command)):
        raise ValueError(f"{name} is no command")
    if issubclass(kind, commands.Push | commands.CreateAudio):
        sound = sounds.part({part: fields.pop(part) for part in ("rate", "at", "bytes")})
        return kind(sound.pcm, sound.rate, **fields)
    if issubclass(kind, commands.CreateMessage):
        return kind(sounds.message(fields.pop("message")), **fields)
    if issubclass(kind, commands.CreateResponse):
        before = fields.pop("input_item_ids", None)  # as format 1 had it
        given, reply = fields.pop("input", before), fields.pop("reply")
        if given is not None:
            given = tuple(e if isinstance(e, str) else sounds.message(e) for e in given)
        return kind(input=given, reply=reply and ReplyMode(reply), **fields)
    return TypeAdapter(kind).validate_python(fields)


def _pcm(path: Path) -> bytes:
    """Samples of a sound file, be it one that was never closed; none if there is none.

    Raises:
        OptionError: it is no sound file.
    """
    if not path.exists():
        return b""
    try:
        return soundfile.read(path, dtype="int16")[0].astype("<i2").tobytes()
    except soundfile.LibsndfileError as error:
        raise OptionError(f"{path}: a damaged recording ({error})") from None


# What is different between a recording and its replay, in words and as a document.

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
