"""What Whisper's frozen decoder writes down of the teacher's, the student's and the codes' sound.

The measure of each way is its word error rate beside the teacher's on the same sound. Codes are
those of ``mosstalk``'s own tokenizer, read from the folder that ``export`` wrote.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from evals.intervals import rate
from evals.readings import (
    VOICES,
    Reading,
    librivox_clips,
    noise_like,
    read_aloud,
    telephone_prompts,
)
from evals.words import word_errors
from mosstalk.audio.sound import resample
from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.weights import from_int8, to_int8
from mosstalk.synthesis.sizes import PREPROCESSOR, PUBLISHED_CODEC
from recipes.listener.segments import SEGMENT, alone, load_clips
from recipes.listener.student import Student
from recipes.listener.texts import BENCH, read_lines
from recipes.listener.train import Features, Judge, resume_student
from recipes.listener.whisper import SIZES, Teacher, load_whisper, unpack

_LEAD = INPUT_RATE // 4


def eight_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices rounded to 8 bits with a scale for each output, as they are kept."""
    return from_int8(to_int8(weights))


def stored_bytes(weights: dict[str, Tensor], bits: int) -> int:
    """Bytes of the weights as they ship: without the fixed positions, vectors in float16."""
    total = 0
    for name, value in weights.items():
        if "embed_positions" in name:
            continue
        matrix = value.ndim >= 2
        total += value.numel() * (bits // 8 if matrix else 2)
        total += 2 * value.shape[0] if matrix and bits == 8 else 0
    return total


def export(student: Student, folder: Path) -> None:
    """Write the speech tokenizer in the published layout, float16."""
    student.settle()
    sizes = SIZES | {"quantize_vocab_size": student.encoder.codebook.weight.shape[0]}
    sizes |= {"pooling_position": SIZES["quantize_position"]}
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: v.half().contiguous() for n, v in student.tokenizer.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = PUBLISHED_CODEC | sizes
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    features = PREPROCESSOR | {"feature_size": SIZES["num_mel_bins"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(features, indent=2) + "\n")


def load_tokenizer(folder: Path, bits: int = 16) -> SpeechTokenizer:
    """The tokenizer that ``export`` wrote, its matrices rounded to 8 bits if so wished."""
    tokenizer = SpeechTokenizer(SpeechTokenizerConfig.from_folder(folder))
    weights = {n: v.float() for n, v in load_file(folder / "model.safetensors").items()}
    tokenizer.load_state_dict(eight_bits(weights) if bits == 8 else weights)
    return tokenizer.eval()


def load_student(path: Path, teacher: Teacher) -> Student:
    """A student from the file that ``convert`` or ``quantise`` wrote.

    Raises FileNotFoundError if the file has no reader.
    """
    codebook = load_file(path).get("quantizer.codebook")
    with torch.no_grad():
        student = Student(0 if codebook is None else codebook.shape[0], 8)
        student.begin_as(teacher)
    if not resume_student(student, path):
        raise FileNotFoundError(
            f"{path} has no reader to tell Whisper's decoder what its codes say; "
            f"train one with quantise --resume {path}"
        )
    return student.eval()


def of_codes(student: Student, tokenizer: SpeechTokenizer) -> Features:
    """Features (B, 1500, C) that the student's reader makes of the tokenizer's codes."""
    centres = tokenizer.encoder.codebook.weight

    def features(sound: Tensor) -> Tensor:
        codes = torch.tensor([tokenizer.encode(row) for row in sound])
        inner = student.reader(centres[codes])
        return student.reader.features(inner) * student.spread + student.mean

    return features


def datasets(
    names: Iterable[str], work: Path, most: int
) -> Iterator[tuple[str, list[str], Tensor]]:
    """Name, texts and sounds (B, 480000) of each set; ``kokoro`` are the clips held out."""
    sentences = BENCH.read_text(encoding="utf-8").splitlines()[:most]
    for name in names:
        if name == "kokoro":
            clips = load_clips(work / "sound", torch.device("cpu"))
            lines = read_lines(work / "lines.xz")
            kept = [c for c, line in enumerate(clips.lines) if lines[line].kind == "bench"]
            yield name, [lines[clips.lines[c]].text for c in kept], alone(clips, kept)
            continue
        if name == "prompts":
            reading = telephone_prompts(most)
        elif name == "librivox":
            reading = librivox_clips()
        elif name == "noise":
            reading = noise_like(telephone_prompts(min(most, 20)))
        else:
            reading = read_aloud(VOICES[name], sentences)
        yield name, list(reading.texts), _segments(reading)


def _segments(reading: Reading) -> Tensor:
    sounds = torch.zeros(len(reading), SEGMENT)
    for row, sound in zip(sounds, reading.sounds, strict=True):
        heard = np.asarray(resample(sound, OUTPUT_RATE, INPUT_RATE))[: SEGMENT - _LEAD]
        row[_LEAD : _LEAD + len(heard)] = torch.from_numpy(heard)
    return sounds


def score(
    work: Path, causal: Path | None, students: Iterable[Path], sets: Iterable[str], most: int
) -> Iterator[dict[str, Any]]:
    """One row of figures for each set and way; exports each student beside its file."""
    teacher, decoder = load_whisper(unpack(load_file(work / "whisper.safetensors")))
    judge = Judge(decoder, Tokenizer.from_file(str(work / "tokenizer.json")))
    ways: dict[str, Features] = {"whisper": lambda x: teacher(whisper_log_mel(x, 80))}
    if causal is not None:
        early = load_student(causal, teacher)
        ways["causal"] = lambda x: early.early(early.rows(x))
    for path in students:
        student = load_student(path, teacher)
        export(student, path.with_suffix(""))
        for bits in (16, 8):
            tokenizer = load_tokenizer(path.with_suffix(""), bits)
            size = stored_bytes(tokenizer.state_dict(), bits)
            ways[f"{path.with_suffix('')}, {bits} bits, {size:,} bytes"] = of_codes(
                student, tokenizer
            )
    for name, texts, sounds in datasets(sets, work, most):
        for way, features in ways.items():
            written = judge.written(features, sounds)
            found = rate(word_errors(texts, written))
            yield {
                "set": name, "way": way, "wer": found.value, "low": found.low,
                "high": found.high, "n": found.n, "written": written,
            }  # fmt: skip
