"""Speaking for all sessions of a host: hops of many replies, whoever runs dry first, in one run."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from mosstalk.codec.audio import Samples
from mosstalk.codec.speech_decoder import Saying, SpeechDecoder, SpokenReply
from mosstalk.codec.voices import Voice
from mosstalk.device import own_stream
from mosstalk.engine.turnstile import Turnstile
from mosstalk.errors import CodecFullError, EngineStoppedError
from mosstalk.session.workers import Batches


class Mouth:
    """One thread that makes sound. At most ``most`` hops in a run, so that a first one never
    waits long; with a ``turnstile`` it takes turns with others who compute.
    """

    def __init__(
        self, decoder: SpeechDecoder, most: int, turnstile: Turnstile | None = None
    ) -> None:
        self._decoder = decoder
        self._stream = own_stream(decoder.device)
        self._batches = Batches("mosstalk-mouth", self._say, most, turnstile)

    async def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        await self._batches.run(partial(self._beside, partial(self._decoder.prepare, voice)))

    def open(self, voice: Voice, seed: int) -> SpokenReply:
        """A reply before its first code. It holds nothing until its first hop."""
        return self._decoder.open(voice, seed)

    async def warm(self) -> None:
        """Do ahead of time what would make the first hops slow."""
        await self._batches.run(partial(self._beside, self._decoder.warm))

    async def say(self, saying: Saying, due_s: float) -> Samples:
        """Sound (n,) at 24 kHz of the next codes, the earliest ``due_s`` first.

        Raises:
            CodecFullError: there is no room for the reply now; others go on.
        """
        return await self._batches.do(saying, due_s)

    def close(self, reply: SpokenReply) -> None:
        """Give back what a reply holds, once a hop of it that is being made has ended."""
        with suppress(EngineStoppedError):  # then it goes with everything else
            self._batches.post(partial(self._beside, partial(self._decoder.close, reply)))

    def stop(self) -> None:
        """End the thread after what it was asked so far; refuse what comes later."""
        self._batches.stop()

    def _beside(self, work: Callable[[], None]) -> None:
        with self._stream():
            work()

    @torch.inference_mode()
    def _say(self, sayings: list[Saying]) -> list[Samples | CodecFullError]:
        try:
            with self._stream():
                sounds = self._decoder.say(sayings)
                joined = torch.cat(sounds).cpu()
        except CodecFullError as error:
            if len(sayings) == 1:
                return [error]
            return [result for one in sayings for result in self._say([one])]
        return [part.numpy() for part in joined.split([len(sound) for sound in sounds])]
