"""The flow stage: codes of the teacher's clips to her mel, by flow matching.

Chunk-masked in most batches so that it streams, whole otherwise; conditions are dropped now
and then for guidance (Ho & Salimans 2021); a clip's own beginning serves as voice prompt in
half of the rows. A small extra loss pulls mu towards the mel itself.
"""

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.config import FlowConfig
from mosstalk.constants import MEL_FRAMES_PER_CODE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.models.features import vocoder_mel
from mosstalk.models.flow import FlowDecoder, fixed_noise
from mosstalk.models.voices import Voice
from recipes.pocket.data import Recordings, length_batches, padded_sound, side_by_side
from recipes.pocket.recorded import Recorded
from recipes.pocket.sizes import FLOW, SMOKE_FLOW, Sizes
from recipes.pocket.training import Averaged, Run, adamw, fresh, load_weights, save_weights

_PEAK_RATE = 1.2e-3
_DROPPED = 0.2
_MASKED = 0.75
_PROMPTED = 0.5
_MU_WEIGHT = 0.1
_WINDOW, _LONG_WINDOW, _SMOKE_WINDOW = (64, 96), (24, 256), (4, 30)
"""Rows of a batch and the codes in each."""
_LONG_SHARE = 0.25
_HELD_OUT_EVERY = 50
_VALIDATE_EVERY, _VALIDATED_CLIPS, _VALIDATED_FROM = 4000, 8, 15
"""Steps between two validations; clips in each, of more codes than that."""
_CODES_PER_BATCH = 24_000
"""When mels are predicted."""
_PER_CODE = OUTPUT_SAMPLES_PER_CODE
_MU_SCALE = 4.0
"""mu is pulled to mel / 4: of the size that the estimator's other inputs have."""


class FlowData:
    """Windows of the teacher's clips, one after another as in ``data``, with ``codes`` of them.

    The first clips are held out: one in fifty.
    """

    def __init__(self, data: Recordings, codes: NDArray[np.int16]) -> None:
        self.data, self.codes = data, torch.from_numpy(codes.astype(np.int64))
        self.codes = self.codes[: data.teacher_codes].to(data.spoken.device)
        held = max(1, data.teacher_clips // _HELD_OUT_EVERY)
        long = np.flatnonzero(data.codes[:held] > _VALIDATED_FROM)
        self.held_out = long[:: max(1, len(long) // _VALIDATED_CLIPS)][:_VALIDATED_CLIPS]
        self.first = int(data.codes[:held].sum()) if held < data.teacher_clips else 0

    def draw(self, count: int, size: int) -> tuple[Tensor, Tensor]:
        """``count`` windows of ``size`` codes anywhere: codes (B, size), mel (B, 4 size, 80).

        Windows are shorter where the clips together are.
        """
        device, end = self.codes.device, self.codes.shape[0]
        size = min(size, end - self.first - 2)
        start = torch.randint(self.first + 1, end - size, (count, 1), device=device)
        return self.codes[start + torch.arange(size, device=device)], self._mel(start, size)

    def clip(self, number: int) -> tuple[Tensor, Tensor]:
        """Codes (n,) of a clip and its mel (4n, 80)."""
        start, count = int(self.data.starts[number]), int(self.data.codes[number])
        wave = self.data.spoken[start * _PER_CODE : (start + count) * _PER_CODE]
        return self.codes[start : start + count], vocoder_mel(wave.float() / 32768)

    def _mel(self, start: Tensor, size: int) -> Tensor:
        """Of windows from ``start`` (B, 1); a code around them is what their ends reach into."""
        around = torch.arange(-1, size + 1, device=start.device)
        wave = self.data.spoken.view(-1, _PER_CODE)[start + around].flatten(1)
        return vocoder_mel(wave.float() / 32768)[:, MEL_FRAMES_PER_CODE:-MEL_FRAMES_PER_CODE]


def speaker_embedding(size: int) -> Tensor:
    """The teacher's fixed x-vector (size,): one voice needs no more than a constant."""
    return torch.randn(size, generator=torch.Generator().manual_seed(24))


def losses(
    flow: FlowDecoder, codes: Tensor, mel: Tensor, speaker: Tensor, *, masked: bool
) -> dict[str, Tensor]:
    """Flow-matching loss over the frames that are not prompt, and mu's distance from the mel.

    ``codes`` (B, T), ``mel`` (B, 4T, 80), ``speaker`` (x-vector's size,).
    """
    config = flow.config
    rows, frames = mel.shape[:2]
    device = mel.device
    block = config.chunk_size if masked else None
    speaker = flow.spk_embed_affine_layer(F.normalize(speaker[None], dim=1)).expand(rows, -1)
    mu = flow.encoder_proj(flow.encoder(flow.input_embedding(codes), None, block))
    prompted = torch.rand(rows, 1, device=device) < _PROMPTED
    prompt = (torch.rand(rows, 1, device=device) * 0.6 * frames).long() * prompted
    known = torch.arange(frames, device=device) < prompt
    target = mel.transpose(1, 2)
    condition = target.masked_fill(~known[:, None], 0.0)
    kept = (torch.rand(rows, 1, 1, device=device) >= _DROPPED).to(mu.dtype)
    u = torch.rand(rows, 1, 1, device=device)
    t = 1 - torch.cos(u * 0.5 * math.pi)
    noise = torch.randn_like(target)
    x = (1 - t) * noise + t * target
    velocity = flow.decoder.estimator(
        x, mu.transpose(1, 2) * kept, t[:, 0, 0], speaker * kept[:, 0], condition * kept,
        block and block * config.token_mel_ratio,
    )  # fmt: skip
    counted = ~known[:, None]
    error = (velocity.float() - (target - noise)).square() * counted
    flow_loss = error.sum() / (counted.sum() * config.mel_bins)
    mu_loss = (mu.float() - mel / _MU_SCALE).abs().mean()
    return {"loss": flow_loss + _MU_WEIGHT * mu_loss, "flow": flow_loss, "mu": mu_loss}


def train(data: Recordings, codes: NDArray[np.int16], run: Run) -> FlowDecoder:
    """Train on the teacher's clips, writing ``flow.safetensors``; return the average.

    ``codes`` are of all clips, heard clean.
    """
    device, path = data.spoken.device, run.folder / "flow.safetensors"
    torch.manual_seed(run.seed)
    config: FlowConfig = SMOKE_FLOW if run.smoke else FLOW
    flow = fresh(FlowDecoder(config)).to(device)
    if run.resume:
        load_weights(flow, run.resume)
    optimizer = adamw(list(flow.parameters()), _PEAK_RATE)
    mean, source = Averaged(flow), FlowData(data, codes)
    speaker, draw = speaker_embedding(config.spk_embed_dim).to(device), random.Random(run.seed)

    def gradients(codes: Tensor, mel: Tensor, *, masked: bool) -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts = losses(flow, codes, mel, speaker, masked=masked)
        parts["loss"].backward()
        return parts

    recorded = Recorded(gradients, flow.parameters(), plain=run.plain)
    for step in run.steps():
        window = _LONG_WINDOW if draw.random() < _LONG_SHARE else _WINDOW
        rows, size = _SMOKE_WINDOW if run.smoke else window
        parts = recorded(*source.draw(rows, size), masked=draw.random() < _MASKED)
        run.follow(parts, optimizer, _PEAK_RATE, mean, flow)
        if step % _VALIDATE_EVERY == _VALIDATE_EVERY - 1:
            run.log(**validate(mean.module, source))
            save_weights(mean.module, path, {"step": step})
    run.log(**validate(mean.module, source))
    save_weights(mean.module, path, {"step": run.step})
    return mean.module.eval()


@torch.inference_mode()
def validate(flow: FlowDecoder, source: FlowData) -> dict[str, float]:
    """Mel error of streamed decoding of held-out clips, in natural log of magnitude."""
    errors, of_mu = [], []
    for number in source.held_out:
        codes, mel = source.clip(number)
        voice = Voice(codes[:10], mel[:40], speaker_embedding(flow.config.spk_embed_dim))
        made = flow.decode(voice, codes[10:], final=True, masked=True)
        errors.append(float((made.T - mel[40:]).abs().mean()))
        mean = flow.mean(codes, final=True, masked=True)[0]
        of_mu.append(float((mean * _MU_SCALE - mel).abs().mean()))
    if not errors:
        return {}
    return {"mel_error": float(np.mean(errors)), "mu_error": float(np.mean(of_mu))}


# The teacher's mels as the trained flow makes them: what the vocoder will hear in use.
#
# A vocoder that has heard only true mels blurs what a flow makes; training it further on these
# closes the gap (as fine-tuning on predicted features does in Shen et al. 2018). But a flow draws
# some mel that fits the codes, not the recording's, and a vocoder that is to make the recording of
# it learns to blur. So most of them begin part of the way from noise to the recording's own mel (as
# in Meng et al. 2022, SDEdit): they have a flow's flaws, and the recording's course.


VOICE_CODES = 40
"""Of the teacher's first clip, as the voice that ships."""
_COMPARED_CLIPS = 50
_FIRST_STEPS = 4
"""The Euler steps to begin with are drawn below this."""


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
    size, draw = OUTPUT_SAMPLES_PER_CODE, np.random.default_rng(0)
    prompt = (codes[:prompt_codes], vocoder_mel(data.spoken[: prompt_codes * size].float() / 32768))
    for clips in length_batches(data.codes[: data.teacher_clips], _CODES_PER_BATCH):
        starts, counts = data.starts[clips], data.codes[clips]
        places, _ = side_by_side(starts, counts, codes.device)
        own = vocoder_mel(padded_sound(data.spoken, starts * size, counts * size))
        first = int(draw.integers(min(_FIRST_STEPS, flow.config.n_timesteps)))
        mels = decode(flow, codes[places], prompt, own, first).half()
        for mel, start, count in zip(mels, starts.tolist(), counts.tolist(), strict=True):
            out[start * ratio : (start + count) * ratio] = mel[: count * ratio]
    return out


def mean_distance(mels: Tensor, data: Recordings) -> float:
    """Mean difference of ``mels`` from those of the first clips, in natural log of magnitude."""
    codes = int(data.codes[: min(_COMPARED_CLIPS, data.teacher_clips)].sum())
    own = vocoder_mel(data.spoken[: codes * OUTPUT_SAMPLES_PER_CODE].float() / 32768)
    return float((mels[: own.shape[0]].float() - own).abs().mean())


def decode(
    flow: FlowDecoder,
    codes: Tensor,
    prompt: tuple[Tensor, Tensor],
    own: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Mel (B, 4T, 80) of codes (B, T), block-masked, after one prompt of codes and mel.

    Euler's steps begin with ``first``: where ``own`` (B, 4T, 80) is given, part of the way from the
    noise to it, else from the noise.
    """
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
    if own is not None:
        target = torch.cat([prompt[1].expand(rows, -1, -1), own], dim=1).transpose(1, 2)
        noise = noise.lerp(target.to(noise), float(flow.decoder.times(noise.device)[first]))
    mels = flow.decoder(noise, mu, speaker, condition, block, first)
    return mels[:, :, prompt_frames:].transpose(1, 2)
