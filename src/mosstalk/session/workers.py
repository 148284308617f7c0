"""The threads that compute for all sessions of a host: one makes sound, two hear.

Many calls are done in one run: those that are due first, or all that came since the last one.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder, SpokenReply
from mosstalk.codec.tokenizer_state import LiveCodes
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.constants import INPUT_RATE
from mosstalk.engine.request import BACKGROUND_S
from mosstalk.errors import CodecFullError, EngineStoppedError
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice
from mosstalk.runtime.busy import BusyPart, at_work
from mosstalk.runtime.card_time import on_card
from mosstalk.runtime.device import own_stream
from mosstalk.runtime.sharing import DeadlineLock
from mosstalk.vad.detectors import Detector, Frames

_T = TypeVar("_T")
_A = TypeVar("_A")
_B = TypeVar("_B")
_STOPPED = "the host is not running: it has ended"


@dataclass(order=True)
class _Call:
    """What one asker gave, and what came of it. Those that are due first go first."""

    due_s: float
    number: int
    given: Any = field(compare=False)
    """What the work is given; of a job the function that does it."""
    is_job: bool = field(compare=False)
    done: "Future[Any]" = field(default_factory=Future, compare=False)


class BatchWorker(Generic[_A, _B]):
    """One thread that does what is due first, together with up to ``most`` - 1 others in line.

    ``work`` gets what was given, the earliest first, and returns as many results, of which one
    may be an error for its asker. What it raises, all of that run get. A call whose asker has been
    cancelled is dropped unless it has begun. With a ``deadline_lock`` each run waits its turn among
    others who compute.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[_A]], Sequence[_B | Exception]],
        most: int = sys.maxsize,
        deadline_lock: DeadlineLock | None = None,
    ) -> None:
        self._work, self._most, self._deadline_lock = work, most, deadline_lock
        self._calls = list[_Call]()
        """A heap, guarded by ``_changed`` as ``_stopped`` is."""
        self._changed, self._stopped = Condition(), False
        self._numbers = count()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, given: _A, due_s: float = 0.0) -> _B:
        """This one's result; the earliest ``due_s`` first.

        Raises:
            EngineStoppedError: the thread has been stopped.
        """
        done: Future[_B] = self._put(_Call(due_s, next(self._numbers), given, is_job=False))
        return await asyncio.wrap_future(done)

    async def run(self, job: Callable[[], _T]) -> _T:
        """What ``job`` returns; done on the thread before whatever waits, by itself."""
        return await asyncio.wrap_future(self.post(job))

    def post(self, job: Callable[[], _T]) -> "Future[_T]":
        """``run`` without waiting for it."""
        return self._put(_Call(-math.inf, next(self._numbers), job, is_job=True))

    def stop(self) -> None:
        """End the thread after the run that it is at; refuse all others."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        for call in self._calls:
            if call.done.set_running_or_notify_cancel():
                call.done.set_exception(EngineStoppedError(_STOPPED))
        self._calls.clear()

    def _put(self, call: _Call) -> "Future[Any]":
        with self._changed:
            if self._stopped:
                raise EngineStoppedError(_STOPPED)
            heappush(self._calls, call)
            self._changed.notify()
        return call.done

    def _run(self) -> None:
        while first := self._first():
            with self._deadline_lock.turn(first.due_s) if self._deadline_lock else nullcontext():
                if not first.done.cancelled():
                    self._do([first] if first.is_job else [first, *self._joining()])
            del first  # it may hold much, and the next one may be long in coming

    def _first(self) -> _Call | None:
        """The call that is due first, once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._stopped)
            return None if self._stopped else heappop(self._calls)

    def _joining(self) -> Iterator[_Call]:
        """Who is in line after the first, up to the first that must be done by itself."""
        room = self._most - 1
        with self._changed:
            while room and self._calls and not self._calls[0].is_job:
                call = heappop(self._calls)
                if not call.done.cancelled():
                    room -= 1
                    yield call

    def _do(self, calls: list[_Call]) -> None:
        """Do those whose askers still wait, in one run; a result may be an error for its asker."""
        calls = [call for call in calls if call.done.set_running_or_notify_cancel()]
        if not calls:
            return
        try:
            given = [call.given for call in calls]
            results = [given[0]()] if calls[0].is_job else self._work(given)
        except Exception as error:
            for call in calls:
                call.done.set_exception(error)
            return
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                call.done.set_exception(result)
            else:
                call.done.set_result(result)


# Making sound.

_MOST_DECODE_WAIT_S = 30.0
"""Who finds no place, and is not in the background, waits so long for others' replies to end."""
_MOST_PAUSE_S = 1.0
"""One hop in the background is made in so long although others have made no sound yet: there may
always be one of them."""


class DecoderWorker:
    """One thread that makes sound: hops of many replies, whoever runs dry first, in one run.

    At most ``most`` hops in a run, so that a first one never waits long; with a ``deadline_lock``
    it takes turns with others who compute. The decoder has places for so many replies: who finds
    none waits until another has ended. Replies in the background have at most half of them, and
    wait while another's first sound is being made.
    """

    def __init__(
        self, decoder: SpeechDecoder, most: int, deadline_lock: DeadlineLock | None = None
    ) -> None:
        self._decoder, self._stream = decoder, own_stream(decoder.device)
        self._batches = BatchWorker("mosstalk-decoder", self._decode, most, deadline_lock)
        self._most_background = max(1, decoder.vocoder.figures().slots // 2)
        self._background = set[SpokenReply]()
        """Replies in the background."""
        self._before_first_audio = set[SpokenReply]()
        """Others that have made no sound yet and wait for no place."""
        self._holding = set[SpokenReply]()
        """Those that have a place, or are being given one."""
        self._waiting = set[SpokenReply]()
        self._pausing = asyncio.Lock()
        self._background_slots = asyncio.Semaphore(most)
        """Held by each hop in the background from its turn to its sound. No more of them than one
        run takes wait in line: who begins to speak then finds all others still pausing."""
        self._changed = asyncio.Event()
        """Set, and another taken, whenever a reply ends or makes its first sound."""

    async def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        await self._batches.run(partial(self._on_stream, self._decoder.prepare, voice))

    async def warm(self) -> None:
        """Do ahead of time what would make the first hops slow."""
        await self._batches.run(partial(self._on_stream, self._decoder.warm))

    def open(self, voice: Voice, seed: int, *, background: bool = False) -> SpokenReply:
        """A reply before its first code. It holds nothing until its first hop."""
        reply = self._decoder.open(voice, seed)
        (self._background if background else self._before_first_audio).add(reply)
        return reply

    async def decode(self, request: DecodeRequest, due_s: float) -> Samples:
        """Sound (n,) at 24 kHz of the next codes, the earliest ``due_s`` first.

        While there is no room for the reply it waits for others to end, 30 s at most unless it
        is in the background.

        Raises:
            CodecFullError: there was no room until then, or nobody else will ever make any.
        """
        reply = request.reply
        if reply not in self._background:
            return await self._decode_with_place(request, due_s)
        holding, most = self._holding, self._most_background
        while reply not in holding and len(holding & self._background) >= most:
            await self._changed.wait()
        async with self._background_slots:
            await self._yield_to_first_audio()
            return await self._decode_with_place(request, due_s + BACKGROUND_S)

    def close(self, reply: SpokenReply) -> None:
        """Give back what a reply holds, once a hop of it that is being made has ended."""
        loop = asyncio.get_running_loop()

        def closed(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._forget, reply)

        with suppress(EngineStoppedError):  # then it goes with everything else
            close = partial(self._on_stream, self._decoder.close, reply)
            self._batches.post(close).add_done_callback(closed)

    def stop(self) -> None:
        """End the thread after the run that it is at; refuse what comes later."""
        self._batches.stop()

    async def _yield_to_first_audio(self) -> None:
        """Before a hop in the background: wait a while for others' first sound."""
        async with self._pausing:  # one after the other: so many waits do not end at once
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_PAUSE_S):
                    while self._before_first_audio:
                        await self._changed.wait()

    async def _decode_with_place(self, request: DecodeRequest, due_s: float) -> Samples:
        """The sound of a hop, once there is room for its reply."""
        reply = request.reply
        patient, end_s = reply in self._background, time.monotonic() + _MOST_DECODE_WAIT_S
        while True:
            changed, held = self._changed, reply in self._holding
            self._holding.add(reply)
            try:
                samples = await self._batches.do(request, due_s)
            except CodecFullError:
                if not held:
                    self._holding.discard(reply)
                left_s = None if patient else end_s - time.monotonic()
                nobody = self._holding <= self._waiting | {reply}
                if nobody or (left_s is not None and left_s <= 0):
                    raise
                await self._wait_for_place(reply, changed, left_s)
            else:
                if len(samples) and reply in self._before_first_audio:
                    self._before_first_audio.discard(reply)
                    self._change()
                return samples

    async def _wait_for_place(
        self, reply: SpokenReply, changed: asyncio.Event, most_s: float | None
    ) -> None:
        is_first = reply in self._before_first_audio
        self._before_first_audio.discard(reply)  # those with a place need not wait for its sound
        self._waiting.add(reply)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await changed.wait()
        finally:
            self._waiting.discard(reply)
        if is_first:
            self._before_first_audio.add(reply)

    def _forget(self, reply: SpokenReply) -> None:
        for each in (self._holding, self._background, self._before_first_audio):
            each.discard(reply)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _on_stream(self, job: Callable[..., None], *given: Any) -> None:
        with self._stream():
            job(*given)

    @torch.inference_mode()
    def _decode(self, requests: list[DecodeRequest]) -> list[Samples | CodecFullError]:
        try:
            with self._stream(), at_work(BusyPart.HOP) as work, on_card(work, self._decoder.device):
                sounds = self._decoder.decode(requests)
                joined = torch.cat(sounds).cpu()
        except CodecFullError as error:
            if len(requests) == 1:
                return [error]
            return [result for one in requests for result in self._decode([one])]
        return [part.numpy() for part in joined.split([len(sound) for sound in sounds])]


# Hearing.

_SESSION_S = 31.0
"""A segment of 30 s, the most that is held of a turn, in whole pages of 1.28 s."""
_MOST_ENCODE_WAIT_S = 2.0
"""Who finds no memory for sound waits so long for others' turns to end."""
_PIECE_SAMPLES = 2 * INPUT_RATE
"""Of a recording so much is encoded in one go: others who speak wait no longer than for that."""


def held_s(sessions: int) -> float:
    """Seconds of sound for which a GPU keeps memory where so many talk: a whole segment of each.

    So nobody who talks for long takes it from anybody else.
    """
    return sessions * _SESSION_S


class _EncodeRequest(NamedTuple):
    """More sound of a stream of codes; ``last``: none follows."""

    codes: LiveCodes
    samples: Samples
    last: bool


_DetectRequest = tuple[Any, Samples, Callable[[Frames], Frames]]
"""A detector's state, more sound of its stream, and what its frames go through."""


class EncoderWorker:
    """Threads that hear; what they know of a stream is a value that its session keeps.

    ``detector`` None: no session can be hands-free. ``limit_s``: see ``LiveOptions``.
    """

    def __init__(
        self, tokenizer: SpeechTokenizer, detector: Detector | None, limit_s: float | None = None
    ) -> None:
        self.detector = detector
        self._tokenizer = LiveTokenizer(tokenizer, options=LiveOptions(limit_s=limit_s))
        self._ended = asyncio.Event()
        """Set, and another taken, whenever a turn ends and gives back what it held."""
        self._codes = BatchWorker("mosstalk-codes", self._encode)
        self._frames = BatchWorker("mosstalk-frames", self._detect)

    def open(self, last_maximum: float | None = None) -> LiveCodes:
        """A turn before its first sample; ``last_maximum`` is that of the speaker's last one."""
        return self._tokenizer.open(last_maximum)

    async def encode(self, codes: LiveCodes, samples: Samples, *, last: bool = False) -> None:
        """Bring ``codes`` up to these finite samples (n,) at 16 kHz; ``last`` makes them final.

        Where there is no memory for them it waits for others' turns to end, 2 s at most.

        Raises:
            CodecFullError: there was none until then; nothing was taken.
        """
        request = _EncodeRequest(codes, samples, last)
        end_s = time.monotonic() + _MOST_ENCODE_WAIT_S
        while True:
            ended, left_s = self._ended, end_s - time.monotonic()
            try:
                await self._codes.do(request)
                break
            except CodecFullError:
                if left_s <= 0:
                    raise
            with suppress(TimeoutError):  # then once more: others may have been dropped
                await asyncio.wait_for(ended.wait(), left_s)
        if last:
            self._ended.set()
            self._ended = asyncio.Event()

    async def codes_of(self, samples: Samples) -> list[int]:
        """Codes of a whole turn, in pieces between which other streams have their turn."""
        stream = self.open()
        for start in range(0, max(1, len(samples)), _PIECE_SAMPLES):
            end = start + _PIECE_SAMPLES
            await self.encode(stream, samples[start:end], last=end >= len(samples))
        return stream.codes

    async def detect(
        self, state: Any, samples: Samples, gate: Callable[[Frames], Frames]
    ) -> tuple[Any, Frames]:
        """The detector's next state, and the frames that finite samples (n,) made whole.

        ``gate`` is called on the thread; what it returns in their place is the result.
        """
        return await self._frames.do((state, samples, gate))

    async def warm(self, streams: int) -> None:
        """Make ready for so many streams of codes at once, where that takes time: on a GPU."""
        if self._tokenizer.on_gpu:
            await self._codes.run(partial(self._tokenizer.warm, streams))

    def stop(self) -> None:
        """End the threads."""
        self._codes.stop()
        self._frames.stop()

    def _encode(self, requests: list[_EncodeRequest]) -> list[CodecFullError | None]:
        due = [request for request in requests if request.last or len(request.samples)]
        refused = dict[int, CodecFullError]()
        try:
            self._push(due)
        except CodecFullError:  # of all together: none has been taken
            for request in due:
                try:
                    self._push([request])
                except CodecFullError as error:
                    refused[id(request)] = error
        return [refused.get(id(request)) for request in requests]

    def _push(self, due: list[_EncodeRequest]) -> None:
        """Encode what came of some streams, in one run."""
        if due:
            with at_work(BusyPart.PUSH) as work, on_card(work, self._tokenizer.device):
                streams, sounds, last = (list(each) for each in zip(*due, strict=True))
                changes = self._tokenizer.push_many(streams, sounds, last)
                if any(change.repaired for change in changes):
                    work.part = BusyPart.REPAIR

    def _detect(self, requests: list[_DetectRequest]) -> list[tuple[Any, Frames]]:
        assert self.detector is not None, "no detector of speech"
        states, samples, gates = (list(each) for each in zip(*requests, strict=True))
        with at_work(BusyPart.DETECT):
            found = self.detector.push_many(states, samples)
            return [
                (state, gate(frames)) for gate, (state, frames) in zip(gates, found, strict=True)
            ]
