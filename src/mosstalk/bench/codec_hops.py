"""How long a hop takes: replies at once, early and late hops, and the form that recomputes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.bench.timed import Run, Timed, run_timed
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder, SpokenReply
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import RecomputingFlowStream
from mosstalk.models.hift_stream import HiftStream
from mosstalk.models.voices import Voice
from mosstalk.progress import Progress

_SEED = 7
_RECOMPUTED, _BEFORE = 2, 20
FIRST = "first"


@dataclass(frozen=True)
class Crowd:
    """``replies`` at once in one voice, each ``hops`` long; ``stretches`` are the hops, from 1 on,
    whose times are taken together, by what they are called.
    """

    replies: int
    hops: int
    stretches: dict[str, range]

    @classmethod
    def of(cls, replies: int, hops: int) -> "Crowd":
        """The first hop; the ten after it; and if there are that many, the last ten."""
        early = range(2, min(hops, 11) + 1)
        stretches = {FIRST: range(1, 2), f"{early[0]}-{early[-1]}": early}
        if hops >= 40:
            stretches[f"{hops - 9}-{hops}"] = range(hops - 9, hops + 1)
        return cls(replies, hops, stretches)


def measure_crowd(
    decoder: SpeechDecoder, voice: Voice, crowd: Crowd, rounds: int, tell: Progress
) -> list[Timed]:
    """Each stretch's times: all replies' hops, until all of their sound is there.

    An untimed walk through all hops comes first, whose sound the timed ones must repeat bit for
    bit: a hop whose codes were not those of the one before, or that was not written, would differ.
    ``rounds`` timed walks: the first hop comes once in each.
    """
    cold = list[float]()
    expected = [run.output for run in _walk(decoder, voice, crowd, cold)]
    times: dict[str, list[float]] = {name: [] for name in crowd.stretches}
    wrong: dict[str, list[str]] = {name: [] for name in crowd.stretches}
    for number in range(rounds):
        tell(f"{crowd.replies} replies", number, rounds)
        for hop, run in enumerate(_walk(decoder, voice, crowd), 1):
            fault = _fault(run.output, expected[hop - 1])
            for name, hops in crowd.stretches.items():
                if hop in hops:
                    times[name].append(run.ms)
                    wrong[name] += [fault] if fault else []
    return [
        Timed(
            f"{crowd.replies} x hop {name}",
            cold[0] if name == FIRST else None,
            crowd.hops,
            tuple(times[name]),
            tuple(wrong[name]),
        )
        for name in crowd.stretches
    ]


def _walk(
    decoder: SpeechDecoder, voice: Voice, crowd: Crowd, cold: list[float] | None = None
) -> Iterator[Run[list[Tensor]]]:
    """Hop by hop through all replies, each with codes of its own."""
    replies = [decoder.open(voice, seed) for seed in range(crowd.replies)]
    codes = _codes(decoder, crowd)
    try:
        for _ in range(crowd.hops):
            sayings = [_next(reply, codes[place]) for place, reply in enumerate(replies)]
            run = run_timed(lambda: _said(decoder, sayings), decoder.device)  # noqa: B023
            if cold is not None:
                cold.append(run.ms)
            yield Run(run.ms, [sound.cpu() for sound in run.output])
    finally:
        for reply in replies:
            decoder.close(reply)


def _said(decoder: SpeechDecoder, sayings: Sequence[DecodeRequest]) -> list[Tensor]:
    """In runs of as many hops as a server makes at once."""
    most = decoder.hops_at_once
    runs = [sayings[start : start + most] for start in range(0, len(sayings), most)]
    return [sound for run in runs for sound in decoder.decode(run)]


def _codes(decoder: SpeechDecoder, crowd: Crowd) -> list[list[int]]:
    config = decoder.flow.config
    longest = (crowd.hops + 2) * config.chunk_size + config.pre_lookahead_len
    random = torch.Generator().manual_seed(_SEED)
    limit = min(config.vocab_size, 16384)
    return torch.randint(0, limit, (crowd.replies, longest), generator=random).tolist()


def _next(reply: SpokenReply, codes: Sequence[int]) -> DecodeRequest:
    """The codes of the reply's next hop, those that it waits for."""
    return DecodeRequest(reply, codes[len(reply.flow.codes) : reply.codes_needed])


def _fault(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What is wrong with the sounds of a hop; nothing if they are as expected."""
    for sound, wanted in zip(found, expected, strict=True):
        if sound.shape != wanted.shape or not len(sound):
            return f"{tuple(sound.shape)} samples instead of {tuple(wanted.shape)}"
        if not bool(sound.isfinite().all()):
            return "samples that are not finite"
        if not torch.equal(sound, wanted):
            apart = float((sound - wanted).abs().max())
            return f"unlike an untimed run by up to {apart:.2g}"
    return ""


def measure_recomputing(codec: Codec, voice: Voice, hops: Sequence[int]) -> list[Timed]:
    """One reply by the form that decodes voice and reply anew at each hop, as public ones do.

    Only the ``hops`` that are asked for are computed: none depends on another.
    """
    random = torch.Generator().manual_seed(_SEED)
    limit = min(codec.flow.config.vocab_size, 16384)
    longest = (max(hops, default=0) + 2) * codec.flow.config.chunk_size + 8
    codes = torch.randint(0, limit, (longest,), generator=random).tolist()
    rows = list[Timed]()
    for hop in hops:
        times = [_recomputed_ms(codec, voice, codes, hop) for _ in range(_RECOMPUTED + 1)]
        rows.append(Timed(f"1 x hop {hop}, recomputing", times[0], 1, tuple(times[1:])))
    return rows


@torch.inference_mode()
def _recomputed_ms(codec: Codec, voice: Voice, codes: list[int], hop: int) -> float:
    """Milliseconds of hop number ``hop``, its predecessors taken as played."""
    flow, vocoder = RecomputingFlowStream(codec.flow, voice), HiftStream(codec.vocoder)
    if hop > 1:
        flow.done_codes = flow.hop_codes + (hop - 2) * codec.flow.config.chunk_size
        flow.codes = codes[: flow.done_codes]
        vocoder.push(voice.mel[:_BEFORE].T.to(codec.device))
    missing = codes[flow.done_codes : flow.codes_needed]
    return run_timed(lambda: [vocoder.push(mel) for mel in flow.push(missing)], codec.device).ms
