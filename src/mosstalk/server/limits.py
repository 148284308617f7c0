"""How much one client may ask for, and how long one waits for it."""

import time
from dataclasses import dataclass

from mosstalk.errors import OptionError

MIB = 1 << 20
_PROCESSOR_BURST_S = 2.0
"""The processor is shared now, whatever a client has left unused before."""


@dataclass(frozen=True)
class Limits:
    """What a connection may take, and what all of them together may.

    Attributes:
        message_bytes: longest message; a longer one closes the connection with code 1009.
        audio_bytes: most sound in one message.
        text_chars: longest text of an item or of instructions.
        kept_chars: most that is kept beside the session for the client's eyes alone: a session's
            fields, and items that the model does not read.
        tools_chars: longest ``tools`` of a session, as JSON.
        event_bytes: longest message without what sound takes in it; a longer one is refused
            before it is parsed.
        unsent_s: seconds of sound that may wait for a client that reads too slowly; beyond it
            the connection is closed with code 1008.
        unsent_bytes: the same for all bytes that wait.
        unsent_answers_bytes: the same without sound; beyond it the client is read no further
            until it has taken some.
        stalled_s: how long a single message may take to be taken off by the client.
        unheard_s: seconds of sound that may be on their way to a session; beyond it the client
            is read no further until they are heard.
        commands_per_s: how much a client may ask of its session in the long run, sound aside; long
            items count for several.
        undone_commands: what a client has asked for and its session has not done yet; beyond it
            the client is read no further until less is left.
        messages_per_s, bytes_per_s: how fast a client is read in the long run; bursts of
            ``burst_s`` seconds' worth are read at once. Bytes of answers, but for sound, count too.
        processor_share: how much of a processor's time the messages of a client may take in the
            long run; beyond it the client is read more slowly.
        control_frames_per_s: pings, pongs and fragments of next to nothing that a client may send
            in the long run; beyond them the connection is closed with code 1008.
        large_bytes: a message that is longer is large.
        large_messages: large messages that are read at a time, of all clients together; others
            wait in their sockets.
        message_s: how long a large message may take while others wait for its place; then the
            connection is closed with code 1008.
        per_key: connections at a time for one API key; None is any number.
        connections: open at a time, of all clients together and WebSockets or not; one more takes
            the place of the oldest that waits idly, or is answered 503.
        header_s: how long the first or next request of a connection may take to arrive.
        ping_s, pong_s: how often a client is asked whether it is there, and how long for.
    """

    message_bytes: int = 32 * MIB
    audio_bytes: int = 15 * MIB
    text_chars: int = 32_768
    kept_chars: int = MIB
    tools_chars: int = MIB // 8
    event_bytes: int = MIB
    unsent_s: float = 90.0
    unsent_bytes: int = 16 * MIB
    unsent_answers_bytes: int = MIB // 4
    stalled_s: float = 20.0
    unheard_s: float = 30.0
    commands_per_s: float = 50.0
    undone_commands: int = 256
    messages_per_s: float = 400.0
    bytes_per_s: float = 4.0 * MIB
    burst_s: float = 8.0
    processor_share: float = 0.05
    control_frames_per_s: float = 20.0
    large_bytes: int = MIB // 4
    large_messages: int = 2
    message_s: float = 20.0
    per_key: int | None = None
    connections: int = 512
    header_s: float = 10.0
    ping_s: float = 20.0
    pong_s: float = 20.0

    def __post_init__(self) -> None:
        """Raise OptionError for a limit that lets nothing through."""
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise OptionError(f"{name} must be above 0, not {value}")


class TokenBucket:
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


class ClientBudget:
    """What one client may cost: messages, bytes of them and of their answers, processor time, and
    commands for its session.

    As a context manager it counts the processor's time for what is done within, by the wall's
    clock: nothing within waits, and the thread's own clock takes longer to read than a frame of
    sound to hear.
    """

    def __init__(self, limits: Limits, now_s: float) -> None:
        burst_s = limits.burst_s
        self._buckets = (
            TokenBucket(limits.messages_per_s, burst_s, now_s),
            TokenBucket(limits.bytes_per_s, burst_s, now_s),
            TokenBucket(limits.processor_share, min(burst_s, _PROCESSOR_BURST_S), now_s),
            TokenBucket(limits.commands_per_s, burst_s, now_s),
        )
        self._costs = (0.0, 0.0, 0.0)
        self._entered_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.cost(processor_s=time.perf_counter() - self._entered_s)

    def cost(self, count: int = 0, processor_s: float = 0.0, commands: float = 0.0) -> None:
        """Something has been read, answered, computed or asked of its session for the client."""
        bytes_, processor, asked = self._costs
        self._costs = bytes_ + count, processor + processor_s, asked + commands

    def wait_s(self, now_s: float) -> float:
        """One message is done: how long to wait before the next, given what all has cost."""
        costs, self._costs = (1.0, *self._costs), (0.0, 0.0, 0.0)
        waits = [
            bucket.wait_s(cost, now_s) for bucket, cost in zip(self._buckets, costs, strict=True)
        ]
        return max(waits)
