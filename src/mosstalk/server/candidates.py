"""The addresses and ports that the answer to an offer names (ICE candidates, RFC 8445, 5.1.1)."""

import asyncio
import errno
import ipaddress
import random
import socket
from typing import Any

from aioice.candidate import Candidate, candidate_foundation, candidate_priority
from aioice.ice import Connection, StunProtocol
from aioice.turn import UDP_SOCKET_BUFFER_SIZE
from aiortc import RTCIceTransport

from mosstalk.server.admission import Refusal, RefusedError
from mosstalk.server.call_network import CallNetwork

_AGAIN_S = 5.0
_AFTER_OWN = 65_534
"""How much an address is preferred: less than the machine's own, of 65,535."""


def name_candidates(transport: RTCIceTransport, network: CallNetwork) -> None:
    """Have a connection that has not gathered its candidates yet do so as ``network`` says.

    It raises RefusedError then where no port of the range is free.
    """
    connection: Any = transport.iceGatherer._connection
    assert hasattr(connection, "get_component_candidates"), "aioice has changed"
    of_system = connection.get_component_candidates

    async def candidates(component: int, addresses: list[str], timeout: int = 5) -> list[Candidate]:
        if network.ports is None:
            own = await of_system(component, addresses, timeout)
        else:
            own = await _in_range(connection, component, addresses, network.ports)
        return [*own, *_elsewhere(own, network)]

    connection.get_component_candidates = candidates


def own_candidates(transport: RTCIceTransport) -> list[Candidate]:
    """Those of the machine's own addresses, after they were gathered."""
    return [each.local_candidate for each in transport.iceGatherer._connection._protocols]


async def _in_range(
    connection: Connection, component: int, addresses: list[str], ports: tuple[int, int]
) -> list[Candidate]:
    """Bind one port of a range at each address, the same where it is free at all.

    Raises:
        RefusedError: none is free at any address.
    """
    first, last = ports
    count = last - first + 1
    start = random.randrange(count)
    places = [first + (start + n) % count for n in range(count)]
    bound = [await _bound(connection, component, address, places) for address in addresses]
    if found := [candidate for candidate in bound if candidate]:
        return found
    raise RefusedError(
        Refusal(
            503,
            "webrtc_ports",
            f"all UDP ports for calls are taken ({first}-{last}); the server's owner may choose "
            "more with --webrtc-ports",
            _AGAIN_S,
        )
    )


async def _bound(
    connection: Connection, component: int, address: str, places: list[int]
) -> Candidate | None:
    """A candidate at the first of these ports that is free at an address, if one is."""
    loop = asyncio.get_running_loop()
    for port in places:
        try:
            transport, protocol = await loop.create_datagram_endpoint(
                lambda: StunProtocol(connection), local_addr=(address, port)
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            return None
        bound = transport.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UDP_SOCKET_BUFFER_SIZE)
        host = transport.get_extra_info("sockname")[0]
        protocol.local_candidate = _candidate(component, host, port)
        connection._protocols.append(protocol)
        return protocol.local_candidate
    return None


def _elsewhere(own: list[Candidate], network: CallNetwork) -> list[Candidate]:
    """Candidates at addresses that lead to the machine's own, of the same kind of IP."""
    named = {(each.host, each.port) for each in own}
    found = list[Candidate]()
    for address in network.addresses:
        version = ipaddress.ip_address(address).version
        for each in own:
            alike = ipaddress.ip_address(each.host).version == version
            if alike and (address, each.port) not in named:
                named.add((address, each.port))
                found.append(_candidate(each.component, address, each.port, _AFTER_OWN))
    return found


def _candidate(component: int, host: str, port: int, preferred: int = 65_535) -> Candidate:
    return Candidate(
        foundation=candidate_foundation("host", "udp", host),
        component=component,
        transport="udp",
        priority=candidate_priority(component, "host", preferred),
        host=host,
        port=port,
        type="host",
    )
