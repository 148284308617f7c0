"""Numbers of 8 bits: how far they may lie off, what is kept, what is refused."""

import math

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mosstalk.checkpoints.calibrate import Magnitudes
from mosstalk.errors import DeviceError
from mosstalk.numerics.fp8 import (
    E4M3,
    E4M3_MAX,
    Fp8Linear,
    Fp8Weight,
    fp8_by,
    fp8_matmul,
    fp8_rows,
    require_fp8,
)
from mosstalk.reporting.html import line_chart

ROUNDED_TWICE = 1 + 2**-20
"""Dividing by a scale and multiplying by it round too, in float32."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@examples(200)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_number_of_a_row_is_off_by_more_than_a_sixteenth(
    row: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor([row]).to(dtype)
    q, scale = fp8_rows(x)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (E4M3, x.shape, torch.float32, (1,))
    wide = x.double()
    error = (q.double() * scale.double()[:, None] - wide).abs()
    bound = torch.maximum(wide.abs() * 2**-4, scale.double()[:, None] * 2**-10)
    assert bool((error <= bound * ROUNDED_TWICE).all())


def test_the_largest_of_a_row_becomes_448_and_rows_know_nothing_of_one_another() -> None:
    x = normal(5, 64) * torch.tensor([1e-4, 1.0, 30.0, 1e6, 0.5])[:, None]
    q, scale = fp8_rows(x)
    assert torch.equal(q.float().abs().amax(1), torch.full((5,), E4M3_MAX))
    for place in range(5):
        alone, alone_scale = fp8_rows(x[place])
        assert torch.equal(alone.float(), q[place].float())
        assert alone_scale == scale[place]


def test_zeros_stay_zeros_and_what_is_not_finite_stays_to_be_seen() -> None:
    rows = torch.zeros(4, 8)
    rows[1, 3], rows[2, 3], rows[3, 3] = math.nan, math.inf, 1e-44
    q, scale = fp8_rows(rows)
    found = q.float() * scale[:, None]
    assert torch.equal(found[0], torch.zeros(8))
    assert bool(found[1:3].isnan().any(dim=1).all())
    assert bool(found[3].isfinite().all())


def test_beyond_a_fixed_scale_numbers_are_clipped() -> None:
    found = fp8_by(torch.tensor([900.0, -1e9, 2.0, 0.25, math.inf]), torch.tensor(2.0)).float()
    assert found.tolist() == [E4M3_MAX, -E4M3_MAX, 1.0, 0.125, E4M3_MAX]
    assert bool(fp8_by(torch.tensor([math.nan]), torch.tensor(2.0)).float().isnan())


def test_a_product_is_that_of_the_numbers_that_8_bits_stand_for() -> None:
    weight = Fp8Weight.of(normal(24, 96))
    q, scale = fp8_rows(normal(3, 5, 96, seed=1))
    found = fp8_matmul(q, scale, weight)
    exact = (q.double() * scale.double()[..., None]) @ weight.dequantized().double().T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_8_bits_is_within_a_twentieth_of_the_exact_one(
    calibrated: bool, dtype: torch.dtype
) -> None:
    weight, x = normal(256, 512), normal(7, 512, seed=1).to(dtype)
    scale = x.float().abs().max() / E4M3_MAX if calibrated else None
    found = Fp8Linear.holding(Fp8Weight.of(weight), scale)(x)
    exact = x.double() @ weight.double().T
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 0.05


def test_a_change_of_dtype_leaves_products_in_8_bits_as_they_are() -> None:
    product = Fp8Linear.holding(Fp8Weight.of(normal(8, 16)), torch.tensor(0.01))
    model = nn.Sequential(product, nn.Linear(8, 2))
    before = {name: value.clone() for name, value in product.state_dict().items()}
    for changed in (model.to(torch.bfloat16), model.double(), model.float()):
        after = changed[0].state_dict()
        assert all(value.dtype == before[name].dtype for name, value in after.items())
        assert all(
            torch.equal(value.float(), before[name].float()) for name, value in after.items()
        )
    assert model[1].weight.dtype == torch.float32
    assert not any(value.requires_grad for value in product.parameters())
    assert model.to("meta")[0].weight.dtype == E4M3


def test_cards_without_fp8_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(DeviceError, match=r"NVIDIA A100 has compute capability 8\.0 .* needs 8\.9"):
        require_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    require_fp8(torch.device("cuda"))


def test_fixed_scales_are_of_the_largest_or_of_all_but_one_in_ten_thousand() -> None:
    magnitudes = Magnitudes()
    sizes = torch.linspace(0, 1, 100_001)
    magnitudes.add(-sizes[:50_000])
    magnitudes.add(sizes[50_000:].reshape(-1, 1))
    magnitudes.add(torch.tensor([100.0]))
    assert float(magnitudes.scale("largest")) == pytest.approx(100 / E4M3_MAX)
    # A 64th of an octave is as near as it is counted.
    assert float(magnitudes.scale("p99.99")) == pytest.approx(1 / E4M3_MAX, rel=1 / 64)
    zeros = Magnitudes()
    zeros.add(torch.zeros(5))
    assert 0 < float(zeros.scale("largest")) < 1e-30


def test_a_chart_has_a_line_for_each_name_and_nothing_that_runs() -> None:
    chart = line_chart("Errors <%>", ["a", "b", "c"], {"q & k": [1.0, 2.0, 4.0], "v": [0, 0, 0]})
    assert chart.count("<polyline") == 2
    assert "Errors &lt;%&gt;" in chart
    assert "q &amp; k" in chart
    assert "<script" not in chart
    # 0 lies on the lowest line of the grid, the largest value on the highest.
    lowest, highest = chart.index('y1="190.0"'), chart.index('y1="10.0"')
    assert lowest < highest
    assert ",10.0" in chart
    assert chart.count(",190.0") == 3


@pytest.mark.gpu
def test_a_gpu_rounds_and_multiplies_as_a_processor_does() -> None:
    weight, x = normal(64, 256), normal(9, 256, seed=1)
    here, there = (Fp8Linear.holding(Fp8Weight.of(weight.to(d))) for d in ("cpu", "cuda"))
    assert torch.equal(here.weight.float(), there.weight.float().cpu())
    assert torch.equal(here.weight_scale, there.weight_scale.cpu())
    (q, scale), (q_there, scale_there) = fp8_rows(x), fp8_rows(x.cuda())
    assert torch.equal(q.float(), q_there.float().cpu())
    assert torch.equal(scale, scale_there.cpu())
    torch.testing.assert_close(here(x), there(x.cuda()).cpu(), rtol=1e-5, atol=1e-4)
