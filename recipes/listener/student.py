"""The student: the contract's speech tokenizer with Whisper tiny.en's weights, and its reader.

Two ways lead from its rows of 20 ms back to Whisper's decoder. The first takes the encoder's own
rows, which shows what causality costs. The second pools four rows, quantises them, and lets a
reader, which sees both ways as a language model that has heard all of an utterance does, say
what Whisper's encoder would have made. Shapes: B segments, T rows of 20 ms, K codes, C = 384.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.speech_tokenizer import Encoder, SpeechTokenizer
from recipes.listener.whisper import FRAMES, SIZES, Teacher
from recipes.pocket.quantizer import Quantized, Quantizer
from recipes.pocket.tokenizer import Mixer, sinusoids

STYLE = 256
MEL_BINS = 80
_SILENCE_SHARE = 0.1
"""Share of the codes without speech that move the codebook."""


class Reader(nn.Module):
    """Codes' values to Whisper's features and the mel, both at 50 rows a second; not shipped."""

    positions: Tensor

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        width = SIZES["d_model"]
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, width)
        self.register_buffer("positions", sinusoids(375, width), persistent=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 6, 1024, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.place = nn.Parameter(torch.randn(4, width) * 0.1)
        self.fast = nn.Sequential(*[Mixer(width) for _ in range(3)])
        self.features = nn.Linear(width, width)
        self.style = nn.Linear(STYLE, width)
        self.mel_mixer = Mixer(width)
        self.mel = nn.Linear(width, MEL_BINS)

    def forward(self, values: Tensor) -> Tensor:
        """(B, K, C) to inner states (B, 4K, C)."""
        x = self.enter(self.norm(values)) + self.positions[: values.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.fast((x[:, :, None] + self.place).flatten(1, 2))

    def mel_of(self, inner: Tensor, styles: Tensor) -> Tensor:
        """The speaker's mel (B, 4K, 80) of inner states and styles (B, K, 256)."""
        who = self.style(styles).repeat_interleave(4, dim=1)
        return self.mel(self.mel_mixer(inner + who))


class Encoding(NamedTuple):
    """What the quantised way made: features (B, T, C), ``inner`` for the mel, codes (B, K)."""

    features: Tensor
    inner: Tensor
    codes: Tensor
    commitment: Tensor


def _counted(speech: Tensor) -> Tensor:
    """Codes (B * K,) that may move the codebook: those of ``speech`` (B, K), and a few others."""
    drawn = torch.rand(speech.numel(), device=speech.device) < _SILENCE_SHARE
    return speech.flatten() | drawn


class Student(nn.Module):
    """Tokenizer, codebook in training, the features' norm and the reader.

    ``codes`` 0 leaves the pooled rows as they are; ``look_ahead`` are the rows by which the
    encoder's features come late, so that so much sound after a row is known.
    """

    mean: Tensor
    spread: Tensor
    scale: Tensor
    quantizer: Quantizer | None

    def __init__(self, codes: int, look_ahead: int) -> None:
        super().__init__()
        config = SIZES | {"quantize_vocab_size": max(codes, 1)}
        self.tokenizer = SpeechTokenizer(SpeechTokenizerConfig.from_dict(config))
        positions = self.tokenizer.encoder.embed_positions.weight.requires_grad_(False)
        positions.copy_(sinusoids(FRAMES, SIZES["d_model"]))
        self.tokenizer.encoder.codebook.weight.requires_grad_(False)
        self.quantizer = Quantizer(codes, SIZES["d_model"]) if codes else None
        self.layer_norm = nn.LayerNorm(SIZES["d_model"])
        self.reader = Reader()
        self.look_ahead = look_ahead
        self.register_buffer("mean", torch.zeros(SIZES["d_model"]))
        self.register_buffer("spread", torch.ones(SIZES["d_model"]))
        self.register_buffer("scale", torch.ones(()))

    @property
    def encoder(self) -> Encoder:
        """The part that ships, with the codebook."""
        return self.tokenizer.encoder

    @torch.no_grad()
    def begin_as(self, teacher: Teacher) -> None:
        """Take Whisper's weights."""
        own = teacher.encoder.state_dict()
        own["codebook.weight"] = self.encoder.codebook.weight
        self.encoder.load_state_dict(own)
        self.layer_norm.load_state_dict(teacher.layer_norm.state_dict())

    def rows(self, sound: Tensor) -> Tensor:
        """Sound (B, n) to the encoder's rows (B, T, C), causal."""
        encoder = self.encoder
        x = F.gelu(encoder.conv1(F.pad(whisper_log_mel(sound, SIZES["num_mel_bins"]), (2, 0))))
        x = F.gelu(encoder.conv2(F.pad(x, (2, 0)))).mT
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x)
        return x

    def early(self, rows: Tensor) -> Tensor:
        """The first way: features (B, T, C) in Whisper's own time, zeros where they are late."""
        late = self.look_ahead + 1
        # The causal convolutions alone are one row late.
        return F.pad(self.layer_norm(rows)[:, late:], (0, 0, 0, late))

    def heard(self, rows: Tensor, speech: Tensor | None = None) -> Encoding:
        """The second way; ``speech`` (B, K) says which codes may move the codebook."""
        pooled = self.encoder.pooled(rows)
        if self.quantizer is None:
            codes = torch.zeros(pooled.shape[:2], dtype=torch.long, device=pooled.device)
            found = Quantized(pooled, codes, pooled.float().square().mean() * 0)
        else:
            found = self.quantizer(pooled, None if speech is None else _counted(speech))
        inner = self.reader(found.values)
        features = self.reader.features(inner).float() * self.spread + self.mean
        return Encoding(features, inner, found.codes, found.commitment / self.scale)

    @torch.no_grad()
    def begin_codebook(self, points: Tensor, draw: torch.Generator) -> None:
        """Place the codebook on pooled rows (n, C); their variance scales the commitment."""
        self.scale.copy_(points.var(0).mean())
        if self.quantizer is not None:
            self.quantizer.begin(points, draw)

    @torch.no_grad()
    def settle(self) -> None:
        """Give the tokenizer the codebook that training made."""
        if self.quantizer is not None:
            self.encoder.codebook.weight.copy_(self.quantizer.codebook)
