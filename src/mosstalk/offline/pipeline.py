"""Model and codec together: turns are heard and answered, text read aloud, speech written down.

The main job without a clock: one conversation, one stage after the other, by the engine that
serves. It is what the examples and ``mosstalk chat`` use, and what real-time sessions are
measured by. Reading aloud and writing down take one reply: a model does them as well as it was
trained for their prompts.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mosstalk.audio.sound import Recording, Samples, read_audio
from mosstalk.codec.speech_decoder import DecoderOptions, DecoderStream, SpeechDecoder
from mosstalk.constants import CODE_MS, INPUT_RATE, OUTPUT_RATE
from mosstalk.conversation import (
    SYSTEM_PROMPTS,
    Conversation,
    Mode,
    Reply,
    SpecialIds,
)
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.engine.memory import keep_table_on_host
from mosstalk.errors import AudioError, CheckpointError, TextError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.voices import Voice
from mosstalk.offline.defaults import Defaults, read_defaults
from mosstalk.offline.replies import EngineReply, OfflineEngine, Step
from mosstalk.offline.text_normalizer import readable
from mosstalk.prepared.default_models import chosen_model
from mosstalk.progress import Progress
from mosstalk.reply_options import Limits, SamplingOptions, Script, SoundRequest
from mosstalk.runtime.device import pick_device
from mosstalk.runtime.timing import TurnTimings

OnStep = Callable[[Step], None]
SPEAK_PROMPT = "Read the user's text aloud."
TRANSCRIBE_PROMPT = "Write down what the user says."
PROMPTS = {"speak": SPEAK_PROMPT, "transcribe": TRANSCRIBE_PROMPT}
"""System prompts by the name of a task; a chat has those of ``SYSTEM_PROMPTS``."""
_REPLIES = 4
"""Replies at once of one conversation: an abandoned one may not be gone yet."""
_UNHEARD_CODES = 27
"""For a first hop, ordinary ones and a last one."""
_FEW_REPLIES = 64
"""Replies at once where memory follows what they need."""


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A loaded language model, its tokenizer, its codec, and how it wants ids drawn."""

    model: LanguageModel
    tokenizer: TextTokenizer
    codec: Codec
    ids: SpecialIds
    defaults: Defaults = field(default_factory=Defaults)
    sound: SoundRequest = field(default_factory=SoundRequest)

    def __repr__(self) -> str:
        kind, dtype = self.model.config.weights_kind, str(self.model.dtype).removeprefix("torch.")
        return f"<Pipeline: {kind} weights, {dtype} on {self.model.device}>"

    @cached_property
    def decoder(self) -> SpeechDecoder:
        """What makes the sound: as it was asked for, else as ``DecoderOptions.few`` says.

        Raises:
            ConfigError: the codec's flow was trained on whole replies.
        """
        return SpeechDecoder(self.codec, self._decoder_options)

    @property
    def _decoder_options(self) -> DecoderOptions:
        device = self.codec.device
        if self.sound.plain:
            return DecoderOptions.few(_FEW_REPLIES, device)
        return DecoderOptions.of(self.sound, device, replies=_REPLIES)

    @cached_property
    def engine(self) -> OfflineEngine:
        """What draws the rows of all replies.

        Raises:
            CheckpointError: linear layers of one input are quantised differently.
        """
        return OfflineEngine(self.model, self.ids)

    @property
    def decoder_dtype(self) -> str:
        """Precision of flow and vocoder."""
        return str(self._decoder_options.flow.dtype).removeprefix("torch.")

    def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        On a GPU the first voice also speaks a few hops that nobody hears: kernels are compiled
        and graphs captured for them here, not in the first reply.
        """
        if self.codec.block_codes is None:
            return
        begun = "decoder" in vars(self)
        self.decoder.prepare(voice)
        if self.codec.device.type == "cuda" and not begun:
            stream = self.open_stream(voice)
            stream.push([0] * _UNHEARD_CODES)
            stream.finish()

    def open_stream(self, voice: Voice, seed: int = 0) -> DecoderStream:
        """A reply's way from codes to sound."""
        return DecoderStream(self.decoder, voice, seed)

    @classmethod
    def load(
        cls,
        model: Path | str | None = None,
        codec: Path | str | None = None,
        *,
        device: torch.device | str = "auto",
        dtype: torch.dtype | Literal["auto"] | None = "auto",
        progress: Progress | None = None,
        sound: SoundRequest | None = None,
        embeddings: str = "device",
    ) -> "Pipeline":
        """Read a model folder and a codec folder; without them, the model that ships.

        ``model`` alone is "pocket", "synthetic", or a folder that ``mosstalk build`` made.
        ``device`` "auto" is a GPU where there is one, else the CPU. ``dtype`` is the language
        model's: "auto" is float32 on a CPU and on a GPU the stored one, None always the stored
        one. The codec runs in float32 but for flow and vocoder where ``sound`` asks for something
        else, and on a GPU, where they run in 16 bit unless it asks for float32. ``embeddings``
        "host" keeps those of text in the host's memory.

        Raises:
            ConfigError, CheckpointError: a folder is no checkpoint, is damaged, or the two do
                not fit each other.
            DeviceError: the machine has no such device; see also ``load_language_model`` and
                ``keep_table_on_host``.
        """
        given = [None if folder is None else Path(folder) for folder in (model, codec)]
        model, codec = chosen_model(*given)
        device = pick_device(str(device))
        if dtype == "auto":
            dtype = torch.float32 if device.type == "cpu" else None
        defaults = read_defaults(model)
        network = load_language_model(model, device=device, dtype=dtype, progress=progress)
        if embeddings == "host":
            keep_table_on_host(network)
        tokenizer = TextTokenizer.from_folder(model, network.config.vocab_size)
        ids = SpecialIds.of(network.config, tokenizer.special)
        loaded = load_codec(codec, device=device, progress=progress)
        _check_codes(ids, loaded)
        return cls(network, tokenizer, loaded, ids, defaults, sound or SoundRequest())

    def chat(
        self, *, voice: str | Voice = "default", system: str | None = None, speech: bool = True
    ) -> "Chat":
        """Begin a conversation.

        ``system`` None takes the public demo's prompt for spoken or, without ``speech``, for
        written replies; an empty string leaves the system turn out. The voice is looked for
        at once where ``speech`` is wanted, else when there is speech after all.
        """
        conversation = Conversation(self.ids, self.tokenizer.encode)
        prompt = SYSTEM_PROMPTS["speech" if speech else "text"] if system is None else system
        if prompt:
            conversation.add_text("system", prompt)
        chat = Chat(self, conversation, voice)
        if speech:
            _ = chat.voice
        return chat


def _check_codes(ids: SpecialIds, codec: Codec) -> None:
    heard, spoken = codec.tokenizer.config.quantize_vocab_size, codec.flow.config.vocab_size
    if heard > ids.eosp or spoken < ids.eosp:
        raise CheckpointError(
            f"model and codec do not fit: the model speaks {ids.eosp} codes, the codec hears "
            f"{heard} and can speak {spoken}; take both from one release"
        )


class Chat:
    """One conversation: add what the user says, then iterate over ``answer``."""

    def __init__(self, pipeline: Pipeline, conversation: Conversation, voice: str | Voice) -> None:
        self.pipeline = pipeline
        self.conversation = conversation
        self._voice = voice
        self.sequence = pipeline.engine.open(self)
        self._timings = TurnTimings(pipeline.codec.device)

    def __repr__(self) -> str:
        voice = repr(self._voice)
        return f"<Chat: {len(self.conversation.rows)} rows, voice {voice}, {self.pipeline!r}>"

    @cached_property
    def voice(self) -> Voice:
        """The voice that answers; raise VoiceError when it is unknown or does not fit."""
        named, codec = self._voice, self.pipeline.codec
        voice = codec.voice(named) if isinstance(named, str) else named
        self.pipeline.prepare(voice)
        return voice

    @property
    def longest_speech_s(self) -> float:
        """Seconds of speech that still fit into the model's context."""
        limit = self.pipeline.model.config.max_position_embeddings
        return max(0, limit - len(self.conversation.rows)) * CODE_MS / 1000

    def hear_file(self, path: Path | str, *, channel: int | None = None) -> Recording:
        """Add a spoken turn from a sound file; raise AudioError if it holds nothing to hear."""
        recording = read_audio(path, INPUT_RATE, channel=channel, longest_s=self.longest_speech_s)
        self.hear(recording.samples)
        return recording

    def hear(self, samples: Samples) -> list[int]:
        """Add a spoken turn from samples (n,), float at 16 kHz, and return its codes."""
        self._timings.commit()
        with self._timings.stage("encode"):
            codes = self.pipeline.codec.tokenizer.encode(torch.from_numpy(samples))
        self.conversation.add_speech("user", codes)
        return codes

    def read(self, text: str) -> None:
        """Add a typed turn; special-token strings in it stay text."""
        if not text.strip():
            raise TextError("the text is empty; type what you want to say")
        self._timings.commit()
        self.conversation.add_text("user", text)

    def answer(
        self,
        *,
        speech: bool = True,
        task: str = "chat",
        options: SamplingOptions | None = None,
        limits: Limits | None = None,
        script: Script | None = None,
        on_step: OnStep | None = None,
    ) -> "Answer":
        """Begin the answer to what was said; iterate over it for sound.

        ``options`` and ``limits`` None are the checkpoint's for ``task``, one of
        ``offline.defaults.TASKS``.
        """
        chosen = self.pipeline.defaults.of(task)
        timings, self._timings = self._timings, TurnTimings(self.pipeline.codec.device)
        self.conversation.writes_first = task == "chat" and self.pipeline.defaults.writes_first
        self.conversation.open_reply(speech)
        ask = ReplyParams(
            options or chosen.options(), limits or chosen.limits(), script, whole_rows=True
        )
        generation = EngineReply(
            self.pipeline.engine, self.sequence, list(self.conversation.rows), ask
        )
        return Answer(self, generation, timings, on_step)


@dataclass(repr=False)
class Answer:
    """An answer while it is made and after: iterate for sound, then read what it was.

    Iterating yields float32 samples (n,) at 24 kHz, hop by hop; a written answer yields
    none. However iteration ends, the conversation then holds the reply as history.
    """

    chat: Chat
    generation: EngineReply
    timings: TurnTimings
    on_step: OnStep | None = None
    samples: int = 0
    steps: int = 0
    _closed: bool = field(default=False)

    def __repr__(self) -> str:
        ended = self.reply.finish_reason
        state = ended.value if ended else "being made" if self.steps else "not begun"
        return f"<Answer: {state}, {self.steps} rows, {self.audio_s:.2f} s of sound>"

    @property
    def reply(self) -> Reply:
        """The generated rows and the finish reason."""
        return self.generation.reply

    @property
    def codes(self) -> list[int]:
        """Speech codes of the answer."""
        return self.reply.codes(self.chat.pipeline.ids)

    @property
    def text(self) -> str:
        """Text of the answer as people read it."""
        pipeline = self.chat.pipeline
        return pipeline.tokenizer.decode(self.reply.text_ids(pipeline.ids))

    @property
    def audio_s(self) -> float:
        """Seconds of sound made so far."""
        return self.samples / OUTPUT_RATE

    def cancel(self) -> None:
        """End the answer before its next step; safe from any thread."""
        self.generation.cancel()

    def __iter__(self) -> Iterator[Samples]:
        """Yield the sound of each hop as soon as it is made."""
        try:
            yield from self._hops()
        finally:
            self._close()

    def _hops(self) -> Iterator[Samples]:
        chat, stream = self.chat, None
        with self.timings.stage("prefill"):
            self.timings.rows_prefilled = self.generation.prefill() + 1
        codes, waiting = 0, list[int]()
        for step in self._steps():
            if step.mode is Mode.TEXT or step.row[1] == chat.pipeline.ids.eosp:
                continue
            seed = self.generation.params.options.seed
            stream = stream or chat.pipeline.open_stream(chat.voice, seed)
            codes += 1
            waiting.append(step.row[1])
            if codes >= stream.codes_needed:
                with self.timings.stage("hop"):
                    sounds = stream.push(waiting)
                waiting = []
                yield from map(self._heard, sounds)
        if stream:
            with self.timings.stage("hop"):
                last = [*stream.push(waiting), stream.finish()]
            yield from (self._heard(sound) for sound in last if sound is not None)

    def _steps(self) -> Iterator[Step]:
        self.generation.begin()
        ended = False
        while not ended:
            ended = self.generation.ended
            if not ended:
                with self.timings.stage("step", wait=False):
                    self.generation.step()
            # At last those whose audio ids were drawn as the reply was cancelled.
            for step in self.generation.fresh():
                self.steps += 1
                if self.on_step:
                    self.on_step(step)
                yield step

    def _heard(self, sound: Tensor) -> Samples:
        self.timings.note_first_audio()
        samples: Samples = sound.cpu().numpy().astype(np.float32, copy=False)
        self.samples += len(samples)
        return samples

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.generation.end()
        self.chat.sequence.free_from(self.chat.conversation.close_reply(self.reply))


def speak(
    pipeline: Pipeline,
    text: str,
    *,
    voice: str | Voice = "default",
    system: str | None = None,
    options: SamplingOptions | None = None,
    limits: Limits | None = None,
    script: Script | None = None,
    as_written: bool = False,
) -> Answer:
    """Begin to read ``text`` aloud; iterate over the answer for its sound.

    A conversation of its own: a system turn (``system``, by default ``SPEAK_PROMPT``, empty
    for none), the text as a typed turn, a spoken reply. ``options`` and ``limits`` None are
    the checkpoint's for this task. The text is spelled as the checkpoint asks, with a warning
    of what is left out, and is not cut: longer text is best given in the pieces of
    ``text_normalizer.readable``, ``as_written``, which leaves a text as it is.

    Raises:
        TextError: the text is empty, cannot be encoded, or holds no word or no letters that the
            checkpoint knows.
        VoiceError: the voice is unknown, damaged, or made for another codec.
    """
    if not as_written:
        found = readable(text, pipeline.defaults.text)
        text = found.text
        if found.note:
            warnings.warn(found.note, stacklevel=2)
    chat = pipeline.chat(voice=voice, system=SPEAK_PROMPT if system is None else system)
    chat.read(text)
    return chat.answer(task="speak", options=options, limits=limits, script=script)


def transcribe(
    pipeline: Pipeline,
    samples: Samples,
    *,
    system: str | None = None,
    options: SamplingOptions | None = None,
    limits: Limits | None = None,
    script: Script | None = None,
) -> Answer:
    """Begin to write down speech; once iterated to its end, ``answer.text`` is what was said.

    ``samples`` (n,) are float at 16 kHz, mono, best at most 30 s. A conversation of its own:
    a system turn (``system``, by default ``TRANSCRIBE_PROMPT``, empty for none), the speech
    as a turn, a written reply. ``options`` and ``limits`` None are the checkpoint's for this
    task. No voice is needed.

    Raises:
        AudioError: the samples are none, not one-dimensional, or not finite.
    """
    heard = np.asarray(samples, np.float32)
    if heard.ndim != 1 or not len(heard) or not np.isfinite(heard).all():
        raise AudioError("speech to write down must be finite samples (n,), mono at 16 kHz")
    prompt = TRANSCRIBE_PROMPT if system is None else system
    chat = pipeline.chat(system=prompt, speech=False)
    chat.hear(heard)
    return chat.answer(
        speech=False, task="transcribe", options=options, limits=limits, script=script
    )
