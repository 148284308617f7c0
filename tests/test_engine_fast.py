"""Fast layers read what plain layers read, write nowhere else, and refuse what they must."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import examples
from engine_rig import (
    IDS,
    SILENT,
    Task,
    alone,
    engine_core,
    play,
    random_tasks,
    reference,
    require_idle,
    require_same,
    wild_model,
)
from fast_rig import Scene, Span, read, same
from hypothesis import given
from hypothesis import strategies as st
from test_engine_rows import CASES, golden, golden_reply, golden_task
from torch import Tensor

from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.engine_core import EngineCore
from mosstalk.engine.layers import LayerOptions, Layers
from mosstalk.engine.linears import Matrix, packed_stacks
from mosstalk.engine.scheduler import Work
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.engine.step_plan import (
    Layout,
    PassLimits,
    PassSize,
    Planned,
    Planner,
    QuerySpan,
    StepInputs,
    tiles_over,
)
from mosstalk.errors import EngineInputError
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.attention_prefill import TILE_ROWS
from mosstalk.ops.sampling_parts import AUDIO, TEXT

CPU = torch.device("cpu")
MODEL = wild_model()
BOUND = 1e-5
both_ways = pytest.mark.parametrize("invariant", [True, False])
spans = st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 16, 17, 40])).map(
    lambda drawn: (drawn[0], sum(drawn))
)


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= BOUND * expected.abs().max().clamp(min=1))


def require_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert near(one, other)


@given(
    drawn=st.lists(spans, min_size=1, max_size=7),
    block_rows=st.sampled_from([1, 3, 4, 16]),
    invariant=st.booleans(),
    small=st.booleans(),
    seed=st.integers(0, 1000),
)
@examples(60)
def test_any_mix_of_stretches_reads_as_plain_layers_read_it(
    drawn: list[Span], block_rows: int, invariant: bool, small: bool, seed: int
) -> None:
    expected = Scene.of(MODEL, drawn, block_rows=block_rows, seed=seed)
    found, untouched = expected.own(), expected.own()
    rows, singles = (19, 2) if small else (576, 64)
    options = LayerOptions(rows=rows, singles=singles, invariant=invariant)
    outputs = read(found.fast(MODEL, options), found)
    require_near(outputs, read(expected.plain(MODEL), expected))
    require_near(found.written(), expected.written())
    assert same(found.foreign(), untouched.foreign())


@given(
    drawn=st.lists(spans, min_size=1, max_size=7),
    block_rows=st.sampled_from([1, 3, 4, 16]),
    rows=st.sampled_from([19, 576]),
    seed=st.integers(0, 1000),
)
@examples(60)
def test_without_padding_any_mix_of_stretches_reads_as_plain_layers_read_it(
    drawn: list[Span], block_rows: int, rows: int, seed: int
) -> None:
    expected = Scene.of(MODEL, drawn, block_rows=block_rows, seed=seed)
    found, untouched = expected.own(), expected.own()
    outputs = read(found.exact(MODEL, LayerOptions(rows=rows)), found)
    require_near(outputs, read(expected.plain(MODEL), expected))
    require_near(found.written(), expected.written())
    assert same(found.foreign(), untouched.foreign())


def test_without_padding_no_bit_depends_on_other_sequences() -> None:
    crowd = Scene.of(MODEL, [(3, 20), (0, 40), (70, 75), (8, 13), (0, 6)])
    crowd = replace(crowd, wanted=list(range(len(crowd.rows))))
    company, first = crowd.own(), 0
    together = read(company.exact(MODEL), company)
    for span in crowd.spans:
        rows = slice(first, first + len(span))
        first = rows.stop
        lone = replace(crowd.own(), spans=[span], rows=crowd.rows[rows], wanted=[*range(len(span))])
        assert same([outputs[rows] for outputs in together], read(lone.exact(MODEL), lone))


@both_ways
def test_a_pass_of_padding_alone_writes_nothing(invariant: bool) -> None:
    scene = Scene.of(MODEL, [(8, 9), (3, 20), (0, 33)])
    layers = scene.fast(MODEL, LayerOptions(invariant=invariant))
    read(layers, scene)  # buffers are full of other rows then
    before = scene.own()
    for size in (PassSize(4, 4, 0, 9), PassSize(32, 8, 10, 9), PassSize(128, 0, 16, 9)):
        for part in Part:
            inputs = StepInputs(size, CPU, embeds=part is Part.TRUNK)
            with torch.inference_mode():
                layers.run(part, inputs)
            assert not layers.buffers.asked[: size.rows].any() or part is Part.TRUNK
    assert same(scene.written() + scene.foreign(), before.written() + before.foreign())


@both_ways
@pytest.mark.parametrize("count", [1, 5, 70])
def test_logits_are_the_heads(count: int, invariant: bool) -> None:
    scene = Scene.of(MODEL, [(0, 3)])
    hidden = torch.randn(count, MODEL.config.hidden_size)
    plain, fast = scene.plain(MODEL), scene.fast(MODEL, LayerOptions(invariant=invariant))
    with torch.inference_mode():
        for channel in (TEXT, AUDIO):
            require_near([fast.logits(channel, hidden)], [plain.logits(channel, hidden)])


def with_fast(core: EngineCore, options: LayerOptions) -> EngineCore:
    runner = core.runner
    options = replace(options, kernels=True)
    runner.layers = Layers(core.model, runner.store, runner.layers.latest, options)
    return core


@pytest.mark.parametrize(
    "folder",
    # Slow: one model is enough here; ``test_engine_verify`` has the other.
    [CASES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CASES[1:])],
    ids=lambda path: path.name,
)
def test_golden_rows_come_from_fast_layers(folder: Path) -> None:
    case, model, ids = golden(folder, "cpu")
    runs = case.get("runs")
    tasks = [golden_task(case, run) for run in runs]
    options = LayerOptions(rows=56, singles=16)
    core = with_fast(engine_core(model, ids=ids, step_rows=40), options)
    found = [alone(core, task) for task in tasks] + play(core, tasks, seed=1)
    for request, run in zip(found, runs * 2, strict=True):
        require_same(request, golden_reply(case, run), ids)
    require_idle(core)


@both_ways
@pytest.mark.parametrize("deferral", [True, False])
def test_prompts_kept_aside_mixed_in_one_batch(deferral: bool, invariant: bool) -> None:
    tasks = random_tasks(seed=7, count=16)
    options = LayerOptions(rows=40, singles=6, invariant=invariant)
    core = with_fast(engine_core(MODEL, deferral=deferral), options)
    for request, task in zip(play(core, tasks, seed=2), tasks, strict=True):
        require_same(request, reference(MODEL, task))
    require_idle(core)


def plain(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix


def test_weights_are_packed_in_place_and_once() -> None:
    model, truth = wild_model(), wild_model()
    first, again = packed_stacks(model.model), packed_stacks(model.model)
    state = truth.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in model.parameters()}
    assert sum(map(len, storages.values())) == sum(w.nbytes for w in truth.parameters())
    for part in Part:
        for one, other in zip(first[part].layers, again[part].layers, strict=True):
            assert plain(one.qkv).data_ptr() == plain(other.qkv).data_ptr()
            assert plain(one.gate_up).data_ptr() == plain(other.gate_up).data_ptr()
            assert plain(one.qkv).untyped_storage().data_ptr() in storages
    attention = model.model.text_block.layers[1].get_submodule("self_attn")
    expected = torch.cat([attention.get_parameter(f"{name}_proj.weight") for name in "qkv"])
    assert torch.equal(plain(first[Part.TEXT].layers[1].qkv), expected)


def test_a_packed_model_can_change_its_precision_and_be_packed_again() -> None:
    model = wild_model()
    packed_stacks(model.model)
    layer = packed_stacks(model.to(torch.float16).model)[Part.TRUNK].layers[0]
    assert plain(layer.qkv).dtype == torch.float16
    weights = model.model.shared_block.layers[0].parameters()
    assert layer.nbytes == sum(weight.nbytes for weight in weights)


def test_without_a_gpu_passes_have_the_rows_that_there_are() -> None:
    scene = Scene.of(MODEL, [(0, 3)])
    assert not Layers(MODEL, scene.store, scene.latest).kernels


@given(
    drawn=st.lists(spans, min_size=1, max_size=40),
    rows=st.integers(1, 90),
    singles=st.integers(1, 90),
    tiled=st.booleans(),
)
@examples(100)
def test_lots_hold_all_rows_in_order_and_fit_their_pass(
    drawn: list[Span], rows: int, singles: int, tiled: bool
) -> None:
    limits = PassLimits(rows, min(singles, rows), 500, 4, tiled)
    scene = Scene.of(MODEL, drawn)
    planner, read_rows = Planner(limits), []
    for lot in limits.lots(scene.spans):
        count = sum(map(len, lot))
        planned = planner.embedding(1, [(0, 0)] * count, lot)
        inputs = StepInputs(planned.size, CPU, embeds=True)
        inputs.fill(planned, 1)
        assert planned.size.rows <= rows
        assert planned.size.singles <= limits.singles
        assert planned.size.tiles <= limits.tiles
        read_rows += [(id(s.sequence), row) for s in lot for row in range(s.start, s.end)]
        taken = [row for first, n, *_ in inputs.tiles.tolist() for row in range(first, first + n)]
        alone = [row for row, seen in enumerate(inputs.context_lens.tolist()) if seen]
        assert sorted(taken + alone) == list(range(count))
    expected = [(id(s.sequence), r) for s in scene.spans for r in range(s.start, s.end)]
    assert read_rows == expected


@given(
    drawn=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 80)), min_size=1, max_size=40),
    rows=st.sampled_from([1, 7, 90, 576]),
    singles=st.sampled_from([1, 5, 64]),
    keys=st.sampled_from([40, 1024, 3000, 10_000]),
    tiled=st.booleans(),
)
@examples(100)
def test_every_pass_has_one_of_the_sizes_that_are_captured(
    drawn: list[Span], rows: int, singles: int, keys: int, tiled: bool
) -> None:
    limits = PassLimits(rows, min(singles, rows), keys, 16, tiled)
    drawn = [(start % keys, count) for start, count in drawn]
    drawn = [(start, min(count, keys - start)) for start, count in drawn]
    captured = set(limits.all())
    assert limits.one_row() in captured
    nobody = Sequence(BlockPool(1, 16), 0, [])
    spans = [QuerySpan(nobody, start, start + count) for start, count in drawn]
    assert {Layout.of(lot, limits).size for lot in limits.lots(spans)} <= captured


@given(start=st.integers(0, 100), rows=st.integers(1, 100))
def test_tiles_are_counted_as_they_are_cut(start: int, rows: int) -> None:
    touched = {row // TILE_ROWS for row in range(start, start + rows)}
    assert tiles_over(start, start + rows) == len(touched)


SIZE = PassSize(4, 2, 3, 6)


def good() -> dict[str, np.ndarray]:
    return {
        "rows": np.zeros((3, 2), np.int64),
        "slots": np.zeros(3, np.int32),
        "positions": np.zeros(3, np.int32),
        "slot_mapping": np.zeros(3, np.int32),
        "written": np.zeros(3, np.int32),
        "context_lens": np.zeros(1, np.int32),
        "tiles": np.zeros((1, 4), np.int32),
        "block_tables": np.zeros((2, 6), np.int32),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros((3, 3), np.int64), r"'rows' has the shape \(3, 3\).*2\)"),
        ("rows", np.zeros((3, 2), np.int32), "'rows' is int32, must be int64"),
        ("slots", np.zeros(2, np.int32), r"'slots' has the shape \(2,\), must be \(3,\)"),
        (
            "slot_mapping",
            np.zeros(4, np.int32),
            r"'slot_mapping' has the shape \(4,\), must be \(3,\)",
        ),
        ("context_lens", np.zeros(3, np.int32), r"'context_lens' has the shape \(3,\)"),
        ("tiles", np.zeros((4, 4), np.int32), r"'tiles' has the shape \(4, 4\)"),
        ("block_tables", np.zeros((2, 5), np.int32), r"'block_tables' has the shape \(2, 5\)"),
        ("positions", np.zeros(3, np.float32), "'positions' is float32, must be int32"),
        ("wanted", np.zeros(3, np.int32), "'wanted' is missing or not one"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(name: str, value: np.ndarray, message: str) -> None:
    inputs = StepInputs(SIZE, CPU, embeds=True)
    with pytest.raises(EngineInputError, match=message):
        inputs.fill(Planned(7, SIZE, good() | {name: value}), 7)
    assert (inputs.rows == -1).all()
    inputs.fill(Planned(7, SIZE, good()), 7)
    assert inputs.rows.tolist() == [[0, 0]] * 3 + [[-1, -1]]


@pytest.mark.parametrize("name", good())
def test_what_is_missing_is_named(name: str) -> None:
    values = good()
    del values[name]
    with pytest.raises(EngineInputError, match=f"{name!r} is missing"):
        StepInputs(SIZE, CPU, embeds=True).fill(Planned(7, SIZE, values), 7)


def test_what_is_of_another_step_or_size_is_refused() -> None:
    inputs = StepInputs(SIZE, CPU, embeds=True)
    with pytest.raises(EngineInputError, match="of step 6, this is step 7"):
        inputs.fill(Planned(6, SIZE, good()), 7)
    with pytest.raises(EngineInputError, match="this pass is"):
        inputs.fill(Planned(7, replace(SIZE, rows=8), good()), 7)


class Stale(Planner):
    """A planner that is a step behind."""

    def embedding(self, step: int, *others: object) -> Planned:
        return super().embedding(step - 1, *others)  # type: ignore[arg-type]


def core_with(model: LanguageModel, *, kernels: bool) -> tuple[EngineCore, Layers]:
    core = engine_core(model)
    if kernels:
        with_fast(core, LayerOptions())
    return core, core.runner.layers


with_and_without_kernels = pytest.mark.parametrize("kernels", [True, False])


@with_and_without_kernels
def test_a_step_refuses_before_anything_is_computed(kernels: bool) -> None:
    core, layers = core_with(MODEL, kernels=kernels)
    sequence = core.open([(1, SILENT), (2, SILENT, 3)])  # type: ignore[list-item]
    assert sequence.make_room(2)
    with pytest.raises(ValueError, match="inhomogeneous shape"):
        core.runner.step([Work(sequence, None, 0, 2, False)])
    for rows, message in (
        ([(1.5, SILENT), (2, SILENT)], "'rows' is float64, must be int64"),
        ([(1, SILENT, 2), (2, SILENT, 3)], r"'rows' has the shape \(2, 3\), must be \(2, 2\)"),
    ):
        sequence.rows[:] = rows  # type: ignore[assignment]
        with pytest.raises(EngineInputError, match=message):
            core.runner.step([Work(sequence, None, 0, 2, False)])
    with pytest.raises(EngineInputError, match="has 3 rows, must have 2"):
        layers.trunk(1, [(1, SILENT)] * 3, [QuerySpan(sequence, 0, 2)])
    layers.planner = Stale(layers.limits)
    sequence.rows[:] = [(1, SILENT), (2, SILENT)]
    with pytest.raises(EngineInputError, match=r"of step \d+, this is step \d+"):
        core.runner.step([Work(sequence, None, 0, 2, False)])
    assert sequence.read == [0, 0, 0]
    assert not core.runner.store.hidden.any()


@with_and_without_kernels
def test_a_row_past_the_last_position_is_refused_in_whatever_pass_it_is(kernels: bool) -> None:
    model = wild_model()
    core, layers = core_with(model, kernels=kernels)
    longest = layers.limits.keys
    assert longest == model.config.max_position_embeddings
    sequence = core.open([(1, SILENT)] * (longest + 1))
    assert sequence.make_room(longest + 1)
    rows, span = [(1, SILENT)] * (longest + 1), QuerySpan(sequence, 0, longest + 1)
    with pytest.raises(EngineInputError, match=f"a row at {longest} is past the last"):
        layers.trunk(1, rows, [span])
    assert not core.runner.store.hidden.any()
    layers.trunk(1, rows[:-1], [QuerySpan(sequence, 0, longest)])
    assert core.runner.store.hidden.any()


def test_memory_is_counted() -> None:
    model = wild_model()
    scene = Scene.of(model, [(0, 3)])
    layers = scene.fast(model, LayerOptions(rows=64, singles=8))
    backbone = model.model
    blocks = (backbone.shared_block, backbone.text_block, backbone.audio_block)
    norms = (backbone.text_norm, backbone.audio_norm)
    expected = sum(w.nbytes for part in (*blocks, *norms) for w in part.parameters())
    assert layers.weight_bytes == expected
    before = layers.fixed_bytes
    read(layers, scene)
    assert before > layers.buffers.nbytes
    assert layers.fixed_bytes > before  # descriptors of a pass


def test_one_task_is_the_same_with_small_passes() -> None:
    task = random_tasks(seed=3, count=1)[0]
    core = with_fast(engine_core(MODEL), LayerOptions(rows=3, singles=1))
    require_same(alone(core, Task(task.rows, task.params)), reference(MODEL, task), IDS)
