"""One session's sound as it comes in: its clock, its rate, and who listens to it."""

from collections.abc import AsyncIterator, Callable

import numpy as np
import soxr

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import SessionError
from mosstalk.session.commands import Push
from mosstalk.session.encoder_worker import EncoderWorker
from mosstalk.session.events import ErrorCode
from mosstalk.session.listener import (
    HandsFreeListener,
    Listener,
    ListenerEvent,
    LiveTurn,
    ManualListener,
)
from mosstalk.session.settings import SessionSettings
from mosstalk.session.sound import InputClock, Resampler, require_rate, samples_of

_STOPPING_SAMPLES = INPUT_RATE // 5
"""How long a player goes on after it was told to stop."""
_SLICES_PER_S = 10
"""However much is pushed at once, it is heard 100 ms after 100 ms."""


class AudioInput:
    """Pushed sound on its way to a ``Listener``, resampled to 16 kHz."""

    def __init__(self, encoder_worker: EncoderWorker, settings: SessionSettings) -> None:
        self._encoder_worker = encoder_worker
        self._rate = settings.input_rate
        self._resampler = Resampler(settings.input_rate)
        self._clock = InputClock(settings.input_rate)
        self._rest = np.zeros(0, np.float32)
        """What the resamplers of earlier rates held back, at 16 kHz."""
        self._listener = self._listening(settings, 0)

    @property
    def clock(self) -> int:
        """Samples that came in, counted at 16 kHz."""
        return self._clock.samples

    @property
    def turn(self) -> LiveTurn | None:
        """The turn under way."""
        return self._listener.turn

    def rate_of(self, push: Push) -> int:
        """The rate of a push in Hz: what it says, or else the session's."""
        return push.rate or self._rate

    def samples_of(self, push: Push) -> Samples:
        """The samples of a push; raise SessionError for what cannot be heard."""
        require_rate(self.rate_of(push))
        return samples_of(push.pcm)

    async def hear(
        self, samples: Samples, rate: int, audible: Callable[[], bool]
    ) -> AsyncIterator[ListenerEvent]:
        """Hear samples at ``rate`` Hz; ``audible``: can the assistant be heard now?"""
        size = rate // _SLICES_PER_S
        for start in range(0, len(samples), size):
            piece = samples[start : start + size]
            self._tune(rate)
            self._clock.add(len(piece), rate)
            heard = self._with_rest(self._resampler.push(piece))
            if len(heard):
                async for each in self._listener.hear(heard, audible=audible()):
                    yield each

    def _tune(self, rate: int) -> None:
        """Go on at another rate: what the old one's resampler held back is heard first."""
        if rate == self._resampler.rate:
            return
        self._rest = self._with_rest(self._resampler.flush())
        self._resampler = Resampler(rate)

    def _with_rest(self, samples: Samples) -> Samples:
        """What was held back, and these."""
        rest, self._rest = self._rest, np.zeros(0, np.float32)
        return np.concatenate([rest, samples]) if len(rest) else samples

    async def commit(self) -> LiveTurn:
        """End the turn by hand; raise SessionError if there is none."""
        by_hand = isinstance(self._listener, ManualListener)
        nothing = np.zeros(0, np.float32)
        rest = self._with_rest(self._resampler.flush()) if by_hand else nothing
        return await self._listener.commit(rest)

    def clear(self) -> None:
        """Forget the turn under way."""
        if isinstance(self._listener, ManualListener):
            self._with_rest(self._resampler.flush())
        self._listener.clear()

    def played(self, samples: Samples, at_s: float) -> None:
        """The assistant says this, (n,) at 24 kHz, from the clock's ``at_s`` on."""
        low = soxr.resample(samples, OUTPUT_RATE, INPUT_RATE, quality="LQ")
        self._listener.played(round(at_s * INPUT_RATE), np.asarray(low, np.float32))

    def paused(self, seconds: float) -> None:
        """Nothing was recorded for so long before the next sample."""
        self._listener.paused(self.clock, round(seconds * INPUT_RATE))

    def stopped(self) -> None:
        """The assistant has been told to stop."""
        at = self.clock + _STOPPING_SAMPLES
        self._listener.played(at, np.zeros(0, np.float32))

    def configure(self, settings: SessionSettings) -> None:
        """Take new settings; a turn under way is lost if its end is now decided otherwise.

        Raises:
            SessionError: hands-free where nothing detects speech.
        """
        listener = self._listener
        listener.limit_turn(settings.durations.turn_s)
        detection = settings.turn_detection
        same_gate = isinstance(listener, HandsFreeListener) and listener.gated == settings.echo_gate
        if isinstance(listener, HandsFreeListener) and detection and same_gate:
            listener.configure(detection)
        elif isinstance(listener, HandsFreeListener) or detection:
            # What was heard by hand is no part of a turn that is found, nor the other way round.
            self._listener = self._listening(settings, listener.position)
        self._rate = settings.input_rate

    def _listening(self, settings: SessionSettings, start: int) -> Listener:
        detection, turn_s = settings.turn_detection, settings.durations.turn_s
        if detection is None:
            return ManualListener(self._encoder_worker, turn_s, start)
        if self._encoder_worker.detector is None:
            raise SessionError(
                ErrorCode.BAD_VALUE,
                "turns cannot be detected here: no detector of speech is installed",
            )
        return HandsFreeListener(
            self._encoder_worker, detection, turn_s, start, echo_gate=settings.echo_gate
        )
