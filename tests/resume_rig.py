"""What tests of resumed conversations share: clients that are lost, and come back."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from conftest import require_package, require_program, run
from realtime_rig import judge
from server_rig import POLL_S, START_S, Served, Server, Talker, free_port
from websockets.exceptions import InvalidStatus

from mosstalk.server.conversations import KeptConversation, unpacked

Wire = dict[str, Any]
ASKED = ("Good morning.", "What is the time?", "Thank you.")


class Listener(Protocol):
    """A client, by WebSocket or WebRTC, that keeps the events that it hears."""

    events: list[Wire]

    async def wait(self, kind: str, **fields: Any) -> Wire:
        """Listen until an event of that kind comes, with these fields."""


def token_of(talker: Listener) -> str:
    """The token that a client was told last."""
    return str(resume_of(talker)["token"])


def resume_of(talker: Listener) -> Wire:
    """What a client was told last of how it can come back."""
    told = [each for each in talker.events if each["type"].startswith("session.")]
    resume: Wire = told[-1]["session"]["mosstalk"]["resume"]
    return resume


def back(server: Served, token: str, **more: Any) -> Talker:
    """A client that comes back with a token."""
    return Talker(server, model=f"any&resume={token}", **more)


def lose(talker: Talker) -> None:
    """Lose a connection: nobody says goodbye."""
    talker.socket.transport.abort()


async def history(talker: Listener) -> list[Wire]:
    """The items that have come back, as they were told; every event is as the types want it."""
    count = resume_of(talker)["items"]
    done = [await talker.wait("conversation.item.done") for _ in range(count)]
    for event in talker.events:
        judge(event)
    return [each["item"] for each in done]


def words(item: Wire) -> str:
    """What an item says."""
    content = item["content"][0]
    return str(content.get("text") or content.get("transcript"))


def refusal(server: Server, token: str, **more: Any) -> Wire:
    """The error with which a token is refused, before any connection is opened."""
    found: Wire = {}

    async def main() -> None:
        with pytest.raises(InvalidStatus) as refused:
            await back(server, token, **more).__aenter__()
        found["status"] = refused.value.response.status_code
        found.update(json.loads(refused.value.response.body)["error"])

    run(main())
    return found


def rows_of(server: Server, folder: Path, session_id: str) -> list[tuple[int, int]]:
    """The rows of a session that has ended, as the model has read them."""

    def found() -> list[Path]:
        return list(folder.glob(f"*-{session_id}/rows.json"))

    server.await_metrics(lambda _: bool(found()))
    return [tuple(row) for row in json.loads(found()[0].read_text())]


async def talk(server: Served, *asked: str) -> Talker:
    """A client that has asked this and heard the answers, and is still there."""
    talker = await Talker(server).__aenter__()
    for text in asked:
        done = await talker.ask(text)
        assert done["status"] == "completed", done
    return talker


async def both(*waits: Any) -> list[Any]:
    """What both come to, at the same time."""
    return await asyncio.gather(*waits, return_exceptions=True)


@dataclass
class Store:
    """A Redis of its own, which can be stopped and started again."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """Where servers reach it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        """Somebody who looks at what it holds."""
        from redis import Redis

        return Redis.from_url(self.url)

    def start(self) -> None:
        """Start it and wait until it answers; it holds nothing."""
        words = ("--port", str(self.port), "--save", "", "--dir", str(self.folder))
        self.process = subprocess.Popen(
            [require_program("redis-server"), *words], stdout=subprocess.DEVNULL
        )
        from redis.exceptions import ConnectionError as NotThereError

        end_s = time.monotonic() + START_S
        while True:
            try:
                self.client.ping()
            except NotThereError:
                assert time.monotonic() < end_s, "Redis does not start"
                time.sleep(POLL_S)
            else:
                return

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> "Iterator[Store]":
        """One that answers while the block runs; it needs the package redis."""
        require_package("redis", "redis")
        redis = cls(folder, free_port())
        redis.start()
        try:
            yield redis
        finally:
            redis.kill()

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def conversations(self) -> list[KeptConversation]:
        """All that are kept and were not taken up."""
        client = self.client
        held = (client.hgetall(key) for key in client.keys("mosstalk:conversation:*"))
        plain = ({name.decode(): value for name, value in each.items()} for each in held)
        return [unpacked(each) for each in plain if "head" in each]
