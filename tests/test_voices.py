"""Voice files: what goes in comes out, and what does not fit is refused by name."""

import hashlib
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mosstalk import Pipeline
from mosstalk.errors import OutputError, VoiceError
from mosstalk.files import new_folder
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.voices import (
    Voice,
    find_voice,
    list_voices,
    load_voice,
    save_voice,
    trimmed,
)
from mosstalk.synthesis.sizes import TINY
from mosstalk.synthesis.weights import Synthesis, synthesize

LIMIT = 64
CPU = torch.device("cpu")
INFO = {"name": "Ада", "source": "a recording, 7 s"}


def make_voice(codes: int = 10, seed: int = 0) -> Voice:
    generator = torch.Generator().manual_seed(seed)
    return Voice(
        torch.randint(LIMIT, (codes,), generator=generator),
        torch.randn((4 * codes, 80), generator=generator),
        torch.randn(192, generator=generator),
        INFO,
    )


def parts(voice: Voice) -> dict[str, Tensor]:
    return {"codes": voice.codes, "mel": voice.mel, "embedding": voice.embedding}


def same(one: Voice, other: Voice) -> bool:
    return all(torch.equal(parts(one)[name], value) for name, value in parts(other).items())


def test_a_saved_voice_is_loaded_as_it_was(tmp_path: Path) -> None:
    voice, path = make_voice(), tmp_path / "ada.safetensors"

    save_voice(voice, path)
    loaded = load_voice(path, code_limit=LIMIT)

    assert same(loaded, voice)
    assert loaded.info == INFO
    assert (loaded.codes.dtype, loaded.mel.dtype) == (torch.int64, torch.float32)


def test_parts_of_larger_tensors_are_saved_as_what_they_show(tmp_path: Path) -> None:
    large, path = make_voice(20), tmp_path / "part.safetensors"
    part = Voice(large.codes[::2], large.mel.T.contiguous().T[:40], large.embedding)

    save_voice(part, path)

    assert same(load_voice(path, code_limit=LIMIT), part)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["half", "float8"])
def test_small_numbers_and_short_ids_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    voice, path = make_voice(), tmp_path / "half.safetensors"
    halved = Voice(voice.codes.int(), voice.mel.to(dtype), voice.embedding.to(dtype))

    save_voice(halved, path)
    loaded = load_voice(path, code_limit=LIMIT)

    assert (loaded.codes.dtype, loaded.mel.dtype) == (torch.int64, torch.float32)
    assert loaded.embedding.dtype == torch.float32


@examples(60)
@given(codes=st.integers(0, 40), frames=st.integers(0, 160))
def test_trimming_keeps_whole_blocks_that_codes_and_mel_both_have(codes: int, frames: int) -> None:
    ids, mel = torch.arange(codes), torch.arange(frames)[:, None].expand(-1, 80)
    kept = min(codes, frames // 4) // 5 * 5

    if kept == 0:
        with pytest.raises(VoiceError, match="shorter than 400 ms"):
            trimmed(ids, mel, torch.zeros(192), {})
        return
    voice = trimmed(ids, mel, torch.zeros(192), INFO)

    assert voice.codes.tolist() == list(range(kept))
    assert voice.mel[:, 0].tolist() == list(range(4 * kept))
    assert voice.info == INFO


def with_value(name: str, place: int, value: float) -> Callable[[dict[str, Tensor]], object]:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[place] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda t: t.update(mel=t["mel"][:-1].clone()), "do not fit"),
        (lambda t: t.update(mel=t["mel"][:, :79].clone()), "do not fit"),
        (lambda t: t.update(codes=t["codes"][:-1].clone()), "do not fit"),
        (lambda t: t.update(codes=t["codes"][None]), "do not fit"),
        (lambda t: t.update(codes=t["codes"][0]), "do not fit"),
        (lambda t: t.update(embedding=t["embedding"][:128].clone()), "do not fit"),
        (lambda t: t.update(embedding=t["embedding"][None]), "do not fit"),
        (lambda t: t.pop("embedding"), "not a voice file"),
        (with_value("mel", 7, float("nan")), "NaN or infinity"),
        (with_value("embedding", 0, float("inf")), "NaN or infinity"),
        (with_value("codes", 3, LIMIT), "codes do not fit this codec"),
        (with_value("codes", 3, -1), "codes do not fit this codec"),
        (
            lambda t: t.update(codes=t["codes"][:0].clone(), mel=t["mel"][:0].clone()),
            "codes do not fit this codec",
        ),
    ],
)
def test_a_voice_that_does_not_fit_is_refused_by_name(
    damage: Callable[[dict[str, Tensor]], object], reason: str, tmp_path: Path
) -> None:
    tensors, path = parts(make_voice()), tmp_path / "odd.safetensors"
    damage(tensors)
    save_file(tensors, path)

    with pytest.raises(VoiceError, match=reason) as refusal:
        load_voice(path, code_limit=LIMIT)

    assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("a voice"),
        lambda path: path.unlink(),
    ],
    ids=["torn", "empty", "text", "gone"],
)
def test_a_damaged_voice_file_is_refused_by_name(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "ada.safetensors"
    save_voice(make_voice(), path)
    damage(path)

    with pytest.raises(VoiceError, match="not a voice file") as refusal:
        load_voice(path, code_limit=LIMIT)

    assert str(refusal.value).startswith(f"{path}: ")


def test_unreadable_information_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ada.safetensors"
    save_file(parts(make_voice()), path, metadata={"info": '{"name": '})

    with pytest.raises(VoiceError, match="not a voice file"):
        load_voice(path, code_limit=LIMIT)


def test_a_voice_without_information_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ada.safetensors"
    save_file(parts(make_voice()), path)

    assert load_voice(path, code_limit=LIMIT).info == {}


@pytest.mark.parametrize(
    ("codes", "info"),
    [
        (torch.full((10,), 1.5), {}),
        (torch.full((10,), float("nan")), {}),
        (torch.arange(10), ["not", "an", "object"]),
    ],
)
def test_codes_that_are_no_whole_numbers_and_odd_information_are_refused(
    codes: Tensor, info: object, tmp_path: Path
) -> None:
    path = tmp_path / "odd.safetensors"
    tensors = parts(make_voice()) | {"codes": codes}
    save_file(tensors, path, metadata={"info": json.dumps(info)})

    with pytest.raises(VoiceError):
        load_voice(path, code_limit=LIMIT)


def test_voices_are_listed_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("zoe", "ada", "Bo"):
        save_voice(make_voice(), tmp_path / f"{name}.safetensors")
    (tmp_path / "notes.txt").write_text("about these voices")

    assert list_voices(tmp_path) == ["Bo", "ada", "zoe"]
    assert list_voices(tmp_path / "nowhere") == []


def test_a_voice_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    save_voice(make_voice(), folder / "ada.safetensors")
    elsewhere = tmp_path / "mine.safetensors"
    save_voice(make_voice(seed=1), elsewhere)

    assert find_voice("ada", folder) == folder / "ada.safetensors"
    assert find_voice(str(elsewhere), folder) == elsewhere


@pytest.mark.parametrize("name", ["eve", "eve.safetensors", "../mine", "", "voices/ada"])
def test_an_unknown_voice_lists_those_there_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    save_voice(make_voice(), tmp_path / "mine.safetensors")
    for known in ("zoe", "ada"):
        save_voice(make_voice(), folder / f"{known}.safetensors")

    with pytest.raises(VoiceError, match=r"has: ada, zoe\. Or give a voice file's path") as refusal:
        find_voice(name, folder)

    assert repr(name) in str(refusal.value)


def test_a_folder_without_voices_says_so(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match="has: none"):
        find_voice("ada", tmp_path)


def test_a_codec_refuses_a_voice_of_codes_it_cannot_hear(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    limit, path = pipeline.codec.tokenizer.config.quantize_vocab_size, tmp_path / "far.safetensors"
    voice = make_voice()
    save_voice(Voice(voice.codes + limit, voice.mel, voice.embedding), path)

    with pytest.raises(VoiceError, match="codes do not fit this codec"):
        pipeline.codec.voice(str(path))


def test_the_synthetic_codec_has_a_default_voice(pipeline: Pipeline) -> None:
    voice = pipeline.codec.voice("default")

    assert voice.codes.shape[0] % 5 == 0
    assert voice.mel.shape == (4 * voice.codes.shape[0], 80)


def test_a_disk_that_takes_no_more_leaves_the_old_voice(tmp_path: Path) -> None:
    path = tmp_path / "ada.safetensors"
    path.write_bytes(b"the old one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"ada\.safetensors: cannot be written"):
            save_voice(make_voice(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [
        (path.name, b"the old one")
    ]


def test_a_saved_voice_has_the_usual_permissions(tmp_path: Path) -> None:
    path, plain = tmp_path / "ada.safetensors", tmp_path / "plain"
    save_voice(make_voice(), path)
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


# Fingerprints.


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """A codec of the same sizes with another seed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    with new_folder(folder) as part:
        synthesize(part, Synthesis(TINY, seed=1))
    return load_codec(folder / "codec", device=CPU)


def test_a_codecs_fingerprint_is_its_codebooks(pipeline: Pipeline, other: Codec) -> None:
    codec = pipeline.codec
    weight = codec.tokenizer.encoder.codebook.weight.detach().numpy()
    assert codec.fingerprint == hashlib.sha256(weight.astype("<f4").tobytes()).hexdigest()[:16]

    half = load_codec(codec.folder, device=CPU, dtype=torch.float16)
    assert half.fingerprint == load_codec(codec.folder, device=CPU).fingerprint == codec.fingerprint
    assert other.fingerprint != codec.fingerprint


def test_a_voice_of_another_codec_is_refused_and_one_that_names_none_is_not(
    pipeline: Pipeline, other: Codec, tmp_path: Path
) -> None:
    codec, voice, path = pipeline.codec, make_voice(), tmp_path / "ada.safetensors"
    save_voice(replace(voice, info=INFO | {"codec": codec.fingerprint}), path)
    assert same(codec.voice(str(path)), voice)
    with pytest.raises(VoiceError, match="was made for another codec; make it again with this one"):
        other.voice(str(path))

    save_voice(voice, path)
    assert same(other.voice(str(path)), voice)


def test_a_fingerprint_is_computed_for_voices_that_name_one_alone(tmp_path: Path) -> None:
    voice, path, asked = make_voice(), tmp_path / "ada.safetensors", list[str]()

    def fingerprint() -> str:
        asked.append("once")
        return "0123"

    for info, times in (({}, 0), ({"codec": "0123"}, 1)):
        save_voice(replace(voice, info=info), path)
        assert same(load_voice(path, code_limit=LIMIT, fingerprint=fingerprint), voice)
        assert len(asked) == times


def test_the_default_voice_names_its_codec(pipeline: Pipeline, other: Codec) -> None:
    for codec in (pipeline.codec, other):
        assert codec.voice("default").info["codec"] == codec.fingerprint
