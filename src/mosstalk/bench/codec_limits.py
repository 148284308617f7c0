"""What a hop and a push of the codec must at least move and compute, from the models' sizes."""

from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from mosstalk.bench.ceilings import Work
from mosstalk.config import HiftConfig
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.hift_stream import KEPT_FRAMES
from mosstalk.models.speech_tokenizer import SpeechTokenizer

_BRANCHES = 2
_KEYS_AND_VALUES = 2


def hop_work(
    codec: Codec, dtype: torch.dtype, *, hops: int, voice_frames: int, own_frames: int, steps: int
) -> Work:
    """One hop of a block in each of ``hops`` replies of one voice.

    Each Euler step reads the estimator's weights, the voice's keys and values once for all replies,
    and those of the ``own_frames`` of each. The flow's encoder, a hundredth of it, is left out.
    """
    estimator = flow_work(codec.flow, dtype, hops, voice_frames, own_frames)
    vocoder = vocoder_work(codec.vocoder, dtype, hops)
    return Work(steps * estimator.moved_bytes, steps * estimator.operations) + vocoder


def flow_work(
    flow: FlowDecoder, dtype: torch.dtype, hops: int, voice_frames: int, own_frames: int
) -> Work:
    """One Euler step of the estimator on one block of each of ``hops`` replies."""
    config = flow.config
    weights = sum(weight.numel() for weight in flow.decoder.estimator.parameters())
    frames = config.chunk_size * config.token_mel_ratio
    rows = _BRANCHES * hops * frames
    layers = (config.estimator_mid_blocks + 2) * config.estimator_transformer_blocks
    inner = config.estimator_heads * config.estimator_head_dim
    kept_row = layers * _BRANCHES * _KEYS_AND_VALUES * inner * dtype.itemsize
    seen = voice_frames + own_frames + frames
    return Work(
        weights * dtype.itemsize + kept_row * (voice_frames + hops * (own_frames + frames)),
        2 * rows * weights + layers * 2 * _KEYS_AND_VALUES * rows * seen * inner,
    )


def vocoder_work(vocoder: HiftVocoder, dtype: torch.dtype, hops: int) -> Work:
    """HiFT on the kept frames and those of one block of 20, counted on one run."""
    weights = sum(weight.numel() for weight in vocoder.parameters())
    return Work(weights * dtype.itemsize, hops * _vocoder_operations(vocoder.config))


@cache
def _vocoder_operations(config: HiftConfig) -> int:
    """Counted on another vocoder of these sizes: one in use may lie anywhere, and in parts."""
    frames = KEPT_FRAMES + 20
    mel = torch.zeros(1, config.in_channels, frames)
    source = torch.zeros(1, frames * config.samples_per_frame)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        HiftVocoder(config)(mel, source)
    return counter.get_total_flops()


def push_work(tokenizer: SpeechTokenizer, rows: int, kept_rows: int) -> Work:
    """``rows`` new rows of 20 ms of one stream that has kept ``kept_rows``, in float32."""
    encoder, config = tokenizer.encoder, tokenizer.config
    weights = sum(weight.numel() for weight in encoder.layers.parameters())
    codebook = encoder.codebook.weight.numel()
    attention = config.quantize_position * 4 * rows * (kept_rows + rows) * config.d_model
    kept = config.quantize_position * _KEYS_AND_VALUES * (kept_rows + rows) * config.d_model
    return Work(
        4.0 * (weights + codebook + kept), 2.0 * rows * weights + attention + rows / 2 * codebook
    )
