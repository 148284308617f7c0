"""Attacks on a real server, and what an honest neighbour notices of them."""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attackers
import pytest
from neighbour_rig import Stay, assert_honest, assert_withstood, attack, talk
from server_rig import QUICK, Server, serving

# By themselves: they measure times, and other tests take them.
pytestmark = pytest.mark.alone
MIB = 2**20
FEW, MANY = 3, 30
FILES = 512
HTTP, FRAMES, UPDATES = "before the first request", "frames", "updates"
ATTACKS: dict[str, tuple[str, Callable[..., None], dict[str, Any]]] = {
    "endless headers": (HTTP, attackers.endless_headers, {}),
    "connections that ask for nothing": (HTTP, attackers.idle_connections, {"count": 700}),
    "pings": (FRAMES, attackers.pings, {}),
    "fragments of a byte": (FRAMES, attackers.crumbs, {}),
    "unfinished messages": (FRAMES, attackers.unfinished, {"connections": 16, "size": 32 * MIB}),
    "a read full of updates": (UPDATES, attackers.updates, {"tools": 1_000_000}),
    "updates of the largest session": (UPDATES, attackers.updates, {"tools": 125_000}),
    "updates and no reading": (
        UPDATES, attackers.deaf_updates, {"tools": 125_000, "connections": 8}
    ),
}  # fmt: skip
"""By what it does: its kind, the attacker, and what that is given."""


@contextmanager
def attackable(cache_folder: Path) -> Iterator[Server]:
    """A server with its usual limits, which may have as many files open as on a small machine."""
    with serving(*QUICK, cache=cache_folder) as server:
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (FILES, most))
        yield server


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with its usual limits."""
    with attackable(cache_folder) as running:
        yield running


@pytest.mark.parametrize("kind", [HTTP, FRAMES, UPDATES])
def test_attacks_of_a_kind_are_not_noticed(kind: str, server: Server) -> None:
    def tried() -> tuple[Stay, Stay]:
        alone = talk(server, FEW)
        with ExitStack() as attacks:
            for each, attacker, more in ATTACKS.values():
                if each == kind:
                    attacks.enter_context(attack(server, attacker, **more))
            return alone, talk(server, FEW)

    assert_honest(tried)


@pytest.mark.timeout(900)
@pytest.mark.faults  # two minutes each
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_not_noticed_for_long(name: str, cache_folder: Path) -> None:
    _, attacker, more = ATTACKS[name]
    assert_withstood(lambda: attackable(cache_folder), MANY, attacker, **more)
