"""Running once, before anybody waits, all that a served conversation runs: kernels compile then."""

from mosstalk.conversation import Mode, Row
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.step_plan import KEY_BUCKETS
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script
from mosstalk.session.host import Host

_CROWDS = (1, 2, 16)
"""Replies at once: one, few, and a number that kernels take sixteen of at a time."""
_ROWS = 3


def warm_layers(core: EngineCore) -> int:
    """Compile and capture all sizes of pass, at every length of context; how many graphs."""
    layers = core.runner.layers
    if not layers.kernels:
        return 0
    lengths = {*KEY_BUCKETS, layers.limits.keys}
    sizes = {size for keys in sorted(lengths) for size in layers.limits.usual(keys)}
    layers.warm(sorted(sizes, key=lambda size: tuple(vars(size).values())))
    return layers.graph_count


def warm_draws(core: EngineCore) -> None:
    """Replies in both modes, greedy and sampled, alone and in company."""
    slots = core.options.limits.slots
    for count in (crowd for crowd in _CROWDS if crowd <= slots):
        for mode in Mode:
            for temperature in (0.0, 1.0):
                _reply(core, count, mode, temperature)


def _reply(core: EngineCore, count: int, mode: Mode, temperature: float) -> None:
    ids, audio = core.ids, mode is Mode.AUDIO
    row: Row = (ids.modality_pad, 0) if audio else (0, ids.audio_pad)
    script = Script.parse(f"{'speech' if audio else 'text'}:{_ROWS}")
    ask = ReplyParams(SamplingOptions(temperature=temperature), Limits(_ROWS), script)
    asked = [core.submit(core.open([row] * (number + 2)), ask) for number in range(count)]
    core.run()
    for request in asked:
        core.close(request.sequence)


async def warm_host(host: Host) -> None:
    """Decoder and live tokenizer, and a whole reply; the host is started and stopped for it."""
    async with host:
        await host.warm_up()
