"""Synthetic checkpoints: reproducible, as large as asked for, there whole or not at all."""

import contextlib
import hashlib
import json
import math
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Checkpoint, Run, command_environment, refused
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from mosstalk import Pipeline, Script
from mosstalk.cli import app
from mosstalk.config import LanguageModelConfig
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.weights import in_shards, shapes_of
from mosstalk.synthesis.sizes import PUBLISHED_MODEL
from mosstalk.synthesis.weights import SHARD_BYTES


@pytest.fixture
def synthesize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``mosstalk checkpoint synthesize`` in this process and in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
        line = ["checkpoint", "synthesize", *map(str, words)]
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        return subprocess.CompletedProcess(line, result.exit_code, result.stdout, result.stderr)

    return run


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".safetensors", ".pt"):
            values = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
            found |= {f"{path.relative_to(folder)}: {name}": values[name] for name in values}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


# Seeds and sizes.


def test_the_same_seed_and_sizes_give_the_same_bytes_in_another_process(
    process: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    run = process("checkpoint", "synthesize", "random")
    assert run.returncode == 0
    assert run.stderr == ""
    files = hashes(tmp_path / "random")
    expected = hashes(tiny.model.parent)
    assert files == expected
    assert {"model/model.safetensors", "model/tokenizer.json", "codec/flow/hift.pt"} < set(files)
    assert f"{len(files)} files" in run.stdout


def test_no_two_tensors_of_a_model_are_alike(tiny: Checkpoint) -> None:
    found = tensors(tiny.model)
    assert len({value.float().numpy().tobytes() for value in found.values()}) == len(found)


def test_what_is_printed_to_try_works(mosstalk: Run, synthesize: Run, tmp_path: Path) -> None:
    said = synthesize("random").stdout
    words = said.partition("try: ")[2].partition(" ")[2].split()
    assert mosstalk(*words).returncode == 0
    assert (tmp_path / "answer.wav").stat().st_size > 25 * 1920


def test_another_seed_changes_every_tensor(
    synthesize: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    assert synthesize("random", "--seed", "1").returncode == 0
    first, second = tensors(tiny.model.parent), tensors(tmp_path / "random")
    assert first.keys() == second.keys()
    assert len(first) > 500
    assert [name for name in first if torch.equal(first[name], second[name])] == []


def test_every_file_says_that_it_is_synthetic(tiny: Checkpoint) -> None:
    for folder in (tiny.model, tiny.codec):
        config = json.loads((folder / "config.json").read_text())
        assert (config["mosstalk_weights"], config["mosstalk_seed"]) == ("synthetic", 0)


def test_sizes_change_the_tensors_their_keys_name(synthesize: Run, tmp_path: Path) -> None:
    words = ("--size", "tiny,hidden_size=96,intermediate_size=200,head_dim=16")
    more = ("--size", "num_shared_layers=2,codec.d_model=32", "--size", "flow.input_size=96")
    assert synthesize("random", *words, *more, "--dtype", "float32").returncode == 0
    shapes = {name: list(value.shape) for name, value in tensors(tmp_path / "random").items()}
    model = "model/model.safetensors: model."
    assert shapes[f"{model}embed_tokens.weight"] == [264, 96]
    layer = f"{model}shared_block.layers.1."
    assert shapes[f"{layer}mlp.up_proj.weight"] == [200, 96]
    assert shapes[f"{layer}self_attn.q_proj.weight"] == [4 * 16, 96]
    assert shapes[f"{layer}self_attn.k_proj.weight"] == [2 * 16, 96]
    assert not any("shared_block.layers.2." in name for name in shapes)
    assert shapes["codec/model.safetensors: encoder.codebook.weight"] == [1024, 32]
    assert shapes["codec/flow/flow-chunk-5.pt: input_embedding.weight"] == [1280, 96]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ("tiny,hidden_size=96,head_dim=16,num_shared_layers=1", "float16"),
        ("codec.d_model=32,codec.encoder_ffn_dim=64,codec.quantize_vocab_size=500", "float32"),
        ("flow.input_size=96,flow.spk_embed_dim=64,hift.base_channels=32", "bfloat16"),
    ],
)
def test_what_is_written_loads_and_answers(
    synthesize: Run, tmp_path: Path, size: str, dtype: str
) -> None:
    assert synthesize("random", "--size", size, "--dtype", dtype).returncode == 0
    folder = tmp_path / "random"
    pipeline = Pipeline.load(folder / "model", folder / "codec", dtype=None, device="cpu")
    assert pipeline.model.dtype == getattr(torch, dtype)
    chat = pipeline.chat()
    chat.hear(torch.randn(8000, generator=torch.Generator().manual_seed(0)).numpy())
    answer = chat.answer(script=Script.parse("speech:5"))
    assert sum(map(len, answer)) == 5 * 1920


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "huge"), "unknown size 'huge'; say tiny, full"),
        (("--size", "hidden=96"), "unknown key 'hidden'"),
        (("--size", "decoder.width=96"), "unknown key 'decoder.width'"),
        (("--size", "preprocessor.n_fft=512"), "unknown key 'preprocessor.n_fft'"),
        (("--size", "hidden_size=many"), "hidden_size=many: the value is not a number"),
        (("--size", "num_shared_layers=null"), "num_shared_layers=null: the value is not a number"),
        (("--size", "hidden_size=96.5"), "hidden_size must be int"),
        (("--size", "hidden_size=0"), "hidden_size must be at least 1"),
        (("--size", "vocab_size=100"), "leave no room for 256 bytes"),
        (("--size", "head_dim=33"), "head_dim even"),
        # These fail when the language model has been written already.
        (("--size", "codec.d_model=65"), "d_model is no multiple"),
        (("--size", "hift.upsample_rates=[8]"), "one kernel and one source block"),
        (("--dtype", "int4"), "unknown dtype 'int4'"),
        (("--tokenizer", "none.json"), "none.json: no such file"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, tuple) else "",
)
def test_a_checkpoint_that_cannot_be_leaves_nothing_behind(
    synthesize: Run, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(synthesize("random", *words))
    assert list(tmp_path.iterdir()) == []


# The folder it goes to.


def test_an_existing_checkpoint_is_not_overwritten(synthesize: Run, tmp_path: Path) -> None:
    assert synthesize("random").returncode == 0
    before = hashes(tmp_path)
    line = refused(synthesize("random", "--seed", "1"))
    assert "random: exists already; remove it or choose another name" in line
    assert hashes(tmp_path) == before


def test_an_empty_folder_is_filled_and_parents_are_made(synthesize: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "deep/down"):
        assert synthesize(folder).returncode == 0
        assert (tmp_path / folder / "codec" / "voices" / "default.safetensors").is_file()


def test_a_file_in_the_way_is_named(synthesize: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "file: exists already" in refused(synthesize("file"))
    assert "file/random: cannot be made" in refused(synthesize("file/random"))
    assert (tmp_path / "file").read_text() == "mine"


@contextlib.contextmanager
def writing(folder: Path, cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of writing a checkpoint that takes seconds."""
    words = ("checkpoint", "synthesize", "random", "--size", "intermediate_size=400000")
    with subprocess.Popen(
        [sys.executable, "-m", "mosstalk.cli", *words],
        cwd=folder,
        env=command_environment(cache),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 200
        while not list(folder.glob(".random.*.part/model/config.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        try:
            yield process
        finally:
            process.kill()


# Slow: a process of its own; that one killed leaves nothing is shown below.
@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(cache_folder: Path, tmp_path: Path) -> None:
    with writing(tmp_path, cache_folder) as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    assert (process.returncode, stderr) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_checkpoint_and_the_next_one_succeeds(
    cache_folder: Path, synthesize: Run, tmp_path: Path
) -> None:
    with writing(tmp_path, cache_folder) as process:
        process.kill()
        process.communicate(timeout=200)
    assert not (tmp_path / "random").exists()
    assert synthesize("random").returncode == 0


# The full size, of which nothing is written here.


def test_the_full_size_has_the_published_tensors_in_four_shards() -> None:
    with torch.device("meta"):
        shapes = shapes_of(LanguageModel(LanguageModelConfig.from_dict(PUBLISHED_MODEL)))
    assert len(shapes) == 446
    layer = {
        "input_layernorm.weight": (4096,),
        "mlp.down_proj.weight": (4096, 12288),
        "mlp.gate_proj.weight": (12288, 4096),
        "mlp.up_proj.weight": (12288, 4096),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.k_norm.weight": (128,),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
    }
    first = "model.shared_block.layers.31."
    assert {name: shapes[first + name] for name in layer} == layer
    assert shapes["model.embed_tokens.weight"] == (151680, 4096)
    assert shapes["model.audio_embed.weight"] == (16512, 4096)
    assert sum(map(math.prod, shapes.values())) == pytest.approx(9.1e9, rel=0.01)

    def bytes_of(name: str) -> int:
        return math.prod(shapes[name]) * torch.bfloat16.itemsize

    shards = list(in_shards(shapes, bytes_of, SHARD_BYTES))
    assert len(shards) == 4
    assert [name for names in shards for name in names] == list(shapes)


# Tokenizers.


def tokenizer_file(tiny: Checkpoint, path: Path, shift: int = 0, drop: str = "") -> Path:
    """The tiny tokenizer in other bytes, its special ids moved or one of them left out."""
    values: dict[str, Any] = json.loads((tiny.model / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["id"] += shift
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != drop]
    path.write_text(json.dumps(values))
    return path


def test_a_given_tokenizer_is_taken_as_it_is(
    synthesize: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    path = tokenizer_file(tiny, tmp_path / "mine.json")
    assert synthesize("random", "--tokenizer", path).returncode == 0
    taken = (tmp_path / "random" / "model" / "tokenizer.json").read_bytes()
    assert taken == path.read_bytes() != (tiny.model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("shift", "drop", "size", "said"),
    [
        (1, "", "tiny", "add --size sosp_token_id=260"),
        (0, "<|im_end|>", "tiny", "added token <|im_end|> is missing"),
        (9, "", "sosp_token_id=268,modality_pad_token_id=262", "ids up to 271"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(
    synthesize: Run, tiny: Checkpoint, tmp_path: Path, shift: int, drop: str, size: str, said: str
) -> None:
    path = tokenizer_file(tiny, tmp_path / "mine.json", shift, drop)
    assert said in refused(synthesize("random", "--tokenizer", path, "--size", size))
    assert list(tmp_path.iterdir()) == [path]


@given(text=st.text())
def test_the_byte_level_tokenizer_spells_text_in_its_bytes(tiny: Checkpoint, text: str) -> None:
    assume("<|" not in text)
    spelt = unicodedata.normalize("NFC", text)
    library = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    ours = TextTokenizer.from_folder(tiny.model, 264)
    assert library.encode(text).ids == list(ours.encode(text)) == list(spelt.encode())
    assert library.decode(library.encode(text).ids) == ours.decode(ours.encode(text)) == spelt


def test_the_library_knows_the_special_tokens_where_the_config_has_them(tiny: Checkpoint) -> None:
    library = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    config = LanguageModelConfig.from_folder(tiny.model)
    assert library.token_to_id("<|object_ref_start|>") == config.sosp_token_id
    assert library.encode("a<|im_end|>").ids == [97, library.token_to_id("<|im_end|>")]
    assert library.get_vocab_size() <= config.vocab_size
