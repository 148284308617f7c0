"""From log magnitudes and phase sines to sound: the inverse STFT with what stands before it.

Centred, with overlap-add divided by the windows' squared sum (Griffin and Lim 1984). Shapes:
B rows, M frames, n = n_fft, F = n / 2 + 1 bins, N = hop (M - 1) samples.
"""

import torch
from torch import Tensor

from mosstalk.ops.launch import ceil_div, runs, tl, triton

_STFT_BLOCK = 256


def inverse_basis(n_fft: int, window: Tensor) -> Tensor:
    """What each real and imaginary part gives each sample of a frame, windowed: (2 F, n_fft).

    Multiplied with a half spectrum this is ``irfft`` times ``window``, which ignores the
    imaginary parts of the first and the last bin.
    """
    bins = n_fft // 2 + 1
    spectra = torch.eye(2 * bins, dtype=torch.float64)
    frames = torch.fft.irfft(torch.complex(spectra[:, :bins], spectra[:, bins:]), n_fft)
    return (frames * window.double().cpu()).float().to(window.device)


def inverse_stft(
    x: Tensor, basis: Tensor, window: Tensor, hop: int, loudest: float, limit: float
) -> Tensor:
    """Sound (B, N) float32, within +-``limit``.

    ``x`` (B, 2 F, M) float32 holds log magnitudes and numbers whose sines are the phases;
    magnitudes are cut at ``loudest``. ``basis`` is ``inverse_basis`` of ``window`` (n_fft,),
    whose length is a multiple of ``hop``.
    """
    if not runs(x):
        return inverse_stft_reference(x, basis, window, hop, loudest, limit)
    batch, parts, frames = x.shape
    samples, n_fft = hop * (frames - 1), window.shape[0]
    out = torch.empty((batch, samples), device=x.device)
    _inverse_kernel[(batch, ceil_div(samples, _STFT_BLOCK))](
        x, basis, window, out, samples, frames, *x.stride(), loudest, limit,
        BINS=parts // 2, LENGTH=n_fft, HOP=hop, BLOCK=_STFT_BLOCK,
    )  # fmt: skip
    return out


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
):
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
