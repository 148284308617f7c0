"""Codes of many replies to sound, hop by hop: flow and vocoder for all of them at once.

``SpeechDecoder`` takes replies in any voices, at any hops, joining and leaving; a hop costs the
same however long its reply has become. ``SpeechStream`` and ``decode_offline`` are codes to sound
in plain torch, of one reply: what the decoder is compared with.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mosstalk.codec.bigvgan_stream import BatchedBigVgan, BigVganOptions
from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowFigures, FlowOptions
from mosstalk.codec.flow_replies import FlowReply
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.codec.vocoder import StreamingVocoder, VocoderFigures, VocoderReply
from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE
from mosstalk.errors import CodecFullError, ConfigError
from mosstalk.models.bigvgan import load_bigvgan
from mosstalk.models.codec_folder import STREAMING_FLOW, Codec
from mosstalk.models.flow import FlowDecoder, RecomputingFlowStream
from mosstalk.models.hift import NOISE_STREAM, HiftStream, HiftVocoder
from mosstalk.models.voices import Voice
from mosstalk.numerics.rng import normal
from mosstalk.reply_options import CONTEXT_S, SoundRequest
from mosstalk.runtime.device import pick_dtype


class SpeechStream:
    """Sound of one reply in one voice, from codes as they are generated.

    The samples of all ``push`` calls and of ``finish`` together are 1920 for each code. Voice and
    reply are computed again at every hop.
    """

    def __init__(self, codec: Codec, voice: Voice, seed: int = 0) -> None:
        if codec.block_codes is None:
            raise ConfigError(f"this flow was trained on whole replies; stream {STREAMING_FLOW}")
        self._flow = RecomputingFlowStream(codec.flow, voice)
        self._vocoder = HiftStream(codec.vocoder, seed)

    @property
    def codes_needed(self) -> int:
        """How many codes of the reply there must be before more sound can be made."""
        return self._flow.codes_needed

    def push(self, codes: Iterable[int]) -> list[Tensor]:
        """Take more codes; return the sound (n,) of every hop that became possible, float32."""
        return [self._vocoder.push(mel) for mel in self._flow.push(codes)]

    def finish(self) -> Tensor | None:
        """End the reply: the rest of its sound, None when it had no codes."""
        mel = self._flow.finish()
        return None if mel is None else self._vocoder.push(mel, final=True)


def decode_offline(
    codec: Codec, voice: Voice, codes: list[int], seed: int = 0, *, masked: bool = False
) -> Tensor:
    """Sound (1920 n,) float32 of a whole reply at once.

    ``masked`` attends by blocks as streaming does; the noise is the streamed reply's.
    """
    flow: FlowDecoder = codec.flow
    vocoder: HiftVocoder = codec.vocoder
    ids = torch.tensor(codes, device=codec.device)
    mel = flow.decode(voice, ids, final=True, masked=masked)
    positions = torch.arange(len(codes) * OUTPUT_SAMPLES_PER_CODE, device=codec.device)
    return vocoder.vocode(mel, normal(seed, NOISE_STREAM, positions, vocoder.harmonics))


_PLACES = 256
_FEW_PAGES = 32
"""At first where they grow: 12.8 s of voice and reply."""
_FEW_ITEMS = 2
"""Blocks of a pass for few replies: a first hop's. In float32 all passes are of one size."""


@dataclass(frozen=True)
class DecoderOptions:
    """How flow and vocoder compute; ``bigvgan`` is a folder with that vocoder, None the codec's
    own HiFT. See ``FlowOptions``, ``HiftOptions`` and ``BigVganOptions``.
    """

    flow: FlowOptions = field(default_factory=FlowOptions)
    hift: HiftOptions = field(default_factory=HiftOptions)
    bigvgan: Path | None = None

    @classmethod
    def exact(cls, replies: int) -> Self:
        """Float32 and nothing forgotten, for few replies: pages are as many as these need."""
        flow = FlowOptions(pages=_FEW_PAGES, grows=True, max_items=_FEW_ITEMS, lanes=1, voices=4)
        return cls(flow, HiftOptions(replies=replies))

    @classmethod
    def few(cls, replies: int, device: torch.device) -> Self:
        """Options where the user gave none: exact on a CPU; on a GPU those of a server.

        These are 16 bit and a history of ``CONTEXT_S``, here in as few pages as ``exact`` has.
        """
        exact = cls.exact(replies)
        if device.type != "cuda":
            return exact
        served = cls.of(SoundRequest(), device, replies)
        flow = replace(exact.flow, dtype=served.flow.dtype, context_s=served.flow.context_s)
        return cls(flow, served.hift)

    @classmethod
    def of(cls, request: SoundRequest, device: torch.device, replies: int | None = None) -> Self:
        """What ``request`` means on ``device``.

        Where no precision was asked for it is float16 on a GPU, else float32. Where no memory was,
        and a reply's history is bounded, there are pages for ``replies`` at once and some voices.

        Raises:
            OptionError: a value is out of its range.
            DeviceError: the dtype is unknown.
        """
        dtype = request.dtype or ("float16" if device.type == "cuda" else "float32")
        context_s = (CONTEXT_S if request.context_s is None else request.context_s) or None
        flow = FlowOptions(
            context_s=context_s,
            steps=request.steps,
            dtype=pick_dtype(dtype),
            memory_mib=request.memory_mib,
            replies=replies,
            graphs=request.graphs,
        )
        hift = HiftOptions(dtype=dtype, graphs=request.graphs, replies=replies or _PLACES)
        return cls(flow, hift, request.vocoder_folder)


@dataclass(eq=False)
class SpokenReply:
    """One reply on its way to sound; only ``SpeechDecoder`` writes here."""

    flow: FlowReply
    seed: int
    vocoder: VocoderReply | None = None
    closed: bool = False

    @property
    def codes_needed(self) -> int:
        """How many codes of the reply there must be before more sound can be made."""
        return self.flow.codes_needed


@dataclass(frozen=True)
class DecodeRequest:
    """More ``codes`` of a reply: those of its next hop, or with ``last`` all that is left.

    A hop has what ``SpokenReply.codes_needed`` asks for: with fewer there is no sound yet.
    """

    reply: SpokenReply
    codes: Sequence[int]
    last: bool = False


class SpeechDecoder:
    """Flow and vocoder of a codec for many replies at once.

    One thread at a time. Whatever a reply holds is taken at its first hop and given back by
    ``close``.
    """

    def __init__(self, codec: Codec, options: DecoderOptions | None = None) -> None:
        """Pack the weights and, on a GPU, take the memory for voices and replies.

        Raises:
            ConfigError: the codec's flow was trained on whole replies, or the vocoder's config
                cannot be read.
            CheckpointError: the vocoder's weights cannot be read.
            OptionError: an option means nothing here.
        """
        if codec.block_codes is None:
            raise ConfigError(f"this flow was trained on whole replies; stream {STREAMING_FLOW}")
        options = options or DecoderOptions()
        self.device, self._codec = codec.device, codec
        self.flow = batched_flow(codec.flow, options.flow)
        self.vocoder = _vocoder(codec, options)

    def open(self, voice: Voice, seed: int = 0) -> SpokenReply:
        """A reply in ``voice`` before its first code; what is random in it depends on ``seed``."""
        return SpokenReply(self.flow.open(voice), seed)

    @property
    def hops_at_once(self) -> int:
        """How many replies one ``decode`` computes at the same time; more wait for one another."""
        return self.flow.hops_at_once

    def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        self.flow.prepare(voice)

    @torch.inference_mode()
    def decode(self, requests: Sequence[DecodeRequest]) -> list[Tensor]:
        """Sound (n,) float32 on the device of each reply's codes, at 24 kHz; may be empty.

        All of a reply's sound together is 1920 samples for each code. Each reply at most once.

        Raises:
            CodecFullError: there is no room; then nothing has changed.
        """
        begun = self._begin([request.reply for request in requests])
        hops = [(request.reply.flow, request.codes, request.last) for request in requests]
        try:
            mels = self.flow.advance(hops)
        except CodecFullError:
            self._undo(begun)
            raise
        work = [
            (request.reply.vocoder, mel, request.last)
            for request, mel in zip(requests, mels, strict=True)
            if mel.shape[1] and request.reply.vocoder
        ]
        sounds = iter(self.vocoder.push(work) if work else [])
        return [next(sounds) if mel.shape[1] else mel.new_zeros(0) for mel in mels]

    def decode_one(self, request: DecodeRequest) -> Tensor:
        """``decode`` of one reply."""
        return self.decode([request])[0]

    def close(self, reply: SpokenReply) -> None:
        """Give back what a reply holds; harmless if it has been closed."""
        if reply.closed:
            return
        reply.closed = True
        self.flow.close(reply.flow)
        if reply.vocoder:
            self.vocoder.close(reply.vocoder)

    def warm(self) -> None:
        """Do ahead of time what would make the first hops slow."""
        self.flow.warm()
        self.vocoder.warm()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def release_float32(self) -> None:
        """Give a GPU's memory of the codec's own weights back, where this computes with others.

        What is used of them as it is stays. The codec can then decode nothing offline.
        """
        if self.device.type == "cuda" and self.flow.options.dtype != torch.float32:
            for part in (self._codec.flow.encoder, self._codec.flow.decoder, self._codec.vocoder):
                part.to("cpu")
            torch.cuda.empty_cache()

    def figures(self) -> tuple[FlowFigures, VocoderFigures]:
        """What is held now."""
        return self.flow.figures(), self.vocoder.figures()

    def _begin(self, replies: Sequence[SpokenReply]) -> list[SpokenReply]:
        """Take a place for each that has none, or none at all; return those that got one."""
        begun: list[SpokenReply] = []
        try:
            for reply in replies:
                if reply.vocoder is None:
                    reply.vocoder = self.vocoder.open(reply.seed)
                    begun.append(reply)
        except CodecFullError:
            self._undo(begun)
            raise
        return begun

    def _undo(self, begun: Sequence[SpokenReply]) -> None:
        """Give back the places that ``_begin`` took."""
        for reply in begun:
            if reply.vocoder:
                self.vocoder.close(reply.vocoder)
            reply.vocoder = None


def _vocoder(codec: Codec, options: DecoderOptions) -> StreamingVocoder:
    if options.bigvgan is None:
        return BatchedHift(codec.vocoder, options.hift)
    network = load_bigvgan(options.bigvgan, device=codec.device)
    given = BigVganOptions(dtype=options.hift.dtype, replies=options.hift.replies)
    return BatchedBigVgan(network, given)


class DecoderStream:
    """One reply through a ``SpeechDecoder``.

    What it holds is given back by ``finish``, or when it is dropped.
    """

    def __init__(self, decoder: SpeechDecoder, voice: Voice, seed: int = 0) -> None:
        self._decoder = decoder
        self._reply = decoder.open(voice, seed)
        self._dropped = weakref.finalize(self, decoder.close, self._reply)

    @property
    def codes_needed(self) -> int:
        """How many codes of the reply there must be before more sound can be made."""
        return self._reply.codes_needed

    def push(self, codes: Iterable[int]) -> list[Tensor]:
        """Take more codes; return the sound (n,) of every hop that became possible, float32."""
        rest, sounds = list(codes), list[Tensor]()
        while rest:
            missing = self.codes_needed - len(self._reply.flow.codes)
            part, rest = rest[:missing], rest[missing:]
            sounds.append(self._decoder.decode_one(DecodeRequest(self._reply, part)))
        return [sound for sound in sounds if len(sound)]

    def finish(self) -> Tensor | None:
        """End the reply: the rest of its sound, None when it had no codes."""
        had_codes = bool(self._reply.flow.codes)
        rest = (
            self._decoder.decode_one(DecodeRequest(self._reply, [], last=True))
            if had_codes
            else None
        )
        self._dropped()
        return rest
