"""A random language model straight into a device's memory: no file is written, no file is read.

Of the same distributions as ``synthesize`` writes, though not the same numbers: they are drawn
where they are needed. For measurements at sizes whose files would take minutes.
"""

import zlib

import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import SpecialIds
from mosstalk.models.language_model import LanguageModel
from mosstalk.synthesis.sizes import Sizes
from mosstalk.synthesis.write import scale_of


def random_language_model(
    sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> LanguageModel:
    """The model in ``dtype``; of one seed, device and dtype always the same."""
    config = LanguageModelConfig.from_dict(sizes.model)
    with torch.device("meta"):
        model = LanguageModel(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(requires_grad=False)
    for name, weight in model.named_parameters():
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        scale, offset = scale_of(name)(tuple(weight.shape))
        weight.normal_(offset, scale, generator=generator)
    return model


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
