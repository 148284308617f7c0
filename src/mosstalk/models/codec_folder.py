"""A codec folder: speech tokenizer, flow, vocoder and voices, read strictly."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from mosstalk.config import FlowConfig, HiftConfig, Reader, SpeechTokenizerConfig
from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import read_json
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice, find_voice, load_voice
from mosstalk.models.weights import (
    Store,
    fill,
    fold_weight_norm,
    open_pickled,
    open_safetensors,
    open_sharded,
)
from mosstalk.progress import Progress

FLOW_BLOCK_CODES = {"flow": None, "flow-chunk-5": 5, "flow-chunk-25": 25}
"""The published flow files and the attention block, in codes, that each was trained with.

The one place where a file's name means something. ``None``: full attention, no streaming.
"""
STREAMING_FLOW = "flow-chunk-5"
FLOWS_KEY = "mosstalk_flows"
"""Key of a codec's config under which a release that has not all three flows names its own."""
ONE_VOICE_KEY = "mosstalk_one_voice"
"""Key of a codec's config that is true where the flow was trained on one voice alone."""
_CODEBOOK = "encoder.codebook.weight"
_FINGERPRINT_DIGITS = 16

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class Codec:
    """The loaded codec: ``tokenizer`` listens, ``flow`` and ``vocoder`` speak."""

    folder: Path
    tokenizer: SpeechTokenizer
    flow: FlowDecoder
    vocoder: HiftVocoder
    block_codes: int | None
    """Attention block the flow was trained with; None: made for whole replies alone."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.flow.encoder_proj.weight.device

    @cached_property
    def fingerprint(self) -> str:
        """What tells this codec's codes from another's: see ``read_fingerprint``."""
        return read_fingerprint(self.folder)

    def voice(self, name: str) -> Voice:
        """A voice of this folder by name, or any voice file by path.

        Raises:
            VoiceError: unknown, damaged, or made for another codec.
        """
        path = find_voice(name, self.folder / "voices")
        config = self.flow.config
        return load_voice(
            path,
            code_limit=self.tokenizer.config.quantize_vocab_size,
            mel_bins=config.mel_bins,
            embedding_size=config.spk_embed_dim,
            fingerprint=lambda: self.fingerprint,
        )


def load_codec(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    flow_name: str = STREAMING_FLOW,
    progress: Progress | None = None,
) -> Codec:
    """Read the codec in ``folder`` onto ``device``.

    Raises:
        ConfigError: a config is absent or asks for other arithmetic.
        CheckpointError: a part or tensor is missing, unexpected, misshapen, damaged or not
            finite, or the parts do not fit each other.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the codec's folder with --codec")

    def load(make: Callable[[], _M], store: Store, where: Path) -> _M:
        return build(make, store, where, device=device, dtype=dtype, progress=progress)

    speech_config = SpeechTokenizerConfig.from_folder(folder)
    flow_config = read_flow_config(folder, flow_name)
    hift_config = read_hift_config(folder)
    _check_fit(folder, speech_config, flow_config, hift_config)
    flow = folder / "flow"
    return Codec(
        folder,
        load(lambda: SpeechTokenizer(speech_config), open_sharded(folder), folder),
        load(lambda: FlowDecoder(flow_config), open_part(flow, flow_name), flow / flow_name),
        load(
            lambda: HiftVocoder(hift_config),
            fold_weight_norm(open_part(flow, "hift")),
            flow / "hift",
        ),
        FLOW_BLOCK_CODES[flow_name],
    )


def build(
    make: Callable[[], _M],
    store: Store,
    where: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> _M:
    """A part of the codec, made by ``make`` and filled from ``store``; see ``weights.fill``."""
    with torch.device("meta"):
        module = make()
    unused = module.unused if isinstance(module, SpeechTokenizer) else lambda _: False
    fill(
        module, store, where=str(where), device=device, dtype=dtype,
        unused=unused, progress=progress,
    )  # fmt: skip
    return module


def flow_names(config: SpeechTokenizerConfig) -> list[str]:
    """The flows that a codec has: those it names, else all that are published.

    Raises:
        ConfigError: it names one that is unknown, or names them otherwise than in a list.
    """
    names: list[str] = Reader(config.extra, "config.json").get(
        FLOWS_KEY, list, list(FLOW_BLOCK_CODES)
    )
    for name in names:
        _known_flow(str(name))
    return names


def _known_flow(name: str) -> None:
    if name not in FLOW_BLOCK_CODES:
        raise ConfigError(f"unknown flow {name!r}; choose of {', '.join(FLOW_BLOCK_CODES)}")


def read_flow_config(folder: Path, flow_name: str) -> FlowConfig:
    """Sizes of the flow: ``flow/config.json`` where there is one, else the published ones.

    ``flow/config.yaml`` is never read: evaluating it would run code from the checkpoint.
    """
    _known_flow(flow_name)
    path = folder / "flow" / "config.json"
    values = read_json(path) if path.exists() else {}
    return FlowConfig.from_dict(
        values | {"chunk_size": FLOW_BLOCK_CODES[flow_name] or FlowConfig.chunk_size}, str(path)
    )


def read_hift_config(folder: Path) -> HiftConfig:
    """Sizes of the vocoder: ``flow/hift.json`` where there is one, else the published ones."""
    path = folder / "flow" / "hift.json"
    return HiftConfig.from_dict(read_json(path) if path.exists() else {}, str(path))


def read_fingerprint(folder: Path) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a codec's codebook, as float32 bytes.

    The codebook is what gives codes their meaning, so two codecs with the same one can share
    voices. It is read from the file: the precision a codec was loaded in makes no difference.

    Raises:
        CheckpointError: the speech tokenizer's weights or their codebook cannot be read.
    """
    store = open_sharded(folder)
    if _CODEBOOK not in store:
        raise CheckpointError(f"{folder}: has no {_CODEBOOK}; is this a codec's folder?")
    codebook = store[_CODEBOOK].load().float().contiguous()
    return hashlib.sha256(codebook.numpy().data).hexdigest()[:_FINGERPRINT_DIGITS]


def open_part(folder: Path, stem: str) -> Store:
    """Weights of a part, from the safetensors file this project writes or the published .pt."""
    converted = folder / f"{stem}.safetensors"
    return (
        open_safetensors(converted) if converted.exists() else open_pickled(folder / f"{stem}.pt")
    )


def _check_fit(
    folder: Path, speech: SpeechTokenizerConfig, flow: FlowConfig, hift: HiftConfig
) -> None:
    if speech.quantize_vocab_size > flow.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {speech.quantize_vocab_size} codes, "
            f"the flow embeds only {flow.vocab_size}"
        )
    if flow.mel_bins != hift.in_channels:
        raise CheckpointError(
            f"{folder}: the flow gives {flow.mel_bins} mel bins, the vocoder takes "
            f"{hift.in_channels}"
        )
