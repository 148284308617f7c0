"""Quantised checkpoints: what is written, that it loads as what was meant, what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDENS, Checkpoint
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mosstalk.checkpoints.convert import convert
from mosstalk.checkpoints.inspect import inspect
from mosstalk.checkpoints.quantize import Source, Writer
from mosstalk.cli import app
from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError, ConfigError, MosstalkError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, quantize_in_place
from mosstalk.numerics.fp8 import E4M3, Fp8Linear
from mosstalk.verify.compare import read_case

CPU = torch.device("cpu")
GOLDEN_BOUND = 0.15
"""Relative norm of the error over a golden prompt, activations by row; found: see the page."""
PRODUCT = "model.shared_block.layers.1.mlp.down_proj"
FUSED = "model.shared_block.layers.1.self_attn.qkv_proj"
ROWS = torch.tensor([[[7, 512], [260, 3], [260, 9], [65, 512], [66, 512]]])


def command(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def write(source: Path, out: Path, record: Quantization, shard_gib: float = 2.0) -> Path:
    out.mkdir()
    opened = Source.open(source)
    scales = {name: torch.tensor(0.02) for name in record.linears(opened.config)}
    Writer(opened, record, opened.hashes(), scales, shard_gib=shard_gib).write(out)
    return out


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([part[0].flatten() for part in model(ROWS, model.new_cache())])


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture(scope="module")
def quantised(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, its shared block in FP8."""
    return write(tiny.model, tmp_path_factory.mktemp("fp8") / "model", Quantization())


@pytest.fixture
def damaged(quantised: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy whose tensors or config were changed."""

    def make(
        tensors: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: object
    ) -> Path:
        for path in quantised.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        values = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(values | config))
        if tensors:
            held = load_file(tmp_path / "model.safetensors")
            tensors(held)
            save_file(held, tmp_path / "model.safetensors")
        return tmp_path

    return make


def test_the_shared_blocks_products_become_8_bits_and_all_else_stays(
    tiny: Checkpoint, quantised: Path
) -> None:
    before = load_file(tiny.model / "model.safetensors")
    after = load_file(quantised / "model.safetensors")
    scaled = {name for name in after if name.endswith("_scale")}
    assert len(scaled) == 7 * 4
    assert set(after) - scaled == set(before)
    for name, value in before.items():
        scale = f"{name.removesuffix('weight')}weight_scale"
        if scale in scaled:
            assert "shared_block" in name
            assert after[name].dtype == E4M3
            assert after[scale].dtype == torch.float32
            assert after[scale].shape == value.shape[:1]
            again = after[name].float() * after[scale][:, None]
            assert apart(again, value) < 0.04
        else:
            assert torch.equal(value, after[name])


def test_what_lay_beside_the_weights_is_copied_and_the_config_says_what_was_done(
    tiny: Checkpoint, quantised: Path
) -> None:
    for path in tiny.model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (quantised / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (tiny.model, quantised))
    record = after.pop("quantization")
    assert after == before
    assert {**record, "source_sha256": ""} == Quantization().as_dict()
    manifest = json.loads((quantised / "mosstalk.json").read_text())
    assert set(manifest["sources"]) == {path.name for path in tiny.model.iterdir()}


@pytest.mark.parametrize("blocks", ["shared", "all"])
@pytest.mark.parametrize("activations", ["row", "calibrated"])
@pytest.mark.parametrize("layout", ["published", "converted"])
def test_a_written_model_loads_as_the_one_quantised_in_memory(
    tiny: Checkpoint, tmp_path: Path, blocks: str, activations: str, layout: str
) -> None:
    source = tiny.model
    if layout == "converted":
        source = tmp_path / "converted"
        convert(tiny.model, source, torch.bfloat16)
    kept = {"prompts": 1, "statistic": "largest"} if activations == "calibrated" else {}
    record = Quantization(blocks, activations, "0" * 64, kept)
    loaded = load_language_model(
        write(source, tmp_path / "out", record, shard_gib=0.0005), device=CPU, dtype=torch.float32
    )
    meant = load_language_model(tiny.model, device=CPU, dtype=torch.float32)
    scales = {name: torch.tensor(0.02) for name in record.linears(meant.config)}
    quantize_in_place(meant, record, scales)
    found, wanted = loaded.state_dict(), meant.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float()), name
    assert torch.equal(logits(loaded), logits(meant))
    assert sum(isinstance(each, Fp8Linear) for each in loaded.modules()) == (
        7 * 4 if blocks == "shared" else 7 * 8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_the_model_keeps_its_own_dtype_beside_8_bits(
    tiny: Checkpoint, quantised: Path, dtype: torch.dtype | None
) -> None:
    model = load_language_model(quantised, device=CPU, dtype=dtype)
    plain = load_language_model(tiny.model, device=CPU, dtype=dtype)
    assert model.dtype == plain.dtype == (dtype or torch.bfloat16)
    found, exact = logits(model), logits(plain)
    assert found.dtype == exact.dtype
    assert apart(found, exact) < 0.1


@pytest.mark.parametrize("name", ["lm-square", "lm-wide-heads"])
def test_golden_prompts_are_met_within_the_bound_of_8_bits(name: str) -> None:
    case = read_case(GOLDENS / name)
    expected = case.expected
    model = load_language_model(case.weights, device=CPU, dtype=torch.float32)
    quantize_in_place(model, Quantization())
    for prompt in {run["prompt"] for run in case.get("runs")}:
        wanted = {k: expected.get(f"{prompt}.prefill_{k}_logits") for k in ("text", "audio")}
        with torch.inference_mode():
            found = model(expected[f"{prompt}.prompt"][None], model.new_cache())
        for head, exact in wanted.items():
            if exact is not None:
                assert 1e-4 < apart(getattr(found, head)[0], exact) < GOLDEN_BOUND


def test_a_spoiled_scale_is_seen(damaged: Callable[..., Path], quantised: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PRODUCT}.weight_scale"][0] *= 512

    exact, found = (
        logits(load_language_model(folder, device=CPU, dtype=torch.float32))
        for folder in (quantised, damaged(spoil))
    )
    assert apart(found, exact) > GOLDEN_BOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{PRODUCT}.weight_scale"), rf"missing: {PRODUCT}\.weight_scale"),
        (lambda t: t[f"{PRODUCT}.weight_scale"][2].zero_(), r"weight_scale must be above 0"),
        (lambda t: t[f"{PRODUCT}.weight_scale"][2].neg_(), r"weight_scale must be above 0"),
        (lambda t: t[f"{PRODUCT}.weight_scale"][2].fill_(float("nan")), r"weight_scale holds NaN"),
        (lambda t: t[f"{PRODUCT}.weight"].view(torch.uint8)[3, 4].fill_(0xFF), r"weight holds NaN"),
        (
            lambda t: t.update({f"{PRODUCT}.weight": t[f"{PRODUCT}.weight"].bfloat16()}),
            r"down_proj\.weight is bfloat16, must be float8_e4m3fn",
        ),
        (
            lambda t: t.update({f"{PRODUCT}.input_scale": torch.tensor(1.0)}),
            r"unexpected: .*input_scale",
        ),
    ],
)
def test_damaged_weights_and_scales_are_named(
    damaged: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_language_model(damaged(change), device=CPU)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"scheme": "int4"}, r"unknown scheme 'int4'.*checkpoint quantize"),
        ({"blocks": "text"}, r"unknown blocks 'text'"),
        ({"activations": "token"}, r"unknown activations 'token'"),
        ({"version": 2}, r"version 2 is of another mosstalk"),
        ({"activations": "calibrated"}, r"'calibration' is missing"),
        (
            {"activations": "calibrated", "calibration": {}},
            r"calibration: key 'prompts' is missing",
        ),
        ({"group_size": 128}, r"unknown key 'group_size'"),
    ],
)
def test_a_record_that_is_not_known_is_refused(
    damaged: Callable[..., Path], record: dict[str, object], message: str
) -> None:
    changed = Quantization(source_sha256="0").as_dict() | record
    with pytest.raises(ConfigError, match=message):
        load_language_model(damaged(quantization=changed), device=CPU)


def test_8_bits_without_a_record_or_of_another_program_are_refused(
    damaged: Callable[..., Path],
) -> None:
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn, and config\.json does not say"):
        load_language_model(damaged(quantization=None), device=CPU)
    with pytest.raises(ConfigError, match="another program quantised"):
        load_language_model(damaged(quantization_config={"quant_method": "fp8"}), device=CPU)


def test_what_is_quantised_is_neither_quantised_nor_converted_again(
    quantised: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is quantised already"):
        Source.open(quantised)
    with pytest.raises(CheckpointError, match="is quantised; convert the checkpoint"):
        convert(quantised, tmp_path / "out", torch.bfloat16)


def test_inspect_says_the_scheme_and_the_dtypes_of_every_block(
    quantised: Path, damaged: Callable[..., Path]
) -> None:
    (report,) = inspect(quantised, hashes=False)
    assert report.facts["quantization"] == "fp8 (E4M3), shared block, activations by row"
    assert report.groups["shared block"].dtypes == {"float8_e4m3fn", "float32", "bfloat16"}
    assert report.groups["text block"].dtypes == {"bfloat16"}
    assert report.problems == []
    (bad,) = inspect(damaged(lambda t: t.pop(f"{PRODUCT}.weight_scale")), hashes=False)
    assert bad.problems == [f"missing: {PRODUCT}.weight_scale [128]"]


def test_fused_matrices_keep_their_names_and_one_scale_for_their_input(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    convert(tiny.model, tmp_path / "converted", torch.bfloat16)
    record = Quantization("shared", "calibrated", "0", {"prompts": 1, "statistic": "largest"})
    out = write(tmp_path / "converted", tmp_path / "out", record)
    tensors = load_file(out / "model.safetensors")
    assert tensors[f"{FUSED}.weight"].dtype == E4M3
    assert tensors[f"{FUSED}.weight_scale"].shape == tensors[f"{FUSED}.weight"].shape[:1]
    assert tensors[f"{FUSED}.input_scale"].shape == ()
    (report,) = inspect(out, hashes=False)
    assert report.problems == []


def test_a_weight_that_is_not_finite_leaves_nothing_behind(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    source = tiny.copy(tmp_path).model
    tensors = load_file(source / "model.safetensors")
    tensors[f"{PRODUCT}.weight"][0, 0] = float("inf")
    save_file(tensors, source / "model.safetensors")
    run = command("checkpoint", "quantize", source, tmp_path / "out")
    assert run.exit_code == 2
    assert "down_proj.weight holds NaN or infinity" in run.output
    assert {path.name for path in tmp_path.iterdir()} == {"model", "codec"}


def test_every_refusal_is_one_of_the_houses_errors(quantised: Path) -> None:
    config = LanguageModelConfig.from_folder(quantised)
    assert Quantization.of(config) == Quantization(
        source_sha256=config.extra["quantization"]["source_sha256"]
    )
    broken = replace(config, extra={"quantization": "fp8"})
    with pytest.raises(MosstalkError, match="must be an object"):
        Quantization.of(broken)
