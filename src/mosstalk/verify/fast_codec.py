"""Codec cases through what serves people: batches of replies, live sound."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_options import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.codec.vocoder import VocoderReply
from mosstalk.models.hift_stream import KEPT_FRAMES
from mosstalk.models.voices import Voice
from mosstalk.verify.case import Case, pcm_from
from mosstalk.verify.codec import (
    check_flow,
    check_hift,
    check_hops,
    check_speech_tokenizer,
    load_flow,
    load_tokenizer,
    load_vocoder,
)
from mosstalk.verify.compare import Check, Comparer

_COMPANY = 3
"""Replies that are made beside those of a case, with other codes."""
_PAGES = 512
"""More than a case's replies and those beside them ever hold; the default takes gigabytes."""


def check_flow_fast(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """``check_flow``, and every reply hop by hop: alone, then all in one batch with others."""
    yield from check_flow(case, device, compare)
    flow, voice, runs = load_flow(case, device, torch.float32)
    runs = [(prefix, run) for prefix, run in runs if case.weights == case.folder or "hops" in run]
    # On a CPU replies lie side by side in float32; pages, as on a GPU, are verified there too.
    for label, paged in _ways(device, compare):
        batched = batched_flow(flow, FlowOptions(dtype=compare.dtype, paged=paged, pages=_PAGES))
        for prefix, run in runs:
            reply = batched.open(voice)
            yield from check_hops(case, reply, prefix, f"{label}.", run, compare)
            reply.close()
        yield from _check_together(case, batched, voice, runs, f"{label} together.", compare)


def _ways(device: torch.device, compare: Comparer) -> list[tuple[str, bool]]:
    if device.type == "cuda":
        return [("fast", True)]
    return [("paged", True)] + ([("fast", False)] if compare.dtype == torch.float32 else [])


@dataclass
class _Reply:
    """A reply in a batch: its codes, when it joins, and the mels that it got."""

    prefix: str
    reply: FlowReply
    codes: list[int]
    joins: int
    mels: list[Tensor] = field(default_factory=list)
    ended: bool = False


def _check_together(
    case: Case,
    batched: BatchedFlow,
    voice: Voice,
    runs: Sequence[tuple[str, dict[str, Any]]],
    label: str,
    compare: Comparer,
) -> Iterator[Check]:
    """Replies that join one by one, get a code each at a time, and leave."""
    random, limit = Random(0), batched.config.vocab_size
    replies = [
        _Reply(prefix, batched.open(voice), case.tensor(f"{prefix}tokens").tolist(), 2 * number)
        for number, (prefix, _) in enumerate(runs)
    ]
    for _ in range(_COMPANY):
        codes = [random.randrange(limit) for _ in range(random.randrange(1, 40))]
        replies.append(_Reply("", batched.open(voice), codes, random.randrange(12)))
    talking, time = list(replies), 0
    while talking:
        here = [each for each in talking if each.joins <= time]
        hops = [_given(each, time) for each in here]
        for each, mel in zip(here, batched.advance(hops) if hops else [], strict=True):
            each.mels += [mel] if mel.shape[1] else []
            if each.ended:
                batched.close(each.reply)
        talking = [each for each in talking if not each.ended]
        time += 1
    for each in replies[: len(runs)]:
        names = [*(f"hop{index}.mel" for index in range(len(each.mels) - 1)), "final_streaming.mel"]
        for name, mel in zip(names, each.mels, strict=True):
            expected = case.tensor(each.prefix + name)
            yield compare.tensor(f"{each.prefix}{label}{name}", mel, expected)


def _given(each: _Reply, time: int) -> tuple[FlowReply, list[int], bool]:
    """A reply's next code, or its end."""
    place = time - each.joins
    each.ended = place == len(each.codes)
    return each.reply, each.codes[place : place + 1], each.ended


def check_hift_fast(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """``check_hift``, and its chunks in slots among others that come and go."""
    yield from check_hift(case, device, compare)
    if not case.settings.get("chunks"):
        return
    vocoder = load_vocoder(case, device, torch.float32)
    dtype = str(compare.dtype).removeprefix("torch.")
    batched = BatchedHift(vocoder, HiftOptions(dtype=dtype, replies=8))
    mel = case.tensor("mel").to(device)
    chunks: list[int] = case.get("chunks")
    reply, neighbour = batched.open(), batched.open(1)
    for index, part in enumerate(mel.split(chunks, dim=1)):
        final, name = index == len(chunks) - 1, f"chunk{index}.wave"
        wave = batched.push_with_source(
            reply, part, case.tensor(f"chunk{index}.source"), final=final
        )
        yield compare.tensor(f"fast.{name}", wave, case.tensor(name), wave=True)
        neighbour = _moved_on(batched, neighbour, mel, index)
    yield from _check_company(case, batched, mel, compare)


def _moved_on(batched: BatchedHift, reply: VocoderReply, mel: Tensor, turn: int) -> VocoderReply:
    """Give a neighbour frames, or let another take its place."""
    if turn % 2:
        batched.close(reply)
        return batched.open(turn)
    frames = mel[:, : max(KEPT_FRAMES, mel.shape[1] // 2)]
    batched.push([(reply, frames, False)])
    return reply


def _check_company(
    case: Case, batched: BatchedHift, mel: Tensor, compare: Comparer
) -> Iterator[Check]:
    """A reply's sound among others, against its sound alone."""
    chunks: list[int] = case.get("chunks")
    parts = list(mel.split(chunks, dim=1))

    def sound(company: int) -> Tensor:
        replies = [batched.open(seed) for seed in range(company + 1)]
        waves = []
        for index, part in enumerate(parts):
            final = index == len(parts) - 1
            waves.append(batched.push([(reply, part, final) for reply in replies])[0])
        for reply in replies:
            batched.close(reply)
        return torch.cat(waves)

    yield compare.tensor("fast.in company", sound(_COMPANY), sound(0).cpu(), wave=True)


def check_speech_tokenizer_fast(
    case: Case, device: torch.device, compare: Comparer
) -> Iterator[Check]:
    """``check_speech_tokenizer``, and every clip as it arrives: alone, then all at once."""
    yield from check_speech_tokenizer(case, device, compare)
    tokenizer = load_tokenizer(case, device, compare.dtype)
    live, random = LiveTokenizer(tokenizer), Random(0)
    names = [clip["clip"] for clip in case.get("clips")]
    clips = [_slices(pcm_from(case.tensor(f"{name}.pcm16")), random) for name in names]
    for name, slices in zip(names, clips, strict=True):
        state = live.open()
        for part in slices:
            live.push(state, part)
        live.finish(state)
        yield compare.ids(f"{name}.live tokens", state.codes, case.tensor(f"{name}.tokens"))
    for name, codes in zip(names, _heard_together(live, clips), strict=True):
        yield compare.ids(f"{name}.live tokens together", codes, case.tensor(f"{name}.tokens"))


def _slices(pcm: Tensor, random: Random) -> list[Tensor]:
    cuts = sorted(random.randrange(len(pcm) + 1) for _ in range(random.randrange(3, 20)))
    return [pcm[start:end] for start, end in pairwise([0, *cuts, len(pcm)])]


def _heard_together(live: LiveTokenizer, clips: Sequence[list[Tensor]]) -> list[list[int]]:
    states = [live.open() for _ in clips]
    for turn in range(max(map(len, clips))):
        some = [(s, clip[turn]) for s, clip in zip(states, clips, strict=True) if turn < len(clip)]
        live.push_many(*map(list, zip(*some, strict=True)))
    for state in states:
        live.finish(state)
    return [list(chain(state.codes)) for state in states]
