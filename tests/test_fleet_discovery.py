"""The list of a fleet's replicas, as Prometheus gets it; ``test_fleet`` has a real Prometheus."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from conftest import run

from mosstalk.fleet.discovery import PATH, Discovery, Place
from mosstalk.server.admission import ServeOptions, ServerContext
from mosstalk.server.app import make_app

PLACES = [Place("10.0.0.1", 30000, "first"), Place("fd00::2", 30001, "second")]
WITH_KEY = {"Authorization": "Bearer key"}


class Replicas:
    """What says where they are, and counts how often it was asked."""

    def __init__(self, places: Sequence[Place] | None) -> None:
        self.places, self.asked = places, 0

    async def ask(self) -> Sequence[Place] | None:
        """Where they are, a moment later."""
        self.asked += 1
        await asyncio.sleep(0)
        return self.places


def client_of(replicas: Replicas) -> httpx.AsyncClient:
    """Asks a server with a key, of whose models nothing is loaded."""
    context = ServerContext(ServeOptions(keys=("key",)))
    context.more_routes = {PATH: Discovery(context, replicas.ask).answer}
    transport = httpx.ASGITransport(make_app(context))
    return httpx.AsyncClient(transport=transport, base_url="http://fleet")


def test_every_replica_has_its_address_and_labels_for_who_has_a_key() -> None:
    async def main() -> None:
        async with client_of(Replicas(PLACES)) as client:
            assert (await client.get(PATH)).status_code == 401
            answer = await client.get(PATH, headers=WITH_KEY)
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.json() == [
                {
                    "targets": ["10.0.0.1:30000"],
                    "labels": {"replica": "first", "node": "10.0.0.1"},
                },
                {
                    "targets": ["[fd00::2]:30001"],
                    "labels": {"replica": "second", "node": "fd00::2"},
                },
            ]

    run(main())


@pytest.mark.parametrize("nobody", [None, []], ids=["unknown", "none"])
def test_where_nobody_is_known_prometheus_is_to_keep_those_that_it_knows(
    nobody: Sequence[Place] | None,
) -> None:
    async def main() -> None:
        async with client_of(Replicas(nobody)) as client:
            answer = await client.get(PATH, headers=WITH_KEY)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")

    run(main())


def test_who_asks_all_the_time_does_not_keep_serves_controller_busy() -> None:
    async def main() -> None:
        replicas = Replicas(PLACES)
        async with client_of(replicas) as client:
            asked = [client.get(PATH, headers=WITH_KEY) for _ in range(20)]
            answers = await asyncio.gather(*asked)
        assert {each.status_code for each in answers} == {200}
        assert replicas.asked == 1

    run(main())


def test_a_server_alone_has_no_such_list() -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(make_app(ServerContext(ServeOptions())))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get(PATH)).status_code == 404

    run(main())
