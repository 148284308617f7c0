"""What all sessions of a process share: one engine, one codec, one detector, and the threads."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mosstalk.codec.speech_decoder import DecoderOptions, SpeechDecoder
from mosstalk.engine.async_engine import AsyncEngine
from mosstalk.engine.engine_core import EngineCore, EngineOptions
from mosstalk.engine.memory import sized
from mosstalk.errors import (
    EngineFullError,
    EngineStoppedError,
    OptionError,
    SessionError,
    VoiceError,
)
from mosstalk.models.codec_folder import Codec
from mosstalk.models.voices import NO_VOICE, Voice, list_voices
from mosstalk.offline.defaults import TASKS, Choices
from mosstalk.offline.pipeline import Pipeline
from mosstalk.plan.crowd import heard_s
from mosstalk.plan.sizes import heard_bytes
from mosstalk.progress import Progress
from mosstalk.reply_options import Script
from mosstalk.runtime.device import fit_threads
from mosstalk.runtime.sharing import DeadlineLock
from mosstalk.session.commands import (
    CreateResponse,
    CreateText,
    Durations,
    ReplyLimits,
    ReplyMode,
    SessionSettings,
)
from mosstalk.session.events import CloseReason, ErrorCode, ErrorRaised, KeptItem, ResponseDone
from mosstalk.session.session import Session
from mosstalk.session.workers import DecoderWorker, EncoderWorker
from mosstalk.vad.detectors import Detector

_MEMORY_ON_A_CPU = 256 * 2**20
_GRAPH_BYTES = 2 * 2**30
_WARM_SCRIPT, _WARM_S = "text:3,speech:24", 3.0
"""The first reply on a GPU, whatever the weights would say: with first, ordinary and last hops."""
_SHORT_WARM_SCRIPT = "text:2,speech:3"
"""The first reply on a CPU, where what takes its time at first does so in any hop."""
_STEPS_IN_A_ROW = 3
"""On a GPU, where a run of hops takes as long as several steps. With a run between any two steps
a reply would wait for one run for each row that its first sound needs."""
_MOST_BESIDE_GPU = 16
"""Replies being made beside which one more is begun before its turn has ended; on a CPU none."""
_RECENT_TURNS = 64
"""Turns of which the time to the first sound is known."""
_COME_BACK_S = 5.0
"""When to come back to a host that is full: sessions end when their users want."""


@dataclass(frozen=True)
class HostOptions:
    """``sessions`` at once at most; ``voices`` are files outside the codec's folder that may be
    asked for by name, and ``voice`` is the one to warm up with. ``decoder`` says how sound is made;
    ``in_turn`` lets either that or the engine compute, whoever's work is due first. With
    ``ear_processes`` so many processes look for speech, else a thread of this one.
    """

    sessions: int = 64
    context_rows: int | None = None
    in_turn: bool = True
    engine: EngineOptions = field(default_factory=EngineOptions)
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    ear_processes: int = 0
    voices: Mapping[str, Path] = field(default_factory=dict)
    voice: str = "default"


@dataclass(frozen=True)
class HostFigures:
    """How a host is doing; ``replies`` are being made, ``waiting`` are in line.

    Of all replies that were begun before their turn had ended, ``early_used`` were wanted and
    ``early_dropped`` were not.
    """

    sessions: int
    replies: int
    waiting: int
    blocks: int
    blocks_in_use: int
    early_used: int
    early_dropped: int


class Host:
    """Opens sessions. An async context manager; its loop is the one that sessions run on.

    ``detector`` None: sessions must commit their turns by hand. ``clock`` is the wall's, in
    seconds. ``long_work`` is held by who has another thread prepare something long, a text or a
    recording: one at a time, so that sessions that send many of them do not take every processor.
    """

    encoder_worker: EncoderWorker
    decoder_worker: DecoderWorker

    def __init__(
        self,
        pipeline: Pipeline,
        options: HostOptions | None = None,
        *,
        detector: Detector | None = None,
        clock: Callable[[], float] = time.monotonic,
        decoder: SpeechDecoder | None = None,
    ) -> None:
        """``decoder``: one that was made of the pipeline's codec already."""
        self.options = options or HostOptions()
        self._decoder = decoder or _decoder_of(pipeline.codec, self.options)
        self.sessions: dict[str, Session] = {}
        core = EngineCore(pipeline.model, pipeline.ids, self.options.engine, clock)
        self._deadline_lock = DeadlineLock() if self.options.in_turn else None
        self.on_gpu = pipeline.model.device.type == "cuda"
        self.engine = AsyncEngine(core, self._deadline_lock, _STEPS_IN_A_ROW if self.on_gpu else 0)
        self.pipeline, self._detector, self.clock = pipeline, detector, clock
        self.long_work = asyncio.Lock()
        self.early_used = self.early_dropped = 0
        self.first_audios_ms = deque[float](maxlen=_RECENT_TURNS)
        """Of the last turns, how long after their end their first sound was there."""
        self._voices: dict[str, Voice] = {}
        """Those that are ready to be spoken with."""
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def load(
        cls,
        model: Path | str,
        codec: Path | str,
        options: HostOptions | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = torch.float32,
        memory_bytes: int | None = None,
        detector: Detector | None = None,
        progress: Progress | None = None,
        embeddings: str = "device",
    ) -> "Host":
        """Read a model folder and a codec folder, and size the engine's pool.

        ``memory_bytes`` is what K and V may take: by default what a GPU has left, on a CPU
        256 MiB. ``embeddings`` is as ``Pipeline.load`` takes it.

        Raises:
            ConfigError, CheckpointError: see ``Pipeline.load``.
            DeviceError: not one conversation fits.
        """
        pipeline = Pipeline.load(
            model, codec, device=device, dtype=dtype, progress=progress, embeddings=embeddings
        )
        return cls.around(pipeline, options, memory_bytes=memory_bytes, detector=detector)

    @classmethod
    def around(
        cls,
        pipeline: Pipeline,
        options: HostOptions | None = None,
        *,
        memory_bytes: int | None = None,
        detector: Detector | None = None,
        decoder: SpeechDecoder | None = None,
    ) -> "Host":
        """``load`` of a pipeline that is there; ``decoder`` is one that was made of its codec.

        Raises:
            DeviceError: not one conversation fits.
        """
        options = options or HostOptions()
        parts = pipeline.codec
        fit_threads(
            pipeline.model.device, (pipeline.model, parts.tokenizer, parts.flow, parts.vocoder)
        )
        if memory_bytes is None and pipeline.model.device.type == "cpu":
            memory_bytes = _MEMORY_ON_A_CPU
        decoder = decoder or _decoder_of(parts, options)
        spare = (
            _needed_later(parts, options.sessions) if pipeline.model.device.type == "cuda" else 0
        )
        engine = sized(
            pipeline.model,
            pipeline.ids,
            options.engine,
            memory_bytes=memory_bytes,
            context_rows=options.context_rows,
            spare_bytes=spare,
        )
        return cls(pipeline, replace(options, engine=engine), detector=detector, decoder=decoder)

    async def __aenter__(self) -> "Host":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin; the default voice is made ready."""
        tokenizer, decoder = self.pipeline.codec.tokenizer, self._decoder
        # On a CPU a second hop in a run would only make the first one wait.
        most = decoder.hops_at_once if self.on_gpu else 1
        limit_s = heard_s(self.options.sessions) if self.on_gpu else None
        self.encoder_worker = EncoderWorker(
            tokenizer, self._detector, limit_s, self.options.ear_processes
        )
        self.decoder_worker = DecoderWorker(decoder, most, self._deadline_lock)
        self.engine.start()
        self._watch = asyncio.create_task(self._watch_engine())

    async def stop(self) -> None:
        """Close every session, then end the threads."""
        closing = [session.close(CloseReason.HOST) for session in self.sessions.values()]
        await asyncio.gather(*closing)
        await asyncio.to_thread(self.engine.stop)
        if self._watch:
            await self._watch
        await asyncio.to_thread(self.encoder_worker.stop)
        await asyncio.to_thread(self.decoder_worker.stop)

    async def open(
        self, settings: SessionSettings | None = None, items: Sequence[KeptItem] = ()
    ) -> Session:
        """A new session; ``async with`` closes it. It goes on from ``items`` of an earlier one.

        Raises:
            EngineFullError: there are as many as there may be; says when to come back.
            EngineStoppedError: the engine has ended.
            OptionError, ScriptError, SessionError, VoiceError: the settings, or the items, cannot
                be used here.
        """
        assert self._watch, "the host has not been started: use it as `async with`"
        settings = settings or SessionSettings()
        if self.engine.ended.done():
            raise EngineStoppedError(f"the engine has ended: {self.engine.failure}")
        await self.require_usable(settings)
        self._require_readable(items)
        if len(self.sessions) >= self.options.sessions:
            raise EngineFullError(
                f"{len(self.sessions)} sessions are open, which is all there may be; come back in "
                f"{_COME_BACK_S:.0f} s",
                _COME_BACK_S,
            )
        session = Session(self, settings, self._on_session_closed, items)
        self.sessions[session.session_id] = session
        return session

    async def warm_up(self) -> None:
        """Make one short reply and throw it away, so that the first user waits no longer.

        Raises:
            VoiceError: there is no voice of the name to warm up with.
            EngineStoppedError: no reply could be made; the message says why.
        """
        await self.engine.warm()
        await self.decoder_worker.warm()
        await self.encoder_worker.warm(self.options.sessions)
        settings = SessionSettings(
            turn_detection=None,
            limits=ReplyLimits(longest_s=_WARM_S),
            durations=Durations(idle_s=600.0),
            script=_WARM_SCRIPT if self.on_gpu else _SHORT_WARM_SCRIPT,
            voice=self.options.voice,
        )
        async with await self.open(settings) as session:
            session.do(CreateText("user", "Good morning."))
            session.do(CreateResponse())
            async for event in session:
                if isinstance(event, ErrorRaised):
                    raise EngineStoppedError(f"warming up failed: {event.message}")
                if isinstance(event, ResponseDone):
                    break
        self.first_audios_ms.clear()

    # For sessions.

    @property
    def context_rows(self) -> int:
        """The longest conversation that can be answered."""
        pool, config = self.engine.core.pool, self.pipeline.model.config
        return min(config.max_position_embeddings, pool.size * pool.rows)

    @property
    def voice_names(self) -> list[str]:
        """Voices that sessions may name."""
        folder = self.pipeline.codec.folder / "voices"
        return sorted({*list_voices(folder), *self.options.voices})

    async def voice(self, name: str) -> Voice:
        """A voice by name, ready to be spoken with; never a path that a client chose.

        Raises:
            VoiceError: unknown, damaged, or made for another codec.
            CodecFullError: there is no room to make it ready.
        """
        if name not in self._voices:
            if name not in self.voice_names:
                there = ", ".join(self.voice_names) or NO_VOICE
                raise VoiceError(f"unknown voice {name!r}; there are: {there}")
            file = str(self.options.voices.get(name, name))
            voice = await asyncio.to_thread(self.pipeline.codec.voice, file)
            await self.decoder_worker.prepare(voice)
            self._voices[name] = voice
        return self._voices[name]

    def choices(self, settings: SessionSettings) -> Choices:
        """How ids are drawn: the settings' values over the checkpoint's.

        Raises:
            OptionError: they mean nothing.
        """
        chosen = settings.sampling
        own = Choices(
            0.0 if chosen.greedy else chosen.temperature,
            chosen.top_k,
            chosen.top_p,
            chosen.repetition_penalty,
            settings.limits.rows,
        )
        return own.over(self.pipeline.defaults.of(settings.task))

    async def require_usable(self, settings: SessionSettings) -> None:
        """Check what only the models can tell.

        Raises:
            OptionError: sampling values mean nothing, or there is no such task.
            ScriptError: the script does not parse.
            VoiceError: the voice is unknown or does not fit.
        """
        if settings.task not in TASKS:
            raise OptionError(f"unknown task {settings.task!r}; there are: {', '.join(TASKS)}")
        self.choices(settings)
        if settings.script is not None:
            Script.parse(settings.script)
        if settings.reply is ReplyMode.AUDIO:
            await self.voice(settings.voice)

    def _require_readable(self, items: Sequence[KeptItem]) -> None:
        """Raise SessionError for rows that are another model's: no embedding has their ids."""
        config = self.pipeline.model.config
        rows = [row for kept in items for row in kept.rows]
        if any(
            not (0 <= text < config.vocab_size and 0 <= audio < config.audio_vocab_size)
            for text, audio in rows
        ):
            raise SessionError(
                ErrorCode.BAD_ITEM, "this conversation was held with another model: begin anew"
            )

    @property
    def figures(self) -> HostFigures:
        """How things are now."""
        scheduler, pool = self.engine.core.scheduler, self.engine.core.pool
        return HostFigures(
            len(self.sessions), len(scheduler.running), len(scheduler.waiting),
            pool.size, pool.in_use, self.early_used, self.early_dropped,
        )  # fmt: skip

    @property
    def first_audio_ms(self) -> tuple[float, float] | None:
        """From the end of a turn to its first sound, over the last turns; None without any.

        Its median and its 95th percentile.
        """
        ordered = sorted(self.first_audios_ms)
        last = len(ordered) - 1
        return (ordered[last // 2], ordered[round(0.95 * last)]) if ordered else None

    @property
    def has_slack(self) -> bool:
        """Whether there is time for what may be thrown away: few replies are being made."""
        figures = self.figures
        return figures.replies + figures.waiting <= (_MOST_BESIDE_GPU if self.on_gpu else 0)

    def first_rows(self, voice: Voice) -> int:
        """Rows of a spoken reply that are due at once.

        Those that its first sound needs; on a CPU one, since a hop takes as long as many steps
        there, and others would run dry.
        """
        return self._decoder.open(voice).codes_needed if self.on_gpu else 1

    def _on_session_closed(self, session: Session) -> None:
        self.sessions.pop(session.session_id, None)

    async def _watch_engine(self) -> None:
        """Tell every session when the engine ends."""
        await asyncio.wrap_future(self.engine.ended)
        failure = self.engine.failure
        why = f"{type(failure).__name__}: {failure}" if failure else "it was stopped"
        for session in list(self.sessions.values()):
            session.on_engine_ended(f"the engine has ended ({why}); open another session later")


def _decoder_of(codec: Codec, options: HostOptions) -> SpeechDecoder:
    decoder = SpeechDecoder(codec, options.decoder)
    decoder.release_float32()
    return decoder


def _needed_later(codec: Codec, sessions: int) -> int:
    """Bytes of a GPU that graphs, and what is heard of ``sessions`` at once, are going to take."""
    return _GRAPH_BYTES + round(heard_bytes(codec.tokenizer.config, heard_s(sessions)))
