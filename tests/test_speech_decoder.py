"""Codes of many replies to sound: as each alone, from memory that comes back."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from test_bigvgan import SMALL, as_stored, publish, small
from torch import Tensor

from mosstalk import Pipeline
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.hift_vocoder import HiftOptions
from mosstalk.codec.speech_decoder import (
    DecodeRequest,
    DecoderOptions,
    DecoderStream,
    SpeechDecoder,
    SpeechStream,
    SpokenReply,
)
from mosstalk.constants import OUTPUT_SAMPLES_PER_CODE
from mosstalk.errors import CodecFullError, ConfigError, OptionError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.voices import Voice
from mosstalk.reply_options import SoundRequest
from mosstalk.session.workers import DecoderWorker


@pytest.fixture(scope="module")
def codec(pipeline: Pipeline) -> Codec:
    return pipeline.codec


@pytest.fixture(scope="module")
def voice(codec: Codec) -> Voice:
    return codec.voice("default")


def codes_of(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000) for _ in range(count)]


def heard(stream: SpeechStream | DecoderStream, codes: list[int], piece: int) -> list[Tensor]:
    sounds = list[Tensor]()
    for start in range(0, len(codes), piece):
        sounds += stream.push(codes[start : start + piece])
    last = stream.finish()
    return sounds if last is None else [*sounds, last]


@pytest.mark.parametrize(
    ("count", "piece"),
    [
        *((count, 7) for count in (0, 1, 4, 8, 9, 13)),
        *((9, 1), (31, 40)),
        # Slow: every length in every piece.
        *(
            pytest.param(count, piece, marks=pytest.mark.slow)
            for count in (0, 1, 4, 8, 9, 13, 31)
            for piece in (1, 7, 40)
        ),
    ],
)
def test_a_stream_gives_what_the_plain_one_does(
    codec: Codec, voice: Voice, count: int, piece: int
) -> None:
    codes = codes_of(count)
    found = heard(DecoderStream(SpeechDecoder(codec), voice, 3), codes, piece)
    plain = heard(SpeechStream(codec, voice, 3), codes, piece)
    assert [len(sound) for sound in found] == [len(sound) for sound in plain]
    for sound, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(sound, expected, rtol=0, atol=5e-4)
    assert sum(map(len, found)) == count * OUTPUT_SAMPLES_PER_CODE


def next_hop(reply: SpokenReply, codes: list[int]) -> DecodeRequest:
    done = len(reply.flow.codes)
    hop = codes[done : reply.codes_needed]
    return DecodeRequest(reply, hop, last=len(hop) < reply.codes_needed - done)


def test_in_company_a_reply_sounds_bit_for_bit_as_alone(codec: Codec, voice: Voice) -> None:
    decoder, random = SpeechDecoder(codec), Random(1)
    lengths = {seed: random.randrange(1, 40) for seed in range(5)}
    alone = {
        seed: torch.cat(heard(DecoderStream(decoder, voice, seed), codes_of(count, seed), 1))
        for seed, count in lengths.items()
    }
    replies = {seed: decoder.open(voice, seed) for seed in lengths}
    together: dict[int, list[Tensor]] = {seed: [] for seed in lengths}
    while replies:
        chosen = random.sample(sorted(replies), random.randrange(1, len(replies) + 1))
        requests = [next_hop(replies[seed], codes_of(lengths[seed], seed)) for seed in chosen]
        for seed, request, sound in zip(chosen, requests, decoder.decode(requests), strict=True):
            together[seed].append(sound)
            if request.last:
                decoder.close(replies.pop(seed))
    for seed, sounds in together.items():
        assert torch.equal(torch.cat(sounds), alone[seed])


def test_what_a_reply_held_comes_back_however_it_ends(codec: Codec, voice: Voice) -> None:
    decoder = SpeechDecoder(codec)
    decoder.prepare(voice)
    voices, _ = decoder.figures()
    reply = decoder.open(voice)
    decoder.decode_one(DecodeRequest(reply, codes_of(8)))
    flow, vocoder = decoder.figures()
    assert (flow.pages_in_use > voices.pages_in_use, vocoder.slots_used) == (True, 1)
    decoder.close(reply)
    decoder.close(reply)
    stream = DecoderStream(decoder, voice)
    stream.push(codes_of(8))
    del stream  # dropped in the middle
    flow, vocoder = decoder.figures()
    assert (flow.pages_in_use, vocoder.slots_used) == (voices.pages_in_use, 0)


@pytest.mark.parametrize("short", ["places", "pages"])
def test_a_full_decoder_refuses_and_nothing_has_changed(
    codec: Codec, voice: Voice, short: str
) -> None:
    flow, hift = FlowOptions(), HiftOptions()
    alone = SpeechDecoder(codec).flow
    alone.prepare(voice)
    pages = alone.figures().pages_in_use + 3
    options = DecoderOptions(
        replace(flow, pages=pages) if short == "pages" else flow,
        replace(hift, replies=1) if short == "places" else hift,
    )
    decoder = SpeechDecoder(codec, options)
    first, second = decoder.open(voice), decoder.open(voice, 1)
    decoder.decode_one(DecodeRequest(first, codes_of(8)))
    with pytest.raises(CodecFullError):
        decoder.decode(
            [DecodeRequest(first, codes_of(5, 2)), DecodeRequest(second, codes_of(8, 1))]
        )
    assert decoder.figures()[1].slots_used == 1
    decoder.close(first)
    found = decoder.decode_one(DecodeRequest(second, codes_of(8, 1)))
    plain = SpeechStream(codec, voice, 1).push(codes_of(8, 1))[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=5e-4)


@pytest.mark.parametrize("context_s", [0.4, 2.0])
def test_who_has_a_place_finds_pages_to_the_end(
    codec: Codec, voice: Voice, context_s: float
) -> None:
    places, request = 3, SoundRequest(context_s=context_s)
    options = DecoderOptions.of(request, codec.device, places)
    decoder = SpeechDecoder(codec, options)
    decoder.prepare(voice)
    more = replace(options.flow, replies=places + 1).page_count(decoder.flow.layout)
    pool = decoder.flow.pool
    pool.take(pool.free - places * (more - pool.size))  # what is meant for other voices
    replies = [decoder.open(voice, seed) for seed in range(places)]

    def hop(reply: SpokenReply) -> list[int]:
        return codes_of(reply.codes_needed - len(reply.flow.codes))

    for _ in range(8):
        decoder.decode([DecodeRequest(reply, hop(reply)) for reply in replies])
    # The longest that can be left: one code less than another hop.
    sounds = decoder.decode([DecodeRequest(reply, hop(reply)[1:], last=True) for reply in replies])
    assert all(len(sound) for sound in sounds)


class Refusing(SpeechDecoder):
    """Counts the runs that it refused."""

    refusals = 0

    def decode(self, requests: Sequence[DecodeRequest]) -> list[Tensor]:
        try:
            return super().decode(requests)
        except CodecFullError:
            self.refusals += 1
            raise


def test_more_replies_than_places_are_all_spoken_and_no_run_is_refused(
    codec: Codec, voice: Voice
) -> None:
    decoder = Refusing(codec, DecoderOptions.of(SoundRequest(), codec.device, 2))

    async def speak(worker: DecoderWorker, seed: int) -> int:
        reply = worker.open(voice, seed)
        first = await worker.decode(DecodeRequest(reply, codes_of(reply.codes_needed)), seed)
        rest = await worker.decode(DecodeRequest(reply, codes_of(4), last=True), seed)
        worker.close(reply)
        return len(first) + len(rest) - OUTPUT_SAMPLES_PER_CODE * len(reply.flow.codes)

    async def main() -> list[int]:
        worker = DecoderWorker(decoder, 8)
        try:
            return await asyncio.gather(*(speak(worker, seed) for seed in range(7)))
        finally:
            await asyncio.to_thread(worker.stop)

    assert asyncio.run(main()) == [0] * 7
    assert decoder.refusals == 0


class Counting(SpeechDecoder):
    """Counts the hops of each run."""

    hops: Sequence[int] = ()

    def decode(self, requests: Sequence[DecodeRequest]) -> list[Tensor]:
        self.hops = [*self.hops, len(requests)]
        return super().decode(requests)


def test_beside_others_the_background_has_few_hops_of_a_run(codec: Codec, voice: Voice) -> None:
    decoder = Counting(codec, DecoderOptions.of(SoundRequest(), codec.device, 16))

    async def main() -> tuple[int, int]:
        worker = DecoderWorker(decoder, 8)
        other = worker.open(voice, 0)
        others = [worker.open(voice, seed, background=True) for seed in range(1, 8)]

        async def hop(reply: SpokenReply) -> None:
            await worker.decode(DecodeRequest(reply, codes_of(reply.codes_needed)), 0.0)

        async def most_at_once() -> int:
            decoder.hops = []
            await asyncio.gather(*(hop(reply) for reply in others))
            return max(decoder.hops)

        try:
            await hop(other)
            beside = await most_at_once()
            worker.close(other)
            # A run of its own ends after the close that was asked for before it.
            await hop(others[0])
            return beside, await most_at_once()
        finally:
            await asyncio.to_thread(worker.stop)

    beside, alone = asyncio.run(main())
    assert beside <= 4 < alone


def test_in_the_background_the_hop_that_is_due_first_is_made_first(
    codec: Codec, voice: Voice
) -> None:
    decoder = SpeechDecoder(codec, DecoderOptions.of(SoundRequest(), codec.device, 16))

    async def main() -> list[float]:
        worker, made = DecoderWorker(decoder, 1), list[float]()

        async def hop(due_s: float) -> None:
            reply = worker.open(voice, 0, background=True)
            await worker.decode(DecodeRequest(reply, codes_of(reply.codes_needed)), due_s)
            made.append(due_s)

        try:
            await asyncio.gather(*map(hop, (9.0, 3.0, 5.0, 1.0)))
        finally:
            await asyncio.to_thread(worker.stop)
        return made

    assert asyncio.run(main()) == [9.0, 1.0, 3.0, 5.0]  # the first found the worker idle


def test_a_reply_can_be_spoken_by_bigvgan(codec: Codec, voice: Voice, tmp_path: Path) -> None:
    folder = publish(tmp_path, as_stored(small("22 kHz/80")), SMALL)
    request = SoundRequest(vocoder="bigvgan", vocoder_folder=folder)
    decoder = SpeechDecoder(codec, DecoderOptions.of(request, codec.device))
    sounds = heard(DecoderStream(decoder, voice), codes_of(23), 1)
    assert sum(map(len, sounds)) == 23 * OUTPUT_SAMPLES_PER_CODE
    assert torch.cat(sounds).isfinite().all()


def test_fewer_steps_and_less_history_are_other_sounds_of_the_same_length(
    codec: Codec, voice: Voice
) -> None:
    codes = codes_of(40)
    exact = torch.cat(heard(DecoderStream(SpeechDecoder(codec), voice), codes, 5))
    for request in (SoundRequest(steps=4), SoundRequest(context_s=0.8)):
        decoder = SpeechDecoder(codec, DecoderOptions.of(request, codec.device))
        sound = torch.cat(heard(DecoderStream(decoder, voice), codes, 5))
        assert sound.shape == exact.shape
        assert not torch.allclose(sound, exact, atol=1e-3)


def test_what_means_nothing_is_refused(codec: Codec) -> None:
    with pytest.raises(ConfigError, match="whole replies"):
        SpeechDecoder(replace(codec, block_codes=None))
    with pytest.raises(OptionError, match="choose of hift, bigvgan"):
        SoundRequest(vocoder="wavenet")
    with pytest.raises(OptionError, match="needs --vocoder-dir"):
        SoundRequest(vocoder="bigvgan")
    with pytest.raises(OptionError, match="belongs to --vocoder bigvgan"):
        SoundRequest(vocoder_folder=Path("somewhere"))
