"""Messages over a stream socket: a length of four bytes, then the message, pickled."""

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

LENGTH = struct.Struct("!I")
_UNSENT_BYTES = 1 << 20
"""Bytes on their way to the other process from which on ``send`` waits."""


class Channel:
    """One end of a link; what is sent arrives whole and in order, or the link is broken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=_UNSENT_BYTES)

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """A wire over one end of a socket pair, which it closes in the end."""
        return cls(*await asyncio.open_connection(sock=end))

    def post(self, message: Any) -> None:
        """Send without waiting; into a broken link it is lost."""
        if not self._writer.is_closing():
            pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(LENGTH.pack(len(pickled)) + pickled)

    async def send(self, message: Any) -> None:
        """Send, and wait while too much is on its way; into a broken link it is lost."""
        self.post(message)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._writer.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the other end is closed."""
        while True:
            try:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    def close(self) -> None:
        """Close this end once all that was posted has gone."""
        self._writer.close()
