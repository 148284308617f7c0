"""Codes of every clip, each heard as an utterance of its own, clean or as a room has it.

Each shard of sound has a file of codes, so that parts can be encoded one by one, as they are
made, and read together.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import INPUT_SAMPLES_PER_CODE
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from recipes.pocket.augment import augment
from recipes.pocket.data import Recordings, padded_sound
from recipes.pocket.quantizer import nearest
from recipes.pocket.sizes import CODEC, SMOKE_CODEC
from recipes.pocket.training import load_weights

_CODES_PER_BATCH = 12_000


def load_tokenizer(path: Path, device: torch.device, *, smoke: bool = False) -> SpeechTokenizer:
    """The tokenizer that the tokenizer stage wrote."""
    tokenizer = SpeechTokenizer(SpeechTokenizerConfig.from_dict(SMOKE_CODEC if smoke else CODEC))
    load_weights(tokenizer, path)
    return tokenizer.to(device).eval()


def length_batches(
    codes: NDArray[np.int64], most: int = _CODES_PER_BATCH
) -> Iterator[NDArray[np.int64]]:
    """Clip numbers in groups of like length, at most ``most`` codes each with padding."""
    order = np.argsort(codes, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        full = end == len(order) or (end + 1 - start) * codes[order[end]] > most
        if full:
            yield order[start:end]
            start = end


def clip_sound(data: Recordings, clips: NDArray[np.int64]) -> Tensor:
    """Sound (B, n) float of clips, with zeros after each one's end."""
    per_code = INPUT_SAMPLES_PER_CODE
    return padded_sound(data.heard, data.starts[clips] * per_code, data.codes[clips] * per_code)


@torch.inference_mode()
def encode_all(
    tokenizer: SpeechTokenizer, data: Recordings, *, noisy: bool, seed: int = 0
) -> NDArray[np.int16]:
    """Codes of all clips in the order of ``data.starts``; ``noisy`` hears them in rooms."""
    device = data.heard.device
    draw = torch.Generator(device).manual_seed(seed)
    out = np.zeros(int(data.codes.sum()), dtype=np.int16)
    centres = tokenizer.encoder.codebook.weight
    for clips in length_batches(data.codes):
        sound = clip_sound(data, clips)
        if noisy:
            sound = augment(sound, draw, 0.9)
        log_mel = whisper_log_mel(sound, tokenizer.config.num_mel_bins)
        pooled = tokenizer.encoder(log_mel)
        found = nearest(pooled, centres).to(torch.int16).cpu().numpy()
        for row, clip in enumerate(clips):
            start, count = data.starts[clip], data.codes[clip]
            out[start : start + count] = found[row, :count]
    return out


def write_codes(folder: Path, data: Recordings, hearings: list[NDArray[np.int16]]) -> None:
    """Write ``folder``/SHARD.npy (hearings, codes) for each shard of ``data``."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(list(data.shards.values()))[:-1]
    for name, codes in zip(data.shards, np.split(np.stack(hearings), ends, axis=1), strict=True):
        np.save(folder / f"{name}.npy", codes)


def read_codes(folder: Path, data: Recordings) -> list[NDArray[np.int16]]:
    """All hearings of ``data``'s codes, in its order; FileNotFoundError where one is missing."""
    return list(np.concatenate([np.load(folder / f"{name}.npy") for name in data.shards], axis=1))
