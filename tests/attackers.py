"""Clients that are after everybody's server, each a function that runs in a process of its own.

``neighbour_rig.attack`` starts them; each goes on until it is ended. They use the loopback alone,
at the rate that stopped the server when its limits were missing, and import little.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


def begun() -> None:
    """Say that the attack is under way."""
    print("begun", flush=True)


def endless_headers(url: str, mib_per_s: float = 400.0) -> None:
    """One request whose headers never end; another connection once it is thrown out."""
    block = b"".join(b"X-%05d: %s\r\n" % (n, b"a" * 120) for n in range(500))
    pause_s = len(block) / (mib_per_s * 2**20)
    first = True
    while True:
        with suppress(OSError), _raw(url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n")
            while True:
                connection.sendall(block)
                if first:
                    begun()
                    first = False
                time.sleep(pause_s)
        time.sleep(0.05)


@contextmanager
def _raw(url: str) -> Iterator[socket.socket]:
    """A plain connection to where a URL points."""
    where = urlsplit(url)
    assert where.hostname in ("127.0.0.1", "localhost"), "attacks stay on this machine"
    connection = socket.create_connection((where.hostname, where.port or 80), timeout=30)
    with connection:
        yield connection
