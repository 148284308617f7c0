"""``mosstalk bench step``, of steps and prompts: figures of valid runs, beside their limits."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Run, refused
from engine_rig import wild_model

from mosstalk.bench.step_baselines import PlainStep
from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Mode
from mosstalk.models.quantization import Quantization
from mosstalk.plan.limits import Load, layer_weights, step_work
from mosstalk.synthesis.sizes import FULL

TINY = ("--random-weights", "tiny")


def test_steps_are_timed_beside_their_limit(mosstalk: Run, tmp_path: Path) -> None:
    page = tmp_path / "steps.html"
    asked = ("--at", "1x20,3x9", "--steps", "5", "--errors", "24", "--json", "-", "--html", page)
    run = mosstalk("bench", "step", *TINY, *asked)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["format"] == "mosstalk-step-1"
    assert document["weights"] == "synthetic"
    assert {"device", "torch", "commit", "precision", "rates"} <= document["settings"].keys()
    names = [row["name"] for row in document["timed"]]
    assert names == ["1 x 1 row after 20", "3 x 1 row after 9"]
    for row in document["timed"]:
        assert row["valid"] == row["n"] == 5
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["max_ms"]
        assert row["limit_ms"] > 0
    errors = {(row["head"], row["by"]): row for row in document["errors"]}
    assert len(errors) == 4
    assert max(float(row["rms"]) for row in errors.values()) < 1e-5
    for place in (run.stderr, page.read_text()):
        assert "real-time factor" in place


# Slow: one more measurement in small; that of steps, above, is made by the same command.
@pytest.mark.slow
def test_prompts_are_timed_to_their_first_row(mosstalk: Run) -> None:
    asked = ("--rows", "30,3+25", "--runs", "2", "--mode", "text", "--json", "-")
    run = mosstalk("bench", "step", "--prefill", *TINY, *asked)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["timed"]
    assert [row["name"] for row in rows] == ["30 rows", "3 rows after 25"]
    assert all(row["valid"] == row["n"] == 2 for row in rows)


# Slow: one more measurement in small; that of steps, above, is made by the same command.
@pytest.mark.slow
def test_in_fp8_its_error_stands_beside_the_plain_ones(mosstalk: Run, tmp_path: Path) -> None:
    asked = ("--precision", "fp8", "--at", "1x20", "--steps", "3", "--errors", "24")
    run = mosstalk("bench", "step", *TINY, *asked, "--json", tmp_path / "fp8.json")
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "fp8.json").read_text())
    assert document["settings"]["precision"] == "float32, shared block in fp8"
    errors = {(row["head"], row["by"]): float(row["rms"]) for row in document["errors"]}
    for head in ("text", "audio"):
        assert errors[head, "plain torch, float32"] == 0
        in_fp8 = [errors[head, f"{by}, float32, shared block in fp8"]
                  for by in ("plain torch", "the engine")]  # fmt: skip
        assert 0.01 < in_fp8[0] < 0.2
        assert in_fp8[1] == pytest.approx(in_fp8[0], rel=0.05)


def test_what_is_in_fp8_cannot_be_measured_in_bf16(mosstalk: Run, tmp_path: Path) -> None:
    quantized = tmp_path / "fp8"
    run = mosstalk("checkpoint", "quantize", "synthetic", quantized, "--scheme", "fp8")
    assert run.returncode == 0, run.stderr
    run = mosstalk("bench", "step", "--model", quantized / "model", "--precision", "bf16")
    assert "is in fp8; name the folder before it" in refused(run)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("step", "--at", "512"), "--at 512: give something like 1x512,64x1000"),
        (("step", "--at", "0x5"), "--at 0x5: there must be at least one"),
        (("step", "--at", "1x0"), "--at 1x0: there must be at least one"),
        (("step", "--prefill", "--rows", "6+"), "--rows 6+: give something like 512,6"),
        (("step", "--precision", "fp16"), "--precision must be bf16 or fp8, not 'fp16'"),
        (("step", "--mode", "song"), "--mode must be audio or text, not 'song'"),
        (("step", "--baseline", "vllm"), "--baseline vllm: choose of graph, compile"),
        (("step", "--baseline", "graph", "--device", "cpu"), "graph needs an NVIDIA GPU"),
        (("step", "--random-weights", "huge"), "--random-weights must be full or tiny, not 'huge'"),
        (("step", "--model", "absent"), "absent: no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused(mosstalk: Run, words: tuple[str, ...], complaint: str) -> None:
    weights = () if "--random-weights" in words or "--model" in words else TINY
    assert complaint in refused(mosstalk("bench", *words, *weights))


def test_the_limit_counts_each_byte_once() -> None:
    config = LanguageModelConfig.from_dict(FULL.model)
    step = step_work(config, torch.bfloat16, Load(1, 512))
    # The contract's 3.26 ms at 4.29 TB/s.
    assert step.moved_bytes / 4.29e12 == pytest.approx(3.26e-3, rel=0.01)
    many = step_work(config, torch.bfloat16, Load(64, 1000))
    kept = 64 * 1001 * 36 * 4096
    assert many.moved_bytes - step.moved_bytes == pytest.approx(kept - 513 * 36 * 4096)
    prompt = step_work(config, torch.bfloat16, Load(1, 0, 512, Mode.TEXT))
    assert prompt.operations > 2 * 512 * 36 * layer_weights(config)


def test_a_weight_in_fp8_is_a_byte_and_its_channel_has_a_scale() -> None:
    config = LanguageModelConfig.from_dict(FULL.model)
    load = Load(1, 512)
    plain = step_work(config, torch.bfloat16, load)
    shared = step_work(config, torch.bfloat16, load, Quantization("shared"))
    every = step_work(config, torch.bfloat16, load, Quantization("all"))
    # The 1.83 ms at 4.29 TB/s.
    assert shared.moved_bytes / 4.29e12 == pytest.approx(1.83e-3, rel=0.02)
    channels = 6144 + 4096 + 2 * 12288 + 4096
    saved = layer_weights(config) - 4 * channels
    assert plain.moved_bytes - shared.moved_bytes == 32 * saved
    assert plain.moved_bytes - every.moved_bytes == 36 * saved
    assert plain.operations == every.operations
    assert (plain.fp8, shared.fp8) == (0, 2 * 32 * layer_weights(config))


# Slow: torch compiles a step for what engines are compared with on a GPU alone.
@pytest.mark.slow
def test_what_is_compiled_beside_the_engine_computes_what_plain_torch_does() -> None:
    step = PlainStep(wild_model(), Load(2, 20))
    compiled = torch.compile(step.compute, backend="aot_eager", dynamic=False)
    found = compiled()
    torch.testing.assert_close(found, step.compute())
