"""Whisper tiny.en (Radford et al. 2022) in PyTorch, from CTranslate2's ``model.bin``.

The encoder is the teacher, the decoder reads what the student made: it is never trained.
Shapes: B segments, T frames of 20 ms, N text tokens, C = 384.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.models.speech_tokenizer import Encoder, EncoderAttention, EncoderLayer

START, END, NO_TIMES = 50257, 50256, 50362
"""Ids of the English-only models: start of transcript, end of text, no timestamps."""
VOCABULARY = 51864
MOST_TOKENS = 448
FRAMES = 1500
"""Rows of the encoder in its 30 s."""
SIZES: dict[str, Any] = {
    "d_model": 384,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "encoder_layers": 4,
    "num_mel_bins": 80,
    "max_source_positions": FRAMES,
    "pooling_kernel_size": 4,
    "quantize_position": 4,
    "quantize_vocab_size": 1024,
}
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def read_model_bin(path: Path) -> dict[str, Tensor]:
    """All tensors of CTranslate2's file, version 6, by its own names."""
    data, place = path.read_bytes(), 0

    def number(form: str) -> int:
        nonlocal place
        place += struct.calcsize(form)
        return int(struct.unpack_from(form, data, place - struct.calcsize(form))[0])

    def text() -> str:
        nonlocal place
        length = number("<H")
        place += length
        return data[place - length : place - 1].decode()

    if number("<I") != 6 or text() != "WhisperSpec":
        raise ValueError(f"{path}: not CTranslate2's form of Whisper, version 6")
    number("<I")
    found = {}
    for _ in range(number("<I")):
        name = text()
        shape = [number("<I") for _ in range(number("<B"))]
        kind, size = number("<B"), number("<I")
        values = np.frombuffer(data[place : place + size], _TYPES[kind])
        found[name] = torch.from_numpy(values.reshape(shape).copy())
        place += size
    return found


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """CTranslate2's tensors under the names of ``Encoder`` and ``Decoder``, with a prefix each."""
    out: dict[str, Tensor] = {}

    def norm(source: str, name: str) -> None:
        out[f"{name}.weight"] = tensors[f"{source}/gamma"]
        out[f"{name}.bias"] = tensors[f"{source}/beta"]

    def linear(source: str, *names: str) -> None:
        weights = tensors[f"{source}/weight"].chunk(len(names))
        biases = tensors[f"{source}/bias"].chunk(len(names))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            out[f"{name}.weight"] = weight
            if not name.endswith("k_proj"):
                out[f"{name}.bias"] = bias

    for side in ("encoder", "decoder"):
        for layer in range(SIZES["encoder_layers"]):
            old, new = f"{side}/layer_{layer}", f"{side}.layers.{layer}"
            attention = f"{new}.self_attn"
            qkv = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
            linear(f"{old}/self_attention/linear_0", *qkv)
            linear(f"{old}/self_attention/linear_1", f"{attention}.out_proj")
            norm(f"{old}/self_attention/layer_norm", f"{new}.self_attn_layer_norm")
            linear(f"{old}/ffn/linear_0", f"{new}.fc1")
            linear(f"{old}/ffn/linear_1", f"{new}.fc2")
            norm(f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            if side == "decoder":
                cross = f"{new}.encoder_attn"
                linear(f"{old}/attention/linear_0", f"{cross}.q_proj")
                linear(f"{old}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                linear(f"{old}/attention/linear_2", f"{cross}.out_proj")
                norm(f"{old}/attention/layer_norm", f"{new}.encoder_attn_layer_norm")
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        positions = tensors[f"{side}/position_encodings/encodings"]
        out[f"{side}.embed_positions.weight"] = positions
    for name in ("conv1", "conv2"):
        out[f"encoder.{name}.weight"] = tensors[f"encoder/{name}/weight"]
        out[f"encoder.{name}.bias"] = tensors[f"encoder/{name}/bias"]
    out["decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]
    return out


def pack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the token embedding in 8 bits, a scale for each row: half the size."""
    table = weights["decoder.embed_tokens.weight"].float()
    scale = table.abs().amax(1, keepdim=True) / 127
    packed = {name: value.half() for name, value in weights.items()}
    packed["decoder.embed_tokens.weight"] = (table / scale).round().to(torch.int8)
    packed["decoder.embed_tokens.scale"] = scale.half()
    return packed


def unpack(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 weights from what ``pack`` made."""
    weights = {name: value.float() for name, value in packed.items() if "scale" not in name}
    weights["decoder.embed_tokens.weight"] *= packed["decoder.embed_tokens.scale"].float()
    return weights


class Teacher(nn.Module):
    """Whisper's own encoder: both ways, 30 s at once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(SpeechTokenizerConfig.from_dict(SIZES))
        self.layer_norm = nn.LayerNorm(SIZES["d_model"])

    def forward(self, log_mel: Tensor) -> Tensor:
        """Log-mel (B, 80, 2T) to features (B, T, C)."""
        encoder = self.encoder
        x = F.gelu(F.conv1d(log_mel, encoder.conv1.weight, encoder.conv1.bias, padding=1))
        x = F.gelu(F.conv1d(x, encoder.conv2.weight, encoder.conv2.bias, stride=2, padding=1))
        x = x.mT + encoder.embed_positions.weight[: x.shape[-1]]
        for layer in cast(Iterable[EncoderLayer], encoder.layers):
            inner = layer.self_attn_layer_norm(x)
            own = read_with(layer.self_attn, inner)
            x = x + attend(layer.self_attn, inner, own, causal=False)
            x = x + layer.feed_forward(x)
        return cast(Tensor, self.layer_norm(x))


def split(values: Tensor, heads: int) -> Tensor:
    """(B, N, C) to (B, heads, N, C / heads)."""
    return values.unflatten(-1, (heads, -1)).transpose(1, 2)


def read_with(weights: EncoderAttention, read: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``read`` (B, T, C)."""
    return split(weights.k_proj(read), weights.heads), split(weights.v_proj(read), weights.heads)


def attend(
    weights: EncoderAttention, x: Tensor, read: tuple[Tensor, Tensor], *, causal: bool
) -> Tensor:
    """Attention of ``x`` (B, N, C) over what ``read_with`` made."""
    query = split(weights.q_proj(x), weights.heads)
    mixed = F.scaled_dot_product_attention(query, *read, is_causal=causal)
    return cast(Tensor, weights.out_proj(mixed.transpose(1, 2).flatten(2)))


class DecoderLayer(nn.Module):
    """A pre-LayerNorm layer that reads the encoder's features."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = SIZES["d_model"], SIZES["encoder_attention_heads"]
        self.self_attn = EncoderAttention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.encoder_attn = EncoderAttention(width, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, SIZES["encoder_ffn_dim"])
        self.fc2 = nn.Linear(SIZES["encoder_ffn_dim"], width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, read: tuple[Tensor, Tensor]) -> Tensor:
        """(B, N, C) to the same; ``read`` are the features' keys and values."""
        inner = self.self_attn_layer_norm(x)
        x = x + attend(self.self_attn, inner, read_with(self.self_attn, inner), causal=True)
        x = x + attend(self.encoder_attn, self.encoder_attn_layer_norm(x), read, causal=False)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Decoder(nn.Module):
    """Whisper's decoder: what text the features tell."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["d_model"]
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.embed_positions = nn.Embedding(MOST_TOKENS, width)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(SIZES["encoder_layers"]))
        self.layer_norm = nn.LayerNorm(width)

    def read(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of features (B, T, C) in each layer."""
        layers = cast(Iterable[DecoderLayer], self.layers)
        return [read_with(layer.encoder_attn, features) for layer in layers]

    def forward(self, tokens: Tensor, read: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Tokens (B, N), and what ``read`` made of the features, to hidden states (B, N, C)."""
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        for layer, own in zip(self.layers, read, strict=True):
            x = layer(x, own)
        return cast(Tensor, self.layer_norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states (..., C): (..., vocabulary)."""
        return hidden @ self.embed_tokens.weight.T

    @torch.no_grad()
    def transcribe(self, features: Tensor, most: int = 60) -> list[list[int]]:
        """Greedy text of features (B, T, C), the tokens of each without the special ones."""
        device = features.device
        rows, read = features.shape[0], self.read(features)
        tokens = torch.tensor([[START, NO_TIMES]], device=device).repeat(rows, 1)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        for _ in range(most):
            logits = self.logits(self(tokens, read)[:, -1]).float()
            logits[:, START:] = -torch.inf
            chosen = torch.where(ended, END, logits.argmax(-1))
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            ended |= chosen == END
            if bool(ended.all()):
                break
        return [[t for t in row if t < END] for row in tokens.tolist()]


def load_whisper(weights: dict[str, Tensor]) -> tuple[Teacher, Decoder]:
    """Both halves, frozen, from ``renamed`` or ``unpack``."""
    teacher, decoder = Teacher(), Decoder()
    own = {name: value.float() for name, value in weights.items()}
    encoder = {
        name.removeprefix("encoder."): value
        for name, value in own.items()
        if name.startswith("encoder.")
    }
    encoder["codebook.weight"] = torch.zeros_like(teacher.encoder.codebook.weight)
    norm = {key: encoder.pop(f"layer_norm.{key}") for key in ("weight", "bias")}
    with torch.no_grad():
        teacher.encoder.load_state_dict(encoder)
        teacher.layer_norm.load_state_dict(norm)
        decoder.load_state_dict(
            {n.removeprefix("decoder."): v for n, v in own.items() if n.startswith("decoder.")}
        )
    return teacher.requires_grad_(False).eval(), decoder.requires_grad_(False).eval()
