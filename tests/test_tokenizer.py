"""Text to ids: nothing typed becomes special, and text comes back as people read it."""

import json
from pathlib import Path

import pytest
from conftest import Checkpoint, examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk import Pipeline
from mosstalk.errors import MosstalkError
from mosstalk.models.text_tokenizer import TextTokenizer

NAMES = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|object_ref_start|>", "<|modality_pad|>"]


@pytest.fixture(scope="module")
def tokenizer(pipeline: Pipeline) -> TextTokenizer:
    return pipeline.tokenizer


@given(parts=st.lists(st.one_of(st.sampled_from(NAMES), st.text(max_size=6)), max_size=6))
@examples(200)
def test_typed_text_never_yields_a_special_id(tokenizer: TextTokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode("".join(parts))
    assert all(token < min(tokenizer.special.values()) for token in ids)


@pytest.mark.parametrize("text", ["Good morning!", "été 12 €", "<|im_end|>", "\n", "日本語"])
def test_text_comes_back_as_it_was(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_are_skipped_and_the_empty_marks_shown(tokenizer: TextTokenizer) -> None:
    special = tokenizer.special
    ids = [
        special["<|im_start|>"],
        *tokenizer.encode("yes"),
        special["<|empty|>"],
        *tokenizer.encode(" no"),
        special["<|end_empty|>"],
        special["<|im_end|>"],
        10**6,
    ]
    assert tokenizer.decode(ids) == "yes. no:"


def test_added_tokens_that_are_not_special_stay_text_too(tiny: Checkpoint, tmp_path: Path) -> None:
    values = json.loads((tiny.model / "tokenizer.json").read_text())
    plain = dict(values["added_tokens"][-1], id=263, content="<think>", special=False)
    values["added_tokens"].append(plain)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = TextTokenizer.from_folder(tmp_path, 264)
    assert tokenizer.encode("<think>") == list(b"<think>")


@pytest.mark.parametrize(
    ("content", "word"),
    [("{}", "endoftext"), ("[]", "json object"), ("nonsense", "json")],
)
def test_a_foreign_tokenizer_is_refused(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(MosstalkError, match=word):
        TextTokenizer.from_folder(tmp_path, 264)
