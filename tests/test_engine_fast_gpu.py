"""On an NVIDIA GPU: kernels in graphs read what plain layers read, and the same every time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rig import (
    CONFIG,
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
from test_engine_rows import CASES, golden, golden_reply, golden_task
from torch import Tensor

from mosstalk.engine.engine_core import EngineCore
from mosstalk.engine.layers import LayerOptions, Layers
from mosstalk.engine.sequence import Part
from mosstalk.engine.step_plan import MIXED_BUCKETS, PassSize, StepInputs
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.launch import references_only
from mosstalk.ops.sampling_parts import AUDIO, TEXT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIDDLE = replace(
    CONFIG,
    hidden_size=512,
    intermediate_size=1280,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=6000,
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SPARE_BYTES = 24 << 20
"""What torch may give beyond what was asked for, a tensor at a time."""
INVARIANT = LayerOptions(invariant=True)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def single_rows(count: int) -> list[Span]:
    """``count`` conversations of all lengths with one row to read."""
    return [(7 * n % 90, 7 * n % 90 + 1) for n in range(count)]


ROWS = {
    f"{count} rows": single_rows(count) for count in (1, 2, 4, 7, 8, 16, 24, 32, 48, 57, 64, 65)
}
TILES = {f"{count} in tiles": [(11, 11 + count)] for count in (*MIXED_BUCKETS, 6, 300)}
MIXES = {
    f"{count} mixed": [*single_rows(min(60, count // 4)), (11, 11 + count - min(60, count // 4))]
    for count in (*MIXED_BUCKETS, 576)
}
LONG = {
    "a row after 3000": [(3000, 3001)],
    "6 rows after 1000": [(1000, 1006)],
    "mixed after 5000": [(5000, 5001), (5000, 5020)],
}
EVERY_KIND = ROWS | TILES | MIXES | LONG
SOME_KINDS = {name: EVERY_KIND[name] for name in ("1 rows", "57 rows", "6 in tiles", "512 mixed")}


@pytest.fixture(scope="module")
def models() -> Callable[[torch.dtype], LanguageModel]:
    made: dict[torch.dtype, LanguageModel] = {}

    def model(dtype: torch.dtype) -> LanguageModel:
        if dtype not in made:
            made[dtype] = wild_model("cuda", dtype, config=MIDDLE)
        return made[dtype]

    return model


Models = Callable[[torch.dtype], LanguageModel]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@every_dtype
@pytest.mark.parametrize("invariant", [True, False])
def test_a_graph_equals_eager_bit_for_bit_in_every_kind_and_bucket(
    dtype: torch.dtype, invariant: bool, models: Models
) -> None:
    model = models(dtype)
    for name, spans in EVERY_KIND.items():
        captured = Scene.of(model, spans)
        eager, untouched = captured.own(), captured.own()
        graphs = captured.fast(model, LayerOptions(invariant=invariant))
        found = read(graphs, captured)
        assert graphs.graph_count >= 3
        expected = read(eager.fast(model, LayerOptions(graphs=False, invariant=invariant)), eager)
        assert same(found, expected), name
        assert same(captured.written(), eager.written()), name
        assert same(captured.foreign(), untouched.foreign()), name


@every_dtype
@pytest.mark.parametrize("kind", SOME_KINDS | LONG)
def test_fast_layers_read_what_plain_layers_read(
    kind: str, dtype: torch.dtype, models: Models
) -> None:
    model = models(dtype)
    expected = Scene.of(model, EVERY_KIND[kind])
    found = expected.own()
    outputs = read(found.fast(model), found) + found.written()
    for one, other in zip(
        outputs, read(expected.plain(model), expected) + expected.written(), strict=True
    ):
        assert relative(one, other) < BOUNDS[dtype]


@every_dtype
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_captured_graph_replays_right_after_the_store_has_changed(
    kind: str, dtype: torch.dtype, models: Models
) -> None:
    model = models(dtype)
    scene, later = (Scene.of(model, EVERY_KIND[kind], seed=seed) for seed in (1, 2))
    layers = scene.fast(model)
    read(layers, scene)
    captured = layers.graph_count
    expected = later.own()
    for part in ("keys", "values", "hidden"):
        getattr(scene.store, part).copy_(getattr(later.store, part))
    scene.latest.copy_(later.latest)
    outputs = read(layers, replace(later, store=scene.store), step=2)
    assert layers.graph_count == captured
    for one, other in zip(outputs, read(expected.plain(model), expected), strict=True):
        assert relative(one, other) < BOUNDS[dtype]


@every_dtype
@pytest.mark.parametrize("graphs", [True, False])
def test_padding_alone_writes_nothing(dtype: torch.dtype, graphs: bool, models: Models) -> None:
    model = models(dtype)
    scene = Scene.of(model, [(8, 9), (3, 40)])
    layers = scene.fast(model, LayerOptions(graphs=graphs))
    read(layers, scene)
    before = scene.own()
    for size in (PassSize(16, 16, 0, 20), PassSize(64, 16, 12, 20), PassSize(256, 0, 24, 20)):
        for part in Part:
            inputs = StepInputs(size, model.device, embeds=part is Part.TRUNK)
            with torch.inference_mode():
                layers.run(part, inputs)
    layers.warm(layers.limits.all())
    assert same(scene.written() + scene.foreign(), before.written() + before.foreign())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_no_further_from_float32_than_plain_torch(
    dtype: torch.dtype, models: Models
) -> None:
    model = models(dtype)
    truth = wild_model("cuda", config=MIDDLE)
    truth.load_state_dict({name: w.float() for name, w in model.state_dict().items()})
    for spans in ([(0, 300)], single_rows(48)):
        fast = Scene.of(model, spans)
        plain = fast.own()
        store = fast.own().store
        exact = replace(
            fast, store=replace(store, **{n: getattr(store, n).float() for n in STORED})
        )
        expected = read(exact.plain(truth), exact)
        found, torch_s = (
            [relative(one, other) for one, other in zip(outputs, expected, strict=True)]
            for outputs in (read(fast.fast(model), fast), read(plain.plain(model), plain))
        )
        print(f"{dtype}, {len(spans)} stretches: fast {found}, plain {torch_s}")
        assert all(ours <= 1.05 * theirs for ours, theirs in zip(found, torch_s, strict=True))


STORED = ("keys", "values", "hidden")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_the_same_alone_among_63_and_beside_poison(
    dtype: torch.dtype, models: Models
) -> None:
    model = models(dtype)
    crowd = Scene.of(model, [*single_rows(61), (1, 35), (40, 41), (0, 90)])
    crowd = replace(crowd, wanted=list(range(len(crowd.rows))))
    poisoned, company = crowd.own(), crowd.own()
    victim = poisoned.spans[40].sequence.table[0] * poisoned.store.rows_per_block
    poisoned.store.keys[:, victim] = float("nan")
    together = read(company.fast(model, INVARIANT), company)
    beside = read(poisoned.fast(model, INVARIANT), poisoned)
    first = 0
    for number, span in enumerate(crowd.spans):
        rows = slice(first, first + len(span))
        first = rows.stop
        if number not in (0, 13, 60, 61, 62, 63):
            continue
        own_rows, wanted = crowd.rows[rows], list(range(len(span)))
        lone = replace(crowd.own(), spans=[span], rows=own_rows, wanted=wanted)
        expected = read(lone.fast(model, INVARIANT), lone)
        for found in (together, beside):
            assert same([outputs[rows] for outputs in found], expected), number
        here = span.places(span.start)
        assert same([company.store.keys[:, here]], [lone.store.keys[:, here]])
    assert all(outputs[40].isnan().any() for outputs in beside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_the_same_however_its_prompt_was_cut(dtype: torch.dtype, models: Models) -> None:
    model = models(dtype)
    whole = Scene.of(model, [(0, 150)])
    whole = replace(whole, wanted=list(range(150)))
    cut = whole.own()
    expected, layers = read(whole.fast(model, INVARIANT), whole), cut.fast(model, INVARIANT)
    found: list[list[Tensor]] = []
    for start, end in ((0, 1), (1, 40), (40, 41), (41, 103), (103, 150)):
        piece = replace(cut.spans[0], start=start, end=end)
        part = replace(
            cut, spans=[piece], rows=cut.rows[start:end], wanted=list(range(end - start))
        )
        found.append(read(layers, part))
    joined = [torch.cat(outputs) for outputs in zip(*found, strict=True)]
    assert same(joined, expected)
    assert same(cut.written(), whole.written())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.name)
def test_golden_rows_come_from_kernels(folder: Path, graphs: bool) -> None:
    case, model, ids = golden(folder, "cuda")
    runs = case.get("runs")
    tasks = [golden_task(case, run) for run in runs]
    core = with_fast(engine_core(model, ids=ids, step_rows=40), LayerOptions(56, 16, graphs))
    found = [alone(core, task) for task in tasks] + play(core, tasks, seed=1)
    for request, run in zip(found, runs * 2, strict=True):
        require_same(request, golden_reply(case, run), ids)
    require_idle(core)


@pytest.mark.parametrize("deferral", [True, False])
def test_prompts_kept_aside_mixed_in_one_batch(deferral: bool) -> None:
    truth, tasks = wild_model(), random_tasks(seed=7, count=24)
    core = with_fast(engine_core(wild_model("cuda"), deferral=deferral), LayerOptions(80, 16))
    for request, task in zip(play(core, tasks, seed=2), tasks, strict=True):
        require_same(request, reference(truth, task))
    require_idle(core)


def with_fast(core: EngineCore, options: LayerOptions) -> EngineCore:
    runner = core.runner
    runner.layers = Layers(core.model, runner.store, runner.layers.latest, options)
    return core


def test_a_warm_pass_neither_captures_nor_waits_for_the_device(models: Models) -> None:
    model = models(torch.bfloat16)
    scene = Scene.of(model, single_rows(24))
    layers = scene.fast(model)
    sizes = layers.limits.all()
    layers.warm(sizes)
    assert layers.graph_count == len(Part) * len(sizes)
    for _ in range(10):  # more than there are host buffers
        read(layers, scene)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = read(layers, scene)
        with torch.inference_mode():
            for channel in (TEXT, AUDIO):
                layers.logits(channel, outputs[channel])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layers.graph_count == len(Part) * len(sizes)


def test_weights_are_packed_without_a_second_copy() -> None:
    large = replace(MIDDLE, hidden_size=1024, intermediate_size=3072)
    model = wild_model("cuda", torch.bfloat16, config=large)
    scene = Scene.of(model, [(0, 3)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers = scene.fast(model)
    taken = torch.cuda.memory_allocated() - before
    one_layer = sum(w.nbytes for w in model.model.shared_block.layers[0].parameters())
    assert taken == pytest.approx(layers.fixed_bytes, abs=SPARE_BYTES)
    assert torch.cuda.max_memory_allocated() - before < layers.fixed_bytes + one_layer + SPARE_BYTES
    assert layers.weight_bytes > 4 * one_layer


def test_kernels_run_unless_they_are_switched_off(models: Models) -> None:
    model = models(torch.bfloat16)
    scene = Scene.of(model, [(0, 3)])
    assert Layers(model, scene.store, scene.latest).kernels
    truth = read(scene.plain(model), scene)
    given = model, scene.store, scene.latest
    off = read(Layers(*given, LayerOptions(kernels=False)), scene)
    with references_only():
        assert not Layers(model, scene.store, scene.latest).kernels
        found = off, read(scene.fast(model), scene), read(Layers(*given), scene)
    for outputs in found:
        for one, other in zip(outputs, truth, strict=True):
            assert relative(one, other) < BOUNDS[torch.bfloat16]
