"""One response while it is made: rows from the engine to text, codes and sound."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Protocol

from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import DecodeRequest, SpokenReply
from mosstalk.constants import CODE_MS, OUTPUT_RATE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import FinishReason, Mode, Row
from mosstalk.engine.async_engine import ReplyStream
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.errors import MosstalkError
from mosstalk.models.voices import Voice
from mosstalk.session.detokenizer import Detokenizer
from mosstalk.session.events import Reason, ResponseStatus, Timings, Usage
from mosstalk.session.repetition import RepetitionDetector
from mosstalk.session.resources import SessionResources
from mosstalk.session.settings import ReplyMode

_LOG = getLogger(__name__)
_FIRST_SOUND_S = 0.2
"""When a reply's first sound is due: before the next sound of those that play already."""


@dataclass(frozen=True)
class ResponsePlan:
    """A response that is to be made, with everything decided.

    ``committed_s`` is when the turn that it answers ended, on the host's clock, and
    ``vad_wait_ms`` how long it took to know. The rows may fill the context, and then
    ``bounded_by`` is ``Reason.CONTEXT``.
    """

    response_id: str
    item_id: str
    reply: ReplyMode
    prompt: list[Row]
    params: ReplyParams
    voice: Voice | None
    in_conversation: bool
    metadata: Mapping[str, str]
    bounded_by: Reason
    repeating_codes: int | None
    committed_s: float
    vad_wait_ms: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a response ended."""

    status: ResponseStatus
    reason: Reason | None = None
    message: str | None = None


class ResponseObserver(Protocol):
    """Who is told what a response makes, as it is made."""

    def on_audio(self, response: "Response", start: int, samples: Samples) -> None:
        """More sound, (n,) at 24 kHz: ``start`` is its place in the item."""

    def on_text(self, response: "Response", text: str) -> None:
        """More text."""

    def on_end(self, response: "Response") -> None:
        """It has come to its end by itself; ``outcome`` is set."""


@dataclass
class Response:
    """Follow with ``start``; ``stop`` ends it where it is, and nothing more is told of it."""

    plan: ResponsePlan
    stream: ReplyStream
    resources: SessionResources
    observer: ResponseObserver
    outcome: Outcome | None = None
    text: str = ""
    sent_samples: int = 0
    rows_read: int = 0
    """Rows of the reply that were followed: the engine may be further."""
    _codes: "asyncio.Queue[int | None]" = field(default_factory=asyncio.Queue)
    _task: asyncio.Task[None] | None = None
    _first_s: float | None = None
    _last_s: float | None = None

    def start(self) -> None:
        """Begin to make text and sound of the engine's rows."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._forget)

    def stop(self, outcome: Outcome) -> None:
        """Make no more of it; harmless if it has come to its end."""
        if self._task:
            self._task.cancel()
        self.outcome = self.outcome or outcome

    def _forget(self, _: "asyncio.Task[None]") -> None:
        # A cancelled task holds its frames, and they the state of a vocoder.
        self._task = None

    @property
    def sent_codes(self) -> int:
        """Codes of which anything was sent."""
        return -(-self.sent_samples // OUTPUT_SAMPLES_PER_CODE)

    @property
    def sent_ms(self) -> int:
        """Sound that was sent."""
        return self.sent_samples * 1000 // OUTPUT_RATE

    @property
    def usage(self) -> Usage:
        """Rows read and made, by kind."""
        pad = self.stream.cached.conversation.ids.modality_pad
        audio = sum(text == pad for text, _ in self.plan.prompt)
        modes = self.stream.reply.modes
        made = sum(mode is Mode.AUDIO for mode in modes)
        return Usage(
            input_text=len(self.plan.prompt) - audio,
            input_audio=audio,
            cached=self.stream.cached_rows,
            output_text=len(modes) - made,
            output_audio=made,
        )

    def timings(self) -> Timings:
        """Where the time went until now."""
        first, waited = self._since_commit_ms(self._first_s), self.plan.vad_wait_ms
        spoken = self.plan.reply is ReplyMode.AUDIO
        audio_s = self.sent_samples / OUTPUT_RATE
        asked_s = self.plan.committed_s
        until = self._last_s if spoken and self._last_s is not None else self.resources.clock()
        return Timings(
            commit_to_first_audio_ms=first if spoken else None,
            commit_to_first_text_ms=None if spoken else first,
            speech_to_first_audio_ms=(
                first + waited if spoken and first is not None and waited is not None else None
            ),
            vad_wait_ms=waited,
            total_ms=1000 * (self.resources.clock() - asked_s),
            audio_s=audio_s,
            real_time_factor=(until - asked_s) / audio_s if audio_s else None,
        )

    def _since_commit_ms(self, then_s: float | None) -> float | None:
        return None if then_s is None else 1000 * (then_s - self.plan.committed_s)

    async def _run(self) -> None:
        """Read rows and make sound at once; whatever fails is this response's outcome."""
        audio_task = asyncio.create_task(self._make_audio())
        try:
            outcome = await self._read(audio_task)
            self._codes.put_nowait(None)
            await audio_task
        except MosstalkError as error:
            outcome = Outcome(ResponseStatus.FAILED, Reason.ERROR, str(error))
        except Exception as error:
            # A fault of this one: its session and its neighbours go on.
            _LOG.exception("response %s failed", self.plan.response_id)
            failure = f"{type(error).__name__}: {error}"
            outcome = Outcome(ResponseStatus.FAILED, Reason.ERROR, failure)
        finally:
            audio_task.cancel()
            await asyncio.gather(audio_task, return_exceptions=True)
        self.outcome = outcome
        self.observer.on_end(self)

    async def _read(self, audio_task: "asyncio.Task[None]") -> Outcome:
        """Follow the engine's rows to their end."""
        ids, spoken = self.resources.pipeline.ids, self.plan.reply is ReplyMode.AUDIO
        detokenizer = Detokenizer(self.resources.pipeline.tokenizer)
        skipped = {ids.sosp, ids.modality_pad, *ids.stop}
        repetition = RepetitionDetector(self.plan.repeating_codes)
        async for new in self.stream:
            self.rows_read = new.step
            text, code = new.row
            if new.mode is Mode.TEXT:
                self._send_text("" if text in skipped else detokenizer.push(text))
            elif code != ids.eosp and spoken:
                self._codes.put_nowait(code)
                if repetition.add(code):
                    return Outcome(
                        ResponseStatus.INCOMPLETE,
                        Reason.REPETITION,
                        f"the same {CODE_MS} ms codes went round for {repetition.limit} codes",
                    )
            if audio_task.done():
                break
        self._send_text(detokenizer.finish())
        if self.stream.reply.finish_reason is FinishReason.LENGTH:
            return Outcome(ResponseStatus.INCOMPLETE, self.plan.bounded_by)
        return Outcome(ResponseStatus.COMPLETED)

    def _send_text(self, text: str) -> None:
        if text and not self.outcome:
            self._note_time()
            self.text += text
            self.observer.on_text(self, text)

    async def _make_audio(self) -> None:
        """Make sound of codes, a hop as soon as its codes are there."""
        if not self.plan.voice:
            await self._codes.get()  # the end: nothing else is put there
            return
        params = self.plan.params
        reply = self.resources.decoder_worker.open(
            self.plan.voice, params.options.seed, background=params.background
        )
        try:
            await self._decode_hops(reply)
        finally:
            self.resources.decoder_worker.close(reply)

    async def _decode_hops(self, reply: SpokenReply) -> None:
        codes, ended = 0, False
        while not ended:
            hop = list[int]()
            while codes < reply.codes_needed and not ended:
                code = await self._codes.get()
                if code is None:
                    ended = True
                else:
                    hop.append(code)
                    codes += 1
            request = DecodeRequest(reply, hop, last=ended)
            self._send_audio(await self.resources.decoder_worker.decode(request, self._due_s))

    @property
    def _due_s(self) -> float:
        """When whoever listens runs dry."""
        played_s = self.sent_samples / OUTPUT_RATE
        begun_s = self.plan.committed_s + _FIRST_SOUND_S if self._first_s is None else self._first_s
        return begun_s + played_s

    def _send_audio(self, samples: Samples) -> None:
        if len(samples) and not self.outcome:
            self._note_time()
            start, self.sent_samples = self.sent_samples, self.sent_samples + len(samples)
            self.observer.on_audio(self, start, samples)

    def _note_time(self) -> None:
        now = self.resources.clock()
        self._first_s = now if self._first_s is None else self._first_s
        self._last_s = now
