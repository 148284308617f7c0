"""Floods of items and responses on a real server, and what an honest neighbour notices of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flood_attackers
import pytest
from neighbour_rig import Stay, assert_honest, assert_withstood, attack, talk
from server_rig import QUICK, Server, serving

# By themselves: they measure times, and other tests take them.
pytestmark = pytest.mark.alone
FEW, MANY = 3, 30
FLOODS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "system items": (flood_attackers.items, {"role": "system", "chars": 20, "connections": 4}),
    "user items": (flood_attackers.items, {"role": "user", "chars": 20, "connections": 4}),
    "long items": (
        flood_attackers.items,
        {"role": "user", "chars": 30_000, "connections": 4, "per_burst": 5},
    ),
    "spoken responses": (flood_attackers.responses, {"connections": 1}),
    "spoken responses of four": (flood_attackers.responses, {"connections": 4}),
    "written responses of four": (flood_attackers.responses, {"connections": 4, "kind": "text"}),
}


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with its usual limits."""
    with serving(*QUICK, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: Server) -> Stay:
    """What the neighbour meets when there is nobody else."""
    return talk(server, FEW)


@pytest.mark.parametrize("name", ["system items", "spoken responses of four"])
def test_a_flood_is_not_noticed(name: str, server: Server, alone: Stay) -> None:
    flood, more = FLOODS[name]

    def tried() -> tuple[Stay, Stay]:
        with attack(server, flood, **more):
            return alone, talk(server, FEW)

    assert_honest(tried)
    server.await_nothing_held()


@pytest.mark.timeout(900)
@pytest.mark.faults  # two minutes each
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_not_noticed_for_long(name: str, cache_folder: Path) -> None:
    flood, more = FLOODS[name]
    assert_withstood(lambda: serving(*QUICK, cache=cache_folder), MANY, flood, **more)
