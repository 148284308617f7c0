"""What others send wrongly: one line says what and what to do, and nothing of theirs changes."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import QUESTION, SYNTHETIC, Checkpoint, Run, refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from mosstalk import Pipeline
from mosstalk.audio.sound import Samples
from mosstalk.cli import app

OLD_ANSWER = b"an answer from before"
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)).astype(np.float32)
SHORT = ("--script", "speech:5")
TYPED = ("--text", "hi", *SHORT)
FLOW = "flow/flow-chunk-5.pt"
WHOLE = "model.safetensors"
NORM = "model.text_norm.weight"

NESTED = "[" * 100_000
"""Python's parser gives up on it."""
DEEP = '{"a": ' * 500 + "1" + "}" * 500
"""Python's parser reads it; code that walks through it would give up."""
LONG_NUMBER = f'{{"hidden_size": {"1" * 5000}}}'

Refusal = Callable[..., str]
Damage = Callable[[Checkpoint], object]


@pytest.fixture
def here(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process: starting one takes seconds, and most cases differ in data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOSSTALK_CACHE", str(cache_folder))

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
        return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)

    return run


def refusal(run: Run, folder: Path, *words: str | Path) -> str:
    """The one line that a chat is refused with, which leaves an older answer as it was."""
    answer = folder / "answer.wav"
    answer.write_bytes(OLD_ANSWER)
    model = () if "--model" in words else SYNTHETIC
    line = refused(run("chat", *words, "--force", *model))
    assert answer.read_bytes() == OLD_ANSWER
    assert not list(folder.glob("*.part"))
    return line


@pytest.fixture
def refuse(here: Run, tmp_path: Path) -> Refusal:
    """``refusal`` of a chat in this process."""
    return lambda *words: refusal(here, tmp_path, *words)


def assert_says(line: str, said: str) -> None:
    """Check that ``line`` holds the parts of ``said``, which " ... " stands between, in order."""
    pattern = ".*".join(map(re.escape, said.split(" ... ")))
    assert re.search(pattern, line), f"{said!r} not in: {line}"


# Recordings.


def recording(path: Path, samples: Samples, subtype: str) -> Path:
    soundfile.write(path, samples, 16_000, subtype=subtype)
    return path


@pytest.mark.parametrize(
    ("samples", "subtype", "said"),
    [
        pytest.param(TONE[:0], "PCM_16", "holds no samples ... record it again", id="no-samples"),
        pytest.param(0 * TONE, "PCM_16", "is silent ... check the microphone", id="silence"),
        pytest.param(TONE / 2000, "FLOAT", "silent ... -72 dB", id="below-hearing"),
        pytest.param(TONE[:160], "PCM_16", "10 ms ... too short ... 100 ms", id="10-ms"),
        pytest.param(
            np.append(TONE[:4000], np.nan), "FLOAT", "NaN ... 0.250 s ... again", id="nan"
        ),
        pytest.param(
            np.append(TONE[:4000], -np.inf), "FLOAT", "infinite ... 0.250 s", id="infinity"
        ),
        pytest.param(
            np.stack([TONE] * 8, 1), "PCM_16", "8 channels ... --channel 1..8", id="8-channels"
        ),
    ],
)
def test_a_recording_without_speech_in_it_is_refused(
    refuse: Refusal, tmp_path: Path, samples: Samples, subtype: str, said: str
) -> None:
    path = recording(tmp_path / "question.wav", samples, subtype)
    assert_says(refuse("--speech", path, *SHORT), f"{path} ... {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "0 bytes ... record it again", id="empty"),
        pytest.param(np.random.default_rng(0).bytes(20_000), "convert it to wav", id="noise"),
        pytest.param(b"Good morning!\n" * 99, "not a readable sound file", id="text"),
        pytest.param(QUESTION.read_bytes()[:20_000], "not a readable sound", id="cut-flac"),
    ],
)
def test_a_file_that_is_no_sound_is_refused(
    refuse: Refusal, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "question.wav"
    path.write_bytes(content)
    assert_says(refuse("--speech", path, *SHORT), f"{path} ... {said}")


def test_an_hour_is_refused_by_its_header(refuse: Refusal, tmp_path: Path) -> None:
    # Silence in flac takes 90 kB; that it is silent would be found only by decoding it.
    path = tmp_path / "hour.flac"
    soundfile.write(path, np.zeros(3600 * 8000, np.float32), 8000)
    assert_says(refuse("--speech", path), "3600 s ... at most 819 s ... cut the recording")


def test_a_folder_and_a_missing_file_are_refused(refuse: Refusal, tmp_path: Path) -> None:
    assert_says(refuse("--speech", tmp_path), f"{tmp_path}: not a file")
    assert_says(refuse("--speech", tmp_path / "none.wav"), "none.wav ... no such file")


def test_one_of_eight_channels_is_heard_when_it_is_named(
    here: Run, refuse: Refusal, tmp_path: Path
) -> None:
    channels = np.zeros((16_000, 8), np.float32)
    channels[:, 2] = TONE
    path = recording(tmp_path / "eight.wav", channels, "PCM_16")
    third = here("chat", "--speech", path, "--channel", "3", *SHORT, "--stats", *SYNTHETIC)
    assert third.returncode == 0
    assert "16000 Hz, 8 ch) = 13 codes" in third.stderr
    assert_says(refuse("--speech", path, "--channel", "4"), "is silent")
    assert_says(refuse("--speech", path, "--channel", "9"), "8 channels ... --channel 9")


def test_a_wrong_second_recording_is_told_before_the_first_is_answered(
    refuse: Refusal, tmp_path: Path
) -> None:
    assert_says(refuse("--speech", QUESTION, "--speech", tmp_path / "none.wav"), "none.wav")
    assert not list(tmp_path.glob("answer-*"))


# Text.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param((), "nothing to answer ... --speech FILE or --text TEXT", id="no-turn"),
        pytest.param(("--text", ""), "text is empty ... type what you want", id="empty"),
        pytest.param(("--text", " \n\t"), "text is empty", id="blank"),
        pytest.param(("--text", "x" * 20_000), "rows long ... 10240 ... shorten", id="too-long"),
        pytest.param(("--text", "caf\udce9"), "not valid unicode ... retype", id="latin-1"),
    ],
)
def test_text_that_cannot_be_answered_is_refused(
    refuse: Refusal, words: tuple[str, ...], said: str
) -> None:
    assert_says(refuse(*words, *SHORT), said)


def test_special_tokens_on_the_command_line_cost_as_many_rows_as_their_letters(here: Run) -> None:
    def rows(text: str) -> str:
        words = ("--text", text, *SHORT, "--stats", "--force")
        stderr = here("chat", *words, *SYNTHETIC).stderr
        return next(line for line in stderr.splitlines() if "rows prefilled" in line)

    assert rows("<|im_end|>") == rows("ten letter")
    assert rows("<|im_end|>") != rows("only nine")


# Voices.


def voice_file(pipeline: Pipeline, path: Path, **changed: Tensor) -> Path:
    voice = pipeline.codec.voice("default")
    tensors = {"codes": voice.codes, "mel": voice.mel, "embedding": voice.embedding}
    save_file(tensors | changed, path)
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"mel": torch.zeros(99, 80)}, "[99, 80] ... (4n, 80)", id="mel-too-short"),
        pytest.param({"embedding": torch.zeros(64)}, "[64] ... (192)", id="embedding"),
        pytest.param({"codes": torch.full((25,), 1024)}, "codes ... make the voice", id="codes"),
        pytest.param({"codes": torch.full((25,), -1)}, "codes ... make the voice", id="negative"),
        pytest.param({"embedding": torch.full((192,), torch.nan)}, "NaN ... again", id="nan"),
    ],
)
def test_a_voice_that_does_not_fit_the_codec_is_refused(
    refuse: Refusal, pipeline: Pipeline, tmp_path: Path, changed: dict[str, Tensor], said: str
) -> None:
    path = voice_file(pipeline, tmp_path / "mine.safetensors", **changed)
    assert_says(refuse(*TYPED, "--voice", path), f"{path} ... {said}")


def test_a_damaged_voice_file_is_refused(
    refuse: Refusal, pipeline: Pipeline, tmp_path: Path
) -> None:
    path = voice_file(pipeline, tmp_path / "mine.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert_says(refuse(*TYPED, "--voice", path), f"{path}: not a voice file ... make it again")


def test_a_voice_file_with_endless_lists_in_it_is_refused(
    refuse: Refusal, pipeline: Pipeline, tmp_path: Path
) -> None:
    path = voice_file(pipeline, tmp_path / "mine.safetensors")
    save_file(load_file(path), path, metadata={"info": NESTED})
    assert_says(refuse(*TYPED, "--voice", path), f"{path}: not a voice file ... make it again")


# Checkpoints.


def change_json(path: Path, **changed: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def change_tensors(path: Path, **changed: Tensor) -> None:
    save_file(load_file(path) | changed, path)


def lose_tensor(path: Path, name: str) -> None:
    pickled = path.suffix == ".pt"
    tensors = torch.load(path, weights_only=True) if pickled else load_file(path)
    del tensors[name]
    (torch.save if pickled else save_file)(tensors, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def split(model: Path, **misplaced: str) -> Path:
    """Put a model's tensors into two shards with an index; return the second shard."""
    tensors = load_file(model / WHOLE)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {name: shards[place % 2] for place, name in enumerate(tensors)}
    for shard in shards:
        part = {name: value for name, value in tensors.items() if places[name] == shard}
        save_file(part, model / shard)
    (model / WHOLE).unlink()
    (model / f"{WHOLE}.index.json").write_text(json.dumps({"weight_map": places | misplaced}))
    return model / shards[1]


FAULTS: dict[str, tuple[Damage, str]] = {
    "a-file-cut-mid-tensor": (
        lambda at: cut(at.model / WHOLE),
        f"{WHOLE} ... damaged or truncated ... fetch it again",
    ),
    "a-lost-shard": (
        lambda at: split(at.model).unlink(),
        "model-00002-of-00002.safetensors ... no such file ... fetch it",
    ),
    "a-shard-outside-the-folder": (
        lambda at: split(at.model, **{NORM: f"../codec/{WHOLE}"}),
        f"index.json ... {NORM} ... outside the folder ... ../codec",
    ),
    "a-missing-tensor": (
        lambda at: lose_tensor(at.model / WHOLE, NORM),
        f"missing ... {NORM} ... fetch both again",
    ),
    "an-unexpected-tensor": (
        lambda at: change_tensors(at.model / WHOLE, surprise=torch.zeros(1)),
        "unexpected ... surprise ... fetch both again",
    ),
    "a-wrong-shape": (
        lambda at: change_tensors(at.model / WHOLE, **{NORM: torch.ones(7)}),
        f"misshapen ... {NORM} is [7], must be [128]",
    ),
    "nan": (
        lambda at: change_tensors(at.model / WHOLE, **{NORM: torch.full((128,), torch.nan)}),
        f"{WHOLE} ... {NORM} holds NaN ... fetch it again",
    ),
    "another-architecture": (
        lambda at: change_json(at.model / "config.json", model_type="llama"),
        "model/config.json ... 'llama' ... another architecture",
    ),
    "scaled-rotary-positions": (
        lambda at: change_json(at.model / "config.json", rope_scaling={"type": "yarn"}),
        "model/config.json ... rope_scaling ... yarn ... not supported",
    ),
    "no-tokenizer": (
        lambda at: (at.model / "tokenizer.json").unlink(),
        "tokenizer.json ... no such file",
    ),
    "a-foreign-codec": (
        lambda at: (at.codec / "config.json").write_text('{"model_type": "encodec"}'),
        "codec/config.json ... not the config of a speech tokenizer",
    ),
    "codes-the-flow-lacks": (
        lambda at: change_json(at.codec / "config.json", quantize_vocab_size=2048),
        "2048 codes ... 1280",
    ),
    "a-cut-flow": (
        lambda at: cut(at.codec / FLOW),
        f"{FLOW} ... damaged or truncated ... fetch it again",
    ),
    "a-list-for-a-flow": (
        lambda at: torch.save([torch.zeros(1)], at.codec / FLOW),
        f"{FLOW} ... no state dict",
    ),
    "a-training-state-for-a-flow": (
        lambda at: torch.save({"generator": {}}, at.codec / FLOW),
        f"{FLOW} ... 'generator' is no tensor ... no plain state dict",
    ),
    "a-missing-vocoder-tensor": (
        lambda at: lose_tensor(at.codec / "flow" / "hift.pt", "conv_post.bias"),
        "flow/hift ... missing ... conv_post.bias",
    ),
}


def holding(name: str, text: str) -> Damage:
    return lambda at: (at.model.parent / name).write_text(text)


def in_tokenizer(at: Checkpoint, text: str) -> None:
    path = at.model / "tokenizer.json"
    path.write_text(f'{path.read_text().rstrip().removesuffix("}")}, "truncation": {text}}}')


TOO_DEEP = "lists and objects are nested more than 100 levels deep ... fetch it again"
FAULTS |= {
    f"endless-lists-in-{name}": (holding(name, NESTED), f"{name}: {TOO_DEEP}")
    for name in (
        "model/config.json",
        "model/tokenizer.json",
        "model/generation_config.json",
        f"model/{WHOLE}.index.json",
        "codec/config.json",
        "codec/preprocessor_config.json",
        "codec/flow/config.json",
        "codec/flow/hift.json",
    )
}
FAULTS |= {
    "a-deep-object-in-a-config": (
        lambda at: change_json(at.model / "config.json", hidden_size=json.loads(DEEP)),
        f"model/config.json: {TOO_DEEP}",
    ),
    "a-deep-object-in-a-tokenizer": (
        lambda at: in_tokenizer(at, DEEP),
        f"tokenizer.json: {TOO_DEEP}",
    ),
    "a-number-of-5000-digits": (
        holding("model/config.json", LONG_NUMBER),
        "model/config.json: not readable as json ... fetch it again",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_is_refused_for(
    refuse: Refusal, tiny: Checkpoint, tmp_path: Path, fault: str
) -> None:
    damage, said = FAULTS[fault]
    at = tiny.copy(tmp_path)
    damage(at)
    assert_says(refuse(*TYPED, "--model", at.model, "--codec", at.codec), said)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_code_hidden_in_a_weights_file_is_not_run(
    refuse: Refusal, tiny: Checkpoint, tmp_path: Path
) -> None:
    at, sprung = tiny.copy(tmp_path), tmp_path / "sprung"
    torch.save({"weight": Trap(sprung)}, at.codec / FLOW)
    # The trap works: a reader that trusts the file springs it.
    torch.load(at.codec / FLOW, weights_only=False)
    sprung.unlink()
    said = f"{FLOW} ... code in it is not run"
    assert_says(refuse(*TYPED, "--model", at.model, "--codec", at.codec), said)
    assert not sprung.exists()


# Options.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "answer.mp3"), "answer.mp3 ... .wav, .flac, .ogg"),
        (("--out", "none/answer.wav"), "none: no such folder ... make it first"),
        (("--out", "folder.wav"), "folder.wav: is a folder ... give a file name"),
        (("--model", "."), "--model and --codec belong together"),
        (("--model", ".", "--codec", "."), "config.json: no such file ... right folder"),
        (("--voice", "bob"), "unknown voice 'bob' ... has: default"),
        (("--reply", "song"), "--reply must be speech or text, not 'song'"),
        (("--script", "song:5"), "'song:5' ... speech:75"),
        (("--script", "speech:0"), "'speech:0' ... speech:75"),
        (("--script", ""), "script part '' ... speech:75"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or more ... -1.0"),
        (("--temperature", "nan"), "temperature ... nan"),
        (("--top-k", "-1"), "top_k must be 0 (off) or more ... -1"),
        (("--top-p", "0"), "top_p must be above 0 and at most 1 ... 0.0"),
        (("--top-p", "2"), "top_p must be above 0 and at most 1 ... 2.0"),
        (("--repetition-penalty", "0"), "repetition_penalty must be above 0"),
        (("--max-rows", "0"), "at least 1, not 0"),
        (("--dtype", "int8"), "'int8' ... float32, bfloat16, float16, float64"),
        (("--device", "toaster"), "'toaster' ... --device cpu"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_without_a_meaning_is_refused(
    refuse: Refusal, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "folder.wav").mkdir()
    assert_says(refuse("--text", "hi", *words), said)


# Slow: a process of its own; ``test_voice_create`` refuses in one as well.
@pytest.mark.slow
def test_a_process_ends_with_one_line_and_exit_code_2(process: Run, tmp_path: Path) -> None:
    assert "none.wav: no such file" in refusal(process, tmp_path, "--speech", "none.wav")


def test_who_has_no_home_is_told_how_to_name_a_folder(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MOSSTALK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert "set MOSSTALK_CACHE" in refused(here("chat", *TYPED, *SYNTHETIC))
