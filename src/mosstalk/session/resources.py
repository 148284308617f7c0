"""What all sessions of a process share: the models, the engine, and the threads around them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mosstalk.engine.async_engine import AsyncEngine
from mosstalk.errors import VoiceError
from mosstalk.models.voices import Voice, list_voices
from mosstalk.offline.pipeline import Pipeline
from mosstalk.session.decoder_worker import DecoderWorker
from mosstalk.session.encoder_worker import EncoderWorker


@dataclass
class SessionResources:
    """``voices`` are files outside the codec's folder, by name; ``clock`` is the wall's.

    ``long_work`` is held by who has another thread prepare something long, a text or a recording:
    one at a time, so that sessions that send many of them do not take every processor.
    """

    pipeline: Pipeline
    engine: AsyncEngine
    encoder_worker: EncoderWorker
    decoder_worker: DecoderWorker
    clock: Callable[[], float]
    voices: Mapping[str, Path] = field(default_factory=dict)
    long_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loaded: dict[str, Voice] = field(default_factory=dict)

    @property
    def context_rows(self) -> int:
        """The longest conversation that can be answered."""
        pool, config = self.engine.core.pool, self.pipeline.model.config
        return min(config.max_position_embeddings, pool.size * pool.rows)

    @property
    def voice_names(self) -> list[str]:
        """Names that ``voice`` knows."""
        return sorted({*list_voices(self.pipeline.codec.folder / "voices"), *self.voices})

    async def voice(self, name: str) -> Voice:
        """A voice by name, ready to be spoken with; never a path that a client chose.

        Raises:
            VoiceError: unknown, damaged, or made for another codec.
            CodecFullError: there is no room to make it ready.
        """
        if name not in self._loaded:
            if name not in self.voice_names:
                there = ", ".join(self.voice_names)
                raise VoiceError(f"unknown voice {name!r}; there are: {there}")
            voice = await asyncio.to_thread(self._load, name)
            await self.decoder_worker.prepare(voice)
            self._loaded[name] = voice
        return self._loaded[name]

    def _load(self, name: str) -> Voice:
        codec = self.pipeline.codec
        return codec.voice(str(self.voices.get(name, name)))
