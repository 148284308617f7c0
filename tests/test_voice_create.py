"""Making a voice: the parts are those of the recording, and what is wrong is told in one line."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from conftest import QUESTION, ROOT, SYNTHETIC, Checkpoint, Run, command_environment, refused
from typer.testing import CliRunner

from mosstalk.audio.sound import Samples, read_audio
from mosstalk.cli import app
from mosstalk.files import new_folder
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.features import vocoder_mel
from mosstalk.models.voices import load_voice, save_voice
from mosstalk.offline.make_voice import LONGEST_S, make_voice, read_sample
from mosstalk.synthesis.sizes import TINY
from mosstalk.synthesis.weights import Synthesis, synthesize

RATE = 16_000
SPEECH = [QUESTION, ROOT / "assets" / "librivox.flac"]
CPU = torch.device("cpu")
CODEC = ("--codec", "synthetic")


@pytest.fixture(scope="module")
def codec(tiny: Checkpoint) -> Codec:
    return load_codec(tiny.codec, device=CPU)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of the same sizes with another seed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    with new_folder(folder) as part:
        synthesize(part, Synthesis(TINY, seed=1))
    return Checkpoint(folder / "model", folder / "codec")


@pytest.fixture
def voice(tiny: Checkpoint, tmp_path: Path) -> Run:
    """``mosstalk voice`` in this process, on a codec in ``tmp_path`` that may be changed."""
    folder = tiny.copy(tmp_path).codec

    def run(command: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        line = ["voice", command, *map(str, words), "--codec", str(folder)]
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        return subprocess.CompletedProcess(line, result.exit_code, result.stdout, result.stderr)

    return run


def speech(path: Path = QUESTION) -> Samples:
    return read_audio(path, RATE).samples


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# The whole way, as real processes.


def test_a_voice_is_made_listed_inspected_and_spoken_with(mosstalk: Run, tmp_path: Path) -> None:
    created = mosstalk("voice", "create", "ada", QUESTION, *CODEC)
    assert (created.returncode, created.stderr) == (0, "")
    source = hashlib.sha256(QUESTION.read_bytes()).hexdigest()
    assert re.search(
        r"ada: 35 codes = 2\.80 s of 2\.87 s -> .*voices/ada\.safetensors", created.stdout
    )
    assert re.search(r"norm \d+\.\d+", created.stdout)
    assert source in created.stdout
    assert "needs that person's permission" in created.stdout
    assert "note" not in created.stdout

    listed = json.loads(mosstalk("voice", "list", "--json", *CODEC).stdout)
    line = {"name": "ada", "codes": 35, "seconds": 2.8, "source": "question.flac"}
    assert line in listed["voices"]
    text = mosstalk("voice", "list", *CODEC).stdout
    assert re.search(r"ada +35 codes +2\.80 s +question\.flac", text)

    inspected = mosstalk("voice", "inspect", "ada", "--json", *CODEC)
    facts = json.loads(inspected.stdout)
    assert inspected.returncode == 0
    assert facts["shapes"] == {"codes": [35], "mel": [140, 80], "embedding": [192]}
    assert facts["info"] == {
        "name": "ada",
        "source": "question.flac",
        "source_sha256": source,
        "seconds": "2.80",
        "codec": facts["codec"],
        "weights": "synthetic",
    }
    assert facts["fits"] is True

    spoken = mosstalk(
        "chat", *created.stdout.partition(" chat ")[2].split(), "--script", "speech:5"
    )
    assert spoken.returncode == 0, spoken.stderr
    assert soundfile.info(tmp_path / "answer.wav").frames == 5 * 1920

    assert "ada.safetensors: exists already" in refused(
        mosstalk("voice", "create", "ada", QUESTION, *CODEC)
    )


def test_a_voice_made_for_another_codec_is_refused_in_chat(
    mosstalk: Run, other: Checkpoint, tmp_path: Path
) -> None:
    created = mosstalk(
        "voice", "create", "ada", QUESTION, "--codec", other.codec, "--out", "ada.safetensors"
    )
    assert created.returncode == 0, created.stderr
    words = ("--text", "hi", "--script", "speech:5", "--voice", "ada.safetensors")

    assert "ada.safetensors: was made for another codec; make it again" in refused(
        mosstalk("chat", *words, *SYNTHETIC)
    )
    assert not (tmp_path / "answer.wav").exists()
    theirs = mosstalk("chat", "--model", other.model, "--codec", other.codec, *words)
    assert theirs.returncode == 0, theirs.stderr


def test_a_codec_that_knows_one_voice_is_refused(
    mosstalk: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    copy = tiny.copy(tmp_path)
    config = copy.codec / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mosstalk_one_voice": True}))
    for codec in (copy.codec, "pocket"):
        line = refused(mosstalk("voice", "create", "ada", QUESTION, "--codec", codec))
        assert "this codec knows one voice" in line
        assert "name another with --codec" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codec", "model"]


def without(packages: set[str], folder: Path, cache: Path) -> Run:
    """Run ``mosstalk`` as a process in which some packages look as if never installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        hidden = name.partition('.')[0] in {packages!r}\n"
        "        return None if hidden else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
    )

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "mosstalk.cli", *map(str, words)],
            cwd=folder,
            env=command_environment(cache) | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    # Slow: one more process, for a package that is asked for at the same place.
    "package",
    ["onnxruntime", pytest.param("kaldi_native_fbank", marks=pytest.mark.slow)],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    package: str, tiny: Checkpoint, tmp_path: Path
) -> None:
    copy = tiny.copy(tmp_path)
    before = hashes(copy.codec)
    run = without({package}, tmp_path / "run", tmp_path / "cache")

    line = refused(run("voice", "create", "ada", QUESTION, "--codec", copy.codec))

    assert f"needs the package {package}" in line
    assert "make setup EXTRAS=voices" in line
    assert hashes(copy.codec) == before


# Slow: two processes without onnx; what a missing package does is shown above.
@pytest.mark.slow
def test_a_synthetic_codec_written_without_onnx_is_completed_when_onnx_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    without_onnx = without({"onnx"}, tmp_path / "without", cache)
    said = without_onnx("checkpoint", "synthesize", "random")
    assert said.returncode == 0, said.stderr
    assert not list((tmp_path / "without").rglob("campplus.onnx"))
    assert [line for line in said.stdout.splitlines() if "EXTRAS=voices" in line] != []

    assert "campplus.onnx: no such file" in refused(
        without_onnx("voice", "create", "ada", QUESTION, *CODEC)
    )
    monkeypatch.setenv("MOSSTALK_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    created = CliRunner().invoke(app, ["voice", "create", "ada", str(QUESTION), *CODEC])
    assert created.exit_code == 0, created.stderr


def test_help_asks_for_consent_and_imports_nothing_heavy() -> None:
    words = (sys.executable, "-X", "importtime", "-m", "mosstalk.cli", "voice", "create", "--help")
    run = subprocess.run(words, check=True, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "onnxruntime", "onnx", "kaldi_native_fbank"}
    assert "needs that person's permission" in run.stdout
    assert 'Needs the extra "voices"' in run.stdout


# What a voice is made of.


def test_codes_and_mel_are_those_of_the_sample_cut_to_blocks(codec: Codec) -> None:
    made = make_voice(codec, read_sample(QUESTION), "ada").voice

    heard = torch.from_numpy(read_audio(QUESTION, 16_000).samples)
    spoken = torch.from_numpy(read_audio(QUESTION, 24_000).samples)
    codes, mel = codec.tokenizer.encode(heard), vocoder_mel(spoken)
    assert (len(codes), len(mel)) == (36, 143)  # 143 frames hold 35 codes: the 36th is padding
    assert made.codes.tolist() == codes[:35]
    assert torch.equal(made.mel, mel[:140])


@pytest.mark.parametrize(("seconds", "codes"), [(1.0, 10), (1.2, 15), (1.59, 15), (1.6, 20)])
def test_a_voice_is_whole_blocks_of_five_codes(
    seconds: float, codes: int, codec: Codec, tmp_path: Path
) -> None:
    path = tmp_path / "cut.wav"
    soundfile.write(path, speech()[: int(seconds * RATE)], RATE)

    made = make_voice(codec, read_sample(path), "ada").voice

    assert (made.codes.shape, made.mel.shape) == ((codes,), (4 * codes, 80))


@pytest.mark.parametrize("samples", [RATE, 20_479, 20_480, 20_481, 45_856])
def test_stereo_at_44_khz_gives_as_many_codes_as_mono_at_16_khz(
    samples: int, codec: Codec, tmp_path: Path
) -> None:
    mono, stereo = tmp_path / "mono.wav", tmp_path / "stereo.wav"
    cut = speech()[:samples]
    soundfile.write(mono, cut, RATE, subtype="FLOAT")
    wide = soxr.resample(cut, RATE, 44_100, quality="VHQ")
    soundfile.write(stereo, np.stack([wide, wide], 1), 44_100, subtype="FLOAT")

    one, two = (make_voice(codec, read_sample(path), "ada").voice for path in (mono, stereo))

    assert len(one.codes) == len(two.codes) == samples // 1280 // 5 * 5


def test_the_same_sample_gives_the_same_file_and_another_speaker_another_x_vector(
    voice: Run, codec: Codec, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        assert (
            voice("create", "ada", QUESTION, "--out", tmp_path / f"{name}.safetensors").returncode
            == 0
        )
    one, two = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two

    first, second = (make_voice(codec, read_sample(path), "ada").voice for path in SPEECH)
    assert not torch.allclose(first.embedding, second.embedding, atol=0.1)


# What it says of the sample.


def test_a_jump_is_said_and_the_voice_made_all_the_same(voice: Run, tmp_path: Path) -> None:
    sample = tmp_path / "two.wav"
    soundfile.write(sample, np.concatenate([speech(), 0.1 * speech()]), RATE, subtype="FLOAT")

    said = voice("create", "two", sample)

    assert said.returncode == 0
    assert re.search(r"note +the speech is \d+ dB louder around \d\.\d s than around", said.stdout)
    assert (tmp_path / "codec" / "voices" / "two.safetensors").is_file()


# Refusals.


def written(path: Path, samples: Samples, rate: int = RATE) -> Path:
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


def with_nan(samples: Samples) -> Samples:
    samples = samples.copy()
    samples[1000] = np.nan
    return samples


SAMPLES: list[tuple[str, Callable[[], Samples], str]] = [
    ("short", lambda: speech()[: RATE - 1], "too short for a voice; record 3 to 15 s"),
    ("tiny", lambda: speech()[:800], "too short to be heard"),
    ("long", lambda: np.resize(speech(), int((LONGEST_S + 1) * RATE)), "31.0 s are too long"),
    ("silent", lambda: 0 * speech(), "is silent"),
    ("nan", lambda: with_nan(speech()), "NaN"),
    ("array", lambda: np.stack([speech()] * 8, 1), "has 8 channels"),
]


@pytest.mark.parametrize(("name", "make", "said"), SAMPLES, ids=[name for name, _, _ in SAMPLES])
def test_a_sample_that_makes_no_voice_is_refused_and_nothing_written(
    name: str, make: Callable[[], Samples], said: str, voice: Run, tmp_path: Path
) -> None:
    sample = written(tmp_path / f"{name}.wav", make())
    before = hashes(tmp_path)

    line = refused(voice("create", "ada", sample))

    assert said in line
    assert str(sample) in line
    assert hashes(tmp_path) == before


def test_thirty_seconds_are_taken(voice: Run, tmp_path: Path) -> None:
    sample = written(tmp_path / "long.wav", np.resize(speech(), int(LONGEST_S * RATE)))
    assert "375 codes = 30.00 s" in voice("create", "ada", sample).stdout


def test_a_channel_can_be_picked(voice: Run, tmp_path: Path) -> None:
    one, zero = speech(), 0 * speech()
    sample = written(tmp_path / "array.wav", np.stack([zero, zero, one], 1))
    assert "channel 4 is not one" in refused(voice("create", "ada", sample, "--channel", "4"))
    assert voice("create", "ada", sample, "--channel", "3").returncode == 0
    assert voice("create", "mono", written(tmp_path / "mono.wav", one)).returncode == 0
    files = [tmp_path / "codec" / "voices" / f"{name}.safetensors" for name in ("ada", "mono")]
    picked, mono = (load_voice(path, code_limit=1024) for path in files)
    assert torch.equal(picked.codes, mono.codes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a/b", QUESTION), "'a/b' is no name for a voice"),
        (("", QUESTION), "'' is no name for a voice"),
        (("..", QUESTION), "'..' is no name for a voice"),
        ((".ada", QUESTION), "'.ada' is no name for a voice"),
        (("a\\b", QUESTION), "is no name for a voice"),
        (("a\nb", QUESTION), "is no name for a voice"),
        (("ada.safetensors", QUESTION), "is no name for a voice"),
        (("a" * 250, QUESTION), "name is too long"),
        (("default", QUESTION), "default.safetensors: exists already"),
        (("ada", "nothing.wav"), "nothing.wav: no such file"),
        (("ada", ROOT), "not a file"),
        (("ada", ROOT / "pyproject.toml"), "not a readable sound file"),
        (("ada", QUESTION, "--out", "ada.wav"), "a voice file's name ends in .safetensors"),
        (("ada", QUESTION, "--out", "none/ada.safetensors"), "none: no such folder"),
        (("ada", QUESTION, "--out", f"{'a' * 250}.safetensors"), "name is too long"),
        (("ada", QUESTION, "--device", "abacus"), "device 'abacus'"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_written(
    words: tuple[str | Path, ...],
    said: str,
    voice: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = hashes(tmp_path)
    assert said in refused(voice("create", *words))
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("where", ["nowhere", "model"])
def test_a_folder_that_is_no_codec_is_refused(where: str, tiny: Checkpoint) -> None:
    folder = tiny.codec.parent / where
    for words in (("create", "ada", str(QUESTION)), ("list",), ("inspect", "default")):
        result = CliRunner().invoke(app, ["voice", *words, "--codec", str(folder)])
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert str(folder) in result.stderr


def test_force_replaces_a_voice_and_nothing_else_does(voice: Run, tmp_path: Path) -> None:
    path = tmp_path / "codec" / "voices" / "default.safetensors"
    before = path.read_bytes()
    assert "add --force" in refused(voice("create", "default", QUESTION))
    assert path.read_bytes() == before
    assert "too short" in refused(
        voice("create", "default", written(tmp_path / "s.wav", speech()[:8000]), "--force")
    )
    assert path.read_bytes() == before
    assert voice("create", "default", QUESTION, "--force").returncode == 0
    assert path.read_bytes() != before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_codec_without_a_voices_folder_gets_one(voice: Run, tmp_path: Path) -> None:
    folder = tmp_path / "codec" / "voices"
    shutil.rmtree(folder)
    assert voice("create", "ada", QUESTION).returncode == 0
    assert [path.name for path in folder.iterdir()] == ["ada.safetensors"]

    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert "voices: cannot be made" in refused(voice("create", "ada", QUESTION))
    assert folder.read_text() == "in the way"


def test_an_x_vector_model_that_is_damaged_or_not_there_is_named_and_nothing_written(
    voice: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "codec" / "flow" / "campplus.onnx"
    model.write_text("version https://git-lfs.github.com/spec/v1\n")
    before = hashes(tmp_path)
    assert f"{model}: not a readable ONNX file" in refused(voice("create", "ada", QUESTION))
    assert hashes(tmp_path) == before

    model.unlink()
    assert f"{model}: no such file" in refused(voice("create", "ada", QUESTION))
    assert not (tmp_path / "codec" / "voices" / "ada.safetensors").exists()
    assert capfd.readouterr() == ("", "")  # nor does ONNX Runtime write anything itself


# Looking at voices.


def test_a_codec_whose_codebook_is_gone_says_so(tiny: Checkpoint, tmp_path: Path) -> None:
    copy = tiny.copy(tmp_path)
    shutil.copy(copy.model / "model.safetensors", copy.codec / "model.safetensors")
    result = CliRunner().invoke(app, ["voice", "inspect", "default", "--codec", str(copy.codec)])
    assert result.exit_code == 2
    assert f"{copy.codec}: has no encoder.codebook.weight" in result.stderr


def test_list_and_inspect_say_which_voices_do_not_fit(
    voice: Run, other: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "codec" / "voices"
    shutil.copy(other.codec / "voices" / "default.safetensors", folder / "theirs.safetensors")
    (folder / "torn.safetensors").write_bytes(b"torn")

    listed = voice("list")
    assert listed.returncode == 0
    assert re.search(r"default +25 codes +2\.00 s +source not named", listed.stdout)
    assert re.search(r"theirs +PROBLEM .*made for another codec", listed.stdout)
    assert re.search(r"torn +PROBLEM .*not a voice file", listed.stdout)

    inspected = voice("inspect", "theirs")
    assert inspected.returncode == 1
    assert "another codec, not this one: make it again" in inspected.stdout
    assert json.loads(voice("inspect", "theirs", "--json").stdout)["fits"] is False
    assert "not a voice file" in refused(voice("inspect", "torn"))
    assert "unknown voice 'eve'" in refused(voice("inspect", "eve"))


def test_a_voice_file_that_names_no_codec_is_said_to(
    codec: Codec, voice: Run, tmp_path: Path
) -> None:
    made = make_voice(codec, read_sample(QUESTION), "ada").voice
    made.info.clear()
    path = tmp_path / "old.safetensors"
    save_voice(made, path)

    inspected = voice("inspect", path)

    assert inspected.returncode == 0
    assert "it names no codec" in inspected.stdout
    assert json.loads(voice("inspect", path, "--json").stdout)["fits"] is None
