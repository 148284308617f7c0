"""Full-size check on a GPU: conversion reads back, the codec's times beside published figures.

    python tests/gpu_full_size.py FULL CONVERTED

FULL is what ``checkpoint synthesize --size full`` wrote, CONVERTED what ``checkpoint convert``
made of it. Prints medians; the weights are synthetic, the codec runs in float32.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mosstalk.codec.speech_decoder import (
    DecoderOptions,
    DecoderStream,
    SpeechDecoder,
    decode_offline,
)
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE
from mosstalk.models.checkpoint import model_shapes
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.language_model import unfused
from mosstalk.models.voices import Voice
from mosstalk.models.weights import open_sharded
from mosstalk.runtime.device import pick_device, synchronize

REPLY_CODES = 75
VOICE_CODES = 85
"""A voice of 6.8 s, as the published figures' 7 s."""
RUNS = 5
PUBLISHED = "public code, fp32, H200: 286 ms at 8 codes, 503 ms at 253 codes (7 s voice)"


def main() -> None:
    full, converted = map(Path, sys.argv[1:3])
    compare_tensors(full / "model", converted / "model")
    codec = load_codec(converted / "codec", device=pick_device("cuda"))
    print(f"codec float32 on {torch.cuda.get_device_name()}, synthetic weights, {RUNS} runs")
    time_encoding(codec)
    time_decoding(codec)


def compare_tensors(published: Path, converted: Path) -> None:
    """Every published tensor must read back bit-identical from the converted folder."""
    config = LanguageModelConfig.from_folder(published)
    before = open_sharded(published)
    after = unfused(open_sharded(converted), config, model_shapes(config))
    assert before.keys() == after.keys()
    different = [
        name
        for name, stored in before.items()
        if not torch.equal(stored.load(), after[name].load())
    ]
    print(f"{len(before)} tensors read back, {len(different)} differ {different[:3]}")
    assert not different


def median_ms(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of ``run`` after one warm-up, in ms."""
    times = []
    for _ in range(RUNS + 1):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def time_encoding(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    pcm = 0.1 * torch.randn(10 * INPUT_RATE, generator=generator)
    codes = -(-len(pcm) // INPUT_SAMPLES_PER_CODE)
    elapsed = median_ms(codec.device, lambda: codec.tokenizer.encode(pcm))
    print(f"encode 10 s = {codes} codes: {elapsed:.1f} ms")


def time_decoding(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(1)
    limit = codec.tokenizer.config.quantize_vocab_size
    codes = torch.randint(limit, (REPLY_CODES,), generator=generator).tolist()
    voice = Voice(
        torch.randint(limit, (VOICE_CODES,), generator=generator),
        torch.randn((4 * VOICE_CODES, 80), generator=generator) - 6,
        torch.randn(192, generator=generator),
    )
    offline = median_ms(codec.device, lambda: decode_offline(codec, voice, codes))
    print(f"decode {REPLY_CODES} codes offline, {VOICE_CODES}-code voice: {offline:.1f} ms")
    hops = streamed_hops_ms(codec, voice, codes)
    print(
        f"decode {REPLY_CODES} codes streamed: {len(hops)} hops, first {hops[0]:.1f} ms, last "
        f"{hops[-1]:.1f} ms, sum {sum(hops):.1f} ms, each recomputing its prefix"
    )
    print(f"  beside it: {PUBLISHED}")


def streamed_hops_ms(codec: Codec, voice: Voice, codes: list[int]) -> list[float]:
    """Median time of each hop of a streamed reply, in ms."""
    runs, decoder = [], SpeechDecoder(codec, DecoderOptions.exact(1))
    for _ in range(RUNS + 1):
        stream, times, waiting = DecoderStream(decoder, voice), list[float](), list[int]()
        for count, code in enumerate(codes, 1):
            waiting.append(code)
            if count >= stream.codes_needed:
                started = time.perf_counter()
                stream.push(waiting)
                synchronize(codec.device)
                times.append(1000 * (time.perf_counter() - started))
                waiting = []
        started = time.perf_counter()
        stream.push(waiting)
        stream.finish()
        synchronize(codec.device)
        times.append(1000 * (time.perf_counter() - started))
        runs.append(times)
    return [statistics.median(times) for times in zip(*runs[1:], strict=True)]


if __name__ == "__main__":
    main()
