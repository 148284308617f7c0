"""What the engine's tests share: small random models, prompts, and the reference's replies."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Mode, Reply, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.models.generation import Generation
from mosstalk.models.language_model import LanguageModel
from mosstalk.reply_options import Limits, SamplingOptions, Script, StepRule
from mosstalk.runtime.device import pick_device

on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
"""The same claims on the CPU and, where there is one, on a GPU in float32."""

CONFIG = LanguageModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_shared_layers=2,
    num_modality_layers=2,
    vocab_size=30,
    audio_vocab_size=20,
    max_position_embeddings=160,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    modality_pad_token_id=27,
    sosp_token_id=26,
    eosp_token_id=16,
    audio_pad_token_id=5,
)
IDS = SpecialIds(28, 25, 29, 26, 27, 16, 5, stop=frozenset((28, 29)))
PAD, SOSP, EOSP, SILENT = IDS.modality_pad, IDS.sosp, IDS.eosp, IDS.audio_pad
GREEDY = SamplingOptions(temperature=0, repetition_penalty=1.3)
HOT = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.2)
"""So few ids, drawn so hot, visit every kind of row within a few steps."""


def wild_model(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    config: LanguageModelConfig = CONFIG,
) -> LanguageModel:
    """A random model that says something else at every step."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.ones_(weight)
            continue
        scale = 1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5
        torch.nn.init.normal_(weight, std=scale, generator=generator)
    return model.to(device=pick_device(device), dtype=dtype)


@dataclass(frozen=True)
class Flapping(Script):
    """A script that changes the mode at every single step."""

    parts: tuple[tuple[Mode, int], ...] = ((Mode.AUDIO, 1),)
    steps: int = 20

    def rules(self, first_mode: Mode, ids: SpecialIds) -> list[StepRule]:
        """Open, close, open, close ... and stop."""
        both = [
            StepRule(text=ids.sosp, never_audio=frozenset((ids.eosp,))),
            StepRule(audio=ids.eosp),
        ]
        first = both[::-1] if first_mode is Mode.AUDIO else both
        rules = (first * self.steps)[: self.steps]
        in_audio = (first_mode is Mode.AUDIO) ^ (self.steps % 2 == 1)
        return [*rules, *([both[1]] if in_audio else []), StepRule(text=ids.im_end)]


@dataclass(frozen=True)
class Forced(Script):
    """A script that forces a row at each of the first steps, and leaves the others free."""

    parts: tuple[tuple[Mode, int], ...] = ((Mode.TEXT, 1),)
    rows: tuple[tuple[int | None, int | None], ...] = ()

    def rules(self, first_mode: Mode, ids: SpecialIds) -> list[StepRule]:
        """The given rows, then whatever is drawn but a stop."""
        del first_mode  # the rows say it themselves
        free = StepRule(never_text=ids.stop)
        return [StepRule(text, audio) for text, audio in self.rows] + [free] * 200


@dataclass(frozen=True)
class Task:
    """A prompt and what is asked for it."""

    rows: list[Row]
    params: ReplyParams


def random_rows(random: Random, count: int) -> list[Row]:
    """A prompt that may end in either mode."""

    def row() -> Row:
        if random.random() < 0.4:
            return (PAD, random.randrange(EOSP + 1))
        return (random.randrange(25), SILENT)

    last = random.choice([(SOSP, SILENT), (PAD, 3), (PAD, EOSP), (7, SILENT), (SOSP, EOSP)])
    return [*(row() for _ in range(count - 1)), last]


def random_ask(random: Random) -> ReplyParams:
    """Greedy or sampled, short or long, at times with a script."""
    options = SamplingOptions(
        temperature=random.choice([0.0, 0.8, 1.5]),
        top_k=random.choice([0, 5]),
        top_p=random.choice([1.0, 0.9]),
        repetition_penalty=random.choice([1.0, 1.1, 1.5]),
        seed=random.getrandbits(70),
    )
    script = random.choice([None, None, None, Flapping(steps=9), Script.parse("text:2,speech:3")])
    limits = Limits(random.randint(1, 30), random.randint(0, 12))
    return ReplyParams(options, limits, script, whole_rows=random.random() < 0.5)


def random_tasks(seed: int, count: int) -> list[Task]:
    """Tasks of which some prompts begin alike."""
    random = Random(seed)
    common = random_rows(random, 20)
    tasks = []
    for _ in range(count):
        shared = common[: random.choice([0, 0, 16, 20])]
        rows = shared + random_rows(random, random.randint(1, 25))
        tasks.append(Task(rows, random_ask(random)))
    return tasks


def reference(model: LanguageModel, task: Task, ids: SpecialIds = IDS) -> Reply:
    """What the reference loop replies, alone and one row a step.

    Computed once: tests params for the same reply with every switch and size of the engine.
    """
    key = (model.config, _fingerprint(model), repr(task.rows), repr(task.params), ids)
    if key not in _replies:
        params = task.params
        made = Generation(
            model, model.new_cache(), task.rows, ids, params.options, params.limits, params.script
        )
        for _ in made:
            pass
        _replies[key] = made.reply
    kept = _replies[key]
    return replace(kept, rows=list(kept.rows), modes=list(kept.modes))


_replies: dict[tuple[object, ...], Reply] = {}


def _fingerprint(model: LanguageModel) -> tuple[object, ...]:
    """What tells a model from others: its precision, device and the bytes of its weights."""
    weights = [weight.detach() for weight in model.parameters()]
    sums = [hash(weight.cpu().view(torch.uint8).numpy().tobytes()) for weight in weights]
    return weights[0].dtype, weights[0].device, *sums


def engine_core(
    model: LanguageModel,
    *,
    ids: SpecialIds = IDS,
    blocks: int = 400,
    block_rows: int = 8,
    step_rows: int = 64,
    slots: int = 16,
    waiting: int = 256,
    deferral: bool = True,
    share: bool = True,
    late: bool = True,
    invariant: bool = False,
) -> EngineCore:
    """An engine whose new blocks are NaN."""
    limits = SchedulerLimits(step_rows, slots, waiting)
    options = EngineOptions(
        blocks, block_rows, limits, deferral, share,
        poison=True, late=late, batch_invariant=invariant,
    )  # fmt: skip
    return EngineCore(model, ids, options)


def play(core: EngineCore, tasks: Iterable[Task], seed: int = 0) -> list[Request]:
    """Submit tasks at random steps until all have ended; then forget their conversations."""
    random, pending = Random(seed), list(tasks)[::-1]
    requests: list[Request] = []
    while pending or core.busy:
        for _ in range(min(len(pending), random.choice([0, 0, 1, 3]))):
            task = pending.pop()
            requests.append(core.submit(core.open(task.rows), task.params))
        core.step()
    for request in requests:
        core.close(request.sequence)
    return requests


def alone(core: EngineCore, task: Task) -> Request:
    """One task with nobody else there."""
    return play(core, [task])[0]


def as_known(reply: Reply, *, whole: bool, ids: SpecialIds = IDS) -> list[Row]:
    """A reply's rows; unless ``whole``, audio ids that no later row depends on are left out."""
    return [
        row if whole or mode is Mode.AUDIO or row[0] == ids.modality_pad else (row[0], -1)
        for row, mode in zip(reply.rows, reply.modes, strict=True)
    ]


def require_same(found: Request, expected: Reply, ids: SpecialIds = IDS) -> None:
    """Check rows, modes and the reason to end."""
    assert found.error is None
    assert found.reply.modes == expected.modes
    whole = found.whole_rows
    assert as_known(found.reply, whole=whole, ids=ids) == as_known(expected, whole=whole, ids=ids)
    assert found.reply.finish_reason is expected.finish_reason


def require_idle(core: EngineCore) -> None:
    """Check that nothing is held: no block, no slot, no record."""
    assert core.pool.in_use == 0
    scheduler = core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.idle
    assert scheduler.free_slots == core.options.limits.slots


def whole(task: Task) -> Task:
    """The same task, with whole rows asked for."""
    return replace(task, params=replace(task.params, whole_rows=True))


def penalised_tokens(core: EngineCore, request: Request) -> tuple[set[int], set[int]]:
    """Text and audio tokens that the repetition penalty of a running request counts as seen."""
    text, audio = (
        set(seen[request.slot].nonzero()[:, 0].tolist()) for seen in core.runner._slots.seen
    )
    return text, audio
