"""Inputs of a step: sent whole, and refused by name where they are not what they must be."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.errors import EngineInputError
from mosstalk.runtime.device import pick_device
from mosstalk.runtime.device_inputs import DeviceInputs, Field

CPU = torch.device("cpu")
FIELDS = {
    "sound": Field((3, 4), "float32", "items"),
    "page": Field((3,), "int32", "items", padding=7),
    "table": Field((2, 5), "int64", padding=None),
    "known": Field((3,), "bool", "rows", padding=True),
}
on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def values(items: int = 2, rows: int = 3, first: int = 0) -> dict[str, NDArray[Any]]:
    return {
        "sound": np.arange(4 * items, dtype=np.float32).reshape(items, 4) + first,
        "page": np.arange(items, dtype=np.int32) + first,
        "table": np.arange(10).reshape(2, 5) + first,
        "known": np.arange(rows) % 2 == 0,
    }


@on_every_device
def test_inputs_are_sent_whole_and_what_is_not_given_is_padding(device: str) -> None:
    inputs = DeviceInputs(FIELDS, pick_device(device))
    inputs.fill(values(items=3))
    inputs.fill(values(items=1, rows=1, first=5))

    assert inputs["sound"].tolist() == [[5, 6, 7, 8], [0] * 4, [0] * 4]
    assert inputs["page"].tolist() == [5, 7, 7]
    assert inputs["table"].tolist() == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert inputs["known"].tolist() == [True] * 3
    assert all(tensor.device.type == device for tensor in inputs.tensors.values())


def test_inputs_stay_where_they_are_and_begin_aligned() -> None:
    inputs = DeviceInputs(FIELDS, CPU)
    places = {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
    inputs.fill(values())

    assert {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()} == places
    first = min(places.values())
    assert all((place - first) % 128 == 0 for place in places.values())
    assert sum(field.nbytes for field in FIELDS.values()) <= inputs.nbytes


def test_clearing_leaves_padding_alone_but_for_what_has_none() -> None:
    inputs = DeviceInputs(FIELDS, CPU)
    inputs.fill(values())
    inputs.clear()

    assert not inputs["sound"].any()
    assert inputs["page"].tolist() == [7, 7, 7]
    assert inputs["known"].all()
    assert torch.equal(inputs["table"], torch.arange(10).view(2, 5))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise", np.zeros(1, np.int32), "'noise' is missing or not one"),
        ("sound", np.zeros((4, 4), np.float32), r"'sound' has the shape \(4, 4\).*at most 3"),
        ("sound", np.zeros((2, 5), np.float32), r"'sound' has the shape \(2, 5\).*, 4\)"),
        ("sound", np.zeros(4, np.float32), "'sound' has the shape"),
        ("sound", np.zeros((2, 4)), "'sound' is float64, must be float32"),
        ("page", np.zeros(2), "'page' is float64, must be int32"),
        ("page", np.zeros(2, np.int64), "'page' is int64, must be int32"),
        ("page", np.zeros(3, np.int32), r"'page' has the shape \(3,\), must be \(2,\)"),
        ("table", np.zeros((1, 5), np.int64), r"'table' has the shape \(1, 5\), must be \(2, 5\)"),
    ],
)
def test_an_input_that_does_not_fit_is_named_and_nothing_is_sent(
    name: str, value: NDArray[Any], message: str
) -> None:
    inputs = DeviceInputs(FIELDS, CPU)
    inputs.fill(values())
    before = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    with pytest.raises(EngineInputError, match=message):
        inputs.fill(values(first=9) | {name: value})
    assert all(torch.equal(inputs[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_missing_is_named(name: str) -> None:
    given = values()
    del given[name]
    with pytest.raises(EngineInputError, match=f"{name!r} is missing"):
        DeviceInputs(FIELDS, CPU).fill(given)


@pytest.mark.parametrize("step", [6, 8])
def test_what_was_made_for_another_step_is_refused(step: int) -> None:
    inputs = DeviceInputs(FIELDS, CPU)
    inputs.fill(values(), made_for=7, step=7)
    with pytest.raises(EngineInputError, match=f"of step 7, this is step {step}"):
        inputs.fill(values(), made_for=7, step=step)


@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_no_step_reads_what_another_left(sizes: list[int]) -> None:
    inputs = DeviceInputs(FIELDS, CPU)
    for number, size in enumerate(sizes):
        inputs.fill(values(items=size, first=number))
        found = inputs["page"].tolist()
        assert found == [*range(number, number + size), *[7] * (3 - size)]


@on_every_device
def test_what_is_sent_arrives_as_it_was_however_much_is_on_its_way(device: str) -> None:
    inputs = DeviceInputs(FIELDS, pick_device(device))
    found: list[Tensor] = []
    for number in range(60):
        inputs.fill(values(first=number))
        found.append(inputs["table"].clone())
    for number, table in enumerate(found):
        assert table.flatten().tolist() == list(range(number, number + 10))


@pytest.mark.gpu
def test_a_stream_does_not_overwrite_what_another_still_reads() -> None:
    device = pick_device("cuda")
    inputs = DeviceInputs(FIELDS, device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found: list[Tensor] = []
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            inputs.fill(values(first=number))
            torch.cuda._sleep(2_000_000)  # the reader is late
            found.append(inputs["table"].clone())
    torch.cuda.synchronize(device)
    for number, table in enumerate(found):
        assert table.flatten().tolist() == list(range(number, number + 10))


@pytest.mark.gpu
def test_filling_waits_for_nothing() -> None:
    inputs = DeviceInputs(FIELDS, pick_device("cuda"))
    inputs.fill(values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.fill(values(first=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert inputs["page"].tolist() == [1, 2, 7]
