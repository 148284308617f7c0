"""Doing once, before anybody waits, all that steps do: kernels are compiled and graphs captured."""

from mosstalk.conversation import Row
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.ops.linear_tiles import FEW_ROWS
from mosstalk.ops.sampling_parts import HELD
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script

_CROWDS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 64, FEW_ROWS + 1, 80)
"""Replies at once: heads divide their rows otherwise past 1, 16, 32 and 64, what settles modes is
compiled for each power of two, and kernels once more for numbers that 16 divides."""
_SCRIPT = Script.parse("text:3,speech:3")
"""A reply with draws in both modes, put-off ones among them."""


def warm_up(core: EngineCore) -> None:
    """Compile and capture what a served engine runs: every size of pass, and every way to draw.

    References need nothing of the kind.
    """
    layers = core.runner.layers
    if layers.kernels:
        layers.warm(layers.limits.all())
        warm_draws(core)


def warm_draws(core: EngineCore) -> None:
    """Replies that change their mode: greedy, sampled from few tokens, and sampled from all.

    The last sort whole vocabularies by torch, one or several.
    """
    most = core.options.limits.slots
    for count in sorted({crowd for crowd in (*_CROWDS, most) if crowd <= most}):
        for options in (SamplingOptions(temperature=0.0), SamplingOptions(top_k=HELD)):
            _replies(core, count, options)
    for count in range(1, min(most, 2) + 1):
        _replies(core, count, SamplingOptions(top_k=0))


def _replies(core: EngineCore, count: int, options: SamplingOptions) -> None:
    """So many replies at the same time; nothing of them stays."""
    row: Row = (0, core.ids.audio_pad)
    params = ReplyParams(options, Limits(), _SCRIPT)
    sequences = [core.open([row] * 2) for _ in range(count)]
    for sequence in sequences:
        core.submit(sequence, params)
    core.run()
    for sequence in sequences:
        core.close(sequence)
