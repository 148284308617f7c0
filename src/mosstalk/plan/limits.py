"""What a card could do at best: bytes over its bandwidth, operations over its rates.

Computed, not measured: nothing reaches these times, and nothing can be faster.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS, CODES_PER_SECOND, MEL_FRAMES_PER_CODE
from mosstalk.errors import DeviceError, OptionError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.quantization import Quantization
from mosstalk.plan.sizes import SOUND_DTYPE, Configs, codec_on_meta, codec_parts, language_parts
from mosstalk.plan.work import Ceilings, Load, Work, hop_work, push_work, step_work
from mosstalk.reply_options import CONTEXT_S

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
    hop_work, first_work, heard_work, weights = _sound_work(configs)
    half, single = _best(card, card.bf16_tflops), _best(card, card.fp32_tflops)
    hop, first_hop = half.limit_ms(hop_work), half.limit_ms(first_work)
    heard = single.limit_ms(heard_work)
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
