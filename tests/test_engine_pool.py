"""How much the pool takes and holds; every precision; memory that stays flat."""

import asyncio
import gc

import pytest
import torch
from engine_rig import (
    CONFIG,
    GREEDY,
    HOT,
    IDS,
    SILENT,
    Task,
    alone,
    engine_core,
    on_every_device,
    play,
    random_tasks,
    reference,
    require_idle,
    require_same,
    wild_model,
)
from engine_soak import soak

from mosstalk.conversation import Conversation, Mode
from mosstalk.engine.async_engine import AsyncEngine, ReplyStream
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.kv_store import KVStore, blocks_that_fit, bytes_per_row
from mosstalk.engine.memory import free_bytes, largest_step, sized
from mosstalk.engine.request import Request
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.engine.step_plan import StepInputs
from mosstalk.errors import DeviceError
from mosstalk.reply_options import Limits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@each_dtype
def test_the_store_takes_the_bytes_it_says(dtype: torch.dtype) -> None:
    store = KVStore.allocate(CONFIG, BlockPool(7, 3), CPU, dtype)
    taken = sum(part.nbytes for part in (store.keys, store.values, store.hidden))
    assert taken == 21 * bytes_per_row(CONFIG, dtype)
    # K and V of 2 + 2 x 2 layers with 2 heads of 8, and a trunk output of 32.
    assert bytes_per_row(CONFIG, dtype) == (2 * 6 * 2 * 8 + 32) * dtype.itemsize


@on_every_device
@each_dtype
@pytest.mark.parametrize("deferral", [True, False])
def test_every_precision_runs(device: str, dtype: torch.dtype, deferral: bool) -> None:
    core = engine_core(wild_model(device, dtype), deferral=deferral)
    tasks = random_tasks(seed=29, count=12)
    for request, task in zip(play(core, tasks), tasks, strict=True):
        assert request.error is None
        assert 1 <= len(request.reply.rows) <= task.params.limits.max_new_rows
        for (text, audio), mode in zip(request.reply.rows, request.reply.modes, strict=True):
            assert (text == IDS.modality_pad) or mode is Mode.TEXT
            assert 0 <= audio <= IDS.eosp
    require_idle(core)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_lower_precision_one_alone_equals_the_reference(dtype: torch.dtype) -> None:
    model = wild_model(dtype=dtype)
    same = 0
    for task in random_tasks(seed=31, count=10):
        expected, found = reference(model, task), alone(engine_core(model), task)
        same += found.reply.modes == expected.modes
    # Roundings differ where a batch is laid out differently; by and large rows do not.
    assert same >= 7


def test_a_budget_in_bytes_gives_as_many_blocks_as_fit() -> None:
    row = bytes_per_row(CONFIG, torch.float32)
    assert blocks_that_fit(CONFIG, torch.float32, 16, 100 * 16 * row) == 100
    assert blocks_that_fit(CONFIG, torch.float32, 16, 100 * 16 * row - 1) == 99
    assert blocks_that_fit(CONFIG, torch.float32, 16, 100 * 16 * row, context_rows=1600) == 100
    assert blocks_that_fit(CONFIG, torch.bfloat16, 16, 100 * 16 * row) == 200


@pytest.mark.parametrize("memory", [-1e9, 0, 159])
def test_a_budget_that_holds_no_conversation_says_what_to_change(memory: float) -> None:
    row = bytes_per_row(CONFIG, torch.float32)
    with pytest.raises(DeviceError, match="may have 160: give more memory") as refused:
        blocks_that_fit(CONFIG, torch.float32, 1, memory * row)
    assert f"hold {max(0, int(memory))} rows" in str(refused.value)
    assert blocks_that_fit(CONFIG, torch.float32, 1, 160 * row) == 160


def test_an_engine_sized_by_a_budget_stays_in_it() -> None:
    model = wild_model()
    budget = 300 * bytes_per_row(CONFIG, torch.float32)
    options = sized(model, IDS, EngineOptions(), memory_bytes=budget)
    assert options.blocks == 300 // options.block_rows
    core = EngineCore(model, IDS, options)
    store = core.runner.store
    assert sum(part.nbytes for part in (store.keys, store.values, store.hidden)) <= budget
    with pytest.raises(DeviceError, match="name a budget"):
        sized(model, IDS, EngineOptions())


@on_every_device
def test_the_largest_step_runs_and_is_as_large_as_it_says(device: str) -> None:
    limits = SchedulerLimits(step_rows=20, slots=5)
    trial = largest_step(wild_model(device), IDS, EngineOptions(block_rows=7, limits=limits))
    assert sorted(work.count for work in trial.works) == [1, 1, 1, 1, 1, 20]
    assert {work.start + work.count for work in trial.works} == {160}
    trial.run()
    assert {tuple(work.sequence.read) for work in trial.works} == {(160, 160, 159), (160, 160, 0)}


@pytest.mark.gpu
def test_blocks_measured_on_a_gpu_leave_room_for_the_largest_step() -> None:
    model = wild_model("cuda")
    limits = SchedulerLimits(step_rows=64, slots=16)
    options = EngineOptions(limits=limits)
    free = free_bytes(model, IDS, options)
    total = torch.cuda.mem_get_info()[1]
    assert 0 < free < total
    chosen = sized(model, IDS, options)
    assert chosen.blocks * options.block_rows * bytes_per_row(CONFIG, torch.float32) <= total
    del model
    model = wild_model("cuda")
    core = EngineCore(model, IDS, chosen)
    tasks = random_tasks(seed=37, count=20)
    for request, task in zip(play(core, tasks), tasks, strict=True):
        require_same(request, reference(wild_model(), task))


def test_catching_up_with_a_long_prompt_runs_no_pass_above_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    core = engine_core(wild_model(), step_rows=16)
    run = core.runner.layers.run

    def noted(part: Part, inputs: StepInputs) -> None:
        passes.extend([inputs.size.rows] * (part is Part.AUDIO))
        run(part, inputs)

    monkeypatch.setattr(core.runner.layers, "run", noted)
    task = Task(
        [(n % 20, SILENT) for n in range(100)], ReplyParams(GREEDY, Limits(3), whole_rows=True)
    )
    request = alone(core, task)
    require_same(request, reference(wild_model(), task))
    assert max(passes) == 16
    assert sum(passes) >= 100


def test_short_requests_leave_nothing_behind() -> None:
    # What other tests of this process still hold is not this test's to judge.
    before = requests_alive()
    core = engine_core(wild_model(), slots=32)
    engine = AsyncEngine(core)

    def new_conversation() -> Conversation:
        return Conversation(IDS, lambda text: [ord(letter) % 20 for letter in text])

    async def main() -> None:
        async with engine:
            samples = await soak(engine, new_conversation, 160)
            assert len(samples) == 20
        require_idle(core)

    asyncio.run(main())
    assert [each for each in requests_alive() if not any(each is old for old in before)] == []


def requests_alive() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (Request, Sequence, ReplyStream)]


def test_a_sampled_batch_may_hold_greedy_ones() -> None:
    model = wild_model()
    tasks = [
        Task([(3, SILENT), (n, SILENT)], ReplyParams(options, Limits(12), whole_rows=True))
        for n in range(4)
        for options in (GREEDY, HOT)
    ]
    for request, task in zip(play(engine_core(model), tasks), tasks, strict=True):
        require_same(request, reference(model, task))
