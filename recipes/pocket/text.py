"""The pocket model's own byte-pair vocabulary, trained on the text that teachers read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.synthesis.small_parts import byte_alphabet, write_tokenizer


def train_text_tokenizer(
    lines: Iterable[str], folder: Path, model: dict[str, Any]
) -> TextTokenizer:
    """Train on ``lines`` and write ``folder/tokenizer.json`` for ``model`` (its config)."""
    room = model["sosp_token_id"] - 3
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=byte_alphabet(), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(lines, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in learned["merges"]]
    alphabet = set(byte_alphabet())
    pieces = [token for token in learned["vocab"] if token not in alphabet]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, model, sorted(pieces, key=learned["vocab"].__getitem__), merges)
    return TextTokenizer.from_folder(folder, model["vocab_size"])
