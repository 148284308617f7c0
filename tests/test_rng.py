"""Counter-based random numbers: published vectors, independence of order, distributions."""

import math

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.numerics.rng import gumbel, normal, philox, uniform

# Known answers of Philox4x32-10 from the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_meets_its_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    words = philox((a, b, c, d), key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == output


def test_uniform_never_reaches_zero_or_one() -> None:
    ends = uniform(torch.tensor([0, 0xFFFFFFFF]))
    assert 0 < float(ends[0]) < float(ends[1]) < 1


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(1, 10_000), cut=st.integers(1, 99))
@examples(30)
def test_a_draw_depends_on_its_own_coordinates_alone(seed: int, step: int, cut: int) -> None:
    ids = torch.arange(100)
    whole = gumbel(seed, 1, step, ids)
    parts = torch.cat([gumbel(seed, 1, step, ids[:cut]), gumbel(seed, 1, step, ids[cut:])])
    assert torch.equal(whole, parts)


def test_channels_steps_and_seeds_draw_differently() -> None:
    ids = torch.arange(1000)
    base = gumbel(1, 0, 1, ids)
    for other in (gumbel(2, 0, 1, ids), gumbel(1, 1, 1, ids), gumbel(1, 0, 2, ids)):
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.1


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    noise = gumbel(7, 0, 1, torch.arange(200_000))
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@given(start=st.integers(0, 2**40), cut=st.integers(1, 63), columns=st.integers(1, 9))
@examples(30)
def test_noise_cut_anywhere_is_the_same_noise(start: int, cut: int, columns: int) -> None:
    positions = torch.arange(start, start + 64)
    whole = normal(5, 1, positions, columns)
    parts = [normal(5, 1, part, columns) for part in (positions[:cut], positions[cut:])]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.shape == (64, columns)


def test_normal_noise_is_standard_and_uncorrelated_between_columns() -> None:
    noise = normal(3, 1, torch.arange(50_000), 9)
    assert float(noise.mean()) == pytest.approx(0, abs=0.005)
    assert float(noise.std()) == pytest.approx(1, abs=0.005)
    correlation = torch.corrcoef(noise.T) - torch.eye(9)
    assert float(correlation.abs().max()) < 0.02
