"""One conversation in real time: sound in, sound out, interruption. Knows no protocol.

``commands`` (with the settings) and ``events`` are plain values, to be used from any process;
``host`` is where the models are. The names below are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosstalk.session.commands import SessionSettings
    from mosstalk.session.host import Host, HostOptions
    from mosstalk.session.session import Session

_HOMES = {
    "Host": "mosstalk.session.host",
    "HostOptions": "mosstalk.session.host",
    "Session": "mosstalk.session.session",
    "SessionSettings": "mosstalk.session.commands",
}

__all__ = ["Host", "HostOptions", "Session", "SessionSettings"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mosstalk.session' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
