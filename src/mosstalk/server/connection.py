"""One WebSocket and its session: what comes in goes to the session, what it tells goes out.

Nothing here waits for a slow client on behalf of anybody else: what it has not read waits in an
``Outbox`` of limited size, and what it sends too fast is left in its own socket.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from mosstalk.server.captions import Captions
from mosstalk.server.house import LEFT_S, House
from mosstalk.server.limits import Allowance
from mosstalk.server.link import RemoteSession
from mosstalk.server.outbox import Outbox, TooSlowError
from mosstalk.server.realtime.protocol import RealtimeProtocol, Step, Transcript
from mosstalk.server.recording import Recording
from mosstalk.server.watch import Watch
from mosstalk.server.websocket import IS_GONE
from mosstalk.session.commands import (
    Command,
    Push,
    Sound,
    UpdateSettings,
    messages_of,
    sample_count,
)
from mosstalk.session.events import AudioDelta, Closed, CloseReason, Event

_LOG = logging.getLogger(__name__)
DRAIN = "drain"
_GOODBYE_S = 1.0
_DRAINED_S = 2.0
"""For what waits to be sent when the server ends: one that reads nothing shall not hold it up."""
_LOOK_S = 0.25
"""How often it is looked whether a client that is not being read is still there."""
_CHARS, _SAMPLES = 500, 6_000
"""So much text or recorded sound in an item costs as much again as an item without any."""


@dataclass(frozen=True)
class Ending:
    """How a connection ends: for the metrics ``reason``, for the client ``code`` and ``message``.

    ``code`` None: the client has gone already. ``flush``: what waits for it is sent before.
    """

    reason: str
    code: int | None = None
    message: str = ""
    flush: bool = False


_CLOSES = {
    CloseReason.CLIENT: (1000, "closed"),
    CloseReason.IDLE: (1001, "nothing has happened for too long"),
    CloseReason.LONGEST: (1001, "the session has lasted as long as it may"),
    CloseReason.ENGINE: (1011, "the engine has ended; connect again later"),
    CloseReason.HOST: (1012, "the server ends; connect again"),
    DRAIN: (1012, "the server ends; connect again"),
}
_GONE = {1008: "flood", 1009: "too_big", 1002: "protocol", 1003: "protocol", 1007: "protocol"}


class Connection:
    """Runs from the session's opening to its end; ``key`` names who it belongs to."""

    def __init__(
        self,
        socket: WebSocket,
        protocol: RealtimeProtocol,
        remote: RemoteSession,
        house: House,
        watch: Watch,
        recording: Recording | None,
        key: str,
    ) -> None:
        self.key = key
        self._socket, self._protocol, self._remote = socket, protocol, remote
        self._house, self._watch, self._recording = house, watch, recording
        self._outbox = Outbox(house.limits)
        self._captions = self._captioned(remote)
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._draining = self._told_to_end = False
        self._allowance = Allowance(house.limits, time.monotonic())
        self._passed_on = asyncio.Event()
        self._last_response: str | None = None

    @property
    def unsent_s(self) -> float:
        """Seconds of sound that wait for the client."""
        return self._outbox.unsent_s

    async def run(self, subprotocol: str | None) -> None:
        """Accept, and talk until one side ends it; the session is over when this returns."""
        self._house.enter(self)
        ending = Ending("vanished")
        closing = None
        try:
            await self._socket.accept(subprotocol)
            ending = await self._talk()
            await self._close_session()
            closing = asyncio.create_task(self._close_socket(ending))
            await asyncio.wait((closing,), timeout=_GOODBYE_S)
        except OSError:
            _LOG.debug("a client went before it was let in")
        finally:
            await self._close_session()
            self._house.leave(self)
            self._watch.ended(ending.reason)
            if self._recording:
                self._recording.ended(ending.reason, self._remote.rows)
        if closing:  # one that reads nothing may hear of it when it reads again
            await asyncio.wait((closing,), timeout=self._house.limits.stalled_s)
            closing.cancel()

    async def _talk(self) -> Ending:
        """Until one side ends it and, if that is the server, what waits is sent."""
        parts = (self._receive(), self._follow(), self._send())
        tasks = [asyncio.create_task(part) for part in parts]
        for task in tasks:
            task.add_done_callback(self._failed)
        try:
            ending = await self._ending
            if ending.flush:
                self._outbox.end()
                left_s = _DRAINED_S if self._draining else LEFT_S
                await asyncio.wait(tasks[-1:], timeout=left_s)
            return ending
        finally:
            if self._captions:
                self._captions.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def drain(self) -> None:
        """End as soon as the conversation's response that is being made now, if any, has ended."""
        self._last_response = self._watch.answering
        self._draining = True
        if not self._last_response:
            self.send_away()

    def send_away(self) -> None:
        """End now, because the server does."""
        self._tell_session_to_end(DRAIN)

    # From the client.

    async def _receive(self) -> None:
        gone = False
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                self._end(_went(message))
                return
            if gone:
                continue  # nobody waits any more for what would come of it
            raw = message.get("text") or message.get("bytes") or ""
            self._house.metrics.messages.labels("in").inc()
            if self._recording:
                self._recording.passed("client", raw)
            with self._metered():
                self._act(self._protocol.from_client(raw))
            self._allowance.cost(len(raw))
            wait_s = self._allowance.wait_s(time.monotonic())
            if wait_s or not self._is_served:
                self._house.metrics.throttled.inc()
                gone = await self._goes_before(self._served(wait_s))
            else:
                await asyncio.sleep(0)  # the others have their turn

    @property
    def _is_served(self) -> bool:
        """Whether little of what the client has sent, or has been answered, is left to be done."""
        limits = self._house.limits
        room = self._remote.has_room(limits.unheard_s, limits.undone_commands)
        return room and self._outbox.has_room and not self._protocol.waits

    async def _served(self, wait_s: float) -> None:
        """Wait for so long, and for that."""
        limits = self._house.limits
        await asyncio.sleep(wait_s)
        await self._remote.room(limits.unheard_s, limits.undone_commands)
        await self._outbox.room()
        while self._protocol.waits:
            self._passed_on.clear()
            await self._passed_on.wait()

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count the processor's time for what is done within as the client's."""
        begun_s = time.thread_time()
        yield
        self._allowance.cost(processor_s=time.thread_time() - begun_s)

    async def _goes_before(self, wait: Coroutine[Any, Any, None]) -> bool:
        """Whether the client has gone before something is waited for that keeps it unread.

        What it has sent and nobody has read is then not waited for.
        """
        is_gone = self._socket.scope["extensions"][IS_GONE]
        waiting = asyncio.create_task(wait)
        try:
            while not (await asyncio.wait((waiting,), timeout=_LOOK_S))[0]:
                if is_gone():
                    return True
            waiting.result()
            return False
        finally:
            waiting.cancel()

    # From the session.

    async def _follow(self) -> None:
        async for event in self._remote:
            self._note(event)
            if self._captions:
                self._captions.take(event)
            else:
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, AudioDelta):
            self._act(self._protocol.from_session(event), event)
        else:
            with self._metered():
                self._act(self._protocol.from_session(event), event)
        self._passed_on.set()
        if isinstance(event, Closed):
            code, message = _CLOSES.get(event.reason, (1011, "the session has failed"))
            self._end(Ending(event.reason, code, message, flush=True))
        elif self._draining and self._watch.answering != self._last_response:
            self.send_away()

    def _captioned(self, remote: RemoteSession) -> Captions | None:
        def tell(transcript: Transcript) -> None:
            self._act(self._protocol.from_transcript(transcript))

        transcriber = self._house.transcriber
        if transcriber is None:
            return None
        return Captions(transcriber, remote.settings, self._pass_on, tell)

    def _act(self, step: Step, event: Event | None = None) -> None:
        for command in step.commands:
            if isinstance(command, UpdateSettings):
                command = replace(command, settings=self._house.fitted(command.settings))
            self._watch.told(command)
            if self._recording:
                self._recording.told(command)
            if self._captions:
                self._captions.told(command)
            self._remote.tell(command)
            self._allowance.cost(commands=_work(command))
        for note in step.notes:
            self._watch.remark(note)
        seconds = event.audio_ms / 1000 if isinstance(event, AudioDelta) else 0.0
        for wire_event in step.events:
            message = wire_event.to_json()
            self._watch.sent(wire_event)
            if self._recording:
                self._recording.passed("server", message)
            try:
                self._outbox.put(message, seconds)
                self._allowance.cost(0 if seconds else len(message))
            except TooSlowError as error:
                self._end(Ending("slow", 1008, f"too slow: {error}"))
                return
            seconds = 0.0

    def _note(self, event: Event) -> None:
        self._watch.heard(event)
        if self._recording:
            self._recording.heard(event)

    # To the client.

    async def _send(self) -> None:
        sent = self._house.metrics.messages.labels("out")
        while (message := await self._outbox.get()) is not None:
            try:
                async with asyncio.timeout(self._house.limits.stalled_s):
                    await self._socket.send_text(message)
            except TimeoutError:
                self._end(Ending("stalled", 1008, "too slow: nothing is being read"))
                return
            except WebSocketDisconnect:
                self._outbox.drop()
                return  # the receiving side finds out how
            sent.inc()

    # The end.

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _failed(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error:
            _LOG.error("a connection failed", exc_info=error)
            self._end(Ending("fault", 1011, "an internal error"))

    async def _close_socket(self, ending: Ending) -> None:
        if ending.code is None:
            return
        try:
            await self._socket.close(ending.code, ending.message)
        except (OSError, RuntimeError):
            _LOG.debug("a client did not hear that its connection is closed")

    def _tell_session_to_end(self, reason: str) -> None:
        if not self._told_to_end:
            self._told_to_end = True
            self._remote.close(reason)

    async def _close_session(self) -> None:
        """End the session and see it end, so that its blocks are free."""
        self._tell_session_to_end(CloseReason.CLIENT)
        try:
            async with asyncio.timeout(2 * LEFT_S):
                async for event in self._remote:
                    self._note(event)
        except TimeoutError:
            _LOG.error("a session did not end", extra={"session": self._watch.session_id})


def _work(command: Command) -> float:
    """What a command costs the session, in short ones; sound is paced by its length."""
    if isinstance(command, Push):
        return 0.0
    parts = [part for message in messages_of(command) for part in message.parts]
    texts = sum(len(part) for part in parts if isinstance(part, str))
    samples = sum(sample_count(part.pcm) for part in parts if isinstance(part, Sound))
    return 1.0 + texts / _CHARS + samples / _SAMPLES


def _went(message: MutableMapping[str, Any]) -> Ending:
    """How the client has gone: uvicorn gives a reason only with a close frame."""
    if "reason" not in message:
        return Ending("vanished")
    return Ending(_GONE.get(message["code"], "client"))
