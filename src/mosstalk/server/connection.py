"""One client's socket and its session: what comes in goes to the session, what it tells goes out.

Nothing here waits for a slow client on behalf of anybody else: what it has not read waits in a
``SendQueue`` of limited size, and what it sends too fast is left in its own socket.
"""

import asyncio
import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from mosstalk.errors import MosstalkError
from mosstalk.server.admission import LEFT_S, Refusal, RefusedError, ServerContext
from mosstalk.server.captions import Captions
from mosstalk.server.conversations import Keeper
from mosstalk.server.engine_client import SessionProxy
from mosstalk.server.keys import Grant
from mosstalk.server.limits import ClientBudget, SendQueue, TooSlowError, work_of
from mosstalk.server.observers import SessionMetrics, SessionObserver
from mosstalk.server.realtime.protocol import ProtocolOutput, RealtimeProtocol, Transcript
from mosstalk.server.realtime.session_config import ServedModel
from mosstalk.server.resume import Beginning
from mosstalk.server.websocket import WEBSOCKET, WebSocketProtocol
from mosstalk.session import commands
from mosstalk.session.events import AudioDelta, Closed, CloseReason, Event

if TYPE_CHECKING:
    from mosstalk.server.peer import Peer


_LOG = logging.getLogger(__name__)
DRAIN = "drain"
_GOODBYE_S = 1.0
_DRAINED_S = 2.0
"""For what waits to be sent when the server ends: one that reads nothing shall not hold it up."""
_LOOK_S = 0.25
"""How often it is looked whether a client that is not being read is still there."""


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
_TAKEN_UP = Ending("resumed", 1000, "the conversation was taken up elsewhere, or deleted")
_GONE = {1008: "flood", 1009: "too_big", 1002: "protocol", 1003: "protocol", 1007: "protocol"}


class Client(Protocol):
    """Somebody who has a session: a WebSocket's connection, or a text that is read over HTTP."""

    key: str

    @property
    def unsent_s(self) -> float:
        """Seconds of sound that wait for the client."""

    def drain(self) -> None:
        """End once what is being said has been said."""

    def send_away(self) -> None:
        """End now, because the server does."""


class Connection:
    """Runs from the session's opening to its end; ``key`` names who it belongs to."""

    def __init__(
        self,
        socket: "WebSocket | Peer",
        protocol: RealtimeProtocol,
        session: SessionProxy,
        context: ServerContext,
        key: str,
    ) -> None:
        self.key = key
        self._socket, self._protocol, self._session = socket, protocol, session
        self._context = context
        self._metrics = SessionMetrics(context.metrics, session.settings, key)
        self._captions: Captions | None = None
        self._observers: list[SessionObserver] = [self._metrics]
        if context.recorder:
            info = context.engine.ready.result()
            named = context.recorder.open(session.settings, info, protocol.conversation_id)
            self._observers.append(named)
        if context.transcriber:
            wanted = lambda: protocol.transcription  # noqa: E731
            told = (wanted, self._pass_on, self._tell_transcript)
            self._captions = Captions(context.transcriber, session.settings, *told)
            self._observers.append(self._captions)
        self._send_queue = SendQueue(context.limits)
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._draining = self._told_to_end = False
        self._budget = ClientBudget(context.limits, time.monotonic())
        self._within_budget_s = 0.0
        """When the client may be heard again, given what it has cost."""
        self._passed_on, self._last_response = asyncio.Event(), ""

    def keep(self, keeper: Keeper | None) -> None:
        """Have the conversation kept, if it can be; who takes it up elsewhere ends this one."""
        if keeper:
            self._observers.append(keeper)
            keeper.end = partial(self._end, _TAKEN_UP)

    @property
    def unsent_s(self) -> float:
        """Seconds of sound that wait for the client."""
        return self._send_queue.unsent_s

    async def run(self, subprotocol: str | None) -> None:
        """Accept, and talk until one side ends it; the session is over when this returns."""
        self._context.connections.add(self)
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
            self._context.leave(self)
            for observer in self._observers:
                observer.on_close(ending.reason, self._session.rows)
        if closing:  # one that reads nothing may hear of it when it reads again
            await asyncio.wait((closing,), timeout=self._context.limits.stalled_s)
            closing.cancel()

    async def _talk(self) -> Ending:
        """Until one side ends it and, if that is the server, what waits is sent."""
        websocket: WebSocketProtocol | Peer = self._socket.scope["extensions"][WEBSOCKET]
        websocket.hears = partial(self._hear_at_once, websocket)
        parts = (self._receive(websocket), self._follow(), self._send())
        tasks = [asyncio.create_task(part) for part in parts]
        for task in tasks:
            task.add_done_callback(self._failed)
        try:
            ending = await self._ending
            if ending.flush:
                self._send_queue.end()
                left_s = _DRAINED_S if self._draining else LEFT_S
                await asyncio.wait(tasks[-1:], timeout=left_s)
            return ending
        finally:
            websocket.hears = None
            if self._captions:
                self._captions.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def drain(self) -> None:
        """End as soon as the conversation's response that is being made now, if any, has ended."""
        self._last_response = self._metrics.answering or ""
        self._draining = True
        self._drain_on()

    def send_away(self) -> None:
        """End now, because the server does."""
        self._tell_session_to_end(DRAIN)

    @property
    def _has_said(self) -> bool:
        """Whether what was being said when the server began to end has been said."""
        return not self._last_response or self._metrics.answering != self._last_response

    def _drain_on(self) -> None:
        if self._draining and self._has_said:
            self.send_away()

    # From the client.

    async def _receive(self, websocket: "WebSocketProtocol | Peer") -> None:
        """Hear what could not be heard at once, and find out how the client goes."""
        gone = False
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                self._end(_went(message))
                return
            gone = gone or await self._held_back(websocket)
            raw = message.get("text", message.get("bytes"))
            if raw is not None and not gone:
                self._hear(raw)
                gone = await self._held_back(websocket)
                await asyncio.sleep(0)  # the others have their turn

    async def _held_back(self, websocket: "WebSocketProtocol | Peer") -> bool:
        """Wait until the client may be heard again, if it may not; whether it has gone meanwhile.

        Nobody waits any more for what would come of what it has sent and nobody has read.
        """
        if not self._must_wait:
            return False
        self._context.metrics.throttled.inc()
        waiting = asyncio.create_task(self._served())
        try:
            while not websocket.is_gone():
                if (await asyncio.wait((waiting,), timeout=_LOOK_S))[0]:
                    waiting.result()
                    return False
            websocket.hears = None
            return True
        finally:
            waiting.cancel()

    def _hear_at_once(self, websocket: "WebSocketProtocol | Peer", raw: str | bytes) -> bool:
        """Hear a message; False if it must wait."""
        if self._must_wait:
            return False
        try:
            self._hear(raw)
        except Exception as error:
            self._fail(error)
        if self._must_wait:
            websocket.hold()
        return True

    def _hear(self, raw: str | bytes) -> None:
        for observer in self._observers:
            observer.on_message("client", raw)
        with self._budget:
            self._act(self._protocol.from_client(raw))
        self._budget.cost(len(raw))
        now_s = time.monotonic()
        self._within_budget_s = now_s + self._budget.wait_s(now_s)

    @property
    def _must_wait(self) -> bool:
        """Whether the client has cost too much, or too much of what it has sent is not done."""
        return time.monotonic() < self._within_budget_s or not self._is_served

    @property
    def _is_served(self) -> bool:
        """Whether little of what the client has sent, or has been answered, is left to be done."""
        limits = self._context.limits
        room = self._session.has_room(limits.unheard_s, limits.undone_commands)
        return room and self._send_queue.has_room and not self._protocol.waits

    async def _served(self) -> None:
        """Wait until the client may be heard again."""
        limits = self._context.limits
        await asyncio.sleep(self._within_budget_s - time.monotonic())
        await self._session.room(limits.unheard_s, limits.undone_commands)
        await self._send_queue.room()
        while self._protocol.waits:
            self._passed_on.clear()
            await self._passed_on.wait()

    # From the session.

    async def _follow(self) -> None:
        async for event in self._session:
            self._note(event)
            if not (self._captions and self._captions.holds(event)):
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, AudioDelta):
            self._act(self._protocol.from_session(event), event)
        else:
            with self._budget:
                self._act(self._protocol.from_session(event), event)
        self._passed_on.set()
        if isinstance(event, Closed):
            code, message = _CLOSES.get(event.reason, (1011, "the session has failed"))
            self._end(Ending(event.reason, code, message, flush=True))
        else:
            self._drain_on()

    def _tell_transcript(self, transcript: Transcript) -> None:
        self._act(self._protocol.from_transcript(transcript))

    def _act(self, step: ProtocolOutput, event: Event | None = None) -> None:
        for command in step.commands:
            if isinstance(command, commands.UpdateSettings):
                command = replace(command, settings=self._context.fitted(command.settings))
            for observer in self._observers:
                observer.on_command(command)
            self._session.tell(command)
            self._budget.cost(commands=work_of(command))
        for note in step.notes:
            self._metrics.note(note)
        seconds = event.audio_ms / 1000 if isinstance(event, AudioDelta) else 0.0
        for wire_event in step.events:
            message = wire_event.to_json()
            for observer in self._observers:
                observer.on_message("server", message, wire_event)
            try:
                self._send_queue.put(message, seconds)
                self._budget.cost(0 if seconds else len(message))
            except TooSlowError as error:
                self._end(Ending("slow", 1008, f"too slow: {error}"))
                return
            seconds = 0.0

    def _note(self, event: Event) -> None:
        for observer in self._observers:
            observer.on_event(event)

    # To the client.

    async def _send(self) -> None:
        sent = self._context.metrics.messages.labels("out")
        while (message := await self._send_queue.get()) is not None:
            try:
                async with asyncio.timeout(self._context.limits.stalled_s):
                    await self._socket.send_text(message)
            except TimeoutError:
                self._end(Ending("stalled", 1008, "too slow: nothing is being read"))
                return
            except WebSocketDisconnect:
                self._send_queue.drop()
                return  # the receiving side finds out how
            sent.inc()

    # The end.

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _failed(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
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
            self._session.close(reason)

    async def _close_session(self) -> None:
        """End the session and see it end, so that its blocks are free."""
        self._tell_session_to_end(CloseReason.CLIENT)
        try:
            async with asyncio.timeout(2 * LEFT_S):
                async for event in self._session:
                    self._note(event)
        except TimeoutError:
            _LOG.error("a session did not end", extra={"session": self._metrics.session_id})


# Its beginning.


async def opened(
    socket: WebSocket,
    context: ServerContext,
    grant: Grant,
    speaks: type[RealtimeProtocol],
    served: ServedModel,
) -> Connection | None:
    """A client's connection with its session; None where there can be none, and it was told."""
    transcribes = socket.query_params.get("intent") == "transcription"
    beginning = Beginning()
    try:
        if speaks is RealtimeProtocol:  # nobody can make a telephone call anew from this side
            resumable = not transcribes
            beginning = await Beginning.of(socket, context, grant, resumable=resumable)
        begins = dict(beginning.kept.asked if beginning.kept else grant.session)
        if transcribes:
            begins["type"] = "transcription"
        protocol = speaks(served, begins=begins, resumption=beginning.resumption)
        session = await beginning.open(context, protocol)
        if context.unavailable:  # since it was let in
            session.close()
            raise RefusedError(context.unavailable)
    except BaseException as error:
        await beginning.give_back()
        if not isinstance(error, MosstalkError):
            raise
        await context.refuse(socket, Refusal.of(error))
        return None
    connection = Connection(socket, protocol, session, context, grant.name)
    connection.keep(beginning.keeper(protocol, session))
    return connection


def _went(message: MutableMapping[str, Any]) -> Ending:
    """How the client has gone: uvicorn gives a reason only with a close frame."""
    if "reason" not in message:
        return Ending("vanished")
    return Ending(_GONE.get(message["code"], "client"))
