"""Whether what serves computes what the reference does, on the card and in the built precision.

The engine is held against the plain network with the same weights, the codec's batched decoder
against the plain one: on the spot, because kernels are compiled for this card alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder, SpeechStream
from mosstalk.constants import OUTPUT_RATE
from mosstalk.conversation import Mode, Row
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.errors import BuildError, PoisonedError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.features import MelSpec, vocoder_mel
from mosstalk.models.generation import Generation, Step
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.voices import Voice, any_voice, list_voices
from mosstalk.reply_options import Limits, SamplingOptions
from mosstalk.synthesis.weights import random_rows, random_voice
from mosstalk.verify.compare import LOW_PRECISION, Check, Comparer
from mosstalk.verify.language_model import PlainNetwork, WholeEngine

FLOAT32_BOUND = 1e-3
QUANTIZED_BOUND = 0.2
"""Relative norms. An input that lies between two 8-bit numbers may be rounded to either."""
LEAD = 4.0
"""Where rows part, the plain network's lead of its own id, over the spread of its logits, is at
most so many bounds: each of the two logits may be off by one of them, and by twice that rarely."""
REPLY_ROWS = 12
_PROMPTS = ((Mode.TEXT, 24), (Mode.AUDIO, 40), (Mode.AUDIO, 300))
"""In which mode, and rows: less than a tile, a few blocks, more than a pass of single rows."""
_GREEDY = SamplingOptions(temperature=0.0, repetition_penalty=1.0)
_CHANNELS = ("text", "audio")
_VOICE_S = 3.2
_BANDS = MelSpec(OUTPUT_RATE, 1024, 256, 20, 0.0, OUTPUT_RATE / 2)
_CODES, _SEED = 20, 5
"""How many codes the checked reply has, at least two hops of them, and what they are drawn by."""


def bound_of(model: LanguageModel) -> float:
    """The largest relative norm of an error of logits that passes."""
    if any(weight.dtype == torch.float8_e4m3fn for weight in model.parameters()):
        return QUANTIZED_BOUND
    return LOW_PRECISION.get(model.dtype, FLOAT32_BOUND)


def require(checks: list[Check]) -> None:
    """Raise BuildError naming the first check that does not hold."""
    failed = next((check for check in checks if not check.passed), None)
    if failed:
        raise BuildError(
            f"check failed: {failed.name}: error {failed.error:.3g}, at most {failed.bound:.3g} "
            f"is rounding {failed.note}".rstrip()
            + "; nothing was written. Run mosstalk verify --path fast, and report it"
        )


def as_values(checks: list[Check]) -> list[dict[str, Any]]:
    """For documents."""
    return [vars(check) | {"passed": check.passed} for check in checks]


@torch.inference_mode()
def check_language(core: EngineCore) -> Iterator[Check]:
    """Logits of prompts, and greedy replies to them, by the engine and by the plain network."""
    model, limit = core.model, core.pool.size * core.pool.rows
    bound, engine, network = bound_of(model), WholeEngine(core), PlainNetwork(model, core.ids)
    for mode, rows in _PROMPTS:
        if rows + REPLY_ROWS >= min(limit, model.config.max_position_embeddings):
            continue
        prompt = random_rows(model, core.ids, mode, 1, rows)[0]
        name = f"{rows} rows of {mode.name.lower()}"
        (_, *found), (_, *plain) = engine.states(prompt), network.states(prompt)
        for channel, one, other in zip(_CHANNELS, found, plain, strict=True):
            yield Check(
                f"{name}, {channel} head",
                _apart(one, other.float()),
                bound,
                note="relative norm of logits",
            )
        yield _check_reply(core, prompt, f"{name}, greedy reply", LEAD * bound)


def _apart(found: Tensor, expected: Tensor) -> float:
    centred = expected - expected.mean(dim=1, keepdim=True)
    return float((found - expected).norm() / centred.norm().clamp_min(1e-12))


def _check_reply(core: EngineCore, prompt: list[Row], name: str, bound: float) -> Check:
    """Equal rows, or a near tie where they part: after that both go their own ways."""
    limits = Limits(REPLY_ROWS)
    plain = list(Generation(core.model, core.model.new_cache(), prompt, core.ids, _GREEDY, limits))
    request = core.submit(core.open(prompt), ReplyParams(_GREEDY, limits, whole_rows=True))
    core.run()
    core.close(request.sequence)
    if isinstance(request.error, PoisonedError):
        return Check(name, float("inf"), bound, note=str(request.error))
    rows = request.reply.rows
    for place, (step, row) in enumerate(zip(plain, rows, strict=False)):
        if step.row != row:
            note = f"rows are equal up to row {place} of {len(plain)}; the lead there"
            return Check(name, _lead(step, row), bound, note=note)
    same = len(plain) == len(rows)
    return Check(name, 0.0 if same else float("inf"), bound, note=f"{len(rows)} rows are equal")


def _lead(step: Step, row: Row) -> float:
    """By how much the plain network prefers its ids to the engine's, in spreads of its logits."""
    leads = [
        float((logits[own] - logits[other]) / logits.std())
        for logits, own, other in zip(
            (step.text_logits, step.audio_logits), step.row, row, strict=True
        )
        if own != other
    ]
    return max(map(abs, leads))


def a_voice(codec: Codec) -> Voice:
    """A voice of the codec's folder; a random one where it has none, as the published codec."""
    names = list_voices(codec.folder / "voices")
    if not names:
        return random_voice(codec, _VOICE_S)
    return codec.voice(any_voice(names))


@torch.inference_mode()
def plain_hops(codec: Codec, voice: Voice) -> list[Tensor]:
    """Sound (n,) of a reply's first hops by the plain decoder, which keeps nothing."""
    return [sound.cpu() for sound in SpeechStream(codec, voice).push(checked_codes(codec))]


def check_codec(
    decoder: SpeechDecoder,
    codec: Codec,
    voice: Voice,
    plain: list[Tensor],
    dtype: torch.dtype | None = None,
) -> list[Check]:
    """The same hops by the decoder that serves, in ``dtype`` (by default the flow's).

    In 16 bit, levels of 20 bands are compared. A pitch is rounded there, and then partials drift
    against one another: whole spectra of a right network differ by up to a fifth.
    """
    reply, codes, checks = decoder.open(voice), checked_codes(codec), list[Check]()
    compare = Comparer(dtype or decoder.flow.options.dtype)
    for hop, expected in enumerate(plain, 1):
        said = codes[len(reply.flow.codes) : reply.codes_needed]
        found = decoder.decode_one(DecodeRequest(reply, said))
        if not compare.exact:
            found, expected = (vocoder_mel(each.cpu(), _BANDS).exp() for each in (found, expected))
        checks.append(compare.tensor(f"codec, hop {hop}", found, expected, wave=True))
    decoder.close(reply)
    return checks


def checked_codes(codec: Codec) -> list[int]:
    """Codes of the reply that is checked."""
    limit = min(codec.flow.config.vocab_size, codec.tokenizer.config.quantize_vocab_size)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(limit, (_CODES,), generator=generator).tolist()
