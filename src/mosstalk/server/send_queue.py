"""Messages that wait for a client to take them, counted in bytes and in seconds of sound."""

import asyncio
from collections import deque

from mosstalk.server.limits import Limits


class TooSlowError(Exception):
    """More waits for a client than may."""


class SendQueue:
    """A queue of one writer and one reader in the same loop; never makes the writer wait."""

    def __init__(self, limits: Limits) -> None:
        self.unsent_s = 0.0
        self._limits, self._unsent_bytes, self._answers_bytes = limits, 0, 0
        self._messages: deque[tuple[str, float]] = deque()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False

    def put(self, message: str, seconds: float = 0.0) -> None:
        """Add a message that carries so many seconds of sound.

        Raises:
            TooSlowError: with it more would wait than the limits allow.
        """
        self.unsent_s += seconds
        self._unsent_bytes += len(message)
        self._answers_bytes += 0 if seconds else len(message)
        if self.unsent_s > self._limits.unsent_s or self._unsent_bytes > self._limits.unsent_bytes:
            raise TooSlowError(f"{self.unsent_s:.0f} s of sound wait to be read")
        self._messages.append((message, seconds))
        self._changed.set()

    @property
    def has_room(self) -> bool:
        """Whether no more than may be waits for the client, sound aside."""
        return self._answers_bytes <= self._limits.unsent_answers_bytes

    async def room(self) -> None:
        """Wait for that."""
        while not self.has_room:
            self._taken.clear()
            await self._taken.wait()

    def drop(self) -> None:
        """Nobody takes anything any more: what waits is lost."""
        self._messages.clear()
        self.unsent_s, self._unsent_bytes, self._answers_bytes = 0.0, 0, 0
        self._taken.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._changed.set()

    async def get(self) -> str | None:
        """The next message, once there is one; None at the end."""
        while not self._messages:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message, seconds = self._messages.popleft()
        self.unsent_s -= seconds
        self._unsent_bytes -= len(message)
        self._answers_bytes -= 0 if seconds else len(message)
        self._taken.set()
        return message
