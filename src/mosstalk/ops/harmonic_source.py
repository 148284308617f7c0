"""The source of a harmonic-plus-noise vocoder, with its noise, in one pass over the samples.

The neural source-filter model (Wang et al. 2019) as HiFTNet has it: sines of the fundamental
and its harmonics where a frame is voiced, Gaussian noise everywhere, mixed into one wave.
Shapes: B rows, T frames, S samples of a frame, N = S T samples, K harmonics.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.numerics.rng import normal
from mosstalk.ops.launch import ceil_div, runs, tl, triton

_SOURCE_BLOCK = 256


@dataclass(frozen=True)
class Excitation:
    """How loud sines (``alpha``) and noise (``sigma`` where voiced) are, and what is voiced.

    Mixed by ``weight`` (K,) and ``bias`` (1,), float32; ``stream`` keeps the noise apart from
    other draws of a seed.
    """

    alpha: float
    sigma: float
    voiced_above_hz: float
    samples_per_frame: int
    stream: int
    weight: Tensor
    bias: Tensor


def harmonic_source(
    f0: Tensor, phases: Tensor, seeds: Tensor, first: Tensor, how: Excitation, skip: int = 0
) -> Tensor:
    """The source (B, N - skip) float32 from sample ``skip`` on.

    ``f0`` (B, T) in Hz float32; ``phases`` (B, T, K) float64 turns at the frames' centres, in
    between linear, held before the first and after the last; ``seeds`` (B,) and ``first`` (B,)
    int64: noise is a function of (seed, first + sample, harmonic) alone.
    """
    if not runs(f0):
        return harmonic_source_reference(f0, phases, seeds, first, how, skip)
    batch, frames, harmonics = phases.shape
    samples = frames * how.samples_per_frame - skip
    out = torch.empty((batch, samples), device=f0.device)
    _source_kernel[(batch, ceil_div(samples, _SOURCE_BLOCK))](
        f0.contiguous(), phases.contiguous(), seeds, first, how.weight, how.bias, out,
        skip, samples, frames, how.alpha, how.sigma, how.voiced_above_hz,
        SAMPLES=how.samples_per_frame, HARMONICS=harmonics, STREAM=how.stream, BLOCK=_SOURCE_BLOCK,
    )  # fmt: skip
    return out


def harmonic_source_reference(
    f0: Tensor, phases: Tensor, seeds: Tensor, first: Tensor, how: Excitation, skip: int = 0
) -> Tensor:
    """``harmonic_source`` in plain torch."""
    per_frame, harmonics = how.samples_per_frame, phases.shape[2]
    frames = f0.repeat_interleave(per_frame, dim=1)[:, skip:, None]
    voiced = (frames > how.voiced_above_hz).float()
    turns = F.interpolate(phases.mT, scale_factor=float(per_frame), mode="linear").mT[:, skip:]
    sines = torch.sin(2 * torch.pi * (turns % 1)).float() * how.alpha
    places = torch.arange(skip, skip + voiced.shape[1], device=f0.device)
    noise = normal(seeds[:, None], how.stream, first[:, None] + places, harmonics)
    level = how.sigma * voiced + how.alpha / 3 * (1 - voiced)
    return torch.tanh(F.linear(sines * voiced + level * noise, how.weight[None], how.bias))[..., 0]


@triton.jit
def _normal_pair(radius_bits, angle_bits):
    """Two independent normal numbers of 2 x 32 random bits (Box and Muller 1958), float64."""
    radius = tl.sqrt(-2.0 * tl.log((radius_bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))
    angle = (angle_bits.to(tl.float64) + 0.5) * (2.3283064365386963e-10 * 6.283185307179586)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _harmonic(phase, here, following, share, noise, voiced, alpha, level, inside):
    """One harmonic's part of the source: its sine where voiced, and noise."""
    before = tl.load(phase + here, mask=inside, other=0.0)
    turns = before + (tl.load(phase + following, mask=inside, other=0.0) - before) * share
    turns -= tl.floor(turns)
    sine = tl.sin((turns * 6.283185307179586).to(tl.float32)) * alpha
    return tl.where(voiced, sine, 0.0) + level * noise.to(tl.float32)


@triton.jit
def _source_kernel(
    f0,
    phases,
    seeds,
    first,
    weight,
    bias,
    out,
    skip,
    samples,
    frames,
    alpha,
    sigma,
    voiced_above,
    SAMPLES: tl.constexpr,
    HARMONICS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < samples
    sample = place + skip
    # Centres of frames lie half a sample off the grid: counted in half samples they do not.
    since_centre = tl.maximum(2 * sample + 1 - SAMPLES, 0)
    frame = tl.minimum(since_centre // (2 * SAMPLES), frames - 1)
    share = (since_centre % (2 * SAMPLES)).to(tl.float64) / (2 * SAMPLES)
    here = frame * HARMONICS
    following = tl.minimum(frame + 1, frames - 1) * HARMONICS
    hertz = tl.load(f0 + row * frames + sample // SAMPLES, mask=inside, other=0.0)
    voiced = hertz > voiced_above
    level = tl.where(voiced, sigma, alpha / 3)
    phase = phases + row * frames * HARMONICS
    seed = tl.load(seeds + row)
    index = tl.load(first + row) + sample
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    total = tl.zeros((BLOCK,), tl.float32)
    for group in tl.static_range((HARMONICS + 3) // 4):
        b0, b1, b2, b3 = tl.philox(seed, low, high, group, STREAM)
        n0, n1 = _normal_pair(b0, b1)
        n2, n3 = _normal_pair(b2, b3)
        h = 4 * group
        part = _harmonic(phase + h, here, following, share, n0, voiced, alpha, level, inside)
        total += part * tl.load(weight + h)
        if 4 * group + 1 < HARMONICS:
            part = _harmonic(
                phase + h + 1, here, following, share, n1, voiced, alpha, level, inside
            )
            total += part * tl.load(weight + h + 1)
        if 4 * group + 2 < HARMONICS:
            part = _harmonic(
                phase + h + 2, here, following, share, n2, voiced, alpha, level, inside
            )
            total += part * tl.load(weight + h + 2)
        if 4 * group + 3 < HARMONICS:
            part = _harmonic(
                phase + h + 3, here, following, share, n3, voiced, alpha, level, inside
            )
            total += part * tl.load(weight + h + 3)
    total += tl.load(bias)
    loud = 2.0 / (1.0 + tl.exp(-2.0 * total)) - 1.0
    tl.store(out + row * samples + place, loud, mask=inside)
