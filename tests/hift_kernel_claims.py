"""What the vocoder's kernels must do: the same as their references.

``test_hift_batch_kernels.py`` runs this file in a process of its own, in which Triton is an
interpreter; with a GPU, ``pytest tests/hift_kernel_claims.py`` runs the compiled kernels on it.
"""

import pytest
import torch
from test_hift import make_mel, make_vocoder
from torch import Tensor

from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.models.hift import HiftStream
from mosstalk.ops.launch import interprets, runs
from mosstalk.ops.vocoder import (
    Excitation,
    add_snake,
    harmonic_source,
    inverse_basis,
    inverse_stft,
    scaled_sum,
    snake,
)
from mosstalk.runtime.device import pick_device

DEVICE = pick_device("cpu" if interprets() else "cuda")
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative norm of a difference; in 16 bit, one rounding of the outputs."""
DTYPES = [torch.float32, torch.float16]
if not interprets():
    DTYPES.append(torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(2, 7, 501), (1, 64, 33), (3, 1, 5)]


def drawn(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE)


def same(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.isfinite(expected.float()).all()
    difference = (found.double() - expected.double()).norm()
    assert float(difference) <= BOUND[dtype] * float(expected.double().norm())


def test_kernels_run_here() -> None:
    assert runs(torch.empty(1, device=DEVICE))


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_snake(shape: tuple[int, int, int], dtype: torch.dtype, *, biased: bool) -> None:
    x, y = (drawn(*shape, seed=seed).to(dtype) for seed in (0, 1))
    alpha, bias = 1 + 0.5 * drawn(shape[1], seed=2), drawn(shape[1], seed=3)
    rest = bias if biased else None
    found = snake(x, alpha, rest)
    assert found.stride() == x.stride()
    same(found, snake.reference(x, alpha, rest), dtype)
    pairs = zip(add_snake(x, y, alpha, rest), add_snake.reference(x, y, alpha, rest), strict=True)
    for one, expected in pairs:
        same(one, expected, dtype)


@every_dtype
@pytest.mark.parametrize("terms", [1, 3, 6, 7])
def test_scaled_sum(terms: int, dtype: torch.dtype) -> None:
    shape = (2, 7, 501)
    given = [drawn(*shape, seed=seed).to(dtype) for seed in range(terms)]
    for bias in (None, drawn(7, seed=9)):
        found = scaled_sum(given, bias, scale=1 / 3, slope=0.1)
        same(found, scaled_sum.reference(given, bias, scale=1 / 3, slope=0.1), dtype)
        wide = scaled_sum(given, bias, dtype=torch.float32)
        same(wide, scaled_sum.reference(given, bias, dtype=torch.float32))


@pytest.mark.parametrize("harmonics", [1, 4, 6, 9])
@pytest.mark.parametrize("skip", [0, 300])
def test_harmonic_source(harmonics: int, skip: int) -> None:
    frames, per_frame = 5, 120
    f0 = drawn(2, frames) * 100 + 50
    assert 0 < int((f0 > 10).sum()) < f0.numel()
    phases = (drawn(2, frames, harmonics, seed=1).double() * 50).cumsum(1)
    seeds = torch.tensor([3, -(2**62)], device=DEVICE)
    first = torch.tensor([0, 2**32 - 200], device=DEVICE)
    weight, bias = drawn(harmonics, seed=2), drawn(1, seed=3) * 0.1
    how = Excitation(0.1, 0.003, 10.0, per_frame, 1, weight, bias)
    expected = harmonic_source.reference(f0, phases, seeds, first, how, skip)
    assert expected.shape == (2, frames * per_frame - skip)
    same(harmonic_source(f0, phases, seeds, first, how, skip), expected)


@pytest.mark.parametrize(("n_fft", "hop"), [(16, 4), (8, 4), (16, 2)])
def test_inverse_stft(n_fft: int, hop: int) -> None:
    window = torch.hann_window(n_fft, device=DEVICE)
    basis = inverse_basis(n_fft, window)
    x = drawn(2, n_fft + 2, 41)
    x[:, 2] += 3  # some magnitudes are cut, some samples reach the limit
    expected = inverse_stft.reference(x, basis, window, hop, 10.0, 1.0)
    assert float(expected.abs().max()) == 1.0
    found = inverse_stft(x, basis, window, hop, 10.0, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_reply_through_the_kernels_is_the_streams(dtype: str) -> None:
    stream = HiftStream(make_vocoder(), 5)
    vocoder = make_vocoder()
    if DEVICE.type == "cuda":
        vocoder = type(vocoder)(vocoder.config)
        vocoder.load_state_dict(make_vocoder().state_dict())
    hift = BatchedHift(vocoder.to(DEVICE), HiftOptions(dtype, graphs=False, replies=2))
    reply = hift.open(5)
    for call in range(2):
        mel = make_mel(10, call)
        expected, found = stream.push(mel), hift.push([(reply, mel, False)])[0].cpu()
        if dtype == "float32":
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert float((found - expected).norm() / expected.norm()) < 0.05
