"""What the session's tests share: the pocket model, real speech, and a client that listens."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from conftest import ROOT, require_package

from mosstalk import Pipeline
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder
from mosstalk.conversation import Row
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.prepared.default_models import default_model
from mosstalk.reply_options import Limits
from mosstalk.session.commands import (
    Command,
    Commit,
    CreateResponse,
    ReplyMode,
    Sampling,
    SessionSettings,
)
from mosstalk.session.events import AudioDelta, Closed, ErrorRaised, Event, ResponseDone, TextDelta
from mosstalk.session.host import Host, HostOptions
from mosstalk.session.session import Session
from mosstalk.session.sound import pcm_of
from mosstalk.vad.detectors import Detector
from mosstalk.vad.turns import TurnDetection

QUESTION = ROOT / "assets" / "question.flac"
SENTENCE = ROOT / "assets" / "librivox.flac"
RATE = 16_000
GREEDY = Sampling(greedy=True, seed=0)
BY_HAND = SessionSettings(input_rate=RATE, turn_detection=None, sampling=GREEDY)
WRITTEN = SessionSettings(
    input_rate=RATE, turn_detection=None, sampling=GREEDY, reply=ReplyMode.TEXT
)
HANDS_FREE = SessionSettings(input_rate=RATE, turn_detection=TurnDetection(), sampling=GREEDY)

_E = TypeVar("_E", bound=Event)


@lru_cache(maxsize=1)
def pocket() -> Pipeline:
    """The model that ships with the package."""
    return Pipeline.load(*default_model(), device="cpu")


@lru_cache(maxsize=4)
def speech(path: Path) -> Samples:
    """A recording of a person, at 16 kHz."""
    return read_audio(path, RATE).samples


def silence(seconds: float) -> Samples:
    """A quiet room."""
    hiss = np.random.default_rng(0).standard_normal(int(seconds * RATE)) * 1e-4
    return hiss.astype(np.float32)


def detector() -> Detector:
    """The detector of speech, where its package is installed."""
    require_package("silero_vad", "vad")
    from mosstalk.vad.detectors import SileroDetector

    return SileroDetector()


def host(
    *,
    hands_free: bool = False,
    blocks: int = 400,
    sessions: int = 8,
    clock: Callable[[], float] | None = None,
    engine: EngineOptions | None = None,
    pipeline: Pipeline | None = None,
) -> Host:
    """A host of the pocket model, unless another is given, whose new blocks are NaN."""
    pipeline = pipeline or pocket()
    options = HostOptions(sessions, engine=engine or EngineOptions(blocks, poison=True))
    heard = detector() if hands_free else None
    if clock:
        return Host(pipeline, options, detector=heard, clock=clock)
    return Host(pipeline, options, detector=heard)


@dataclass
class Client:
    """One who talks with a session and keeps all that it tells."""

    session: Session
    events: list[Event] = field(default_factory=list)

    def do(self, *commands: Command) -> None:
        """Send commands."""
        for command in commands:
            self.session.do(command)

    def say(self, samples: Samples, piece: int = 1600) -> None:
        """Push sound in pieces, at once."""
        for start in range(0, len(samples), piece):
            self.session.push(samples[start : start + piece])

    async def wait(self, kind: type[_E], where: Callable[[_E], bool] = lambda _: True) -> _E:
        """Listen until an event of that kind comes."""
        async for event in self.session:
            self.events.append(event)
            if isinstance(event, kind) and where(event):
                return event
            assert not isinstance(event, Closed), self.events
        raise AssertionError("the session told nothing more")

    async def turn(self, samples: Samples, **asked: Any) -> ResponseDone:
        """A spoken turn by hand, and its answer."""
        self.say(samples)
        self.do(Commit(), CreateResponse(**asked))
        return await self.wait(ResponseDone)

    async def error(self) -> ErrorRaised:
        """The next error."""
        return await self.wait(ErrorRaised)

    def all(self, kind: type[_E]) -> list[_E]:
        """All events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def pcm(self, response_id: str) -> bytes:
        """The sound of a response so far."""
        deltas = [d for d in self.all(AudioDelta) if d.response_id == response_id]
        assert [d.start for d in deltas] == [
            sum(d.samples for d in deltas[:place]) for place in range(len(deltas))
        ]
        return b"".join(delta.pcm for delta in deltas)

    def text(self, response_id: str) -> str:
        """The text of a response so far."""
        return "".join(d.text for d in self.all(TextDelta) if d.response_id == response_id)

    @property
    def rows(self) -> list[Row]:
        """The conversation's rows as the session has them."""
        return self.session.conversation_rows()


@lru_cache(maxsize=1)
def decoder() -> SpeechDecoder:
    """One that no session shares."""
    return SpeechDecoder(pocket().codec)


@lru_cache
def spoken(codes: tuple[int, ...], seed: int) -> bytes:
    """A whole reply, hop by hop, alone; kept, since many tests hear the same one."""
    if not codes:
        return b""
    reply, sounds, last = (
        decoder().open(pocket().codec.voice("default"), seed),
        list[bytes](),
        False,
    )
    while not last:
        missing = reply.codes_needed - len(reply.flow.codes)
        hop, codes = list(codes[:missing]), codes[missing:]
        last = len(hop) < missing
        sounds.append(pcm_of(decoder().decode_one(DecodeRequest(reply, hop, last)).numpy()))
    decoder().close(reply)
    return b"".join(sounds)


@dataclass
class Offline:
    """The plain path that sessions are measured by: ``Pipeline.chat``, one stage after another.

    Its sound is that of a decoder without company, and to rounding the plain path's.
    """

    speech: bool = True

    def __post_init__(self) -> None:
        self.chat = pocket().chat(speech=self.speech)
        self.defaults = pocket().defaults.of("chat")

    def answer(self, *, limits: Limits | None = None) -> tuple[bytes, str]:
        """Sound and text of the answer to what was said."""
        options = replace(self.defaults.options(), temperature=0)
        answer = self.chat.answer(speech=self.speech, options=options, limits=limits)
        plain = b"".join(pcm_of(samples) for samples in answer)
        sound = spoken(tuple(answer.reply.codes(pocket().ids)), options.seed)
        apart = np.frombuffer(plain, "<i2").astype(int) - np.frombuffer(sound, "<i2")
        # Products of other sizes round otherwise: one unit in 16 bits, here and there.
        assert np.abs(apart).max(initial=0) <= 1
        return sound, answer.text

    @property
    def rows(self) -> list[Row]:
        """The conversation's rows."""
        return self.chat.conversation.rows


def require_nothing_held(host: Host) -> None:
    """Check that every block is free, and no reply or conversation is on record."""
    scheduler = host.engine.core.scheduler
    assert host.engine.core.pool.in_use == 0
    kinds = (scheduler.running, scheduler.waiting, scheduler.idle, scheduler.ahead)
    assert [len(kind) for kind in kinds] == [0, 0, 0, 0]
    assert not host.sessions
