"""Events on a call's data channel: how long they may be, in both directions (RFC 8841, 6).

Each side announces in its description how long a message it takes. aiortc raises for one that is
longer than the client takes, and keeps whatever comes, until no room is left and the connection
stands still. Here an event to the client is shortened until it fits, and of a message that is too
long for the server nothing is kept, so that what comes after it can be heard.
"""

import json
from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import Any

from aiortc.rtcsctptransport import (
    SCTP_DATA_FIRST_FRAG,
    SCTP_DATA_LAST_FRAG,
    DataChunk,
    InboundStream,
    RTCSctpCapabilities,
    RTCSctpTransport,
    tsn_plus_one,
)

LEAST_BYTES = 4096
"""A client must take messages of so many bytes: an error has to fit."""
TOO_LONG = token_hex(16)
"""What a message that was too long is replaced with; nobody can guess it."""
_SHORT = 200
"""Characters of a text that are left at least."""
_NOTE_BYTES = 100
"""What it takes at most, about, to tell of a text that was shortened."""


def fitted(message: str, most_bytes: int) -> str:
    """An event as a client takes it: the same, or with its longest texts cut, and sound left out.

    What was cut stands in the event's ``mosstalk.shortened``: by its path the characters that it
    had. An event that is too long even then is replaced with an error that says so. 0
    ``most_bytes`` is any number.
    """
    if not most_bytes or (len(message) <= most_bytes and message.isascii()):
        return message
    event = json.loads(message)
    shortened = dict[str, int]()
    while (size := len(_utf8(event))) > most_bytes:
        texts = [text for text in _texts(event) if len(text.value) > _SHORT or text.is_sound]
        if not texts:
            return _too_long(event, len(message), most_bytes)
        text = max(texts, key=lambda each: (each.is_sound, len(_utf8(each.value))))
        shortened.setdefault(text.path, len(text.value))
        text.put(_cut(text.value, size - most_bytes) if not text.is_sound else "")
        event["mosstalk"] = (event.get("mosstalk") or {}) | {"shortened": shortened}
    return _utf8(event).decode()


class _Text:
    """A text in an event; ``put`` replaces it."""

    def __init__(self, path: str, holder: Any, key: Any) -> None:
        self.path, self._holder, self._key = path, holder, key
        self.value: str = holder[key]
        self.is_sound = key == "audio" and bool(self.value)

    def put(self, value: str) -> None:
        self._holder[self._key] = value


def _texts(value: Any, path: str = "") -> Iterator[_Text]:
    """All texts in a value, but for what was noted of those that were cut."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(each, str):
            yield _Text(name, value, key)
        elif isinstance(each, dict | list):
            yield from _texts(each, name)


def _cut(text: str, excess_bytes: int) -> str:
    """The beginning of a text that is shorter by so many bytes, or as short as texts become."""
    size = len(_utf8(text))
    kept = len(text) * (size - excess_bytes - _NOTE_BYTES) // size
    return text[: max(_SHORT - 1, min(kept, len(text) - 2))] + "…"


def _too_long(event: dict[str, Any], size: int, most_bytes: int) -> str:
    message = (
        f"An event '{event['type']}' of {size} bytes was not sent: this client takes {most_bytes} "
        "at most (a=max-message-size)."
    )
    body = {"type": "server_error", "code": "event_too_long", "message": message}
    body |= {"param": None, "event_id": None}  # type: ignore[dict-item]
    return json.dumps({"event_id": event["event_id"], "type": "error", "error": body})


def _utf8(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


class BoundedMessages:
    """Lets a connection take messages of ``most_bytes``, and announces that.

    Of a longer one comes ``TOO_LONG``.
    """

    def __init__(self, sctp: RTCSctpTransport, most_bytes: int) -> None:
        names = ("_inbound_streams", "_get_inbound_stream", "_advertised_rwnd")
        assert all(hasattr(sctp, name) for name in names), "aiortc has changed"
        self._most_bytes, self._refused_bytes = most_bytes, 0
        self._sctp = sctp
        # What comes behind a packet that was lost waits for it, so there is room for two messages.
        sctp._advertised_rwnd = max(sctp._advertised_rwnd, 2 * most_bytes)
        own: Any = sctp
        own.getCapabilities = lambda: RTCSctpCapabilities(maxMessageSize=most_bytes)
        own._get_inbound_stream = self._stream

    def exceeded(self, most_bytes: int) -> bool:
        """Whether more than so much was refused in all, or more waits than there is room for."""
        return self._refused_bytes > most_bytes or self._sctp._advertised_rwnd < 0

    def _stream(self, stream_id: int) -> InboundStream:
        streams = self._sctp._inbound_streams
        if stream_id not in streams:
            streams[stream_id] = _BoundedStream(self._most_bytes, self._free)
        return streams[stream_id]

    def _free(self, count: int) -> None:
        """So many bytes were received and are not kept."""
        self._sctp._advertised_rwnd += count
        self._refused_bytes += count


class _BoundedStream(InboundStream):
    """Puts messages together of at most ``most_bytes``; ``free`` is told what is not kept.

    Of a message that is longer one chunk stands for all that came: it is the first, holds
    ``TOO_LONG``, and has the number of the last.
    """

    def __init__(self, most_bytes: int, free: Callable[[int], None]) -> None:
        super().__init__()
        self._most_bytes, self._free = most_bytes, free
        self._bytes = self._ends = 0

    def add_chunk(self, chunk: DataChunk) -> None:
        super().add_chunk(chunk)
        self._bytes += len(chunk.user_data)
        self._ends += bool(chunk.flags & SCTP_DATA_LAST_FRAG)
        if self._bytes > self._most_bytes:
            self._drop()

    def pop_messages(self) -> Iterator[tuple[int, int, bytes]]:
        if not self._ends:  # looking through all chunks for each that comes would take long
            return
        for stream_id, protocol, content in super().pop_messages():
            self._bytes -= len(content)
            self._ends -= 1
            if content.startswith(TOO_LONG.encode()):
                self._free(len(content) - len(TOO_LONG))
                content = TOO_LONG.encode()
            yield stream_id, protocol, content

    def prune_chunks(self, tsn: int) -> int:
        size = super().prune_chunks(tsn)
        self._bytes -= size
        self._ends = sum(bool(each.flags & SCTP_DATA_LAST_FRAG) for each in self.reassembly)
        return size

    def _drop(self) -> None:
        """Keep nothing of the first message if it is too long."""
        first = last = self.reassembly[0]
        if not first.flags & SCTP_DATA_FIRST_FRAG:
            return
        count, size = 1, len(first.user_data)
        for chunk in self.reassembly[1:]:
            if last.flags & SCTP_DATA_LAST_FRAG or chunk.tsn != tsn_plus_one(last.tsn):
                break
            last = chunk
            count, size = count + 1, size + len(chunk.user_data)
        if size <= self._most_bytes:
            return
        stub = DataChunk(first.flags | last.flags & SCTP_DATA_LAST_FRAG)
        stub.tsn, stub.stream_id, stub.stream_seq = last.tsn, last.stream_id, last.stream_seq
        stub.protocol, stub.user_data = last.protocol, TOO_LONG.encode()
        self.reassembly[:count] = [stub]
        self._bytes -= size - len(TOO_LONG)
        self._free(size - len(TOO_LONG))
