"""An answer over HTTP that the model makes, as one of the server's connections."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError
from mosstalk.server.admission import LEFT_S, Refusal, RefusedError, ServerContext
from mosstalk.server.engine_client import SessionProxy
from mosstalk.server.observers import SessionMetrics, SessionObserver
from mosstalk.server.realtime.validation import WireError
from mosstalk.server.uploads import read_body
from mosstalk.session import commands, events
from mosstalk.session.commands import SessionSettings
from mosstalk.session.events import CloseReason, ErrorCode, ResponseStatus

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
EVENTS = "text/event-stream"
_BY_REQUEST = (ErrorCode.BAD_ITEM, ErrorCode.BAD_VALUE)
"""Errors of a session for which the request is at fault: they are answered 400."""
_UPLOADS = Refusal(503, "uploads", "many files are being read; send it again", 2.0)
_STOPPED = Refusal(503, "dead", "the session has ended before the answer did; ask again", 10.0)


class SessionReply(Response):
    """Answers one client with what a short session makes, which the client does not see.

    The answer begins with the first bytes of its body, so that whatever fails before has a status
    of its own. What fails later ends the connection before the body is whole; where the body is
    server-sent events, one tells of it. A client that goes away ends it.

    ``kind`` is the body's media type, ``param`` the field of the request that the model is given,
    and ``failed`` what is said where the model fails.
    """

    kind: str
    param: str
    failed: Refusal

    def __init__(self, context: ServerContext, key: str) -> None:
        super().__init__()
        self.key, self.unsent_s = key, 0.0
        self.context = context
        self.usage = Counter[str]()
        """What the session has read and made so far, by the names of ``events.Usage``."""
        self.begun = False
        """Whether some of the answer was sent."""
        self._session: SessionProxy | None = None
        self._observers: list[SessionObserver] = []
        self._sent_away = asyncio.Event()
        self._reason: str = CloseReason.CLIENT

    def chunks(self) -> AsyncIterator[bytes]:
        """The body of the answer, as it is made.

        Raises:
            RefusedError: it cannot be made, or not now.
        """
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the session is over when this returns."""
        context = self.context
        if refusal := context.refuse_now(self.key):  # since the request began to come
            context.note_refusal(refusal)
            await refusal.answer()(scope, receive, send)
            return
        context.connections.add(self)
        speaking = asyncio.create_task(self._speak(scope, receive, send))
        leaving = asyncio.create_task(_gone(receive))
        ending = asyncio.create_task(self._sent_away.wait())
        tasks = (speaking, leaving, ending)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not speaking.done():
                self._reason = "vanished" if leaving.done() else "drain"
            elif speaking.exception():
                self._reason = "fault"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_session()
            context.leave(self)
            for observer in self._observers:
                observer.on_close(self._reason, self._session.rows if self._session else None)
        if not speaking.cancelled():
            speaking.result()

    def drain(self) -> None:
        """Nothing: the answer has an end."""

    def send_away(self) -> None:
        """End now, because the server does."""
        self._sent_away.set()

    async def _speak(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as long as the client takes it off."""
        try:
            await self._answer(scope, receive, send)
        except TimeoutError:
            self._reason = "stalled"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the body, or with why there is none."""
        try:
            async for chunk in self.chunks():
                await self._send(send, chunk)
            await self._send(send, b"", last=True)
        except RefusedError as error:
            await self._refuse(error.refusal, scope, receive, send)

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal.status >= 500 and self._session:
            self._reason = CloseReason.ERROR
            _LOG.warning("an answer was not made to its end: %s", refusal.message)
        if not self.begun:
            await refusal.answer()(scope, receive, send)
        elif self.kind == EVENTS:
            told = {"type": "error", "error": refusal.error()}
            await self._send(send, event(told), last=True)

    # The session.

    async def open(self, settings: SessionSettings) -> None:
        """Open the session.

        Raises:
            RefusedError: there is no room for it, or the settings are not this model's.
        """
        context = self.context
        settings = context.fitted(settings)
        try:
            self._session = await context.engine.open(settings, rows=context.recorder is not None)
        except MosstalkError as error:
            refusal = Refusal.of(error)
            if isinstance(error, EngineFullError | EngineStoppedError):
                context.note_refusal(refusal)
            raise RefusedError(refusal) from None
        self._observers.append(SessionMetrics(context.metrics, settings, self.key))
        if context.recorder:
            info = context.engine.ready.result()
            self._observers.append(context.recorder.open(settings, info))

    @property
    def has_session(self) -> bool:
        """Whether the session was opened."""
        return self._session is not None

    async def answers_to(self, *messages: commands.Message) -> AsyncIterator[events.Event]:
        """What the open session tells of its response to these messages, its end included.

        Raises:
            RefusedError: it fails, or the session ends.
        """
        session = self._session
        assert session
        command = commands.CreateResponse(in_conversation=False, input=messages)
        for observer in self._observers:
            observer.on_command(command)
        session.tell(command)
        async for event in session:
            for observer in self._observers:
                observer.on_event(event)
            if isinstance(event, events.ErrorRaised):
                raise RefusedError(self._refusal_of(event))
            if isinstance(event, events.Closed):
                raise RefusedError(_STOPPED)
            if isinstance(event, events.ResponseDone):
                self.usage.update(vars(event.usage))
                if event.status is ResponseStatus.FAILED:
                    raise RefusedError(self.failed)
                yield event
                return
            yield event

    def tokens(self) -> dict[str, int]:
        """What the session has read and made so far, as the API counts it."""
        read = self.usage["input_text"] + self.usage["input_audio"]
        made = self.usage["output_text"] + self.usage["output_audio"]
        return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}

    def wrong(self, message: str) -> Refusal:
        """What is said of a request that cannot be served."""
        return Refusal(400, "invalid_value", message, param=self.param)

    def _refusal_of(self, event: events.ErrorRaised) -> Refusal:
        """What an error of the session means to who asked."""
        if event.code is ErrorCode.ENGINE_FULL:
            return Refusal(503, "full", event.message, event.retry_after_s or 1.0)
        if event.code is ErrorCode.ENGINE_STOPPED:
            return replace(_STOPPED, message=event.message)
        if event.code is ErrorCode.CONTEXT_FULL:
            return replace(self.wrong(event.message), reason="context_length_exceeded")
        return self.wrong(event.message) if event.code in _BY_REQUEST else self.failed

    async def _close_session(self) -> None:
        """End the session and see it end, so that its blocks are free."""
        session = self._session
        if session is None:
            return
        session.close(self._reason)
        try:
            async with asyncio.timeout(2 * LEFT_S):
                async for event in session:
                    for observer in self._observers:
                        observer.on_event(event)
        except TimeoutError:
            _LOG.error("the session of an answer over HTTP did not end")

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        """Send more of the body, after the head; raise TimeoutError for who takes nothing off."""
        async with asyncio.timeout(self.context.limits.stalled_s):
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", self.kind.encode()), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": not last})


class UploadReply(SessionReply):
    """An answer to a request that may bring a file, whose body is read once its client is let in.

    Few large bodies are held at a time.
    """

    def read(self, body: bytes, content_type: str) -> None:
        """Take the request that is in a body of this media type.

        Raises:
            WireError: it is none, or cannot be served.
        """
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request and answer it."""
        context, request = self.context, Request(scope, receive)
        limits = context.limits
        with context.uploads.one() as take:

            def on_growth(size: int) -> None:
                if size > limits.large_bytes and not take():
                    context.note_refusal(_UPLOADS)
                    raise RefusedError(_UPLOADS)

            try:
                with context.opening(self.key):
                    body = await read_body(request, limits.upload_bytes, limits.upload_s, on_growth)
                    self.read(body, request.headers.get("content-type", ""))
                    del body
            except (WireError, RefusedError) as error:
                await Refusal.of(error).answer()(scope, receive, send)
                return
            await super().__call__(scope, receive, send)


async def under(lock: asyncio.Lock, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """What comes of ``work``, which is done one at a time.

    What a thread or another process has begun it also ends: a client that goes away meanwhile
    keeps the lock until then.
    """
    await lock.acquire()
    task = asyncio.create_task(work())
    task.add_done_callback(lambda _: lock.release())
    return await asyncio.shield(task)


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()
