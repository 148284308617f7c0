"""Where calls by WebRTC come in: this machine's own addresses, others that lead here, and ports."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from mosstalk.environment import install_command
from mosstalk.errors import OptionError
from mosstalk.server.certificate import is_address

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
_LAST_PORT = 65_535


@dataclass(frozen=True)
class CallNetwork:
    """``addresses`` are named to clients beside the machine's own, each with the same ports.

    ``ports`` are the first and the last for UDP; None: any that the system gives.
    """

    addresses: tuple[str, ...] = ()
    ports: tuple[int, int] | None = None


def call_network(hosts: Sequence[str], ports: str | None) -> CallNetwork:
    """What ``--webrtc-address`` and ``--webrtc-ports`` mean; names are looked up.

    Raises:
        OptionError: they mean nothing, or calls are not taken here.
    """
    if (hosts or ports is not None) and find_spec("aiortc") is None:
        raise OptionError(
            "--webrtc-address and --webrtc-ports are for calls by WebRTC, which need the extra "
            f"webrtc; run: {install_command('webrtc')}"
        )
    found = [address for host in hosts for address in _addresses(host)]
    return CallNetwork(tuple(dict.fromkeys(found)), None if ports is None else _ports(ports))


def _addresses(host: str) -> list[str]:
    """The addresses of a host that clients may be told."""
    if is_address(host):
        found = [host]
    elif not re.fullmatch(r"[\w.-]+", host, re.ASCII):
        raise OptionError(
            f"--webrtc-address {host}: give an address or a name alone, as 203.0.113.7, without a "
            "scheme and a port"
        )
    else:
        try:
            found = [str(each[4][0]) for each in socket.getaddrinfo(host, None)]
        except (OSError, UnicodeError) as error:
            raise OptionError(f"--webrtc-address {host}: it has no address ({error})") from None
    for each in map(ipaddress.ip_address, found):
        if each.is_unspecified or each.is_multicast or "%" in str(each):
            raise OptionError(
                f"--webrtc-address {host}: no client can reach {each}; give the address that they "
                "use, as 203.0.113.7"
            )
    return [str(ipaddress.ip_address(each)) for each in found]


def _ports(given: str) -> tuple[int, int]:
    """The first and the last port of a range."""
    match = _RANGE.fullmatch(given)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= _LAST_PORT:
        raise OptionError(
            f"--webrtc-ports {given}: give FIRST-LAST, as 40000-40100, within 1-{_LAST_PORT}"
        )
    return first, last
