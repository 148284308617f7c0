"""Text to ids and back, such that nothing a user types can become a special id."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mosstalk.errors import CheckpointError, TextError
from mosstalk.files import read_json

_SHOWN = {"<|empty|>": ".", "<|end_empty|>": ":"}
"""Added tokens that the public demo shows as text; all others are skipped."""

LONG_CHARS = 2048
"""Texts that are longer take milliseconds to encode."""
REQUIRED_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def added_tokens(path: Path, values: dict[str, Any]) -> dict[str, int]:
    """Added tokens of a ``tokenizer.json`` with their ids; raise CheckpointError if malformed."""
    try:
        return {token["content"]: int(token["id"]) for token in values.get("added_tokens", [])}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: added_tokens is malformed; fetch it again") from None


class TextTokenizer:
    """A byte-level BPE from ``tokenizer.json`` with its added tokens taken out of the text path.

    ``special`` maps the added tokens to their ids. ``encode`` knows none of them, so
    ``<|im_end|>`` typed by a user is tokenised as the ten characters it is.
    """

    def __init__(self, text: Tokenizer, special: dict[str, int], vocab_size: int) -> None:
        self._text = text
        self.special = special
        self.vocab_size = vocab_size
        self._limit = min(special.values())
        self._shown = {special[name]: sign for name, sign in _SHOWN.items() if name in special}

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> "TextTokenizer":
        """Read ``folder/tokenizer.json``; raise CheckpointError if it cannot serve."""
        path = folder / "tokenizer.json"
        values = read_json(path)
        special = added_tokens(path, values)
        absent = [name for name in REQUIRED_TOKENS if name not in special]
        if absent:
            raise CheckpointError(f"{path}: added token {absent[0]} is missing: not Qwen3's family")
        if max(special.values()) >= vocab_size:
            raise CheckpointError(
                f"{path}: ids up to {max(special.values())}, but the model has {vocab_size}; take "
                "both from one release"
            )
        values["added_tokens"], values["post_processor"] = [], None
        try:
            text = Tokenizer.from_str(json.dumps(values))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: not a tokenizer ({error})") from None
        return cls(text, special, vocab_size)

    def encode(self, text: str) -> Sequence[int]:
        """Ids of plain text; raise TextError for text that cannot be encoded as such.

        One of more than ``LONG_CHARS`` characters lets other threads run meanwhile.
        """
        try:
            if len(text) > LONG_CHARS:  # of the library's two ways the one without Python's lock
                encoded = self._text.encode_batch([text], add_special_tokens=False)[0]
            else:
                encoded = self._text.encode(text, add_special_tokens=False)
            ids: list[int] = encoded.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TextError(f"this text is not valid unicode ({error}); retype it") from None
        if any(token >= self._limit for token in ids):
            raise TextError("this text encodes to special ids; the tokenizer does not fit")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text as people read it: special ids skipped, the two 'empty' marks shown."""
        pieces: list[str] = []
        run: list[int] = []
        for token in ids:
            if token < self._limit:
                run.append(token)
            elif token in self._shown:
                pieces += [self._text.decode(run), self._shown[token]]
                run = []
        return "".join([*pieces, self._text.decode(run)])
