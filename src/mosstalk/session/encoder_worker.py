"""Hearing for all sessions of a host: codes and speech probabilities, many streams in one run."""

import asyncio
import time
from contextlib import suppress
from typing import Any, NamedTuple

from mosstalk.audio.sound import Samples
from mosstalk.codec.tokenizer_state import LiveCodes
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import CodecFullError
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.runtime.busy import BusyPart, at_work
from mosstalk.runtime.card_time import on_card
from mosstalk.session.workers import Batcher
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.frames import Detector, Frames

_SESSION_S = 31.0
"""A segment of 30 s, the most that is held of a turn, in whole pages of 1.28 s."""
_MOST_WAIT_S = 2.0
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


class _WarmUpRequest(NamedTuple):
    """How many streams of codes to make ready for."""

    streams: int


class PlayedAudio(NamedTuple):
    """What the assistant says, samples (n,) at 16 kHz, from a place in the microphone's stream.

    Without samples: nothing more is said from there on.
    """

    at: int
    samples: Samples


class InputGap(NamedTuple):
    """Nothing was recorded for so many samples before place ``at`` of the microphone's stream."""

    at: int
    samples: int


class _DetectRequest(NamedTuple):
    """More sound of a stream in which speech is looked for, and what is played beside it."""

    state: Any
    samples: Samples
    gate: EchoGate | None
    played: list[PlayedAudio | InputGap]


class EncoderWorker:
    """Threads that hear; what they know of a stream is a value that its session keeps.

    ``detector`` None: no session can be hands-free. ``limit_s``: see ``LiveOptions``.
    """

    def __init__(
        self,
        tokenizer: SpeechTokenizer,
        detector: Detector | None,
        limit_s: float | None = None,
    ) -> None:
        self.detector = detector
        self._tokenizer = LiveTokenizer(tokenizer, options=LiveOptions(limit_s=limit_s))
        self._ended = asyncio.Event()
        """Set, and another taken, whenever a turn ends and gives back what it held."""
        self._codes = Batcher("mosstalk-codes", self._encode)
        self._frames = Batcher("mosstalk-frames", self._detect)

    def open(self, last_maximum: float | None = None) -> LiveCodes:
        """A turn before its first sample; ``last_maximum`` is that of the speaker's last one."""
        return self._tokenizer.open(last_maximum)

    async def encode(self, codes: LiveCodes, samples: Samples, *, last: bool = False) -> None:
        """Bring ``codes`` up to these finite samples (n,) at 16 kHz; ``last`` makes them final.

        Where there is no memory for them it waits for others' turns to end, 2 s at most.

        Raises:
            CodecFullError: there was none until then; nothing was taken.
        """
        sound, end_s = _EncodeRequest(codes, samples, last), time.monotonic() + _MOST_WAIT_S
        while True:
            ended, left_s = self._ended, end_s - time.monotonic()
            try:
                await self._codes.do(sound)
                break
            except CodecFullError:
                if left_s <= 0:
                    raise
            with suppress(TimeoutError):  # then once more: others may have been dropped
                await asyncio.wait_for(ended.wait(), left_s)
        if last:
            self._ended.set()
            self._ended = asyncio.Event()

    async def warm(self, streams: int) -> None:
        """Make ready for so many streams of codes at once, where that takes time: on a GPU."""
        if self._tokenizer.on_gpu:
            await self._codes.do(_WarmUpRequest(streams))

    async def codes_of(self, samples: Samples) -> list[int]:
        """Codes of a whole turn, in pieces between which other streams have their turn."""
        stream = self.open()
        for start in range(0, max(1, len(samples)), _PIECE_SAMPLES):
            end = start + _PIECE_SAMPLES
            await self.encode(stream, samples[start:end], last=end >= len(samples))
        return stream.codes

    async def detect(
        self,
        state: Any,
        samples: Samples,
        gate: EchoGate | None,
        played: list[PlayedAudio | InputGap],
    ) -> tuple[Any, Frames]:
        """The detector's next state, and the frames that finite samples (n,) made whole.

        ``gate``, which hears of what is ``played``, takes the speech out of those in which only
        that is heard.
        """
        return await self._frames.do(_DetectRequest(state, samples, gate, played))

    def stop(self) -> None:
        """End the threads."""
        self._codes.stop()
        self._frames.stop()

    def _encode(self, calls: list[_EncodeRequest | _WarmUpRequest]) -> list[CodecFullError | None]:
        for call in calls:
            if isinstance(call, _WarmUpRequest):
                self._tokenizer.warm(call.streams)
        heard = [call for call in calls if isinstance(call, _EncodeRequest)]
        due = [sound for sound in heard if sound.last or len(sound.samples)]
        refused = dict[int, CodecFullError]()
        try:
            self._push(due)
        except CodecFullError:  # of all together: none has been taken
            for sound in due:
                try:
                    self._push([sound])
                except CodecFullError as error:
                    refused[id(sound)] = error
        return [refused.get(id(call)) for call in calls]

    def _push(self, due: list[_EncodeRequest]) -> None:
        """Encode what came of some streams, in one run."""
        if due:
            with at_work(BusyPart.PUSH) as work, on_card(work, self._tokenizer.device):
                changes = self._tokenizer.push_many(
                    [sound.codes for sound in due],
                    [sound.samples for sound in due],
                    [sound.last for sound in due],
                )
                if any(change.repaired for change in changes):
                    work.part = BusyPart.REPAIR

    def _detect(self, calls: list[_DetectRequest]) -> list[tuple[Any, Frames]]:
        assert self.detector is not None, "no detector of speech"
        with at_work(BusyPart.DETECT):
            found = self.detector.push_many([c.state for c in calls], [c.samples for c in calls])
            return [
                (state, _apply_echo_gate(call, frames))
                for call, (state, frames) in zip(calls, found, strict=True)
            ]


def _apply_echo_gate(call: _DetectRequest, frames: Frames) -> Frames:
    gate = call.gate
    if gate is None:
        return frames
    for news in call.played:
        if isinstance(news, InputGap):
            gate.paused(news.samples, news.at)
        elif len(news.samples):
            gate.played(news.samples, news.at)
        else:
            gate.stopped(news.at)
    return gate.heard(call.samples, frames)
