"""The speech decoder on an NVIDIA GPU: many replies in one call, and what it holds."""

import pytest
import torch
from torch import Tensor

from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.hift_vocoder import HiftOptions
from mosstalk.codec.speech_decoder import DecodeRequest, DecoderOptions, SpeechDecoder
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.voices import Voice
from mosstalk.prepared.default_models import shipped_model
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import pick_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def pocket() -> Codec:
    """The codec that ships, on the GPU: one of one's own, since tests give parts of it back."""
    shipped = shipped_model()
    assert shipped is not None
    return load_codec(shipped[1], device=pick_device("cuda"))


def codes_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, (count,), generator=generator).tolist()


def said(decoder: SpeechDecoder, voice: Voice, replies: int, most: int) -> list[Tensor]:
    """Sound (n,) of each of so many replies, at most ``most`` of them in a call."""
    opened = [decoder.open(voice, seed) for seed in range(replies)]
    codes = [codes_of(33, seed) for seed in range(replies)]
    sounds: list[list[Tensor]] = [[] for _ in opened]
    for hop in range(5):
        sayings = [
            DecodeRequest(reply, own[len(reply.flow.codes) : reply.codes_needed], last=hop == 4)
            for reply, own in zip(opened, codes, strict=True)
        ]
        for start in range(0, replies, most):
            found = decoder.decode(sayings[start : start + most])
            for place, sound in enumerate(found, start):
                sounds[place].append(sound.cpu())
    for reply in opened:
        decoder.close(reply)
    return [torch.cat(each) for each in sounds]


def test_128_replies_in_one_call_sound_as_in_four() -> None:
    codec = pocket()
    voice = codec.voice("default")
    flow = FlowOptions(context_s=2.0, replies=128)
    decoder = SpeechDecoder(codec, DecoderOptions(flow, HiftOptions(replies=128)))

    assert decoder.hops_at_once == 128
    together, apart = (said(decoder, voice, 128, most) for most in (128, 32))

    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)


def test_what_it_gives_back_of_the_codec_it_does_not_need() -> None:
    codec = pocket()
    voice = codec.voice("default")
    request = SoundRequest(dtype="float16")
    decoder = SpeechDecoder(codec, DecoderOptions.of(request, codec.device, replies=4))
    decoder.warm()
    before = said(decoder, voice, 3, 3)
    held = torch.cuda.memory_allocated()

    decoder.release_float32()

    own = sum(weight.nbytes for weight in codec.vocoder.parameters())
    assert held - torch.cuda.memory_allocated() > own
    decoder.prepare(Voice(voice.codes[:20], voice.mel[:80], voice.embedding))
    for sound, same in zip(before, said(decoder, voice, 3, 3), strict=True):
        assert torch.equal(sound, same)
