"""Sessions on a GPU: ``python tests/gpu_session.py``, with the weights that ship.

Turns by hand of 1 and of 8 sessions at once: commit to first audio, real-time factor, and that
greedy answers are the same alone and in company. Prints where the codec's float32 and 16-bit
sound differ.
"""

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch
from session_rig import BY_HAND, QUESTION, SENTENCE, Client, speech

from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.prepared.default_models import default_model
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import pick_device
from mosstalk.session.events import ResponseDone
from mosstalk.session.host import Host, HostOptions

ROUNDS = 5


async def talk(host: Host, rounds: int) -> tuple[list[ResponseDone], bytes]:
    """A session of as many turns; their ends, and the first answer's sound."""
    done, first = [], b""
    async with await host.open(BY_HAND) as session:
        client = Client(session)
        for number in range(rounds):
            sound = speech(QUESTION if number % 2 == 0 else SENTENCE)
            done.append(await client.turn(sound))
            first = first or client.pcm(done[0].response_id)
    return done, first


async def measure(device: torch.device, dtype: str, in_turn: bool, crowds: list[int]) -> None:
    """Print figures of so many sessions at once."""
    options = HostOptions(
        decoder=DecoderOptions.of(SoundRequest(dtype=dtype, context_s=2.0), device),
        in_turn=in_turn,
    )
    started = time.perf_counter()
    pools = 2 << 30
    async with Host.load(*default_model(), options, device=device, memory_bytes=pools) as host:
        await host.warm_up()
        print(f"{dtype}, in turn {in_turn}: ready in {time.perf_counter() - started:.1f} s")
        alone = None
        for crowd in crowds:
            begun = time.perf_counter()
            talks = await asyncio.gather(*(talk(host, ROUNDS) for _ in range(crowd)))
            took = time.perf_counter() - begun
            timings = [done.timings for dones, _ in talks for done in dones]
            firsts = [t.commit_to_first_audio_ms for t in timings if t.commit_to_first_audio_ms]
            factors = [t.real_time_factor for t in timings if t.real_time_factor]
            sounds = {sound for _, sound in talks}
            alone = alone or talks[0][1]
            print(
                f"  {crowd:2} sessions x {ROUNDS} turns in {took:.1f} s: commit to first audio "
                f"p50 {statistics.median(firsts):.0f} max {max(firsts):.0f} ms, real-time factor "
                f"p50 {statistics.median(factors):.3f} max {max(factors):.3f}; "
                f"{len(sounds)} different answers, like alone: {_apart(alone, talks[0][1])}"
            )
        print(f"  blocks in use at the end {host.engine.core.pool.in_use}")


def _apart(one: bytes, other: bytes) -> str:
    if one == other:
        return "bit for bit"
    if len(one) != len(other):
        return f"{len(one) // 2} against {len(other) // 2} samples"
    apart = np.frombuffer(one, "<i2").astype(int) - np.frombuffer(other, "<i2")
    return f"up to {np.abs(apart).max()} of 32768 apart"


def main() -> None:
    """Measure in 16 bit and in float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sessions", default="1,8")
    chosen = parser.parse_args()
    device = pick_device(chosen.device)
    crowds = [int(number) for number in chosen.sessions.split(",")]
    cases = [("float16", False), ("float16", True), ("float32", False)]
    for dtype, in_turn in cases if device.type == "cuda" else [("float32", True)]:
        asyncio.run(measure(device, dtype, in_turn, crowds))


if __name__ == "__main__":
    main()
