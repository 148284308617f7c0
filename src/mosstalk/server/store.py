"""Where conversations are kept until their clients come back: in memory, or in Redis or Valkey.

A conversation is fields under a key. It is taken as one step, so that of two who ask only one has
it, and for a while it is known that it was: who had it before may not write it there again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from mosstalk.environment import install_command
from mosstalk.errors import MosstalkError, OptionError

if TYPE_CHECKING:
    from redis.asyncio import Redis

MEMORY, NONE = "memory", "none"
_SCHEMES = ("redis", "rediss", "unix")
_TAKEN = "taken"
"""The field that stays, for a while, of a conversation that was taken up."""
Fields = dict[str, bytes]
"""A conversation as it is kept: its head, and each of its items by itself."""
_PATIENCE_S = 2.0
"""How long a store may take."""
_MOST_CONVERSATIONS, _MOST_BYTES = 4096, 64 << 20


@dataclass(frozen=True)
class StoreOptions:
    """Where conversations are kept, and for how long after their connection is lost.

    ``url`` is ``MEMORY``, or where Redis or Valkey is reached. It may hold a password.
    """

    url: str = field(default=MEMORY, repr=False)
    resume_s: float = 300.0


def store_options(asked: str, resume_s: float) -> StoreOptions | None:
    """What ``--store`` and ``--resume-s`` mean; None: no conversation can be taken up again.

    Raises:
        OptionError: there is no such store, what it needs is not installed, or no time is left.
    """
    if asked == NONE:
        return None
    if resume_s <= 0:
        raise OptionError(f"--resume-s must be above 0; to keep nothing: --store {NONE}")
    if asked != MEMORY:
        if urlsplit(asked).scheme not in _SCHEMES:
            raise OptionError(f"--store: give {MEMORY}, {NONE} or redis://HOST:PORT/DATABASE")
        if find_spec("redis") is None:
            raise OptionError(f"--store needs the package redis; run: {install_command('redis')}")
        _client(asked)
    return StoreOptions(asked, resume_s)


class StoreError(MosstalkError):
    """The store does not answer, or cannot do what it is asked for."""


class Written(IntEnum):
    """What has become of a write: done, or not since the conversation was taken up elsewhere.

    ``UNKNOWN``: not done, because there is nothing that it could change.
    """

    TAKEN = 0
    DONE = 1
    UNKNOWN = 2


class Store(Protocol):
    """Keeps fields by key for so many seconds; each method raises StoreError."""

    async def write(
        self, key: str, fields: Fields, gone: Collection[str], seconds: float, *, whole: bool
    ) -> Written:
        """Put these fields there and take those out that are ``gone``; ``whole``: all others."""

    async def take(self, key: str, seconds: float) -> Fields | None:
        """All fields; whoever asks next, or writes within so many seconds, finds them taken."""

    async def give_back(self, key: str, fields: Fields, seconds: float) -> None:
        """Undo ``take``."""

    async def close(self) -> None:
        """Let go of connections."""


# In the process.


@dataclass
class _Kept:
    fields: Fields
    ends_s: float

    @property
    def size(self) -> int:
        return sum(len(name) + len(value) for name, value in self.fields.items())


class MemoryStore:
    """In this process: at most so many conversations and bytes, of which the stalest go first."""

    def __init__(
        self,
        most: int = _MOST_CONVERSATIONS,
        most_bytes: int = _MOST_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes, self._now = most, most_bytes, now
        self._kept: dict[str, _Kept] = {}
        """The one that was written last comes last."""
        self._bytes = 0
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    async def write(
        self, key: str, fields: Fields, gone: Collection[str], seconds: float, *, whole: bool
    ) -> Written:
        """See ``Store``."""
        before = self._pop(key)
        if before and _TAKEN in before.fields:
            self._put(key, before)
            return Written.TAKEN
        if before is None and not whole:
            return Written.UNKNOWN
        held = {} if whole or before is None else before.fields
        left = {name: value for name, value in held.items() if name not in gone}
        self._put(key, _Kept(left | fields, self._now() + seconds))
        return Written.DONE

    async def take(self, key: str, seconds: float) -> Fields | None:
        """See ``Store``."""
        kept = self._pop(key)
        if kept is None:
            return None
        if _TAKEN in kept.fields:
            self._put(key, kept)
            return None
        self._put(key, _Kept({_TAKEN: b"1"}, self._now() + seconds))
        return kept.fields

    async def give_back(self, key: str, fields: Fields, seconds: float) -> None:
        """See ``Store``."""
        self._pop(key)
        self._put(key, _Kept(fields, self._now() + seconds))

    async def close(self) -> None:
        """See ``Store``."""
        if self._sweeping:
            self._sweeping.cancel()

    def _pop(self, key: str) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept:
            self._bytes -= kept.size
        return kept if kept and self._now() < kept.ends_s else None

    def _put(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        self._bytes += kept.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._pop(next(iter(self._kept)))
        self._sweep_later()

    def _sweep_later(self) -> None:
        """Have those go whose time is over, though nobody asks for them."""
        if self._kept and self._sweeping is None:
            next_s = min(kept.ends_s for kept in self._kept.values()) - self._now()
            self._sweeping = asyncio.get_running_loop().call_later(max(next_s, 1.0), self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now_s = self._now()
        for key in [key for key, kept in self._kept.items() if kept.ends_s <= now_s]:
            self._pop(key)
        self._sweep_later()


# In Redis or Valkey.

_WRITE = f"""
if redis.call('HEXISTS', KEYS[1], '{_TAKEN}') == 1 then return {Written.TAKEN} end
if ARGV[2] == '1' then
  redis.call('DEL', KEYS[1])
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  return {Written.UNKNOWN}
end
local fields = 4 + tonumber(ARGV[3])
for place = 4, fields - 1 do redis.call('HDEL', KEYS[1], ARGV[place]) end
for place = fields, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {Written.DONE}
"""
"""Milliseconds, whether all is written, how many fields are gone, these, then names and values."""
_GIVE_BACK = f"redis.call('DEL', KEYS[1]){_WRITE}"
_TAKE = f"""
if redis.call('HEXISTS', KEYS[1], '{_TAKEN}') == 1 then return {{}} end
local fields = redis.call('HGETALL', KEYS[1])
if #fields > 0 then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], '{_TAKEN}', '1')
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return fields
"""


def _client(url: str) -> "Redis":
    """What speaks with a server of Redis; connects when it is first asked."""
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    try:
        return Redis.from_url(
            url, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S, protocol=2
        )
    except (RedisError, ValueError) as error:
        raise OptionError(f"--store: {error}; give redis://HOST:PORT/DATABASE") from None


class RedisStore:
    """In a server that speaks Redis' protocol, for all of mosstalk's that share it.

    What takes and what writes are scripts, which it runs as one step each. Every key ends by
    itself.
    """

    def __init__(self, url: str) -> None:
        self._client = _client(url)

    async def write(
        self, key: str, fields: Fields, gone: Collection[str], seconds: float, *, whole: bool
    ) -> Written:
        """See ``Store``."""
        given = [part for pair in fields.items() for part in pair]
        head = (_ms(seconds), int(whole), len(gone))
        return Written(await self._run(_WRITE, key, *head, *gone, *given))

    async def take(self, key: str, seconds: float) -> Fields | None:
        """See ``Store``."""
        found = await self._run(_TAKE, key, _ms(seconds))
        pairs = zip(found[::2], found[1::2], strict=True)
        return {name.decode(): value for name, value in pairs} or None

    async def give_back(self, key: str, fields: Fields, seconds: float) -> None:
        """See ``Store``."""
        given = [part for pair in fields.items() for part in pair]
        await self._run(_GIVE_BACK, key, _ms(seconds), 1, 0, *given)

    async def close(self) -> None:
        """See ``Store``."""
        with suppress(StoreError):
            async with self._asked():
                await self._client.aclose()

    async def _run(self, script: str, key: str, *given: Any) -> Any:
        async with self._asked():
            return await self._client.eval(script, 1, _name(key), *given)

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_PATIENCE_S):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error


def _name(key: str) -> str:
    return f"mosstalk:conversation:{key}"


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
