"""The package stage: trained weights in the published layout, in 8 bits, with the voice."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mosstalk.config import WEIGHTS_KIND_KEY
from mosstalk.files import open_to_readers
from mosstalk.models.codec_folder import (
    FLOWS_KEY,
    ONE_VOICE_KEY,
    STREAMING_FLOW,
    load_codec,
    read_fingerprint,
)
from mosstalk.models.features import vocoder_mel
from mosstalk.models.voices import CODEC_KEY, X_VECTOR_FILE, save_voice, trimmed
from mosstalk.models.weights import from_int8, to_int8
from mosstalk.synthesis.small_parts import write_x_vector_model
from recipes.pocket.data import TeacherClip, teacher_clip
from recipes.pocket.flow import VOICE_CODES, speaker_embedding
from recipes.pocket.sizes import PREPROCESSING, Sizes

LARGEST_BYTES = 40_000_000
"""What a wheel that everyone downloads may weigh; package registries take four times as much."""
_LABEL = {WEIGHTS_KIND_KEY: "pocket"}
_NOT_NORMALISED = ("source_downs.", "m_source.", "f0_predictor.classifier.")
_GENERATION: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.0,
    "max_new_tokens": 512,
    "mosstalk": {
        "chat": {"temperature": 0.1, "writes_first": True},
        "speak": {
            "do_sample": False,
            "max_new_tokens": 400,
            # Of 180, as the teachers read, it loses more words (docs/quality.md).
            "max_chars": 90,
            "languages": ["en"],
            "normalize": True,
        },
        "transcribe": {"do_sample": False, "max_new_tokens": 200},
    },
}


class PackageError(RuntimeError):
    """The weights cannot be shipped as they are."""


def package(
    work: Path,
    out: Path,
    sizes: Sizes,
    largest_bytes: int = LARGEST_BYTES,
    kept_codec: Path | None = None,
) -> int:
    """Write ``out/model`` and ``out/codec`` from the stages' files in ``work``; return their bytes.

    The voice is a clip of the teacher's from ``work/data``. A ``kept_codec``, the codec of an
    earlier package, is copied as it is, voices included. What stood in ``out`` stays until
    everything is written. Raises PackageError above ``largest_bytes``, FileNotFoundError
    where a stage has not run.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, suffix=".part") as scratch:
        model, codec = Path(scratch, "model"), Path(scratch, "codec")
        model.mkdir()
        _write_model(work, model, sizes)
        if kept_codec is None:
            _write_codec(work, codec, sizes)
            _write_voice(codec, teacher_clip(work / "data", VOICE_CODES), sizes)
        else:
            shutil.copytree(kept_codec, codec)
        open_to_readers(Path(scratch))
        total = sum(path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file())
        if total > largest_bytes:
            raise PackageError(f"{total:,} bytes are more than the {largest_bytes:,} that may ship")
        for folder in (model, codec):
            shutil.rmtree(out / folder.name, ignore_errors=True)
            folder.replace(out / folder.name)
    return total


def unpack(packed: Path, out: Path) -> None:
    """Write what ``package`` was given into ``out``, for trainings to go on from: the weights of
    language model, flow and vocoder, as exact as 8 bits are, and the vocabulary in ``out/text``.

    ``packed`` has model/ and codec/. Raises ConfigError or CheckpointError for another folder.
    """
    codec = load_codec(packed / "codec", device=torch.device("cpu"))
    (out / "text").mkdir(parents=True, exist_ok=True)
    language_model = from_int8(load_file(packed / "model" / "model.safetensors"))
    shutil.copy(packed / "model" / "tokenizer.json", out / "text")
    parts = {
        "language_model": language_model,
        "flow": codec.flow.state_dict(),
        "vocoder": codec.vocoder.state_dict(),
    }
    for name, weights in parts.items():
        halves = {n: value.half().contiguous() for n, value in weights.items()}
        save_file(halves, out / f"{name}.safetensors")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _small(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in 8 bits, all else in float16."""
    small = to_int8(weights).items()
    return {n: (v if v.dtype == torch.int8 else v.half()).contiguous() for n, v in small}


def _write_model(work: Path, folder: Path, sizes: Sizes) -> None:
    weights = load_file(work / "language_model.safetensors")
    save_file(_small(weights), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", sizes.model | {"torch_dtype": "float16"} | _LABEL)
    _write_json(folder / "generation_config.json", _GENERATION)
    # Without spaces and line ends it is a third as large.
    tokenizer = json.loads((work / "text" / "tokenizer.json").read_text())
    compact = json.dumps(tokenizer, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact)


def _write_codec(work: Path, folder: Path, sizes: Sizes) -> None:
    for part in ("flow", "voices"):
        (folder / part).mkdir(parents=True)
    weights = load_file(work / "tokenizer.safetensors")
    save_file(_small(weights), folder / "model.safetensors", metadata={"format": "pt"})
    own = {FLOWS_KEY: [STREAMING_FLOW], ONE_VOICE_KEY: True} | _LABEL
    _write_json(folder / "config.json", sizes.codec | own)
    _write_json(folder / "preprocessor_config.json", PREPROCESSING)
    flow = folder / "flow"
    _write_json(flow / "config.json", sizes.flow.to_dict())
    _write_json(flow / "hift.json", sizes.hift.to_dict())
    torch.save(_small(load_file(work / "flow.safetensors")), flow / f"{STREAMING_FLOW}.pt")
    vocoder = load_file(work / "vocoder.safetensors")
    torch.save(_small(dict(_weight_normed(vocoder))), flow / "hift.pt")
    write_x_vector_model(flow / X_VECTOR_FILE, sizes.flow.spk_embed_dim, seed=0, hidden=16)


def _weight_normed(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Plain weights as the published file has them: g and v with w = g v / ||v||."""
    for name, value in weights.items():
        if not name.endswith(".weight") or name.startswith(_NOT_NORMALISED):
            yield name, value.half()
            continue
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight"
        direction = value.half()
        norm = value.flatten(1).norm(dim=1).reshape(-1, *[1] * (value.ndim - 1))
        yield f"{stem}.original0", norm.half()
        yield f"{stem}.original1", direction


def _write_voice(codec: Path, clip: TeacherClip, sizes: Sizes) -> None:
    """The beginning of a clip: its codes, its mel and the fixed x-vector."""
    loaded = load_codec(codec, device=torch.device("cpu"))
    codes = torch.tensor(loaded.tokenizer.encode(clip.heard.float() / 32768))
    mel = vocoder_mel(clip.spoken.float() / 32768)
    info = {
        "name": "default",
        "weights": "pocket",
        "speaker": clip.voice,
        "text": clip.text,
        CODEC_KEY: read_fingerprint(codec),
    }
    embedding = speaker_embedding(sizes.flow.spk_embed_dim)
    voice = trimmed(codes[:VOICE_CODES], mel[: 4 * VOICE_CODES], embedding, info)
    save_voice(voice, codec / "voices" / "default.safetensors")
