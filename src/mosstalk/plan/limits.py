"""What a step, a hop and a push must at least move and compute, and what a card needs for that.

Bytes over a card's bandwidth, operations over its rates, from the models' sizes: computed, not
measured. Nothing reaches these times, and nothing can be faster.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mosstalk.config import HiftConfig, LanguageModelConfig
from mosstalk.constants import CODE_MS, CODES_PER_SECOND, MEL_FRAMES_PER_CODE
from mosstalk.conversation import Mode
from mosstalk.errors import DeviceError, OptionError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.hift import KEPT_FRAMES, HiftVocoder
from mosstalk.models.quantization import Quantization
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.plan.sizes import SOUND_DTYPE, Configs, codec_on_meta, codec_parts, language_parts
from mosstalk.reply_options import CONTEXT_S

_KEYS_AND_VALUES = 2
_SCALE_BYTES = 4
_BRANCHES = 2


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved at least once, and operations (a multiply-add is two).

    Of the operations ``fp8`` are products of numbers in E4M3.
    """

    moved_bytes: float
    operations: float
    fp8: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
            self.fp8 + other.fp8,
        )


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a large copy (read and written), and operations a second of a large
    matrix product of random values in ``dtype``, and in E4M3 where it was measured; the best of a
    few runs each.
    """

    bytes_per_s: float
    flops_per_s: float
    dtype: torch.dtype
    fp8_per_s: float | None = None

    def limit_ms(self, work: Work) -> float:
        """The longer of the two: moving the bytes, or doing the operations."""
        computing_s = (work.operations - work.fp8) / self.flops_per_s
        computing_s += work.fp8 / (self.fp8_per_s or self.flops_per_s)
        return 1000 * max(work.moved_bytes / self.bytes_per_s, computing_s)

    def describe(self) -> str:
        """For people."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"copies {self.bytes_per_s / 1e9:,.0f} GB/s, multiplies {kind} at "
            f"{self.flops_per_s / 1e12:,.2f} TFLOP/s"
            + (f", E4M3 at {self.fp8_per_s / 1e12:,.2f}" if self.fp8_per_s else "")
        )


@dataclass(frozen=True)
class Load:
    """``sessions`` conversations of ``kept`` rows that read ``new`` rows each and draw one.

    In ``mode``, whose block and head alone are needed.
    """

    sessions: int
    kept: int
    new: int = 1
    mode: Mode = Mode.AUDIO

    @property
    def name(self) -> str:
        """For tables."""
        if self.new == 1:
            return f"{self.sessions} x 1 row after {self.kept}"
        if self.kept == 0:
            return f"{self.new} rows"
        return f"{self.new} rows after {self.kept}"


def layer_weights(config: LanguageModelConfig) -> int:
    """Weights of the products of one layer."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + _KEYS_AND_VALUES * keys)
    return attention + 3 * config.hidden_size * config.intermediate_size


def layer_channels(config: LanguageModelConfig) -> int:
    """Columns that the products of one layer write: each has a scale where it is quantised."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = queries + _KEYS_AND_VALUES * keys + config.hidden_size
    return attention + 2 * config.intermediate_size + config.hidden_size


def step_work(
    config: LanguageModelConfig,
    dtype: torch.dtype,
    load: Load,
    record: Quantization | None = None,
) -> Work:
    """Weights and kept rows read once, new rows through trunk and one block, a head each.

    Of layers that ``record`` says are in FP8 a weight is a byte, a channel has its scale, and
    products are of numbers in E4M3.
    """
    layers = config.num_shared_layers + config.num_modality_layers
    vocabulary = config.audio_vocab_size if load.mode is Mode.AUDIO else config.vocab_size
    head = config.hidden_size * vocabulary
    weights = layers * layer_weights(config)
    kept_row = layers * _KEYS_AND_VALUES * config.num_key_value_heads * config.head_dim
    seen = load.kept + (load.new + 1) / 2
    queries = config.num_attention_heads * config.head_dim
    attention = layers * load.sessions * load.new * seen * 2 * _KEYS_AND_VALUES * queries
    others = head + kept_row * load.sessions * (load.kept + load.new)
    quantized = _quantized_layers(config, record)
    saved = (dtype.itemsize - 1) * layer_weights(config) - _SCALE_BYTES * layer_channels(config)
    return Work(
        dtype.itemsize * (weights + others) - quantized * saved,
        2.0 * load.sessions * (load.new * weights + head) + attention,
        2.0 * load.sessions * load.new * quantized * layer_weights(config),
    )


def _quantized_layers(config: LanguageModelConfig, record: Quantization | None) -> int:
    """Of the layers that a step reads."""
    if record is None:
        return 0
    return config.num_shared_layers + (config.num_modality_layers if record.blocks == "all" else 0)


def hop_work(
    codec: Codec, dtype: torch.dtype, *, hops: int, voice_frames: int, own_frames: int, steps: int
) -> Work:
    """One hop of a block in each of ``hops`` replies of one voice.

    Each Euler step reads the estimator's weights, the voice's keys and values once for all replies,
    and those of the ``own_frames`` of each. The flow's encoder, a hundredth of it, is left out.
    """
    estimator = flow_work(codec.flow, dtype, hops, voice_frames, own_frames)
    vocoder = vocoder_work(codec.vocoder, dtype, hops)
    return Work(steps * estimator.moved_bytes, steps * estimator.operations) + vocoder


def flow_work(
    flow: FlowDecoder, dtype: torch.dtype, hops: int, voice_frames: int, own_frames: int
) -> Work:
    """One Euler step of the estimator on one block of each of ``hops`` replies."""
    config = flow.config
    weights = sum(weight.numel() for weight in flow.decoder.estimator.parameters())
    frames = config.chunk_size * config.token_mel_ratio
    rows = _BRANCHES * hops * frames
    layers = (config.estimator_mid_blocks + 2) * config.estimator_transformer_blocks
    inner = config.estimator_heads * config.estimator_head_dim
    kept_row = layers * _BRANCHES * _KEYS_AND_VALUES * inner * dtype.itemsize
    seen = voice_frames + own_frames + frames
    return Work(
        weights * dtype.itemsize + kept_row * (voice_frames + hops * (own_frames + frames)),
        2 * rows * weights + layers * 2 * _KEYS_AND_VALUES * rows * seen * inner,
    )


def vocoder_work(vocoder: HiftVocoder, dtype: torch.dtype, hops: int) -> Work:
    """HiFT on the kept frames and those of one block of 20, counted on one run."""
    weights = sum(weight.numel() for weight in vocoder.parameters())
    return Work(weights * dtype.itemsize, hops * _vocoder_operations(vocoder.config))


@cache
def _vocoder_operations(config: HiftConfig) -> int:
    """Counted on another vocoder of these sizes: one in use may lie anywhere, and in parts."""
    frames = KEPT_FRAMES + 20
    mel = torch.zeros(1, config.in_channels, frames)
    source = torch.zeros(1, frames * config.samples_per_frame)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        HiftVocoder(config)(mel, source)
    return counter.get_total_flops()


def push_work(tokenizer: SpeechTokenizer, rows: int, kept_rows: int) -> Work:
    """``rows`` new rows of 20 ms of one stream that has kept ``kept_rows``, in float32."""
    encoder, config = tokenizer.encoder, tokenizer.config
    weights = sum(weight.numel() for weight in encoder.layers.parameters())
    codebook = encoder.codebook.weight.numel()
    attention = config.quantize_position * 4 * rows * (kept_rows + rows) * config.d_model
    kept = config.quantize_position * _KEYS_AND_VALUES * (kept_rows + rows) * config.d_model
    return Work(
        4.0 * (weights + codebook + kept), 2.0 * rows * weights + attention + rows / 2 * codebook
    )


_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_HALVED = ", half of those with sparsity"
ALL = "all"
VOICE_CODES = 85
"""A voice of 6.8 s: 7 s, cut to whole blocks."""
STEP, CROWD, PROMPT = Load(1, 512), Load(64, 1000), Load(1, 0, 512)
TURN_END = Load(1, 1000, 6)
"""Rows that are still to be read when a turn ends: its last block and what opens the reply."""
TALK = Load(1, 1000)
_HEARD_ROWS, _KEPT_ROWS = 20, 750
"""400 ms of live sound after 15 s of it."""
_FIRST_HOP_BLOCKS = 2
"""A trimmed voice's last block sees the reply through the look-ahead, so it is decoded with it."""
SOUND = ("hop_ms", "heard_ms")
"""The same whatever the precision of the language model."""


@dataclass(frozen=True)
class Card:
    """A card as its vendor describes it.

    ``memory_gb`` and ``bandwidth_gb_s`` in 10^9 bytes; rates in 10^12 operations a second, sums in
    float32. ``fp8_tflops`` None: no FP8 products.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    fp32_tflops: float
    source: str


CARDS = {
    card.name: card
    for card in (
        Card("rtx-4090", 24, 1008, 165.2, 330.3, 82.6, _ADA),
        Card("l4", 24, 300, 121, 242.5, 30.3, f"NVIDIA L4 data sheet{_HALVED}"),
        Card("l40s", 48, 864, 362.05, 733, 91.6, "NVIDIA L40S data sheet"),
        Card("a100", 80, 2039, 312, None, 19.5, "NVIDIA A100 80GB data sheet (SXM)"),
        Card("h100", 80, 3350, 989.5, 1979, 67, f"NVIDIA H100 data sheet (SXM){_HALVED}"),
        Card("h200", 141, 4800, 989.5, 1979, 67, f"NVIDIA H200 data sheet (SXM){_HALVED}"),
    )
}


def cards(names: list[str]) -> list[Card]:
    """The cards of these names; ``all`` is every one.

    Raises:
        OptionError: a name that is not in the table.
    """
    for name in names:
        if name != ALL and name not in CARDS:
            raise OptionError(f"--gpu {name}: choose of {', '.join((*CARDS, ALL))}")
    return list(CARDS.values()) if ALL in names else [CARDS[name] for name in names]


def _titled(title: str) -> Any:
    return field(metadata={"title": title})


@dataclass(frozen=True)
class Limits:
    """Milliseconds, and the share of playing time that computing takes; None: no room for it."""

    step_ms: float | None = _titled("a step, 1 x 512 rows, ms")
    crowd_ms: float | None = _titled("a step, 64 x 1000 rows, ms")
    prompt_ms: float | None = _titled("512 rows of a prompt, ms")
    hop_ms: float = _titled("a hop of 5 codes, voice of 6.8 s, ms")
    heard_ms: float = _titled("400 ms of live sound to codes, ms")
    first_audio_ms: float | None = _titled("end of turn to first audio, ms")
    real_time_factor: float | None = _titled("real-time factor, one session")


TITLES = {each.name: each.metadata["title"] for each in fields(Limits)}


def limits_of(configs: Configs, card: Card, precision: str) -> Limits:
    """The limits of one card.

    First audio is the sum of what waits for one another: the last 400 ms to codes, six rows after a
    thousand, the steps to the first hop's last code of look-ahead, and that hop.

    Raises:
        DeviceError: FP8 on a card that has no such products.
    """
    if precision == "fp8" and card.fp8_tflops is None:
        raise DeviceError(f"{card.name} has no FP8 products: plan with --precision bf16")
    a_hop, the_first, hearing, weights = _sound_work(configs)
    half, single = _best(card, card.bf16_tflops), _best(card, card.fp32_tflops)
    hop, first_hop = half.limit_ms(a_hop), half.limit_ms(the_first)
    heard = single.limit_ms(hearing)
    weights += sum(part.bytes for part in language_parts(configs.model, precision))

    def step(load: Load) -> float | None:
        return _step_ms(configs.model, card, precision, load, weights)

    talk, turn_end = step(TALK), step(TURN_END)
    codes = configs.flow.chunk_size
    steps = codes + configs.flow.pre_lookahead_len - 1
    first = heard + turn_end + steps * talk + first_hop if talk and turn_end else None
    factor = (codes * talk + hop) / (codes * CODE_MS) if talk else None
    return Limits(step(STEP), step(CROWD), step(PROMPT), hop, heard, first, factor)


@cache
def _sound_work(configs: Configs) -> tuple[Work, Work, Work, int]:
    """What the codec moves and computes whatever the card (a hop, the first hop, live sound), and
    the bytes of its weights.
    """
    codec = codec_on_meta(configs)
    return (
        _hop_work(codec, 1),
        _hop_work(codec, _FIRST_HOP_BLOCKS),
        push_work(codec.tokenizer, _HEARD_ROWS, _KEPT_ROWS),
        sum(part.bytes for part in codec_parts(codec)),
    )


def _hop_work(codec: Codec, blocks: int) -> Work:
    """``blocks`` blocks of flow and vocoder with the usual memory of a reply."""
    config = codec.flow.config
    own = round(CONTEXT_S * CODES_PER_SECOND) - config.chunk_size
    return hop_work(
        codec,
        SOUND_DTYPE,
        hops=blocks,
        voice_frames=VOICE_CODES * MEL_FRAMES_PER_CODE,
        own_frames=own * MEL_FRAMES_PER_CODE,
        steps=config.n_timesteps,
    )


def _best(card: Card, tflops: float) -> Ceilings:
    """What the vendor says, where what is not in FP8 runs at ``tflops``."""
    fp8_per_s = card.fp8_tflops * 1e12 if card.fp8_tflops else None
    return Ceilings(card.bandwidth_gb_s * 1e9, tflops * 1e12, torch.bfloat16, fp8_per_s)


def _step_ms(
    config: LanguageModelConfig, card: Card, precision: str, load: Load, weights: int
) -> float | None:
    """None where all weights and the load's rows are more than the card's memory."""
    record = Quantization() if precision == "fp8" else None
    work = step_work(config, torch.bfloat16, load, record)
    row = 2 * config.num_kv_layers * config.num_key_value_heads * config.head_dim
    rows = load.sessions * (load.kept + load.new) * row * torch.bfloat16.itemsize
    if weights + rows > card.memory_gb * 1e9:
        return None
    return _best(card, card.bf16_tflops).limit_ms(work)
