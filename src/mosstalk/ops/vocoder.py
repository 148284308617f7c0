"""HiFT's fused steps: Snake, sums of branches, the inverse transform and the harmonic source."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.numerics.rng import normal
from mosstalk.ops.launch import Launch, ceil_div, op, runs, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.tiles import Tile

# Snake, with the bias of the convolution before it and the residual sum it follows.
#
# x + sin^2(a x) / a with one a per channel (Ziyin et al. 2020). Shapes: (B, C, L) without gaps.


_EPS = 1e-9
_BLOCK = Tile(1, 1024, 0, 4, 3)
"""``columns`` numbers to a program."""


def snake_reference(x: Tensor, alpha: Tensor, bias: Tensor | None = None) -> Tensor:
    """``snake`` in plain torch."""
    total = x.float() if bias is None else x.float() + bias[:, None]
    waves = (total * alpha[:, None]).sin_().square_()
    return torch.addcmul(total, waves, (alpha + _EPS).reciprocal()[:, None]).to(x.dtype)


def add_snake_reference(
    x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``add_snake`` in plain torch."""
    exact = x.float() + y.float()
    if bias is not None:
        exact += bias[:, None]
    return exact.to(x.dtype), snake_reference(exact, alpha).to(x.dtype)


@op(snake_reference)
def snake(x: Tensor, alpha: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Launch]:
    """Snake of x + bias, in x's dtype; ``alpha`` and ``bias`` (C,) float32."""
    out = torch.empty_like(x)
    return out, _snake(x, None, bias, alpha, None, out)


@op(add_snake_reference)
def add_snake(
    x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], Launch]:
    """x + y + bias, and Snake of that sum, both in x's dtype."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    return (total, out), _snake(x, y, bias, alpha, total, out)


def _snake(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    total: Tensor | None,
    out: Tensor,
) -> Launch:
    assert x.is_contiguous()
    assert y is None or y.is_contiguous()
    size = x.numel()
    return Launch(
        _snake_kernel,
        (ceil_div(size, _BLOCK.columns),),
        {
            "x": x, "y": x if y is None else y, "bias": alpha if bias is None else bias,
            "alpha": alpha, "total": out if total is None else total, "out": out, "size": size,
            "channels": x.shape[1], "step": x.shape[2],
        },
        {"ADDS": y is not None, "BIASED": bias is not None, "BLOCK": _BLOCK.columns, "EPS": _EPS},
        _BLOCK,
        short=False,
    )  # fmt: skip


@triton.jit
def _snake_kernel(
    x,
    y,
    bias,
    alpha,
    total,
    out,
    size,
    channels,
    step,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_wait(DEPENDENT)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    channel = (place // step) % channels
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + channel, mask=inside, other=0.0)
    if ADDS:
        tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)
    rate = tl.load(alpha + channel, mask=inside, other=1.0)
    wave = tl.sin(rate * value)
    value += wave * wave / (rate + EPS)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


# A sum of several tensors with a bias, scaled, through leaky ReLU, in another dtype.


_MOST_TERMS = 6


def _few(terms: Sequence[Tensor]) -> bool:
    return runs(terms[0]) and len(terms) <= _MOST_TERMS


def scaled_sum_reference(
    terms: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    slope: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``scaled_sum`` in plain torch."""
    total = terms[0].to(torch.float32, copy=True)
    for term in terms[1:]:
        total += term
    if bias is not None:
        total += bias[:, None]
    if scale != 1:
        total *= scale
    if slope != 1:
        torch.nn.functional.leaky_relu_(total, slope)
    return total.to(dtype or terms[0].dtype)


@op(scaled_sum_reference, takes=_few)
def scaled_sum(
    terms: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    slope: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Launch]:
    """Leaky ReLU with ``slope`` of ``scale`` times the sum of ``terms`` and ``bias``.

    ``terms`` one to six (B, C, L) of one dtype without gaps; the result has it too, unless
    ``dtype`` says otherwise; ``bias`` (C,) float32. Summed in float32. A slope of 1
    leaves the sum as it is.
    """
    first = terms[0]
    assert all(term.is_contiguous() for term in terms)
    out = torch.empty_like(first, dtype=dtype or first.dtype)
    given = [*terms, *[first] * (_MOST_TERMS - len(terms))]
    size = first.numel()
    return out, Launch(
        _sum_kernel,
        (ceil_div(size, _BLOCK.columns),),
        {
            **dict(zip("abcdef", given, strict=True)), "bias": first if bias is None else bias,
            "out": out, "size": size, "channels": first.shape[1], "step": first.shape[2],
            "scale": scale, "slope": slope,
        },
        {"TERMS": len(terms), "BIASED": bias is not None, "BLOCK": _BLOCK.columns},
        _BLOCK,
        short=False,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    a,
    b,
    c,
    d,
    e,
    f,
    bias,
    out,
    size,
    channels,
    step,
    scale,
    slope,
    TERMS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_wait(DEPENDENT)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 1:
        value += tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 2:
        value += tl.load(c + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 3:
        value += tl.load(d + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 4:
        value += tl.load(e + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 5:
        value += tl.load(f + place, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + (place // step) % channels, mask=inside, other=0.0)
    value *= scale
    value = tl.where(value < 0, value * slope, value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


# From log magnitudes and phase sines to sound: the inverse STFT with what stands before it.
#
# Centred, with overlap-add divided by the windows' squared sum (Griffin and Lim 1984). Shapes:
# B rows, M frames, n = n_fft, F = n / 2 + 1 bins, N = hop (M - 1) samples.


_SAMPLES = Tile(1, 256, 0, 4, 3)
"""``columns`` samples to a program."""


def inverse_basis(n_fft: int, window: Tensor) -> Tensor:
    """What each real and imaginary part gives each sample of a frame, windowed: (2 F, n_fft).

    Multiplied with a half spectrum this is ``irfft`` times ``window``, which ignores the
    imaginary parts of the first and the last bin.
    """
    bins = n_fft // 2 + 1
    spectra = torch.eye(2 * bins, dtype=torch.float64)
    frames = torch.fft.irfft(torch.complex(spectra[:, :bins], spectra[:, bins:]), n_fft)
    return (frames * window.double().cpu()).float().to(window.device)


def inverse_stft_reference(
    x: Tensor, basis: Tensor, window: Tensor, hop: int, loudest: float, limit: float
) -> Tensor:
    """``inverse_stft`` in plain torch."""
    log_magnitude, phase = x.chunk(2, dim=1)
    magnitude, angle = log_magnitude.exp().clamp_max(loudest), phase.sin()
    spectrum = torch.cat([magnitude * angle.cos(), magnitude * angle.sin()], dim=1)
    sound = _overlap_add(spectrum.mT @ basis, hop)
    squares = window.square().expand(1, x.shape[2], -1)
    return (sound / _overlap_add(squares, hop)).clamp_(-limit, limit)


def _overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Sum of frames (B, M, n) each ``hop`` after the one before, n / 2 less at both ends."""
    batch, count, length = frames.shape
    overlap = length // hop
    total = frames.new_zeros(batch, count + overlap - 1, hop)
    for part in range(overlap):
        total[:, part : part + count] += frames[:, :, part * hop : (part + 1) * hop]
    return total.flatten(1)[:, length // 2 : length // 2 + hop * (count - 1)]


@op(inverse_stft_reference)
def inverse_stft(
    x: Tensor, basis: Tensor, window: Tensor, hop: int, loudest: float, limit: float
) -> tuple[Tensor, Launch]:
    """Sound (B, N) float32, within +-``limit``.

    ``x`` (B, 2 F, M) float32 holds log magnitudes and numbers whose sines are the phases;
    magnitudes are cut at ``loudest``. ``basis`` is ``inverse_basis`` of ``window`` (n_fft,),
    whose length is a multiple of ``hop``.
    """
    batch, parts, frames = x.shape
    samples, n_fft = hop * (frames - 1), window.shape[0]
    out = torch.empty((batch, samples), device=x.device)
    row_step, part_step, frame_step = x.stride()
    return out, Launch(
        _inverse_kernel,
        (batch, ceil_div(samples, _SAMPLES.columns)),
        {
            "x": x, "basis": basis, "window": window, "out": out, "samples": samples,
            "frames": frames, "row_step": row_step, "part_step": part_step,
            "frame_step": frame_step, "loudest": loudest, "limit": limit,
        },
        {"BINS": parts // 2, "LENGTH": n_fft, "HOP": hop, "BLOCK": _SAMPLES.columns},
        _SAMPLES,
        short=False,
    )  # fmt: skip


@triton.jit
def _inverse_kernel(
    x,
    basis,
    window,
    out,
    samples,
    frames,
    row_step,
    part_step,
    frame_step,
    loudest,
    limit,
    BINS: tl.constexpr,
    LENGTH: tl.constexpr,
    HOP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = sample < samples
    place = sample + LENGTH // 2
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for back in tl.static_range(LENGTH // HOP):
        frame = place // HOP - back
        covers = inside & (frame >= 0) & (frame < frames)
        step = place % HOP + back * HOP
        height = tl.load(window + step)
        squares += tl.where(covers, height * height, 0.0)
        part = x + row * row_step + frame * frame_step
        for bin in range(BINS):
            level = tl.load(part + bin * part_step, mask=covers, other=0.0)
            phase = tl.load(part + (BINS + bin) * part_step, mask=covers, other=0.0)
            magnitude = tl.minimum(tl.exp(level), loudest)
            angle = tl.sin(phase)
            real = tl.load(basis + bin * LENGTH + step)
            imaginary = tl.load(basis + (BINS + bin) * LENGTH + step)
            value = magnitude * (tl.cos(angle) * real + tl.sin(angle) * imaginary)
            total += tl.where(covers, value, 0.0)
    sound = tl.minimum(tl.maximum(total / squares, -limit), limit)
    tl.store(out + row * samples + sample, sound, mask=inside)


# The source of a harmonic-plus-noise vocoder, with its noise, in one pass over the samples.
#
# The neural source-filter model (Wang et al. 2019) as HiFTNet has it: sines of the fundamental
# and its harmonics where a frame is voiced, Gaussian noise everywhere, mixed into one wave.
# Shapes: B rows, T frames, S samples of a frame, N = S T samples, K harmonics.


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


@op(harmonic_source_reference)
def harmonic_source(
    f0: Tensor, phases: Tensor, seeds: Tensor, first: Tensor, how: Excitation, skip: int = 0
) -> tuple[Tensor, Launch]:
    """The source (B, N - skip) float32 from sample ``skip`` on.

    ``f0`` (B, T) in Hz float32; ``phases`` (B, T, K) float64 turns at the frames' centres, in
    between linear, held before the first and after the last; ``seeds`` (B,) and ``first`` (B,)
    int64: noise is a function of (seed, first + sample, harmonic) alone.
    """
    batch, frames, harmonics = phases.shape
    samples = frames * how.samples_per_frame - skip
    out = torch.empty((batch, samples), device=f0.device)
    return out, Launch(
        _source_kernel,
        (batch, ceil_div(samples, _SAMPLES.columns)),
        {
            "f0": f0.contiguous(), "phases": phases.contiguous(), "seeds": seeds, "first": first,
            "weight": how.weight, "bias": how.bias, "out": out, "skip": skip, "samples": samples,
            "frames": frames, "alpha": how.alpha, "sigma": how.sigma,
            "voiced_above": how.voiced_above_hz,
        },
        {
            "SAMPLES": how.samples_per_frame, "HARMONICS": harmonics, "STREAM": how.stream,
            "BLOCK": _SAMPLES.columns,
        },
        _SAMPLES,
        short=False,
    )  # fmt: skip


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
    DEPENDENT: tl.constexpr,
):
    gdc_wait(DEPENDENT)
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
