"""The table of text embeddings in the host's memory: the same rows, and less of the GPU taken."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import Checkpoint
from engine_rig import CONFIG, alone, engine_core, random_tasks, wild_model
from typer.testing import CliRunner

from mosstalk import Pipeline
from mosstalk.cli import app
from mosstalk.engine.memory import keep_table_on_host

WIDE = replace(
    CONFIG, hidden_size=256, intermediate_size=384, head_dim=64, max_position_embeddings=512
)
LARGE = replace(CONFIG, vocab_size=1_000_000)


@pytest.fixture
def _memory() -> Iterator[None]:
    """Memory that other tests left is none of this one's."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()


def test_on_a_cpu_it_stays_where_it_is(tiny: Checkpoint) -> None:
    usual = Pipeline.load(tiny.model, tiny.codec, device="cpu").model
    asked = Pipeline.load(tiny.model, tiny.codec, embeddings="host", device="cpu").model
    place = asked.model.embed_tokens.weight.data_ptr()
    keep_table_on_host(asked)
    assert asked.model.embed_tokens.weight.data_ptr() == place
    assert torch.equal(asked.model.embed_tokens.weight, usual.model.embed_tokens.weight)


@pytest.mark.parametrize("command", ["serve --print-config", "plan --gpu-memory 24GiB"])
def test_another_place_is_refused(command: str) -> None:
    found = CliRunner().invoke(app, [*command.split(), "--embeddings", "disk"])
    assert found.exit_code == 2
    assert "--embeddings must be device or host, not 'disk'" in found.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("late", [False, True])
def test_rows_are_the_same(dtype: torch.dtype, late: bool) -> None:
    model = wild_model("cuda", dtype, config=WIDE)
    tasks = random_tasks(3, 6)
    expected = [alone(engine_core(model, late=late), task).reply.rows for task in tasks]
    keep_table_on_host(model)
    assert model.device.type == "cuda"
    found = [alone(engine_core(model, late=late), task).reply.rows for task in tasks]
    assert found == expected


@pytest.mark.gpu
@pytest.mark.usefixtures("_memory")
def test_the_gpu_gets_its_memory_back() -> None:
    model = wild_model("cuda", torch.bfloat16, config=LARGE)
    before, table = torch.cuda.memory_allocated(), model.model.embed_tokens.weight
    values, nbytes = table.detach().cpu(), table.nbytes
    del table
    keep_table_on_host(model)
    gc.collect()
    # Large blocks are handed out by whole MiB.
    assert 0 <= before - torch.cuda.memory_allocated() - nbytes < 2 << 20
    held = model.model.embed_tokens.weight
    assert held.is_cuda
    rows = torch.tensor([0, 999_999, 5], device="cuda")
    assert torch.equal(torch.nn.functional.embedding(rows, held).cpu(), values[rows.cpu()])


@pytest.mark.gpu
def test_memory_is_given_back_with_the_model() -> None:
    for _ in range(3):
        keep_table_on_host(wild_model("cuda", torch.bfloat16, config=LARGE))
        gc.collect()
    torch.cuda.synchronize()
