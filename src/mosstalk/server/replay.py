"""A recorded session once more: its input through a fresh session, what it tells kept.

A command is given when the session has told what it had told before it in the recording, so that
an answer is interrupted where it was, however fast this machine is.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import soundfile
from pydantic import TypeAdapter

from mosstalk.conversation import Row
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json
from mosstalk.server.recording import FORMAT
from mosstalk.session import commands as told
from mosstalk.session.events import AudioDelta, Closed, Event, InputPaused, ResponseDone
from mosstalk.session.host import Host
from mosstalk.session.session import Session
from mosstalk.session.settings import ReplyMode, SessionSettings
from mosstalk.session.sound import InputClock

PATIENCE_S = 20.0
"""How long the session may tell nothing before a command is given all the same."""


@dataclass(frozen=True)
class Moment:
    """A command or what was told of an event, and when: seconds from the session's opening."""

    at_s: float
    command: told.Command | None = None
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
        """Those of the moments at which something was told."""
        return [moment for moment in self.moments if moment.event is not None]

    def sound(self) -> bytes:
        """All that the replies sounded like, in the order in which it was made."""
        return _pcm(self.folder / "output-24000.wav")


@dataclass
class Replayed:
    """What the same input has brought this time."""

    events: list[tuple[float, Event]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    waited_in_vain: int = 0

    def sound(self) -> bytes:
        """All that the replies sounded like, in the order in which it was made."""
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
        settings = _adapter(SessionSettings).validate_python(facts["settings"])
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

    def part(self, kept: dict[str, Any]) -> told.Sound:
        """The sound at ``at``, of so many ``bytes``, in the file of a ``rate``."""
        rate, start = kept["rate"], 2 * kept["at"]
        if rate not in self._pcm:
            self._pcm[rate] = _pcm(self._folder / f"input-{rate}.wav")
        return told.Sound(self._pcm[rate][start : start + kept["bytes"]], rate)

    def message(self, kept: dict[str, Any]) -> told.Message:
        """A message with its sound."""
        parts = (part if isinstance(part, str) else self.part(part) for part in kept["parts"])
        return told.Message(kept["role"], tuple(parts))


def _paused_as_then(moments: list[Moment], rate: int) -> Iterator[Moment]:
    """Pauses of the microphone put where they were: this machine's clock says nothing of then."""
    events = [moment.event for moment in moments if moment.event]
    pauses = {e["clock"]: e["seconds"] for e in events if e["type"] == InputPaused.__name__}
    clock = InputClock(rate)
    for moment in moments:
        command = moment.command
        if isinstance(command, told.Push):
            command = replace(command, paused_s=pauses.pop(clock.samples, 0.0))
            clock.add(command.samples, command.rate or rate)
            moment = replace(moment, command=command)
        yield moment


def _command(fields: dict[str, Any], sounds: _Sounds) -> told.Command:
    name = fields.pop("type")
    kind = getattr(told, name)
    if not (isinstance(kind, type) and issubclass(kind, told.Command)):
        raise ValueError(f"{name} is no command")
    if issubclass(kind, told.Push | told.CreateAudio):
        sound = sounds.part({part: fields.pop(part) for part in ("rate", "at", "bytes")})
        return kind(sound.pcm, sound.rate, **fields)
    if issubclass(kind, told.CreateMessage):
        return kind(sounds.message(fields.pop("message")), **fields)
    if issubclass(kind, told.CreateResponse):
        before = fields.pop("input_item_ids", None)  # as format 1 had it
        given, reply = fields.pop("input", before), fields.pop("reply")
        if given is not None:
            given = tuple(e if isinstance(e, str) else sounds.message(e) for e in given)
        return kind(input=given, reply=reply and ReplyMode(reply), **fields)
    command: told.Command = _adapter(kind).validate_python(fields)
    return command


def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _pcm(path: Path) -> bytes:
    """Samples of a sound file, be it one that was never closed; none if there is none."""
    if not path.exists():
        return b""
    return soundfile.read(path, dtype="int16")[0].astype("<i2").tobytes()
