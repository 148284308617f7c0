"""How much one client may ask for, and how long one waits for it."""

from dataclasses import dataclass

from mosstalk.errors import OptionError

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a connection may take.

    Attributes:
        message_bytes: longest message; a longer one closes the connection with code 1009.
        audio_bytes: most sound in one message.
        text_chars: longest text of an item or of instructions.
        unsent_s: seconds of sound that may wait for a client that reads too slowly; beyond it
            the connection is closed with code 1008.
        unsent_bytes: the same for all bytes that wait.
        stalled_s: how long a single message may take to be taken off by the client.
        unheard_s: seconds of sound that may be on their way to a session; beyond it the client
            is read no further until they are heard.
        messages_per_s, bytes_per_s: how fast a client is read in the long run; bursts of
            ``burst_s`` seconds' worth are read at once.
        per_key: connections at a time for one API key; None is any number.
        ping_s, pong_s: how often a client is asked whether it is there, and how long for.
    """

    message_bytes: int = 32 * MIB
    audio_bytes: int = 15 * MIB
    text_chars: int = 32_768
    unsent_s: float = 90.0
    unsent_bytes: int = 16 * MIB
    stalled_s: float = 20.0
    unheard_s: float = 30.0
    messages_per_s: float = 400.0
    bytes_per_s: float = 4.0 * MIB
    burst_s: float = 8.0
    per_key: int | None = None
    ping_s: float = 20.0
    pong_s: float = 20.0

    def __post_init__(self) -> None:
        """Raise OptionError for a limit that lets nothing through."""
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise OptionError(f"{name} must be above 0, not {value}")


class Pace:
    """A bucket that fills at ``per_s`` and holds ``burst_s`` seconds' worth."""

    def __init__(self, per_s: float, burst_s: float, now_s: float) -> None:
        self._per_s, self._most = per_s, per_s * burst_s
        self._left, self._then_s = self._most, now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Take ``amount``; how long to wait before taking more."""
        filled = (now_s - self._then_s) * self._per_s
        self._left = min(self._most, self._left + filled) - amount
        self._then_s = now_s
        return max(0.0, -self._left / self._per_s)
