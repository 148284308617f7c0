"""Every tensor of a checkpoint is read once; what is wrong is named."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Checkpoint
from safetensors.torch import load_file, save_file

from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.codec_folder import load_codec
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.weights import StoredTensor, fold_weight_norm, open_pickled
from mosstalk.synthesis.sizes import PUBLISHED_MODEL

CPU = torch.device("cpu")


def changed(tiny: Checkpoint, tmp_path: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the model with tensors replaced, or removed where None."""
    folder = tiny.copy(tmp_path).model
    path = folder / "model.safetensors"
    values = load_file(path) | tensors
    save_file({name: value for name, value in values.items() if value is not None}, path)
    return folder


def shard(folder: Path) -> dict[str, str]:
    """Split a model in two files with an index; return the weight map."""
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_the_published_layout_has_6_and_11_per_layer_tensors() -> None:
    with torch.device("meta"):
        state = LanguageModel(LanguageModelConfig.from_dict(PUBLISHED_MODEL)).state_dict()
    assert len(state) == 6 + 11 * 40 == 446
    assert sum(value.numel() for value in state.values()) == pytest.approx(9.1e9, rel=0.01)


def test_shards_give_the_same_model_as_one_file(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = tiny.copy(tmp_path).model
    shard(folder)
    whole = load_language_model(tiny.model, device=CPU).state_dict()
    sharded = load_language_model(folder, device=CPU).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(value, sharded[name]) for name, value in whole.items())


def test_the_stored_dtype_is_kept_unless_another_is_asked_for(tiny: Checkpoint) -> None:
    assert load_language_model(tiny.model, device=CPU).dtype is torch.bfloat16
    wide = load_language_model(tiny.model, device=CPU, dtype=torch.float32)
    assert {value.dtype for value in wide.state_dict().values()} == {torch.float32}


def test_a_missing_tensor_is_named(tiny: Checkpoint, tmp_path: Path) -> None:
    name = "model.shared_block.layers.2.self_attn.q_norm.weight"
    with pytest.raises(CheckpointError, match=re.escape(f"1 tensor missing: {name}")):
        load_language_model(changed(tiny, tmp_path, **{name: None}), device=CPU)


def test_an_unexpected_tensor_is_named(tiny: Checkpoint, tmp_path: Path) -> None:
    name = "model.shared_block.layers.0.self_attn.q_proj.bias"
    folder = changed(tiny, tmp_path, **{name: torch.zeros(128)})
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        load_language_model(folder, device=CPU)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = changed(tiny, tmp_path, **{"model.text_norm.weight": torch.ones(7)})
    with pytest.raises(CheckpointError, match=r"text_norm.weight is \[7\], must be \[128\]"):
        load_language_model(folder, device=CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(
    tiny: Checkpoint, tmp_path: Path, value: float
) -> None:
    weight = torch.ones(128)
    weight[5] = value
    folder = changed(tiny, tmp_path, **{"model.audio_norm.weight": weight})
    with pytest.raises(CheckpointError, match=r"audio_norm\.weight holds NaN or infinity"):
        load_language_model(folder, device=CPU)


def test_overflow_in_float16_is_named(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = changed(tiny, tmp_path, **{"model.text_norm.weight": torch.full((128,), 1e6)})
    with pytest.raises(CheckpointError, match=r"text_norm.weight overflows .*bfloat16"):
        load_language_model(folder, device=CPU, dtype=torch.float16)


def test_a_lost_shard_is_named(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = tiny.copy(tmp_path).model
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: no such file"):
        load_language_model(folder, device=CPU)


def test_an_index_that_disagrees_with_its_shards_is_refused(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny.copy(tmp_path).model
    weight_map = shard(folder)
    first = next(iter(weight_map))
    weight_map[first] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=first):
        load_language_model(folder, device=CPU)


def test_a_file_cut_anywhere_is_refused(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = tiny.copy(tmp_path).model
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for share in (0, 0.001, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match="truncated"):
            load_language_model(folder, device=CPU)


def test_codec_parts_are_read_from_safetensors_where_they_were_converted(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny.copy(tmp_path).codec
    before = load_codec(folder, device=CPU)
    for stem in ("flow-chunk-5", "hift"):
        state = torch.load(folder / "flow" / f"{stem}.pt", weights_only=True)
        tensors = {
            name: v.contiguous() for name, v in state.items() if name not in ("epoch", "step")
        }
        save_file(tensors, folder / "flow" / f"{stem}.safetensors")
        (folder / "flow" / f"{stem}.pt").unlink()
    after = load_codec(folder, device=CPU)
    for part in ("flow", "vocoder"):
        old, new = getattr(before, part).state_dict(), getattr(after, part).state_dict()
        assert all(torch.equal(value, new[name]) for name, value in old.items())


def test_training_counters_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "part.pt"
    torch.save({"a": torch.ones(2), "epoch": 3, "step": torch.tensor(7)}, path)
    assert set(open_pickled(path)) == {"a"}
    torch.save({"a": torch.ones(2), "iteration": 3}, path)
    with pytest.raises(CheckpointError, match="iteration"):
        open_pickled(path)


def test_half_a_weight_norm_pair_is_left_to_be_reported() -> None:
    stored = StoredTensor((2, 1, 1), "x", lambda: torch.ones(2, 1, 1))
    assert "conv.weight_g" in fold_weight_norm({"conv.weight_g": stored})


def test_a_part_of_a_tensor_reads_no_other_rows() -> None:
    read: list[tuple[int, int]] = []

    def load_rows(start: int, end: int) -> torch.Tensor:
        read.append((start, end))
        return torch.arange(16.0).view(8, 2)[start:end]

    def load() -> torch.Tensor:
        raise AssertionError("the whole tensor is read")

    part = StoredTensor((8, 2), "x", load, load_rows=load_rows).part(2, (4, 2))

    assert part.load().tolist() == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert part.rows(1, 3).tolist() == [[6, 7], [8, 9]]
    assert read == [(2, 6), (3, 5)]
