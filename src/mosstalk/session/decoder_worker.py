"""Speaking for all sessions of a host: hops of many replies, whoever runs dry first, in one run."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder, SpokenReply
from mosstalk.engine.request import BACKGROUND_S
from mosstalk.errors import CodecFullError, EngineStoppedError
from mosstalk.models.voices import Voice
from mosstalk.runtime.busy import BusyPart, at_work
from mosstalk.runtime.card_time import on_card
from mosstalk.runtime.deadline_lock import DeadlineLock
from mosstalk.runtime.device import own_stream
from mosstalk.session.workers import DeadlineBatcher

_MOST_WAIT_S = 30.0
"""Who finds no place, and is not in the background, waits so long for others' replies to end."""
_MOST_PAUSE_S = 1.0
"""One hop in the background is made in so long although others have made no sound yet: there may
always be one of them."""


class DecoderWorker:
    """One thread that makes sound. At most ``most`` hops in a run, so that a first one never
    waits long; with a ``deadline_lock`` it takes turns with others who compute.

    The decoder has places for so many replies: who finds none waits until another has ended.
    Replies in the background have at most half of them, and wait while another's first sound is
    being made.
    """

    def __init__(
        self, decoder: SpeechDecoder, most: int, deadline_lock: DeadlineLock | None = None
    ) -> None:
        self._most_background = max(1, decoder.vocoder.figures().slots // 2)
        self._background: set[SpokenReply] = set()
        """Replies in the background."""
        self._before_first_audio: set[SpokenReply] = set()
        """Others that have made no sound yet and wait for no place."""
        self._holding: set[SpokenReply] = set()
        """Those that have a place, or are being given one."""
        self._waiting: set[SpokenReply] = set()
        self._pausing = asyncio.Lock()
        self._background_slots = asyncio.Semaphore(most)
        """Held by each hop in the background from its turn to its sound. No more of them than one
        run takes wait in line: who begins to speak then finds all others still pausing."""
        self._changed = asyncio.Event()
        """Set, and another taken, whenever a reply ends or makes its first sound."""
        self._decoder = decoder
        self._stream = own_stream(decoder.device)
        self._batcher = DeadlineBatcher("mosstalk-decoder", self._decode, most, deadline_lock)

    async def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        await self._batcher.run(partial(self._on_stream, partial(self._decoder.prepare, voice)))

    def open(self, voice: Voice, seed: int, *, background: bool = False) -> SpokenReply:
        """A reply before its first code. It holds nothing until its first hop."""
        reply = self._decoder.open(voice, seed)
        (self._background if background else self._before_first_audio).add(reply)
        return reply

    async def warm(self) -> None:
        """Do ahead of time what would make the first hops slow."""
        await self._batcher.run(partial(self._on_stream, self._decoder.warm))

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
        while (
            reply not in self._holding
            and len(self._holding & self._background) >= self._most_background
        ):
            await self._changed.wait()
        async with self._background_slots:
            await self._yield_to_first_audio()
            return await self._decode_with_place(request, due_s + BACKGROUND_S)

    async def _decode_with_place(self, request: DecodeRequest, due_s: float) -> Samples:
        """The sound of a hop, once there is room for its reply."""
        reply = request.reply
        patient, end_s = reply in self._background, time.monotonic() + _MOST_WAIT_S
        while True:
            changed, held = self._changed, reply in self._holding
            self._holding.add(reply)
            try:
                samples = await self._batcher.do(request, due_s)
            except CodecFullError:
                if not held:
                    self._holding.discard(reply)
                left_s = None if patient else end_s - time.monotonic()
                nobody = self._holding <= self._waiting | {reply}
                if nobody or (left_s is not None and left_s <= 0):
                    raise
                await self._wait_for_a_place(reply, changed, left_s)
            else:
                if len(samples) and reply in self._before_first_audio:
                    self._before_first_audio.discard(reply)
                    self._change()
                return samples

    async def _yield_to_first_audio(self) -> None:
        """Before a hop in the background: wait a while for others' first sound."""
        async with self._pausing:  # one after the other: so many waits do not end at once
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_PAUSE_S):
                    while self._before_first_audio:
                        await self._changed.wait()

    async def _wait_for_a_place(
        self, reply: SpokenReply, changed: asyncio.Event, most_s: float | None
    ) -> None:
        before_first_audio = reply in self._before_first_audio
        self._before_first_audio.discard(
            reply
        )  # so that those who have a place need not wait for its sound
        self._waiting.add(reply)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await changed.wait()
        finally:
            self._waiting.discard(reply)
        if before_first_audio:
            self._before_first_audio.add(reply)

    def close(self, reply: SpokenReply) -> None:
        """Give back what a reply holds, once a hop of it that is being made has ended."""
        loop = asyncio.get_running_loop()

        def closed(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._forget, reply)

        with suppress(EngineStoppedError):  # then it goes with everything else
            close = partial(self._on_stream, partial(self._decoder.close, reply))
            self._batcher.post(close).add_done_callback(closed)

    def _forget(self, reply: SpokenReply) -> None:
        for each in (self._holding, self._background, self._before_first_audio):
            each.discard(reply)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """End the thread after what it was asked so far; refuse what comes later."""
        self._batcher.stop()

    def _on_stream(self, work: Callable[[], None]) -> None:
        with self._stream():
            work()

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
