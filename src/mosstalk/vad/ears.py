"""Voice activity detection of many streams, each perhaps behind an echo gate: the "ears".

They are in this process, or in one of their own. The state of a stream, the detector's and the
gate's, stays where it is computed; who asks names it by a number.
"""

import asyncio
import math
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from threading import Lock
from typing import Any, NamedTuple, Protocol

from mosstalk.audio.sound import SOON, Resampler, Samples
from mosstalk.errors import EngineStoppedError
from mosstalk.runtime.busy import BusyPart, at_work, spend
from mosstalk.runtime.sharing import BatchWorker
from mosstalk.vad.detectors import Detector, open_detector
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.frames import Frames

_SPACING_S = 0.01
"""Sound that can wait is sent to a process so long after a run's begin: half a client's frame."""
_SIZE_BYTES = 8
"""Before each answer of a process: its length."""
_READ_BYTES = 1 << 16
GateChange = tuple[str, tuple[Any, ...]]
"""A method of ``EchoGate`` and what it is called with, before the next sound is heard."""


class HearRequest(NamedTuple):
    """The next ``samples`` (n,) of stream ``number``, float32 at ``rate`` Hz and finite.

    ``gated``, for the ``first`` ones: an echo gate stands behind the detector.
    """

    number: int
    samples: Samples
    rate: int
    changes: list[GateChange]
    first: bool
    gated: bool


class JudgedFrames(NamedTuple):
    """Frames that are decided by now, and how many the echo gate holds back."""

    frames: Frames
    held: int


class Ears(Protocol):
    """A detector of speech with the state of its streams, asked from one event loop."""

    def put(self, request: HearRequest, *, soon: bool = False) -> "asyncio.Future[JudgedFrames]":
        """Hear more of a stream, one request after the other; ``soon``: waiting for no others.

        The result may be an ``EngineStoppedError``: nothing is known of the stream any more.

        Raises:
            EngineStoppedError: they have been stopped.
        """

    def forget(self, number: int) -> None:
        """Forget a stream, before more is heard."""

    def stop(self) -> None:
        """Forget all streams; may be called from any thread."""


@dataclass
class _Stream:
    state: Any
    gate: EchoGate | None
    resampler: Resampler


class EarStreams:
    """The streams that are heard in one place, by one thread."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._streams: dict[int, _Stream] = {}

    def hear(
        self, asked: Sequence[HearRequest], closed: Sequence[int]
    ) -> Sequence[JudgedFrames | Exception]:
        """Hear more of some streams, each at most once, and forget those that are closed.

        An ``EngineStoppedError`` in a stream's place: it is not known, or not any more.
        """
        for number in closed:
            self._streams.pop(number, None)
        for each in asked:
            if each.first:
                gate = EchoGate() if each.gated else None
                resampler = Resampler(each.rate, SOON)
                self._streams[each.number] = _Stream(self._detector.start(), gate, resampler)
        known = [each for each in asked if each.number in self._streams]
        streams = [self._streams[each.number] for each in known]
        sounds = [
            stream.resampler.push(each.samples, each.rate)
            for each, stream in zip(known, streams, strict=True)
        ]
        found = self._detector.push_many([stream.state for stream in streams], sounds)
        heard: dict[int, JudgedFrames] = {}
        for each, stream, sound, (state, frames) in zip(known, streams, sounds, found, strict=True):
            stream.state = state
            heard[each.number] = _judged(stream.gate, each.changes, sound, frames)
        return [heard.get(each.number, _lost()) for each in asked]


def _judged(
    gate: EchoGate | None, changes: list[GateChange], sound: Samples, frames: Frames
) -> JudgedFrames:
    if gate is None:
        return JudgedFrames(frames, 0)
    for name, given in changes:
        getattr(gate, name)(*given)
    return JudgedFrames(gate.heard(sound, frames), gate.held)


def _lost() -> EngineStoppedError:
    return EngineStoppedError("the process that found speech has ended")


class EarThread:
    """Ears of this process, on a thread of their own."""

    def __init__(self, detector: Detector) -> None:
        self._streams = EarStreams(detector)
        self._closed = deque[int]()
        self._calls = BatchWorker("mosstalk-ears", self._hear)

    def put(self, request: HearRequest, *, soon: bool = False) -> "asyncio.Future[JudgedFrames]":
        """See ``Ears``; here nobody waits for others, only behind them."""
        del soon
        return self._calls.put(request)

    def forget(self, number: int) -> None:
        """See ``Ears``."""
        self._closed.append(number)

    def stop(self) -> None:
        """See ``Ears``."""
        self._calls.stop()

    def _hear(self, asked: list[HearRequest]) -> Sequence[JudgedFrames | Exception]:
        closed = [self._closed.popleft() for _ in range(len(self._closed))]
        with at_work(BusyPart.DETECT, len(asked), self._calls.waited_s):
            return self._streams.hear(asked, closed)


@dataclass
class _Call:
    """A request, and what comes of it."""

    request: HearRequest
    done: "asyncio.Future[JudgedFrames]"
    asked_s: float = field(default_factory=time.perf_counter)


class EarProcess:
    """Ears in a process of their own, beside the interpreter that steps.

    The event loop itself asks it, with all that has come by then, ``_SPACING_S`` after the last
    time at the earliest: a thread between them would wait for the interpreter twice more. Where
    the process ends, its streams are lost, and those that begin later have another. It ends with
    this one.
    """

    def __init__(self, detector: str) -> None:
        self._detector, self._stopped, self._changing = detector, False, Lock()
        self._calls, self._closed = list[_Call](), list[int]()
        self._asking: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._begun_s = -math.inf
        """When it was last asked."""
        self._start()

    def _start(self) -> None:
        # Not forked: this process has threads, and perhaps a GPU.
        context = get_context("spawn")
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        given = (theirs, self._detector)
        self._process = context.Process(target=_run, args=given, name="mosstalk-ears", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid
        return self._process.pid

    def put(self, request: HearRequest, *, soon: bool = False) -> "asyncio.Future[JudgedFrames]":
        """See ``Ears``."""
        if self._stopped:
            raise _lost()
        loop = asyncio.get_running_loop()
        call = _Call(request, loop.create_future())
        self._calls.append(call)
        if soon:
            self._hurry.set()
        if self._asking is None:
            self._asking = loop.create_task(self._ask(), name="mosstalk-ears")
        return call.done

    def forget(self, number: int) -> None:
        """See ``Ears``."""
        self._closed.append(number)

    async def _ask(self) -> None:
        """Have all that is put heard, until there is no more."""
        while self._calls:
            left_s = self._begun_s + _SPACING_S - time.perf_counter()
            if left_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), left_s)
            self._hurry.clear()
            calls, self._calls = [call for call in self._calls if not call.done.cancelled()], []
            if not calls:
                continue
            closed, self._closed = self._closed, []
            self._begun_s = time.perf_counter()
            found: Sequence[JudgedFrames | Exception]
            try:
                found = await self.hear([call.request for call in calls], closed)
            except Exception as error:
                found = [error] * len(calls)
            wall_s = time.perf_counter() - self._begun_s
            waited_s = self._begun_s - calls[0].asked_s
            spend(BusyPart.DETECT, wall_s, items=len(calls), waited_s=waited_s)
            for call, each in zip(calls, found, strict=True):
                if call.done.cancelled():
                    continue
                if isinstance(each, Exception):
                    call.done.set_exception(each)
                else:
                    call.done.set_result(each)
        self._asking = None

    async def hear(
        self, asked: Sequence[HearRequest], closed: Sequence[int]
    ) -> Sequence[JudgedFrames | Exception]:
        """What ``EarStreams.hear`` gives there; to be asked anew once it has answered."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, pickle.dumps((asked, closed)))
            size = int.from_bytes(await self._read(_SIZE_BYTES))
            heard: Sequence[JudgedFrames | Exception] = pickle.loads(await self._read(size))
        except (EOFError, OSError):
            await loop.run_in_executor(None, self._start_again)
            return [_lost()] * len(asked)
        return heard

    async def _read(self, count: int) -> bytearray:
        """The next bytes that the process sends."""
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < count:
            part = await loop.sock_recv(self._link, min(count - len(found), _READ_BYTES))
            if not part:
                raise EOFError
            found += part
        return found

    def _start_again(self) -> None:
        """Another process in place of one that has ended, unless it was to end."""
        with self._changing:
            self._link.close()
            if not self._stopped:
                self._end()
                self._start()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()

    def stop(self) -> None:
        """See ``Ears``: end the process. What is asked of it meanwhile is lost."""
        with self._changing:
            self._stopped = True
            self._end()
            if self._asking is None:  # else it finds the link closed at the other end
                self._link.close()


def _run(link: socket.socket, detector: str) -> None:
    """Hear what is sent until the link is closed; signals are the parent's to deal with."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    streams = EarStreams(open_detector(detector))
    with link, link.makefile("rb") as sent, suppress(EOFError, OSError):
        while True:
            asked, closed = pickle.load(sent)
            heard = pickle.dumps(streams.hear(asked, closed))
            link.sendall(len(heard).to_bytes(_SIZE_BYTES) + heard)
