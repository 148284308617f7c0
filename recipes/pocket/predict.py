"""The teacher's mels as the trained flow makes them: what the vocoder will hear in use.

A vocoder that has heard only true mels blurs what a flow makes; training it further on these
closes the gap (as fine-tuning on predicted features does in Shen et al. 2018).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.constants import MEL_FRAMES_PER_CODE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.models.features import vocoder_mel
from mosstalk.models.flow import FlowDecoder, fixed_noise
from recipes.pocket.data import Recordings, side_by_side
from recipes.pocket.encode import length_batches
from recipes.pocket.flow import speaker_embedding
from recipes.pocket.package import VOICE_CODES
from recipes.pocket.sizes import Sizes
from recipes.pocket.training import load_weights

_CODES_PER_BATCH = 6_000
_COMPARED_CLIPS = 50


def load_flow(path: Path, sizes: Sizes) -> FlowDecoder:
    """The flow that its stage wrote."""
    flow = FlowDecoder(sizes.flow)
    load_weights(flow, path)
    return flow.eval()


@torch.inference_mode()
def predict_mels(flow: FlowDecoder, data: Recordings, codes: Tensor) -> Tensor:
    """Mel (frames, 80) float16 of all the teacher's clips, 4 frames for each of their codes.

    ``codes`` (n,) are the teacher's, in the data's order. The voice prompt is the beginning
    of the first clip.
    """
    ratio, prompt_codes = MEL_FRAMES_PER_CODE, min(VOICE_CODES, int(data.codes[0]))
    out = torch.empty(
        (data.teacher_codes * ratio, flow.config.mel_bins), dtype=torch.float16, device=codes.device
    )
    wave = data.spoken[: prompt_codes * OUTPUT_SAMPLES_PER_CODE].float() / 32768
    prompt = (codes[:prompt_codes], vocoder_mel(wave))
    for clips in length_batches(data.codes[: data.teacher_clips], _CODES_PER_BATCH):
        starts, counts = data.starts[clips], data.codes[clips]
        places, _ = side_by_side(starts, counts, codes.device)
        mels = decode(flow, codes[places], prompt).half()
        for mel, start, count in zip(mels, starts.tolist(), counts.tolist(), strict=True):
            out[start * ratio : (start + count) * ratio] = mel[: count * ratio]
    return out


def mean_distance(mels: Tensor, data: Recordings) -> float:
    """Mean difference of ``mels`` from those of the first clips, in natural log of magnitude."""
    codes = int(data.codes[: min(_COMPARED_CLIPS, data.teacher_clips)].sum())
    own = vocoder_mel(data.spoken[: codes * OUTPUT_SAMPLES_PER_CODE].float() / 32768)
    return float((mels[: own.shape[0]].float() - own).abs().mean())


def decode(flow: FlowDecoder, codes: Tensor, prompt: tuple[Tensor, Tensor]) -> Tensor:
    """Mel (B, 4T, 80) of codes (B, T), block-masked, after one prompt of codes and mel."""
    config = flow.config
    rows, prompt_frames = codes.shape[0], prompt[1].shape[0]
    whole = torch.cat([prompt[0].expand(rows, -1), codes], dim=1)
    mu = flow.encoder_proj(
        flow.encoder(flow.input_embedding(whole), None, config.chunk_size)
    ).transpose(1, 2)
    condition = torch.zeros_like(mu)
    condition[:, :, :prompt_frames] = prompt[1].T
    embedding = speaker_embedding(config.spk_embed_dim).to(mu)
    speaker = flow.spk_embed_affine_layer(F.normalize(embedding[None], dim=1)).expand(rows, -1)
    noise = fixed_noise(mu.shape[2], config.mel_bins).to(mu).expand(rows, -1, -1)
    block = config.chunk_size * config.token_mel_ratio
    mels = flow.decoder(noise, mu, speaker, condition, block)
    return mels[:, :, prompt_frames:].transpose(1, 2)
