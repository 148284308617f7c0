"""What is kept of a session if the operator asked for it: a folder that can be replayed.

``session.json`` says what was opened, ``session.jsonl`` has every command and event with its time,
``wire.jsonl`` every message, ``input-RATE.wav`` and ``output-24000.wav`` both sides' sound, which
the other files only count, and ``rows.json`` the conversation as the model has read it.

Files are written on a thread of their own. A disk that is full or too slow, or a fault in writing,
ends the recording that it happens to and nothing else.
"""

import json
import logging
import queue
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mosstalk import __version__
from mosstalk.constants import OUTPUT_RATE
from mosstalk.conversation import Row
from mosstalk.errors import OutputError
from mosstalk.files import as_text
from mosstalk.server.conversations import TOKEN_PREFIX, shown_token
from mosstalk.server.ipc import WorkerInfo
from mosstalk.server.observers import Metrics, SessionObserver
from mosstalk.server.realtime import server_events
from mosstalk.session import commands, events
from mosstalk.session.commands import SessionSettings

_LOG = logging.getLogger("mosstalk.server.recording")
FORMAT = 2
"""Format 1 had ``input_item_ids`` where a response now has ``input``; ``replay`` reads both."""
LEFT_BYTES = 64 << 20
"""Recordings end when less than this is free: the disk is not theirs alone."""
_MOST_WAITING_BYTES = 64 << 20
"""What may wait for the disk; each piece counts its sound or message, and a little more."""
_PIECE_BYTES = 1024
_SESSION = "session.json"
_LOOK_EVERY_S, _DAY_S = 3600.0, 86_400.0
"""How often old recordings are looked for."""
_ELIDED = 512
"""Strings of the wire from this length on that hold no blank are counted, not kept."""


class Recorder:
    """Keeps recordings in one folder, which is made; raises OutputError where it cannot be.

    Those to which nothing was added for so many ``days`` are deleted; None: never.
    """

    def __init__(self, folder: Path, metrics: Metrics, days: float | None = None) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.disk_usage(folder)
        except OSError as error:
            raise OutputError(f"{folder}: no recordings there ({error.strerror})") from None
        self._folder, self._metrics, self._days = folder, metrics, days
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._waiting_bytes, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mosstalk-recorder", daemon=True)
        self._thread.start()
        metrics.recorder_up.set_function(self._thread.is_alive)

    def open(
        self, settings: SessionSettings, info: WorkerInfo, conversation_id: str | None = None
    ) -> "Recording":
        """A recording of a session that begins now, in a conversation if it has one."""
        return Recording(self, settings, info, conversation_id)

    def delete(self, conversation_id: str) -> "Future[int]":
        """Have a conversation's recordings deleted; it comes to how many there were."""
        deleted = Future[int]()
        named = partial(self._delete, lambda path: _conversation_of(path) == conversation_id)
        self._jobs.put((lambda: deleted.set_result(named()), 0))
        return deleted

    def stop(self) -> None:
        """Write what waits, and end."""
        self._jobs.put(None)
        self._thread.join()

    # For recordings.

    def folder_for(self, session_id: str) -> Path:
        """A new folder, named after now and the session, for its owner's eyes only."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        folder = self._folder / f"{stamp}-{session_id}"
        folder.mkdir(mode=0o700)
        return folder

    def require_room(self) -> None:
        """Raise OSError when the disk is as good as full."""
        free = shutil.disk_usage(self._folder).free
        if free < LEFT_BYTES:
            raise OSError(f"{free >> 20} MiB are free, and {LEFT_BYTES >> 20} are left to others")

    def later(self, job: Callable[[], None], size: int) -> bool:
        """Do it on the thread; False if too much waits there."""
        with self._lock:
            if self._waiting_bytes + size > _MOST_WAITING_BYTES:
                return False
            self._waiting_bytes += size
        self._jobs.put((job, size))
        return True

    def cut(self, session_id: str, why: str | None = None) -> None:
        """A recording ends before its session does; without ``why`` by a fault of the program."""
        self._metrics.recordings_cut.inc()
        if why:
            _LOG.warning("a recording ends: %s", why, extra={"session": session_id})
        else:
            _LOG.exception("a recording failed and ends", extra={"session": session_id})

    def _run(self) -> None:
        look_s = 0.0
        while True:
            if time.monotonic() >= look_s:
                self._delete_old()
                look_s = time.monotonic() + _LOOK_EVERY_S
            try:
                given = self._jobs.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
            if given is None:
                return
            job, size = given
            try:
                job()
            finally:
                with self._lock:
                    self._waiting_bytes -= size

    def _delete_old(self) -> None:
        if self._days is not None:
            oldest_s = time.time() - self._days * _DAY_S
            self._delete(lambda path: max(map(_written_s, path.parent.iterdir())) < oldest_s)

    def _delete(self, chosen: Callable[[Path], bool]) -> int:
        """Delete those recordings whose ``session.json`` is chosen; how many they were."""
        count = 0
        for path in self._folder.glob(f"*-sess_*/{_SESSION}"):
            try:
                if chosen(path):
                    shutil.rmtree(path.parent)
                    count += 1
            except OSError as error:
                _LOG.warning("a recording cannot be deleted: %s", error)
        return count


def _conversation_of(path: Path) -> str | None:
    """The conversation that a recording's ``session.json`` names."""
    try:
        opened = json.loads(path.read_text())
    except ValueError:  # it is being written
        return None
    return opened.get("conversation_id") if isinstance(opened, dict) else None


def _written_s(path: Path) -> float:
    return path.stat().st_mtime


class Recording(SessionObserver):
    """Keeps all that it is shown of a session in files, which a thread of its own writes."""

    def __init__(
        self,
        recorder: Recorder,
        settings: SessionSettings,
        info: WorkerInfo,
        conversation_id: str | None,
    ) -> None:
        self._recorder, self._settings, self._info = recorder, settings, info
        self._conversation_id = conversation_id
        self._begun_s, self._began = time.monotonic(), datetime.now(UTC)
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._files: _Files
        self._cut, self._session_id, self._rate = False, "", settings.input_rate

    def on_command(self, command: commands.Command) -> None:
        """Keep a command."""
        now = self._now()
        if isinstance(command, commands.UpdateSettings):
            self._rate = command.settings.input_rate
        rate, size = self._rate, sum(len(sound.pcm) for sound in commands.sounds_of(command))
        self._do(lambda: self._files.command(now, command, rate), size)

    def on_event(self, event: events.Event) -> None:
        """Keep an event; the first names the folder."""
        now = self._now()
        if isinstance(event, events.SessionOpened):
            self._session_id = event.session_id
            opened = {
                "format": FORMAT, "version": __version__, "session_id": event.session_id,
                "began": self._began.isoformat(), "worker": asdict(self._info),
                "settings": asdict(self._settings), "conversation_id": self._conversation_id,
            }  # fmt: skip
            self._waiting.appendleft((lambda: self._open(opened), 0))
        size = len(event.pcm) if isinstance(event, events.AudioDelta) else 0
        self._do(lambda: self._files.event(now, event), size)

    def on_message(
        self, sender: str, message: str | bytes, event: server_events.Event | None = None
    ) -> None:
        """Keep a message."""
        del event  # the message holds it all
        now = self._now()
        self._do(lambda: self._files.wire(now, sender, message), len(message))

    def on_close(self, reason: str, rows: list[Row] | None) -> None:
        """Keep how it ended, and the rows."""
        now = self._now()
        self._do(lambda: self._files.end(now, reason, rows))

    def _now(self) -> float:
        return round(time.monotonic() - self._begun_s, 6)

    def _open(self, opened: dict[str, Any]) -> None:
        self._files = _Files(self._recorder.folder_for(self._session_id), opened)

    def _do(self, job: Callable[[], None], size: int = 0) -> None:
        """Have it done on the recorder's thread, once the session has said its name."""
        self._waiting.append((job, size))
        while self._waiting and self._session_id:
            job, size = self._waiting.popleft()
            if not (
                self._cut or self._recorder.later(partial(self._try, job), size + _PIECE_BYTES)
            ):
                self._end("the disk is too slow")

    def _try(self, job: Callable[[], None]) -> None:
        """On the recorder's thread."""
        if self._cut:
            return
        try:
            self._recorder.require_room()
            job()
        except OSError as error:
            self._end(str(error))
        except Exception:  # of this recording: the others go on
            self._end()

    def _end(self, why: str | None = None) -> None:
        self._cut = True
        self._recorder.cut(self._session_id, why)


class _Files:
    """The files of one recording; every method raises OSError where the disk does."""

    def __init__(self, folder: Path, opened: dict[str, Any]) -> None:
        self._folder = folder
        with _text_file(folder / _SESSION) as file:
            file.write(as_text(opened))
        names = ("session.jsonl", "wire.jsonl")
        self._lines = {name: _text_file(folder / name) for name in names}
        self._sounds: dict[str, WavFile] = {}

    def command(self, now: float, command: commands.Command, rate: int) -> None:
        """A command, its sound beside it."""
        fields = self._plain(command, rate) | {"type": type(command).__name__}
        self._line("session.jsonl", {"t": now, "command": fields})

    def event(self, now: float, event: events.Event) -> None:
        """An event, its sound beside it."""
        fields: dict[str, Any] = {"type": type(event).__name__}
        if isinstance(event, events.AudioDelta):
            sound = self._sound("output", OUTPUT_RATE)
            fields |= {"at": sound.write(event.pcm), "samples": event.samples}
        plain = {name: each for name, each in asdict(event).items() if name != "pcm"}
        self._line("session.jsonl", {"t": now, "event": plain | fields})

    def wire(self, now: float, side: str, message: str | bytes) -> None:
        """A message, long strings counted only; one that is no JSON or nested deeply as a whole."""
        line: dict[str, Any] = {"t": now, "from": side}
        try:
            self._line("wire.jsonl", line | {"message": _elided(json.loads(message))})
        except (ValueError, RecursionError):
            self._line("wire.jsonl", line | {"message": {"no_json": len(message)}})

    def end(self, now: float, reason: str, rows: list[Row] | None) -> None:
        """The last line, and the rows."""
        self._line("session.jsonl", {"t": now, "closed": reason})
        if rows is not None:
            (self._folder / "rows.json").write_text(json.dumps(rows) + "\n")
        for lines in self._lines.values():
            lines.close()
        for sound in self._sounds.values():
            sound.close()

    def _plain(self, value: Any, rate: int) -> Any:
        """A value as JSON; of sound, at ``rate`` unless it says otherwise, where it stands."""
        if isinstance(value, tuple):
            return [self._plain(each, rate) for each in value]
        if not is_dataclass(value):
            return value
        plain = {name: self._plain(each, rate) for name, each in vars(value).items()}
        if isinstance(value, commands.Push | commands.CreateAudio | commands.Sound):
            pcm = plain.pop("pcm")
            assert isinstance(pcm, bytes), "what comes over a wire is bytes"
            file = self._sound("input", value.rate or rate)
            plain |= {"rate": file.rate, "at": file.write(pcm), "bytes": len(pcm)}
        return plain

    def _line(self, name: str, line: dict[str, Any]) -> None:
        self._lines[name].write(json.dumps(line, ensure_ascii=False) + "\n")
        self._lines[name].flush()

    def _sound(self, side: str, rate: int) -> "WavFile":
        name = f"{side}-{rate}.wav"
        if name not in self._sounds:
            self._sounds[name] = WavFile(self._folder / name, rate)
        return self._sounds[name]


class WavFile:
    """Mono int16 that grows; until it is closed its header says that its length is unknown."""

    _UNKNOWN = 0xFFFFFFFF

    def __init__(self, path: Path, rate: int) -> None:
        self.rate = rate
        self._file: BinaryIO = path.open("wb")
        self._samples = 0
        self._file.write(self._header(self._UNKNOWN))

    def write(self, pcm: bytes) -> int:
        """Add whole samples; the place of the first of them. Half a sample at the end is left."""
        place, whole = self._samples, len(pcm) // 2
        self._file.write(pcm[: 2 * whole])
        self._file.flush()
        self._samples += whole
        return place

    def close(self) -> None:
        """Write how long it is."""
        self._file.seek(0)
        self._file.write(self._header(2 * self._samples))
        self._file.close()

    def _header(self, size: int) -> bytes:
        """RIFF's 44 bytes: PCM, one channel, 16 bits."""
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, self.rate, 2 * self.rate, 2, 16)
        riff = min(size + 36, self._UNKNOWN)
        head = struct.pack("<4sI4s", b"RIFF", riff, b"WAVE")
        return head + form + struct.pack("<4sI", b"data", size)


def _text_file(path: Path) -> TextIO:
    """A new file. Half a surrogate pair, which UTF-8 cannot write, becomes JSON's escape for it."""
    return path.open("w", encoding="utf-8", errors="backslashreplace")


def _elided(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _elided(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_elided(each) for each in value]
    if isinstance(value, str) and value.startswith(TOKEN_PREFIX):
        return shown_token(value)
    if isinstance(value, str) and len(value) >= _ELIDED and " " not in value:
        return {"chars": len(value)}
    return value
