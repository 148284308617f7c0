"""The first turns after a start: ``python tests/gpu_first_turns.py``, with the weights that ship.

Starts as a server does, then lets 1, 3 and 12 sessions talk at once, in turns by hand. Prints how
long the start took, what graphs it captured and what they hold, and of each crowd the longest gap
between two pieces of an answer's sound. Ends with 1 if a graph was captured or a kernel compiled
after the start, or if a gap was longer than ``--most-gap-ms``. ``--model`` and ``--codec`` take
other folders, such as full-size ones of ``mosstalk checkpoint synthesize``.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from session_rig import BY_HAND, QUESTION, SENTENCE, speech

from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.ops.launch import INSTALLED
from mosstalk.prepared.default_models import chosen_model
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import pick_device
from mosstalk.runtime.graphs import CAPTURES, expect_no_more
from mosstalk.session.commands import Commit, CreateResponse, Push
from mosstalk.session.events import AudioDelta, ResponseDone
from mosstalk.session.host import Host, HostOptions

CROWDS = "1,3,12"
TURNS = 3
SCRIPT = "text:5,speech:50"
_compiled: list[str] = []


def watch_compilations() -> None:
    """Note the kernels that are compiled from now on."""
    if INSTALLED:
        from triton import knobs

        def hook(*_: object, **told: object) -> None:
            _compiled.append(str(told.get("repr", told.get("fn"))))

        knobs.runtime.jit_post_compile_hook = hook


async def talk(host: Host, number: int) -> list[float]:
    """A session's turns; milliseconds between pieces of each answer's sound, and to the first."""
    gaps = []
    settings = replace(BY_HAND, script=SCRIPT)
    async with await host.open(settings) as session:
        for turn in range(TURNS):
            session.do(Push(speech(QUESTION if (number + turn) % 2 else SENTENCE)))
            session.do(Commit())
            session.do(CreateResponse())
            times = [time.perf_counter()]
            async for event in session:
                if isinstance(event, AudioDelta):
                    times.append(time.perf_counter())
                if isinstance(event, ResponseDone):
                    break
            gaps += [1000 * (after - before) for before, after in pairwise(times)]
    return gaps


async def measure(chosen: argparse.Namespace) -> int:
    """Print what the first turns met; the exit code."""
    crowds = [int(number) for number in chosen.sessions.split(",")]
    device, begun_s = pick_device(chosen.device), time.perf_counter()
    options = HostOptions(
        sessions=max(crowds),
        decoder=DecoderOptions.of(SoundRequest(context_s=2.0), device, max(crowds)),
        engine=EngineOptions(limits=SchedulerLimits(slots=max(crowds))),
    )
    folders = chosen_model(chosen.model, chosen.codec)
    async with Host.load(*folders, options, device=device, memory_bytes=4 << 30) as host:
        await host.warm_up()
        expect_no_more()
        print(f"ready after {time.perf_counter() - begun_s:.1f} s: {CAPTURES}", flush=True)
        watch_compilations()
        longest = 0.0
        for crowd in crowds:
            talks = await asyncio.gather(*(talk(host, n) for n in range(crowd)))
            gaps = [gap for each in talks for gap in each]
            longest = max(longest, *gaps)
            print(f"  {crowd:2} sessions x {TURNS} turns: longest gap {max(gaps):.0f} ms")
    print(f"captured after the start: {CAPTURES.late}, compiled: {len(_compiled)} {_compiled}")
    return int(bool(CAPTURES.late or _compiled) or longest > chosen.most_gap_ms)


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sessions", default=CROWDS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--codec", type=Path)
    parser.add_argument("--most-gap-ms", type=float, default=500.0)
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
