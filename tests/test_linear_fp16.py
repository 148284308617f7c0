"""Matmuls with weights in float16 on a CPU: what they compute, and when they do."""

import pytest
import torch
from torch import Tensor

from mosstalk.offline.pipeline import Pipeline
from mosstalk.ops.launch import keep_fp16, linear, linear_fp16

INPUTS, OUTPUTS = 96, 224


@pytest.fixture(autouse=True)
def _fbgemm() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no FBGEMM")


def layer(*, exact: bool = True) -> tuple[Tensor, Tensor]:
    """Weights, numbers of float16 if ``exact``, and a bias."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw) / 8
    return (weight.half().float() if exact else weight), torch.randn(OUTPUTS, generator=draw)


@pytest.mark.parametrize("shape", [(1,), (3,), (40,), (2, 5)])
def test_rows_are_multiplied_in_float32(shape: tuple[int, ...]) -> None:
    weight, bias = layer()
    assert keep_fp16(weight, bias)
    x = torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1))
    y = linear_fp16(x, weight, bias)
    assert y is not None
    wanted = x.double() @ weight.double().T + bias.double()
    # Rows rounded to float16 would be wrong by 1e-3.
    assert float((y - wanted).abs().max()) < 1e-5
    assert y.dtype == torch.float32


def test_only_what_float16_holds_exactly_is_kept() -> None:
    assert not keep_fp16(layer(exact=False)[0])
    assert not keep_fp16(layer()[0][:2]), "a small matrix"
    assert not keep_fp16(layer()[0].double())
    large = layer()[0]
    large[0, 0] = 70_000.0
    assert not keep_fp16(large)


def test_a_matrix_is_known_as_it_was_kept() -> None:
    weight, bias = layer()
    keep_fp16(weight, bias)
    x = torch.ones(1, INPUTS)
    assert linear_fp16(x, weight) is None, "it was kept with its bias"
    assert linear_fp16(x, weight.clone(), bias) is None
    assert linear_fp16(x.double(), weight, bias) is None
    assert linear_fp16(x.requires_grad_(), weight, bias) is None
    with torch.no_grad():
        assert linear_fp16(x, weight, bias) is not None
    weight[0] += 1
    assert linear_fp16(x, weight, bias) is None, "it was changed"


def test_items_that_lie_apart_are_each_what_they_are_alone() -> None:
    weight, bias = layer()
    assert keep_fp16(weight, bias)
    x = torch.randn(3, 2, INPUTS, generator=torch.Generator().manual_seed(2))
    together = linear(x, weight, bias)
    for item, alone in zip(x, together, strict=True):
        assert torch.equal(linear(item, weight, bias), alone)


def test_the_shipped_model_answers_the_same_with_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reply() -> tuple[str, list[int], bool]:
        pipeline = Pipeline.load(device="cpu")
        chat = pipeline.chat()
        chat.read("What is the capital of France?")
        answer = chat.answer()
        samples = sum(map(len, answer))
        return answer.text, answer.codes, samples > 0

    with_it = reply()
    for user in ("engine.linears", "engine.layers", "codec.flow_weights"):
        monkeypatch.setattr(f"mosstalk.{user}.keep_fp16", lambda *_: False)
    assert reply() == with_it
    assert with_it[0] == "The capital of France is Paris."
