"""The x-vector: Kaldi's filter banks through the codec's model, and models that cannot be."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import QUESTION, ROOT, Checkpoint
from onnx import helper, numpy_helper

from mosstalk import Pipeline
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.errors import CheckpointError, VoiceError
from mosstalk.models.voices import fbank, x_vector
from mosstalk.offline.make_voice import make_voice, read_sample
from mosstalk.synthesis.small_parts import write_x_vector_model

SPEECH = [QUESTION, ROOT / "assets" / "librivox.flac"]


def speech(path: Path = QUESTION) -> Samples:
    return read_audio(path, 16_000).samples


def kaldi_fbank(samples: Samples) -> Samples:
    """Kaldi's filter banks from their definition, in float64."""
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), 400)[::160]
    frames = frames - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    povey = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    power = np.abs(np.fft.rfft((frames - 0.97 * before) * povey, 512))[:, :256] ** 2
    mel = 1127 * np.log(1 + np.arange(256) * (16_000 / 512) / 700)
    low, high = 1127 * np.log(1 + np.array([20, 8000]) / 700)
    edges = low + (high - low) / 81 * np.arange(82)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = np.minimum((mel - left) / (centre - left), (right - mel) / (right - centre))
    banks = np.log(np.maximum(power @ np.maximum(filters, 0).T, 2.0**-23))
    return np.asarray(banks - banks.mean(axis=0), np.float32)


@pytest.mark.parametrize("path", SPEECH, ids=lambda path: path.stem)
def test_the_filter_banks_are_kaldis(path: Path) -> None:
    np.testing.assert_allclose(fbank(speech(path)), kaldi_fbank(speech(path)), atol=2e-3)


def test_quiet_sound_meets_the_floor_of_unscaled_samples() -> None:
    quiet = speech() * np.float32(1e-3)
    np.testing.assert_allclose(fbank(quiet), kaldi_fbank(quiet), atol=2e-3)
    assert float(np.abs(fbank(quiet) - fbank(speech())).max()) > 1


def test_the_x_vector_is_what_the_model_makes_of_the_filter_banks(pipeline: Pipeline) -> None:
    codec = pipeline.codec
    made = make_voice(codec, read_sample(QUESTION), "ada").voice

    session = onnxruntime.InferenceSession(codec.folder / "flow" / "campplus.onnx")
    expected = session.run(None, {"features": kaldi_fbank(speech())[None]})[0]

    assert expected.shape == (1, 192)
    np.testing.assert_allclose(made.embedding.numpy(), expected[0], atol=1e-2)
    assert float(made.embedding.norm()) > 1


def linear(
    inputs: list[int | str],
    weight: tuple[int, int],
    outputs: list[int | str],
    *,
    mean_axis: int = 1,
    reshaped: tuple[int, ...] = (0, 0, 0),
) -> bytes:
    """An ONNX model of the given shapes: reshape, mean over an axis, times a matrix of ones."""
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["frames"]),
            helper.make_node("ReduceMean", ["frames"], ["mean"], axes=[mean_axis], keepdims=0),
            helper.make_node("MatMul", ["mean", "weight"], ["y"]),
        ],
        "linear",
        [helper.make_tensor_value_info("x", kind, inputs)],
        [helper.make_tensor_value_info("y", kind, outputs)],
        [
            numpy_helper.from_array(np.array(reshaped, np.int64), "shape"),
            numpy_helper.from_array(np.ones(weight, np.float32), "weight"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    return bytes(model.SerializeToString())


def poisoned(content: bytes) -> bytes:
    model = onnx.load_from_string(content)
    weight = model.graph.initializer[1]
    values = numpy_helper.to_array(weight) * np.float32(np.nan)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    return bytes(model.SerializeToString())


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not a readable ONNX file"),
    "text": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "not a readable ONNX file"),
    "torn": (lambda whole: whole[: len(whole) // 2], "not a readable ONNX file"),
    "other bands": (
        lambda _: linear([1, "T", 40], (40, 192), [1, 192]),
        "it takes float [1, 'T', 40] and gives float [1, 192]",
    ),
    "other size": (
        lambda _: linear([1, "T", 80], (80, 512), [1, 512]),
        "and gives float [1, 512]",
    ),
    "fixed length": (lambda _: linear([1, 200, 80], (80, 192), [1, 192]), "it takes float [1, 200"),
    "a vector a frame": (
        lambda _: linear([1, "T", 80], (80, 192), ["T", 192], mean_axis=0),
        "it gave [285, 192]",
    ),
    "fixed length unsaid": (
        lambda _: linear([1, "T", 80], (80, 192), [1, 192], reshaped=(1, 200, 80)),
        "cannot be reshaped",
    ),
    "nan": (poisoned, "gives NaN or infinity"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_cannot_be_is_named_in_one_line(
    damage: str, tiny: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "campplus.onnx"
    change, said = DAMAGES[damage]
    model.write_bytes(change((tiny.codec / "flow" / "campplus.onnx").read_bytes()))

    with pytest.raises((CheckpointError, VoiceError)) as refusal:
        x_vector(model, speech())

    line = str(refusal.value)
    assert line.startswith(f"{model}: ")
    assert said in line
    assert "copy campplus.onnx from the codec's release" in line
    assert "\n" not in line
    assert capfd.readouterr() == ("", "")  # nor does ONNX Runtime write anything itself


def test_a_model_with_open_lengths_is_taken(tmp_path: Path) -> None:
    model = tmp_path / "open.onnx"
    model.write_bytes(linear(["b", "T", 80], (80, 192), ["b", "n"]))
    expected = kaldi_fbank(speech()).mean(axis=0).sum()
    np.testing.assert_allclose(x_vector(model, speech()).numpy(), expected, atol=1e-2)


def test_the_synthetic_model_follows_its_seed_and_size(tiny: Checkpoint, tmp_path: Path) -> None:
    paths = [tmp_path / str(index) for index in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        assert write_x_vector_model(path, 192, seed)
    first, again, second = (path.read_bytes() for path in paths)
    assert first == again == (tiny.codec / "flow" / "campplus.onnx").read_bytes()
    assert first != second
    onnx.checker.check_model(onnx.load_from_string(first), full_check=True)
    assert x_vector(paths[0], speech()).shape == (192,)
