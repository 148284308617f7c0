"""Looking into checkpoints: what is there, and what is wrong with it, by name."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from conftest import Checkpoint, Run, refused
from safetensors.torch import load_file, save_file

from mosstalk.checkpoints.inspect import inspect
from mosstalk.config import LanguageModelConfig
from mosstalk.errors import ConfigError
from mosstalk.models.language_model import fused_tensors
from mosstalk.synthesis.sizes import PUBLISHED_MODEL


def test_both_halves_are_told_with_layers_parameters_and_hashes(
    mosstalk: Run, tiny: Checkpoint
) -> None:
    run = mosstalk("checkpoint", "inspect", tiny.model.parent)
    assert run.returncode == 0, run.stdout
    assert "4 shared + 2 text + 2 audio = 8 KV layers" in run.stdout
    total = sum(value.numel() for value in load_file(tiny.model / "model.safetensors").values())
    assert f"{total:,} parameters" in run.stdout
    for path in (tiny.model / "model.safetensors", tiny.codec / "flow" / "hift.pt"):
        assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in run.stdout
    assert run.stdout.count("  sound") == 2


def test_json_holds_the_same_for_scripts(mosstalk: Run, tiny: Checkpoint) -> None:
    run = mosstalk("checkpoint", "inspect", tiny.model, "--json", "--no-hashes")
    (report,) = json.loads(run.stdout)
    assert report["groups"]["shared block"]["tensors"] == 44
    assert report["groups"]["final norms"]["dtypes"] == ["bfloat16"]
    assert report["problems"] == []
    assert "sha256" not in report["files"]["model.safetensors"]


def test_every_wrong_tensor_is_named(mosstalk: Run, tiny: Checkpoint, tmp_path: Path) -> None:
    model = tiny.copy(tmp_path).model
    tensors = load_file(model / "model.safetensors")
    del tensors["model.text_block.layers.1.self_attn.k_norm.weight"]
    tensors["model.text_norm.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(2, 2)
    save_file(tensors, model / "model.safetensors")
    run = mosstalk("checkpoint", "inspect", model)
    assert run.returncode == 1
    for line in (
        "missing: model.text_block.layers.1.self_attn.k_norm.weight [32]",
        "misshapen: model.text_norm.weight is [3], must be [128]",
        "unexpected: lm_head.weight [2, 2]",
        "3 problems",
    ):
        assert line in run.stdout


def test_a_lost_codec_part_is_a_problem(tiny: Checkpoint, tmp_path: Path) -> None:
    codec = tiny.copy(tmp_path).codec
    (codec / "flow" / "hift.pt").unlink()
    (report,) = inspect(codec, hashes=False)
    assert [p for p in report.problems if "hift.pt: no such file" in p]


@pytest.mark.parametrize(
    ("flows", "message"),
    [
        (5, "mosstalk_flows must be list, found 5"),
        ("flow", "mosstalk_flows must be list, found 'flow'"),
        ([3], "unknown flow '3'"),
    ],
)
def test_flows_that_are_no_list_of_known_names_are_refused(
    tiny: Checkpoint, tmp_path: Path, flows: object, message: str
) -> None:
    codec = tiny.copy(tmp_path).codec
    path = codec / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mosstalk_flows": flows}))
    with pytest.raises(ConfigError, match=message):
        inspect(codec, hashes=False)


def write_reports_checkpoint(folder: Path, *, norms: bool) -> None:
    """A rank0.safetensors with the names of the source reports, small."""
    tensors = {}
    for layer in range(40):
        stem = f"transformer.layers.{layer}."
        for name in (
            "attention.qkv.weight",
            "attention.qkv.bias",
            "attention.dense.weight",
            "mlp.fc.weight",
            "mlp.gate.weight",
            "mlp.proj.weight",
            "input_layernorm.weight",
            "post_layernorm.weight",
            *(("attention.q_layernorm.weight", "attention.k_layernorm.weight") if norms else ()),
        ):
            tensors[stem + name] = torch.zeros(2)
    save_file(tensors, folder / "rank0.safetensors")


def test_the_reports_checkpoint_is_known_and_its_lost_norms_are_counted(
    mosstalk: Run, tmp_path: Path
) -> None:
    write_reports_checkpoint(tmp_path, norms=False)
    run = mosstalk("checkpoint", "inspect", tmp_path)
    assert run.returncode == 1
    assert "80 q/k norms are missing" in run.stdout
    assert "mosstalk checkpoint convert" in run.stdout
    assert "invented zero QKV biases 40" in " ".join(run.stdout.split())


def test_a_reports_checkpoint_with_its_norms_has_none_missing(tmp_path: Path) -> None:
    write_reports_checkpoint(tmp_path, norms=True)
    (report,) = inspect(tmp_path, hashes=False)
    assert report.problems == []


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_that_is_no_checkpoint_is_refused(
    mosstalk: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    line = refused(mosstalk("checkpoint", "inspect", name))
    assert name in line


def test_the_fused_layout_uses_every_published_tensor_once() -> None:
    config = LanguageModelConfig.from_dict(PUBLISHED_MODEL)
    sources = [name for tensor in fused_tensors(config) for name in tensor.sources]
    assert len(sources) == len(set(sources)) == 446
