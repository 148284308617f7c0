"""Calls to a server behind NAT or a firewall: the addresses and ports that an answer names."""

import re
import socket
from pathlib import Path

import httpx
import pytest
from conftest import require_package, run
from server_rig import QUICK, serving, typed
from typer.testing import CliRunner
from webrtc_rig import Caller, LossyRelay, post

from mosstalk.cli import app
from mosstalk.server.call_network import CallNetwork, call_network

PUBLIC = "127.0.0.2"
"""Stands for an address elsewhere: the server does not name it by itself, and a relay has it."""
_CANDIDATE = re.compile(r"a=candidate:\S+ \d udp (\d+) (\S+) (\d+) typ host\r\n")


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")


def named(answer: str) -> dict[tuple[str, int], int]:
    """The addresses and ports in an answer, and how each is preferred."""
    return {(host, int(port)): int(much) for much, host, port in _CANDIDATE.findall(answer)}


def free_udp_port() -> int:
    """A port that nobody has at any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", 0))
        return int(taken.getsockname()[1])


def test_a_client_elsewhere_talks_through_an_address_that_leads_to_the_server(
    cache_folder: Path,
) -> None:
    port = free_udp_port()
    words = (*QUICK, "--webrtc-address", PUBLIC, "--webrtc-ports", f"{port}-{port}")
    with serving(*words, cache=cache_folder) as server:

        async def main() -> None:
            caller = Caller(server)
            answer = await post(server, await caller.offer())
            candidates = named(answer.text)
            own = [host for host, _ in candidates if host != PUBLIC and ":" not in host]
            assert own, "the machine's own addresses are named too"
            assert {each_port for _, each_port in candidates} == {port}
            assert candidates[PUBLIC, port] < min(candidates[host, port] for host in own)
            nat = LossyRelay((own[0], port), at=(PUBLIC, port))
            reached = _CANDIDATE.sub(lambda m: m[0] if m[2] == PUBLIC else "", answer.text)
            assert set(named(reached)) == {(PUBLIC, port)}
            fitted = httpx.Response(201, headers=answer.headers, text=reached)
            fitted.headers["content-type"] = answer.headers["content-type"]
            await caller.answered(fitted)
            await caller.wait("session.created")
            caller.send(typed("Still there?"), {"type": "response.create"})
            await caller.wait("output_audio_buffer.stopped")
            await caller.connection.close()
            nat.close()

        run(main())
        server.await_nothing_held()
        assert not server.faults()


def test_calls_take_the_ports_that_they_may_and_one_too_many_is_refused(
    cache_folder: Path,
) -> None:
    port = free_udp_port()
    words = (*QUICK, "--webrtc-ports", f"{port}-{port}", "--max-sessions", "3")
    with serving(*words, cache=cache_folder) as server:

        async def main() -> None:
            async with Caller(server):
                refused = await post(server, await Caller(server).offer())
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "webrtc_ports"
                assert f"{port}-{port}" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) > 0
            server.await_nothing_held()  # its port is free
            async with Caller(server) as caller:
                assert caller.kinds()[0] == "session.created"

        run(main())
        server.await_nothing_held()
        assert not server.faults()
        assert server.metrics()['mosstalk_refusals_total{reason="webrtc_ports"}'] == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--webrtc-ports", "40000"), "give FIRST-LAST"),
        (("--webrtc-ports", "40100-40000"), "give FIRST-LAST"),
        (("--webrtc-ports", "0-10"), "1-65535"),
        (("--webrtc-ports", "65000-66000"), "1-65535"),
        (("--webrtc-ports", ""), "give FIRST-LAST"),
        (("--webrtc-address", "203.0.113.7:40000"), "an address or a name alone"),
        (("--webrtc-address", "https://talk.example.org"), "an address or a name alone"),
        (("--webrtc-address", ""), "an address or a name alone"),
        (("--webrtc-address", "0.0.0.0"), "no client can reach 0.0.0.0"),
        (("--webrtc-address", "224.0.0.1"), "no client can reach"),
        (("--webrtc-address", "nobody.invalid"), "it has no address"),
    ],
)
def test_what_means_no_address_and_no_ports_is_refused_with_an_example(
    words: tuple[str, ...], why: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "--print-config", *words])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert words[0] in said
    assert why in said


def test_addresses_and_names_are_told_once() -> None:
    hosts = ("203.0.113.7", "2001:DB8::7", "203.0.113.7", "localhost")
    found = call_network(hosts, "40000-40100")
    assert found.addresses[:2] == ("203.0.113.7", "2001:db8::7")
    assert "127.0.0.1" in found.addresses[2:]
    assert len(set(found.addresses)) == len(found.addresses)
    assert found.ports == (40000, 40100)
    assert call_network((), None) == CallNetwork()
