"""Attacks on a real server, and what an honest neighbour notices of them."""

from pathlib import Path

import attackers
from neighbour_rig import attack, stop, talk
from server_rig import QUICK, serving


def test_headers(cache_folder: Path) -> None:
    with serving(*QUICK, cache=cache_folder) as server:
        alone = talk(server, 6)
        with attack(server, attackers.endless_headers):
            under = talk(server, 6)
            under.stop_s = stop(server)
        under.assert_honest(alone)
