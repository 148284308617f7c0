"""One response while it is made: rows from the engine to text, codes and sound."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger

from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import DecodeRequest
from mosstalk.constants import CODE_MS, OUTPUT_RATE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import FinishReason, Mode, Row
from mosstalk.engine.async_engine import ReplyStream
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.engine.request import FIRST_SOUND_S
from mosstalk.errors import MosstalkError
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.voices import Voice
from mosstalk.session import events
from mosstalk.session.commands import ReplyMode
from mosstalk.session.conversation_state import UNFINISHED, ConversationState
from mosstalk.session.history import EngineConversation, Entry, History
from mosstalk.session.sound import pcm_of

_LOG = getLogger(__name__)
LONGEST_PERIOD = 8
"""Codes in the longest cycle that a ``RepetitionDetector`` looks for: 640 ms."""
_MOST_HELD = 8
"""Ids after which bytes that make no character are given as they are: one has four bytes."""


@dataclass
class RepetitionDetector:
    """Watches codes as they come for a cycle that lasts ``limit`` codes after its first round.

    Replies that have run away go round in one short cycle. What is normal was measured on
    mosstalk-pocket: in 19 of its replies no cycle lasted longer than 2 codes (the same code
    twice), in 6 s of human speech 2, in a pause of digital silence as long as the pause, in a
    second of room noise some 7. Words that a model writes in order to speak them are watched in
    the same way: it may write "S, S, S," for ever, and never come to speak.
    """

    limit: int | None
    _codes: list[int] = field(default_factory=list)
    _runs: list[int] = field(default_factory=lambda: [0] * LONGEST_PERIOD)

    def add(self, code: int) -> bool:
        """Take the next code; whether they have been going round for too long."""
        runs = self._runs
        for place in range(LONGEST_PERIOD):
            period = place + 1
            again = len(self._codes) >= period and self._codes[-period] == code
            runs[place] = runs[place] + 1 if again else 0
        self._codes = [*self._codes[1 - LONGEST_PERIOD :], code]
        return self.limit is not None and max(runs) >= self.limit


@dataclass
class Detokenizer:
    """Text of ids as they come, never half a character; the pieces are the text of all together."""

    tokenizer: TextTokenizer
    _held: list[int] = field(default_factory=list)

    def push(self, token: int) -> str:
        """The text that is settled with this id; "" while a character is unfinished."""
        self._held.append(token)
        text = self.tokenizer.decode(self._held)
        if text.endswith(UNFINISHED) and len(self._held) < _MOST_HELD:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """What is left when no id follows."""
        text, self._held = self.tokenizer.decode(self._held), []
        return text


class _CodeQueue:
    """Codes on their way to sound. Who takes them is woken for a whole hop, not for each."""

    def __init__(self) -> None:
        self._codes, self._wanted, self._ended = list[int](), 0, False
        self._there = asyncio.Event()

    def put(self, code: int) -> None:
        """The next code."""
        self._codes.append(code)
        if len(self._codes) >= self._wanted:
            self._there.set()

    def end(self) -> None:
        """No code follows."""
        self._ended = True
        self._there.set()

    async def take(self, count: int) -> tuple[list[int], bool]:
        """So many codes, fewer at the end; and whether this is the end."""
        self._wanted = count
        while len(self._codes) < count and not self._ended:
            self._there.clear()
            await self._there.wait()
        hop = self._codes[:count]
        del self._codes[:count]
        return hop, len(hop) < count


@dataclass(frozen=True)
class Outcome:
    """How a response ended."""

    status: events.ResponseStatus
    reason: events.Reason | None = None
    message: str | None = None


def _run_away(message: str) -> Outcome:
    return Outcome(events.ResponseStatus.INCOMPLETE, events.Reason.REPETITION, message)


@dataclass(eq=False)
class Response:
    """A response with everything decided, and the item that it makes.

    Begin with ``start``; ``stop`` ends it where it is, and nothing more is told of it. One that was
    begun before its turn had ended tells nothing until ``release``.
    ``on_end`` is called when it has come to its end by itself, with ``outcome`` set.
    ``committed_s`` is when the turn that it answers ended, on the host's clock, and
    ``vad_wait_ms`` how long it took to know. The rows may fill the context, and then
    ``bounded_by`` is ``Reason.CONTEXT``. ``longest_codes`` ends what is spoken after it was
    written, since rows do not: who knows how many of them are text?
    """

    state: ConversationState
    on_end: "Callable[[Response], None]"
    response_id: str
    reply: ReplyMode
    prompt: list[Row]
    params: ReplyParams
    voice: Voice | None
    in_conversation: bool
    metadata: Mapping[str, str]
    bounded_by: events.Reason
    repeating_codes: int | None
    longest_codes: int | None
    committed_s: float
    vad_wait_ms: float | None
    entry: Entry = field(init=False)
    conversation: EngineConversation = field(init=False)
    """Its own in the engine, or the session's."""
    stream: ReplyStream = field(init=False)
    outcome: Outcome | None = None
    sent_samples: int = 0
    rows_read: int = 0
    """Rows of the reply that were followed: the engine may be further."""
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _held: list[Callable[[], None]] = field(default_factory=list)
    """What is to be told once it is released."""
    _codes: _CodeQueue = field(default_factory=_CodeQueue)
    _task: asyncio.Task[None] | None = None
    _first_text_s: float | None = None
    _first_s: float | None = None
    """When the first sound was sent, and below the last."""
    _last_s: float | None = None

    def __post_init__(self) -> None:
        spoken = self.reply is ReplyMode.AUDIO
        self.entry = Entry(
            events.new_id("item"), "assistant", status=events.ItemStatus.IN_PROGRESS,
            response_id=self.response_id, speech=spoken,
            text_is_spoken=spoken and self.state.prompts.writes_first,
        )  # fmt: skip

    async def submit(
        self,
        conversation: EngineConversation,
        history: History,
        system: list[Row],
        live: list[Row],
    ) -> None:
        """Ask the engine for it, in this conversation; raises as ``AsyncEngine.submit`` does.

        ``live``: rows of a turn that is no item yet.
        """
        self.conversation = conversation
        self.stream = await conversation.submit(
            system, history, live, self.params, speech=self.entry.speech
        )

    def release(self) -> None:
        """Tell what there is and what comes, now that the turn has ended."""
        self._released.set()
        for tell in self._held:
            tell()
        self._held.clear()

    def start(self, *, held: bool = False) -> None:
        """Begin to make text and sound of the engine's rows.

        ``held``: nothing is told, and no sound made after the first hop, until ``release``.
        """
        if not held:
            self._released.set()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._forget)

    def stop(self, outcome: Outcome) -> None:
        """Make no more of it; harmless if it has come to its end."""
        if self._task:
            self._task.cancel()
        self._held.clear()
        self.outcome = self.outcome or outcome

    def _forget(self, _: "asyncio.Task[None]") -> None:
        # A cancelled task holds its frames, and they the state of a vocoder.
        self._task = None

    @property
    def sent_codes(self) -> int:
        """Codes of which anything was sent."""
        return -(-self.sent_samples // OUTPUT_SAMPLES_PER_CODE)

    def kept(self, begins: int) -> events.KeptItem:
        """What has been told of it, so that another session can go on from there.

        Rows that came before ``begins`` are left out.
        """
        reply, entry, read = self.stream.reply, self.entry, self.rows_read
        heard = self.sent_codes if entry.speech else None
        rows, modes = tuple(reply.rows[begins:read]), tuple(reply.modes[begins:read])
        return events.KeptItem(entry.item, rows, modes, heard, entry.speech, begins)

    @property
    def usage(self) -> events.Usage:
        """Rows read and made, by kind."""
        pad = self.state.prompts.ids.modality_pad
        audio = sum(text == pad for text, _ in self.prompt)
        modes = self.stream.reply.modes
        made = sum(mode is Mode.AUDIO for mode in modes)
        return events.Usage(
            input_text=len(self.prompt) - audio,
            input_audio=audio,
            cached=self.stream.cached_rows,
            output_text=len(modes) - made,
            output_audio=made,
        )

    def timings(self) -> events.Timings:
        """Where the time went until now."""
        now_s, spoken, waited = self.state.host.clock(), self.entry.speech, self.vad_wait_ms
        first = self._since_commit_ms(self._first_s)
        audio_s = self.sent_samples / OUTPUT_RATE
        until_s = self._last_s if spoken and self._last_s is not None else now_s
        return events.Timings(
            commit_to_first_audio_ms=first,
            commit_to_first_text_ms=self._since_commit_ms(self._first_text_s),
            speech_to_first_audio_ms=(None if first is None or waited is None else first + waited),
            vad_wait_ms=waited,
            total_ms=1000 * (now_s - self.committed_s),
            audio_s=audio_s,
            real_time_factor=(until_s - self.committed_s) / audio_s if audio_s else None,
        )

    def _since_commit_ms(self, at_s: float | None) -> float | None:
        return None if at_s is None else 1000 * (at_s - self.committed_s)

    async def _run(self) -> None:
        """Read rows and make sound at once; whatever fails is this response's outcome."""
        audio_task = asyncio.create_task(self._make_audio())
        try:
            outcome = await self._read(audio_task)
            self._codes.end()
            await audio_task
        except MosstalkError as error:
            outcome = Outcome(events.ResponseStatus.FAILED, events.Reason.ERROR, str(error))
        except Exception as error:
            # A fault of this one: its session and its neighbours go on.
            _LOG.exception("response %s failed", self.response_id)
            failure = f"{type(error).__name__}: {error}"
            outcome = Outcome(events.ResponseStatus.FAILED, events.Reason.ERROR, failure)
        finally:
            audio_task.cancel()
            await asyncio.gather(audio_task, return_exceptions=True)
        await self._released.wait()
        self.outcome = outcome
        self.on_end(self)

    async def _read(self, audio_task: "asyncio.Task[None]") -> Outcome:
        """Follow the engine's rows to their end."""
        pipeline, spoken = self.state.host.pipeline, self.entry.speech
        ids, detokenizer = pipeline.ids, Detokenizer(pipeline.tokenizer)
        skipped = {ids.sosp, ids.modality_pad, *ids.stop}
        written, said = (RepetitionDetector(self.repeating_codes) for _ in range(2))
        spoken_codes = 0
        async for new in self.stream:
            self.rows_read = new.step
            text, code = new.row
            if new.mode is Mode.TEXT:
                self._send_text("" if text in skipped else detokenizer.push(text))
                if self.entry.text_is_spoken and written.add(text):
                    return _run_away(f"{written.limit} tokens that were written went round")
            elif code != ids.eosp and spoken:
                self._codes.put(code)
                if said.add(code):
                    return _run_away(f"{said.limit} codes of {CODE_MS} ms went round")
                spoken_codes += 1
                if spoken_codes == self.longest_codes:
                    return Outcome(events.ResponseStatus.INCOMPLETE, events.Reason.MAX_LENGTH)
            if audio_task.done():
                break
        self._send_text(detokenizer.finish())
        if self.stream.reply.finish_reason is FinishReason.LENGTH:
            return Outcome(events.ResponseStatus.INCOMPLETE, self.bounded_by)
        return Outcome(events.ResponseStatus.COMPLETED)

    async def _make_audio(self) -> None:
        """Make sound of codes, a hop as soon as its codes are there."""
        if not self.voice:
            await self._codes.take(1)  # the end: no code is put there
            return
        params, worker = self.params, self.state.host.decoder_worker
        reply = worker.open(self.voice, params.options.seed, background=params.background)
        try:
            codes, last = 0, False
            while not last:
                hop, last = await self._codes.take(reply.codes_needed - codes)
                codes += len(hop)
                request = DecodeRequest(reply, hop, last=last)
                self._send_audio(await worker.decode(request, self._due_s))
                await self._released.wait()
        finally:
            worker.close(reply)

    @property
    def _due_s(self) -> float:
        """When whoever listens runs dry."""
        played_s = self.sent_samples / OUTPUT_RATE
        begun_s = self.committed_s + FIRST_SOUND_S if self._first_s is None else self._first_s
        return begun_s + played_s

    def _send_text(self, text: str) -> None:
        if not self._released.is_set():
            self._held.append(partial(self._send_text, text))
        elif text and not self.outcome:
            if self._first_text_s is None:
                self._first_text_s = self.state.host.clock()
            ids = self.response_id, self.entry.item_id
            self.state.emit(events.TextDelta(*ids, text, self.entry.text_is_spoken))

    def _send_audio(self, samples: Samples) -> None:
        """Pass sound on; the listener hears it from now on."""
        if not self._released.is_set():
            self._held.append(partial(self._send_audio, samples))
        elif len(samples) and not self.outcome:
            self._last_s = self.state.host.clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
            state, ids = self.state, (self.response_id, self.entry.item_id)
            start, self.sent_samples = self.sent_samples, self.sent_samples + len(samples)
            state.emit(events.AudioDelta(*ids, start, pcm_of(samples)))
            at_s = state.playback.sent(self.entry.item_id, len(samples) / OUTPUT_RATE)
            state.listener.played(samples, at_s)
