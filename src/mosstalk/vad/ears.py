"""Voice activity detection of many streams, each perhaps behind an echo gate: the "ears".

They are in this process, or in one of their own. The state of a stream, the detector's and the
gate's, stays where it is computed; who asks names it by a number.
"""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from mosstalk.audio.sound import SOON, Resampler, Samples
from mosstalk.errors import EngineStoppedError
from mosstalk.vad.detectors import Detector, open_detector
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.frames import Frames

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
    """A detector of speech with the state of its streams; one thread at a time asks."""

    def hear(
        self, asked: Sequence[HearRequest], closed: Sequence[int]
    ) -> Sequence[JudgedFrames | Exception]:
        """Hear more of some streams, each at most once, and forget those that are closed.

        An ``EngineStoppedError`` in a stream's place: nothing is known of it any more.
        """

    def stop(self) -> None:
        """Forget all streams."""


@dataclass
class _Stream:
    state: Any
    gate: EchoGate | None
    resampler: Resampler


class LocalEars:
    """Ears of this process."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._streams: dict[int, _Stream] = {}

    def hear(
        self, asked: Sequence[HearRequest], closed: Sequence[int]
    ) -> Sequence[JudgedFrames | Exception]:
        """See ``Ears``."""
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

    def stop(self) -> None:
        """See ``Ears``."""
        self._streams.clear()


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


class EarProcess:
    """Ears in a process of their own, beside the interpreter that steps.

    Where it ends, its streams are lost, and those that begin later have another. It ends with
    this one.
    """

    def __init__(self, detector: str) -> None:
        self._detector = detector
        self._start()

    def _start(self) -> None:
        # Not forked: this process has threads, and perhaps a GPU.
        context = get_context("spawn")
        self._link, theirs = context.Pipe()
        given = (theirs, self._detector)
        self._process = context.Process(target=_run, args=given, name="mosstalk-ears", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid
        return self._process.pid

    def hear(
        self, asked: Sequence[HearRequest], closed: Sequence[int]
    ) -> Sequence[JudgedFrames | Exception]:
        """See ``Ears``."""
        try:
            self._link.send((asked, closed))
            heard: Sequence[JudgedFrames | Exception] = self._link.recv()
        except (EOFError, OSError):
            self.stop()
            self._start()
            return [_lost()] * len(asked)
        return heard

    def stop(self) -> None:
        """End the process."""
        self._link.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _run(link: Connection, detector: str) -> None:
    """Hear what is sent until the link is closed; signals are the parent's to deal with."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    ears = LocalEars(open_detector(detector))
    with suppress(EOFError, OSError):
        while True:
            asked, closed = link.recv()
            link.send(ears.hear(asked, closed))
