"""Many short requests through the engine: memory must stay flat. ``python tests/engine_soak.py``.

Prints resident memory and blocks every 500 requests and, at the end, the slope after the first
500 in bytes a request. The small form of it is in ``test_engine_pool.py``.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from mosstalk.environment import share_the_processor

share_the_processor()  # before torch is imported: other processes may be using the cores

import torch  # noqa: E402

from mosstalk.conversation import Conversation, SpecialIds  # noqa: E402
from mosstalk.engine.async_engine import AsyncEngine  # noqa: E402
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams  # noqa: E402
from mosstalk.engine.scheduler import SchedulerLimits  # noqa: E402
from mosstalk.models.checkpoint import load_language_model  # noqa: E402
from mosstalk.models.text_tokenizer import TextTokenizer  # noqa: E402
from mosstalk.prepared.default_models import chosen_model  # noqa: E402
from mosstalk.reply_options import Limits, SamplingOptions, Script  # noqa: E402
from mosstalk.server.ipc import resident_bytes  # noqa: E402

EVERY = 500
SCRIPTS = ["speech:3", "text:3", "text:1,speech:2"]
AT_ONCE = 48
"""More than the slots, so that some wait."""


async def soak(
    engine: AsyncEngine, new_conversation: Callable[[], Conversation], requests: int
) -> list[tuple[int, int]]:
    """Run short requests from many tasks; (requests done, resident bytes) every 500 or 20th."""
    samples, random = list[tuple[int, int]](), Random(0)
    counter = iter(range(requests))
    done = 0

    async def client() -> None:
        nonlocal done
        for number in counter:
            await one(engine, new_conversation(), random, number)
            done += 1
            if done % min(EVERY, requests // 20) == 0:
                samples.append((done, resident_bytes()))
                if done % EVERY == 0:
                    report(engine, done)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return samples


async def one(engine: AsyncEngine, conversation: Conversation, random: Random, number: int) -> None:
    """A conversation of one short reply, now and then cancelled or abandoned."""
    conversation.add_text("user", f"Question {random.randrange(1000)}.")
    cached = engine.open(conversation)
    script = Script.parse(random.choice(SCRIPTS))
    ask = ReplyParams(SamplingOptions(seed=number), Limits(12), script)
    stream = await engine.submit(cached, ask, speech=script.parts[0][0] == 1)
    what = random.random()
    if what < 0.1:
        await engine.cancel(stream)
    if what < 0.9:
        async for _ in stream:
            pass
        await engine.close_reply(stream, random.choice([None, 79.0]))
    await engine.close(cached)


def report(engine: AsyncEngine, done: int) -> None:
    """Print where it stands."""
    pool = engine.core.pool
    print(
        f"{done:6} requests  {resident_bytes() / 2**20:8.2f} MiB resident  "
        f"{pool.in_use:4} of {pool.size} blocks in use",
        flush=True,
    )


def slope(samples: list[tuple[int, int]], after: int) -> float:
    """Bytes a request by least squares over the samples after ``after`` requests."""
    counts, sizes = torch.tensor([s for s in samples if s[0] > after], dtype=torch.float64).T
    centred = counts - counts.mean()
    return float((centred * sizes).sum() / centred.square().sum())


def pocket_engine(model: str) -> tuple[AsyncEngine, Callable[[], Conversation]]:
    """The engine over a named model's weights, and what makes its conversations."""
    folder, _ = chosen_model(Path(model), None)
    weights = load_language_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = TextTokenizer.from_folder(folder, weights.config.vocab_size)
    ids = SpecialIds.of(weights.config, tokenizer.special)
    options = EngineOptions(blocks=256, limits=SchedulerLimits(step_rows=256, slots=32))
    engine = AsyncEngine(EngineCore(weights, ids, options))
    return engine, lambda: Conversation(ids, tokenizer.encode)


async def main() -> None:
    """Run it as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default="pocket", help="pocket or synthetic")
    chosen = parser.parse_args()
    engine, new_conversation = pocket_engine(chosen.model)
    started = time.monotonic()
    async with engine:
        samples = await soak(engine, new_conversation, chosen.requests)
        in_use = engine.core.pool.in_use
    print(
        f"{chosen.requests} requests in {time.monotonic() - started:.0f} s on {chosen.model}: "
        f"{slope(samples, EVERY):+.1f} bytes a request after the first {EVERY}, "
        f"{in_use} blocks in use at the end"
    )


if __name__ == "__main__":
    asyncio.run(main())
