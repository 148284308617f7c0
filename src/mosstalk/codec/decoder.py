"""Codes to sound in plain torch: what ``speech_decoder`` is compared with."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE
from mosstalk.errors import ConfigError
from mosstalk.models.codec_folder import STREAMING_FLOW, Codec
from mosstalk.models.flow import FlowDecoder, RecomputingFlowStream
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.hift_stream import NOISE_STREAM, HiftStream
from mosstalk.models.voices import Voice
from mosstalk.numerics.rng import normal


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
