"""Weights that are stored small: in 8 bits, or packed by xz."""

import lzma
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mosstalk.errors import CheckpointError
from mosstalk.models.weights import from_int8, open_pickled, open_safetensors, to_int8


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(6, 10, generator=draw) * torch.logspace(-6, 2, 6)[:, None],
        "conv.weight": torch.randn(4, 3, 5, generator=draw),
        "silent.weight": torch.zeros(2, 3),
        "layer.bias": torch.randn(6, generator=draw),
    }


def test_a_file_in_8_bits_reads_as_float16_under_the_old_names(tmp_path: Path) -> None:
    kept = weights()
    save_file(to_int8(kept), tmp_path / "model.safetensors")
    torch.save(to_int8(kept), tmp_path / "model.pt")
    for store in (
        open_safetensors(tmp_path / "model.safetensors"),
        open_pickled(tmp_path / "model.pt"),
    ):
        assert store.keys() == kept.keys()
        for name, value in kept.items():
            stored = store[name]
            assert stored.shape == tuple(value.shape)
            found = stored.load()
            assert torch.equal(stored.rows(1, 2), found[1:2])
            if value.ndim == 1:
                assert torch.equal(found, value)
                continue
            assert stored.dtype == "float16"
            assert found.dtype == torch.float16
            largest = value.abs().amax(tuple(range(1, value.ndim)), keepdim=True)
            # Half a step of 127, and the rounding of float16 itself.
            assert bool(((found.float() - value).abs() <= largest * 0.0046 + 1e-7).all())
            torch.testing.assert_close(
                found.float(), from_int8(to_int8(kept))[name], rtol=1e-3, atol=1e-7
            )


def test_a_name_that_only_looks_like_a_scale_is_a_tensor(tmp_path: Path) -> None:
    save_file({"odd|scale": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_safetensors(tmp_path / "model.safetensors").keys() == {"odd|scale"}


def test_a_packed_file_is_read_where_there_is_no_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "model.safetensors", tmp_path / "model.safetensors.xz"
    save_file({"a": torch.arange(6.0).reshape(3, 2)} | to_int8(weights()), plain)
    wanted = open_safetensors(plain)
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    found = open_safetensors(plain)
    assert found.keys() == wanted.keys() == weights().keys() | {"a"}
    assert {stored.where for stored in found.values()} == {str(packed)}
    for name, stored in wanted.items():
        assert found[name].dtype == stored.dtype
        assert torch.equal(found[name].load(), stored.load())
        assert torch.equal(found[name].rows(1, 2), stored.rows(1, 2))

    save_file({"b": torch.ones(2)}, plain)
    assert open_safetensors(plain).keys() == {"b"}

    plain.unlink()
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"safetensors.xz: damaged or truncated"):
        open_safetensors(plain)


def test_a_python_without_xz_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors.xz").write_bytes(lzma.compress(b""))
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(CheckpointError, match=r"unpack it yourself, xz -dk .*model.safetensors.xz"):
        open_safetensors(tmp_path / "model.safetensors")
