"""Random networks and prompts straight into a device's memory: no file is written, no file is read.

Of the same distributions as ``synthesize`` writes, though not the same numbers: they are drawn
where they are needed. For measurements at sizes whose files would take minutes.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from mosstalk.config import FlowConfig, HiftConfig, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.models.codec_folder import FLOW_BLOCK_CODES, STREAMING_FLOW, Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice
from mosstalk.synthesis.sizes import Sizes
from mosstalk.synthesis.write import scale_of

_CALM, _MEL_LEVEL = 0.1, -6.0
_ROWS_SEED = 11
_M = TypeVar("_M", bound=nn.Module)


@torch.inference_mode()
def random_codec(sizes: Sizes, device: torch.device, seed: int = 0) -> Codec:
    """The codec in float32; its ``folder`` names none that exists."""
    flow = FlowConfig.from_dict(sizes.flow)
    hift = HiftConfig.from_dict(sizes.hift)
    speech = SpeechTokenizerConfig.from_dict(sizes.codec)
    vocoder = _random(lambda: HiftVocoder(hift), device, seed)
    vocoder.conv_post.weight.mul_(_CALM)
    calm = vocoder.conv_post.bias
    assert calm is not None
    calm[: hift.istft_n_fft // 2 + 1] = 0
    return Codec(
        Path("random-codec"),
        _random(lambda: SpeechTokenizer(speech), device, seed),
        _random(lambda: FlowDecoder(flow), device, seed),
        vocoder,
        FLOW_BLOCK_CODES[STREAMING_FLOW],
    )


def random_voice(codec: Codec, seconds: float, seed: int = 0) -> Voice:
    """A voice of whole blocks, at most ``seconds`` long."""
    config, random = codec.flow.config, torch.Generator().manual_seed(seed)
    block = config.chunk_size
    codes = int(seconds * CODES_PER_SECOND) // block * block
    limit = min(config.vocab_size, codec.tokenizer.config.quantize_vocab_size)
    mel = torch.randn((codes * config.token_mel_ratio, config.mel_bins), generator=random)
    return Voice(
        torch.randint(limit, (codes,), generator=random),
        mel + _MEL_LEVEL,
        torch.randn(config.spk_embed_dim, generator=random),
    )


def _random(make: Callable[[], _M], device: torch.device, seed: int) -> _M:
    with torch.device("meta"):
        module = make()
    module = module.to_empty(device=device).eval().requires_grad_(requires_grad=False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _fill(tensor, name, seed)
    return module


def _fill(tensor: Tensor, name: str, seed: int) -> None:
    if not tensor.is_floating_point():
        tensor.zero_()
        return
    random = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    scale, offset = scale_of(name)(tuple(tensor.shape))
    tensor.normal_(offset, scale, generator=random)


def random_language_model(
    sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> LanguageModel:
    """The model in ``dtype``; of one seed, device and dtype always the same."""
    config = LanguageModelConfig.from_dict(sizes.model)
    return _random(lambda: LanguageModel(config).to(dtype), device, seed)


def special_ids(config: LanguageModelConfig) -> SpecialIds:
    """Ids as published and as ``synthesize`` writes them: three right before ``sosp``."""
    endoftext, im_start, im_end = (config.sosp_token_id - back for back in (3, 2, 1))
    return SpecialIds(
        endoftext=endoftext,
        im_start=im_start,
        im_end=im_end,
        sosp=config.sosp_token_id,
        modality_pad=config.modality_pad_token_id,
        eosp=config.eosp_token_id,
        audio_pad=config.audio_pad_token_id,
        stop=frozenset((endoftext, im_end)),
    )


def random_rows(
    model: LanguageModel, ids: SpecialIds, mode: Mode, count: int, rows: int
) -> list[list[Row]]:
    """``count`` prompts of so many random rows in one mode, those of each its own."""
    random = torch.Generator().manual_seed(_ROWS_SEED)
    if mode is Mode.AUDIO:
        codes = torch.randint(ids.eosp, (count, rows), generator=random)
        codes[codes == ids.audio_pad] = 0
        return [[(ids.modality_pad, code) for code in part] for part in codes.tolist()]
    most = min(*ids.stop, ids.sosp, ids.modality_pad, model.config.vocab_size)
    texts = torch.randint(most, (count, rows), generator=random)
    return [[(text, ids.audio_pad) for text in part] for part in texts.tolist()]
