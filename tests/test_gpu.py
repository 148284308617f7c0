"""On an NVIDIA GPU: the goldens, and the same rows and codes as on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch
from conftest import GOLDENS, QUESTION, SYNTHETIC, Checkpoint, Run

from mosstalk import Chat, Pipeline, SamplingOptions, Script, read_audio
from mosstalk.constants import INPUT_RATE
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import pick_device
from mosstalk.verify.run import run_case

pytestmark = pytest.mark.gpu

CASES = sorted(path.parent for path in GOLDENS.glob("*/case.json"))
GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=1.2, top_k=0, seed=5)


@pytest.fixture(scope="module")
def on_gpu(tiny: Checkpoint) -> Pipeline:
    """The tiny checkpoint in float32 on the GPU, sound included."""
    exact = SoundRequest(dtype="float32", context_s=0)
    return Pipeline.load(tiny.model, tiny.codec, device="cuda", dtype=torch.float32, sound=exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.name)
def test_every_golden_case_passes(folder: Path, dtype: torch.dtype) -> None:
    checks = run_case(folder, pick_device("cuda"), dtype)
    assert checks
    assert [check.name for check in checks if not check.passed] == []


def test_float32_means_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    device = pick_device("cuda")
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 512, 512, generator=generator).unbind()
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).cpu()
    # TF32 keeps ten bits of mantissa: its relative error would be near 3e-4.
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def asked(pipeline: Pipeline, options: SamplingOptions, script: str) -> tuple[Chat, torch.Tensor]:
    """The conversation after one spoken answer, and its sound."""
    chat = pipeline.chat()
    chat.hear_file(QUESTION)
    sounds = list(chat.answer(options=options, script=Script.parse(script)))
    return chat, torch.cat([torch.from_numpy(sound) for sound in sounds])


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_and_sound_equal_the_cpus(
    pipeline: Pipeline, on_gpu: Pipeline, options: SamplingOptions
) -> None:
    here, sound = asked(pipeline, options, "speech:23")
    there, gpu_sound = asked(on_gpu, options, "speech:23")
    assert there.conversation.rows == here.conversation.rows
    torch.testing.assert_close(gpu_sound, sound, rtol=0, atol=5e-3)


def test_codes_of_a_recording_equal_the_cpus(pipeline: Pipeline, on_gpu: Pipeline) -> None:
    samples = torch.from_numpy(read_audio(QUESTION, INPUT_RATE).samples)
    long = samples.repeat(12)
    assert on_gpu.codec.tokenizer.encode(long) == pipeline.codec.tokenizer.encode(long)


def test_other_seeds_draw_other_rows_on_the_gpu_too(on_gpu: Pipeline) -> None:
    first, _ = asked(on_gpu, SAMPLED, "speech:10")
    second, _ = asked(on_gpu, replace(SAMPLED, seed=6), "speech:10")
    assert first.conversation.rows != second.conversation.rows


def test_chat_answers_on_the_gpu_in_the_stored_precision(process: Run, tmp_path: Path) -> None:
    words = ("--speech", QUESTION, "--out", "a.wav", "--device", "cuda", "--stats")
    run = process("chat", *words, *SYNTHETIC)
    assert run.returncode == 0, run.stderr
    assert "model bfloat16, codec float16 on cuda" in run.stderr
    assert "MiB device" in run.stderr
    sound, rate = soundfile.read(tmp_path / "a.wav")
    assert (len(sound), rate) == (75 * 1920, 24_000)
