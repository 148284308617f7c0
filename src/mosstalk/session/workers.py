"""The threads that compute for all sessions of a host: codes to sound, sound to codes, and speech.

Many calls are done in one run: those that are due first, or all that came since the last one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder, SpokenReply
from mosstalk.codec.tokenizer_state import LiveCodes
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.codec.vocoder import RETRY_AFTER_S
from mosstalk.constants import INPUT_RATE
from mosstalk.engine.request import BACKGROUND_S
from mosstalk.errors import CodecFullError, EngineStoppedError
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice
from mosstalk.runtime.busy import BusyPart, at_work, on_card
from mosstalk.runtime.device import own_stream
from mosstalk.runtime.sharing import BatchWorker, DeadlineLock
from mosstalk.vad.detectors import Detector
from mosstalk.vad.ears import EarProcess, Ears, EarThread, GateChange, HearRequest, JudgedFrames

# Making sound.

_NO_PLACE = "all places of the vocoder are taken by other replies"
_MOST_DECODE_WAIT_S = 30.0
"""Who finds no place, and is not in the background, waits so long for others' replies to end."""
_MOST_PAUSE_S = 1.0
"""One hop in the background is made in so long although others have made no sound yet: there may
always be one of them."""

_HOPS_BESIDE_OTHERS = 4
"""Hops in the background that one run makes while others speak."""


class DecoderWorker:
    """One thread that makes sound: hops of many replies, whoever runs dry first, in one run.

    At most ``most`` hops in a run, so that a first one never waits long; with a ``deadline_lock``
    it takes turns with others who compute. The decoder has places for so many replies: who finds
    none waits until another has ended. Replies in the background have at most half of them, wait
    while another's first sound is being made, and have little of a run beside others.
    """

    def __init__(
        self, decoder: SpeechDecoder, most: int, deadline_lock: DeadlineLock | None = None
    ) -> None:
        self._decoder, stream = decoder, own_stream(decoder.device)
        self._batches = BatchWorker("mosstalk-decoder", self._decode, most, deadline_lock, stream)
        self._places = decoder.vocoder.figures().slots
        self._most_background = max(1, self._places // 2)
        self._background = set[SpokenReply]()
        """Replies in the background."""
        self._before_first_audio = set[SpokenReply]()
        """Others that have made no sound yet and wait for no place."""
        self._holding = set[SpokenReply]()
        """Those that have a place, or are being given one."""
        self._waiting = set[SpokenReply]()
        self._pausing = asyncio.Lock()
        self._most_hops, self._background_hops = most, 0
        """Of a run, and in the background: each counts from its turn to its sound."""
        self._background_due = list[float]()
        """When those in the background are due that wait for their turn."""
        self._changed = asyncio.Event()
        """Set, and another taken, whenever a reply ends or makes its first sound, and whenever a
        hop in the background has its turn or its sound."""

    async def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        await self._batches.run(partial(self._decoder.prepare, voice))

    async def warm(self) -> None:
        """Do ahead of time what would make the first hops slow."""
        await self._batches.run(self._decoder.warm)

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
        async with self._background_hop(due_s):
            await self._yield_to_first_audio()
            return await self._decode_with_place(request, due_s + BACKGROUND_S)

    @asynccontextmanager
    async def _background_hop(self, due_s: float) -> AsyncIterator[None]:
        """One of the hops in the background that are under way: of those waiting the first due."""
        self._background_due.append(due_s)
        try:
            while (
                self._background_hops >= self._most_background_hops()
                or min(self._background_due) < due_s
            ):
                await self._changed.wait()
            self._background_hops += 1
        finally:
            self._background_due.remove(due_s)
            self._change()
        try:
            yield
        finally:
            self._background_hops -= 1
            self._change()

    def _most_background_hops(self) -> int:
        """No more than one run takes wait in line: who begins to speak then finds all others still
        pausing. Beside others a few: a run that has begun is not broken off."""
        others = self._before_first_audio or self._holding - self._background
        return min(_HOPS_BESIDE_OTHERS, self._most_hops) if others else self._most_hops

    def close(self, reply: SpokenReply) -> None:
        """Give back what a reply holds, once a hop of it that is being made has ended."""
        loop = asyncio.get_running_loop()

        def closed(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._forget, reply)

        with suppress(EngineStoppedError):  # then it goes with everything else
            self._batches.post(partial(self._decoder.close, reply)).add_done_callback(closed)

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
                if len(self._holding) > self._places:  # others' run would be refused with it
                    raise CodecFullError(_NO_PLACE, RETRY_AFTER_S)
                samples = await self._batches.put(request, due_s)
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

    @torch.inference_mode()
    def _decode(self, requests: list[DecodeRequest]) -> list[Samples | CodecFullError]:
        try:
            hop = at_work(BusyPart.HOP, len(requests), self._batches.waited_s)
            with hop as work, on_card(work, self._decoder.device):
                sounds = self._decoder.decode(requests)
                joined = torch.cat(sounds).cpu()
        except CodecFullError as error:
            if len(requests) == 1:
                return [error]
            half = len(requests) // 2
            return [*self._decode(requests[:half]), *self._decode(requests[half:])]
        return [part.numpy() for part in joined.split([len(sound) for sound in sounds])]


# Hearing.

_MOST_ENCODE_WAIT_S = 2.0
"""Who finds no memory for sound waits so long for others' turns to end."""
_BATCH_DELAY_S = 0.1
"""On a GPU sound of turns that go on waits so long after a run for that of others: a run of many
streams takes hardly longer than one of a single stream."""
_PIECE_SAMPLES = 2 * INPUT_RATE
"""Of a recording so much is encoded in one go: others who speak wait no longer than for that."""


class _EncodeRequest(NamedTuple):
    """More sound of a stream of codes; ``last``: none follows.

    ``foreseen``: what there is if none follows is to be told, and nothing is taken.
    """

    codes: LiveCodes
    samples: Samples
    last: bool
    foreseen: bool = False


@dataclass(eq=False)
class Ear:
    """A stream in which speech is looked for: its number, and which of the ears hear it."""

    number: int
    place: int
    gated: bool
    heard: bool = False
    """Whether they know of it."""


class EncoderWorker:
    """Those that hear: a thread that makes codes of sound, and the ears, which look for speech.

    ``detector`` None: no session can be hands-free. With ``ear_processes`` so many processes look
    for speech, else a thread of this one. ``limit_s``: see ``LiveOptions``.
    """

    def __init__(
        self,
        tokenizer: SpeechTokenizer,
        detector: Detector | None,
        limit_s: float | None = None,
        ear_processes: int = 0,
    ) -> None:
        self.detector = detector
        self._tokenizer = LiveTokenizer(tokenizer, options=LiveOptions(limit_s=limit_s))
        self._ended = asyncio.Event()
        """Set, and another taken, whenever a turn ends and gives back what it held."""
        stream = own_stream(self._tokenizer.device)
        batch_delay_s = _BATCH_DELAY_S if self._tokenizer.on_gpu else 0.0
        self._codes = BatchWorker(
            "mosstalk-codes", self._encode, within=stream, batch_delay_s=batch_delay_s
        )
        self.ears: list[Ears] = []
        if detector and ear_processes:
            self.ears = [EarProcess(detector.name) for _ in range(ear_processes)]
        elif detector:
            self.ears = [EarThread(detector)]
        self._open_ears = set[Ear]()
        self._numbers = count()

    def open(self, last_maximum: float | None = None) -> LiveCodes:
        """A turn before its first sample; ``last_maximum`` is that of the speaker's last one."""
        return self._tokenizer.open(last_maximum)

    def encode_ahead(self, codes: LiveCodes, samples: Samples) -> "asyncio.Future[Any]":
        """``encode`` of a turn that goes on: it can wait for that of others, not for memory.

        Its exception may be a ``CodecFullError``; nothing was taken then.
        """
        return self._codes.put(_EncodeRequest(codes, samples, last=False))

    def foresee(self, codes: LiveCodes, samples: Samples) -> "asyncio.Future[LiveCodes | None]":
        """What ``codes`` will be if the turn ends after these samples, which are not taken.

        None if that cannot be told ahead; its exception may be a ``CodecFullError``. Such a turn
        is ended by ``end_as_foreseen``. It waits for nobody: a reply is begun with it.
        """
        return self._codes.put(_EncodeRequest(codes, samples, last=True, foreseen=True), 0.0)

    def end_as_foreseen(self, codes: LiveCodes) -> None:
        """End a turn without another run: what it would be is known already."""
        self._tokenizer.close(codes)
        self._tell_ended()

    def take_back(self, encoding: "asyncio.Future[Any]") -> bool:
        """Cancel what ``encode_ahead`` or ``foresee`` has begun to wait for; False if it is being
        done.
        """
        return self._codes.take_back(encoding)

    async def encode(self, codes: LiveCodes, samples: Samples, *, last: bool = False) -> None:
        """Bring ``codes`` up to these finite samples (n,) at 16 kHz; ``last`` makes them final.

        Where there is no memory for them it waits for others' turns to end, 2 s at most. A turn
        that ends is then encoded anew, which keeps nothing.

        Raises:
            CodecFullError: there was none until then, and more follows; nothing was taken.
        """
        request = _EncodeRequest(codes, samples, last)
        end_s = time.monotonic() + _MOST_ENCODE_WAIT_S
        while True:
            ended, left_s = self._ended, end_s - time.monotonic()
            try:
                await self._codes.put(request, 0.0)
                break
            except CodecFullError:
                if left_s <= 0 and last:
                    await self._codes.run(partial(self._tokenizer.finish_anew, codes, samples))
                    break
                if left_s <= 0:
                    raise
            with suppress(TimeoutError):  # then once more: others may have been dropped
                await asyncio.wait_for(ended.wait(), left_s)
        if last:
            self._tell_ended()

    def _tell_ended(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()

    async def codes_of(self, samples: Samples) -> list[int]:
        """Codes of a whole turn, in pieces between which other streams have their turn."""
        stream = self.open()
        for start in range(0, max(1, len(samples)), _PIECE_SAMPLES):
            end = start + _PIECE_SAMPLES
            await self.encode(stream, samples[start:end], last=end >= len(samples))
        return stream.codes

    def open_ear(self, *, gated: bool) -> Ear:
        """A stream in which speech is looked for; ``gated``: behind an echo gate."""
        taken = Counter(ear.place for ear in self._open_ears)
        place = min(range(len(self.ears)), key=lambda place: taken[place])
        ear = Ear(next(self._numbers), place, gated)
        self._open_ears.add(ear)
        return ear

    async def detect(
        self,
        ear: Ear,
        samples: Samples,
        rate: int,
        changes: list[GateChange],
        *,
        soon: bool = False,
    ) -> JudgedFrames:
        """What finite samples (n,) more, after ``changes`` of the echo gate, have made known.

        ``soon``: they do not wait for sound of others, as a process's otherwise may, 10 ms.

        Raises:
            EngineStoppedError: the process that knew the stream has ended.
        """
        first, ear.heard = not ear.heard, True
        request = HearRequest(ear.number, samples, rate, changes, first, ear.gated)
        return await self.ears[ear.place].put(request, soon=soon)

    def close_ear(self, ear: Ear) -> None:
        """Forget a stream."""
        self._open_ears.discard(ear)
        self.ears[ear.place].forget(ear.number)

    async def warm(self, streams: int) -> None:
        """Make ready for so many streams of codes at once, where that takes time: on a GPU."""
        if self._tokenizer.on_gpu:
            await self._codes.run(partial(self._tokenizer.warm, streams))

    def stop(self) -> None:
        """End the threads."""
        self._codes.stop()
        for ears in self.ears:
            ears.stop()

    def _encode(self, requests: list[_EncodeRequest]) -> list[CodecFullError | LiveCodes | None]:
        """What is refused of all together is tried in halves: few runs find who is too much."""
        found: dict[int, LiveCodes | None] = {}
        try:
            # First what takes nothing: it may be done twice.
            found = self._foresee([each for each in requests if each.foreseen])
            taken = [each for each in requests if not each.foreseen]
            self._push([each for each in taken if each.last or len(each.samples)])
        except CodecFullError as error:  # none has been taken
            if len(requests) == 1:
                return [error]
            half = len(requests) // 2
            return [*self._encode(requests[:half]), *self._encode(requests[half:])]
        return [found.get(id(each.codes)) if each.foreseen else None for each in requests]

    def _foresee(self, asked: list[_EncodeRequest]) -> dict[int, LiveCodes | None]:
        """What each stream would be if it ended, by its ``id``, in one run."""
        if not asked:
            return {}
        push = at_work(BusyPart.PUSH, len(asked), self._codes.waited_s)
        with push as work, on_card(work, self._tokenizer.device):
            streams = [each.codes for each in asked]
            ends = self._tokenizer.foresee(streams, [each.samples for each in asked])
        return {id(codes): end for codes, end in zip(streams, ends, strict=True)}

    def _push(self, due: list[_EncodeRequest]) -> None:
        """Encode what came of some streams, in one run."""
        if due:
            push = at_work(BusyPart.PUSH, len(due), self._codes.waited_s)
            with push as work, on_card(work, self._tokenizer.device):
                streams, sounds, last, _ = (list(each) for each in zip(*due, strict=True))
                changes = self._tokenizer.push_many(streams, sounds, last)
                if any(change.repaired for change in changes):
                    work.part = BusyPart.REPAIR
