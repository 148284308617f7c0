"""``POST /v1/realtime/calls``: a conversation by WebRTC, as browsers hold it.

An offer (SDP, RFC 8866) is answered, alone or in a form beside settings for the session. What
follows is a conversation of ``/v1/realtime``: its events travel on a data channel, its sound as two
tracks of Opus. The server plays replies at the pace at which they are heard, so it knows what was
played, and cuts an interrupted reply itself.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError
from mosstalk.server.admission import LEFT_S, LONGEST_NAMED, Refusal, RefusedError, ServerContext
from mosstalk.server.call_playback import Change, Playback
from mosstalk.server.connection import Connection, Ending
from mosstalk.server.engine_client import SessionProxy
from mosstalk.server.keys import Grant
from mosstalk.server.limits import TooSlowError
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.protocol import ProtocolOutput, RealtimeProtocol, Resumption
from mosstalk.server.realtime.session_config import ServedModel, session_config
from mosstalk.server.realtime.validation import WireError, parse_message, require_plain
from mosstalk.server.resume import Beginning, end_forerunner
from mosstalk.server.uploads import form_parts, read_body
from mosstalk.session.commands import Push, Truncate
from mosstalk.session.events import (
    AudioDelta,
    ErrorRaised,
    Event,
    ItemTruncated,
    ResponseDone,
    new_id,
)

if TYPE_CHECKING:
    from mosstalk.server.peer import Peer

_LOG = logging.getLogger(__name__)
SDP = "application/sdp"
_BEGINS: Mapping[str, Any] = {"type": "realtime", "mosstalk": {"echo_gate": False}}
"""How sessions begin: whoever has WebRTC cancels echo itself."""
_MISSING = Refusal(
    501,
    "webrtc",
    f"this server speaks no WebRTC; its owner may install it: {install_command('webrtc')}",
)


# What is said.


class RefusedMessage(str):
    """Stands for a message on the data channel that was too long to be kept; it is empty."""


class CallProtocol(RealtimeProtocol):
    """``RealtimeProtocol`` for a client that hears replies from a ``Playback``, not in events.

    A message in bytes is the microphone's sound, int16 at ``INPUT_RATE``.
    """

    def __init__(
        self,
        served: ServedModel,
        playback: Playback,
        begins: Mapping[str, Any],
        resumption: Resumption | None,
    ) -> None:
        super().__init__(served, begins=begins, resumption=resumption)
        self._playback = playback
        self._cut: set[str] = set()
        """Items that were cut here, of which the session has not told yet."""

    def is_hands_free(self) -> bool:
        """Whether the session finds out by itself when the user has spoken."""
        return self._state.session.settings.turn_detection is not None

    def from_client(self, raw: str | bytes) -> ProtocolOutput:
        """What a message on the data channel, or sound, leads to."""
        if isinstance(raw, bytes):
            return ProtocolOutput([Push(raw, INPUT_RATE)])
        if isinstance(raw, RefusedMessage):
            most = self._state.served.limits.event_bytes
            message = f"Invalid 'message': at most {most} bytes by WebRTC. Send less at a time."
            code = "string_above_max_length"
            body = told.ErrorBody(code=code, message=message, param="message")
            self._state.tell(told.Error(error=body))
            return self._output()
        return self._played(super().from_client(raw))

    def from_session(self, event: Event) -> ProtocolOutput:
        """What an event of the session leads to; raises TooSlowError for too much sound."""
        if isinstance(event, AudioDelta):
            self._playback.push(event)
        elif isinstance(event, ResponseDone):
            self._playback.finish(event.response_id)
        return self._played(super().from_session(event))

    def from_playback(self, change: Change, response_id: str) -> ProtocolOutput:
        """What it leads to that a response's sound begins or has come to its end."""
        kind: Any = f"output_audio_buffer.{change}"
        self._state.tell(told.OutputBuffer(type=kind, response_id=response_id))
        return self._output()

    def hung_up(self) -> ProtocolOutput:
        """What it leads to that nobody listens any more: of a reply there is what was played."""
        output = self._output()
        self._clear(output)
        return output

    def _played(self, output: ProtocolOutput) -> ProtocolOutput:
        """The same for a client that hears sound as it is played."""
        events, output.events = output.events, []
        interrupts = self._state.session.settings.interrupt_response
        for event in events:
            match event:
                case told.Delta(type="response.output_audio.delta"):
                    continue
                case told.OutputBuffer() if self._playback.is_playing:
                    self._clear(output)
                    continue
                case told.ItemChanged(item_id=item_id) if item_id in self._cut:
                    self._cut.discard(item_id)
                    if event.mosstalk:
                        event.mosstalk.by_server = True
            output.events.append(event)
            if (
                isinstance(event, told.SpeechEvent)
                and event.type.endswith("started")
                and interrupts
            ):
                self._clear(output)
        return output

    def _clear(self, output: ProtocolOutput) -> None:
        """Play no more of any reply, and cut each to what was played."""
        for reply in self._playback.clear():
            if self._state.items.find(reply.item_id):  # not that of a response apart
                self._cut.add(reply.item_id)
                output.commands.append(Truncate(reply.item_id, reply.sent_ms))
            kind: Any = "output_audio_buffer.cleared"
            self._state.tell(told.OutputBuffer(type=kind, response_id=reply.response_id))
        output.events += self._output().events


class Call(Connection):
    """A call and its session; when the server ends, a reply is played to its end."""

    def __init__(
        self,
        peer: "Peer",
        protocol: CallProtocol,
        playback: Playback,
        session: SessionProxy,
        context: ServerContext,
        key: str,
    ) -> None:
        super().__init__(peer, protocol, session, context, key)
        self._playback, self._call = playback, protocol
        self._hung_up = False
        playback.on_change = self._on_change

    @property
    def _has_said(self) -> bool:
        return super()._has_said and not self._playback.is_playing

    def _on_change(self, change: Change, response_id: str) -> None:
        self._act(self._call.from_playback(change, response_id))
        self._drain_on()

    def _pass_on(self, event: Event) -> None:
        try:
            super()._pass_on(event)
        except TooSlowError as error:
            self._end(Ending("slow", 1008, f"too slow: {error}"))

    async def _close_session(self) -> None:
        if not self._hung_up:
            self._hung_up = True
            cut = self._call.hung_up()
            self._act(cut)
            with suppress(TimeoutError):
                async with asyncio.timeout(LEFT_S):
                    await self._until_done(len(cut.commands))
        await super()._close_session()

    async def _until_done(self, left: int) -> None:
        """Wait until replies were cut: what is asked of a session that is to end it does not do."""
        events = aiter(self._session)
        while left and (event := await anext(events, None)):
            self._note(event)
            left -= isinstance(event, ItemTruncated | ErrorRaised)

    def _note(self, event: Event) -> None:
        super()._note(event)
        if self._hung_up and not isinstance(event, AudioDelta):
            self._call.from_session(event)


# Who calls.


class Calls:
    """Answers offers, and holds what came of them until it is over.

    ``served`` gives what there is, for a client that has asked for a model of some name.
    """

    def __init__(
        self, context: ServerContext, served: Callable[[ServerContext, str | None], ServedModel]
    ) -> None:
        self._context, self._served = context, served
        self._peers: dict[str, tuple[str, Peer]] = {}
        """By a call's id its client's key and its peer."""
        self._tasks = set[asyncio.Task[None]]()

    async def begin(self, request: Request) -> Response:
        """Answer an offer; the conversation begins, or goes on, once the client has connected."""
        context, grant = self._context, self._granted(request)
        if isinstance(grant, Grant):
            if context.unavailable is None:
                await end_forerunner(request, context, grant)
            if refusal := context.refuse_request(grant.name):
                context.note_refusal(refusal)
                grant = refusal
        if isinstance(grant, Refusal):
            return grant.answer()
        try:
            return await self._begin(request, grant)
        except MosstalkError as error:
            refusal = Refusal.of(error)
            if isinstance(error, EngineFullError | EngineStoppedError | RefusedError):
                context.note_refusal(refusal)
            return refusal.answer()

    async def hang_up(self, call_id: str, request: Request) -> Response:
        """End a call, for who has the key that it was begun with."""
        grant = self._granted(request)
        if isinstance(grant, Refusal):
            return grant.answer()
        key, peer = self._peers.get(call_id, ("", None))
        if peer is None or key != grant.name:
            message = f"no call {call_id[:LONGEST_NAMED]!r} is going on here"
            return Refusal(404, "call_not_found", message).answer()
        peer.lost("hung up")
        return Response()

    def _granted(self, request: Request) -> Grant | Refusal:
        """What a client may by its key."""
        granted = self._context.granted(request)
        if isinstance(granted, Refusal):
            self._context.note_refusal(granted)
        return granted

    async def _begin(self, request: Request, grant: Grant) -> Response:
        context = self._context
        offer, asked = await _offered(request, context)
        try:
            peer_of = await asyncio.to_thread(_peer)
        except ImportError:
            raise RefusedError(_MISSING) from None
        beginning = await Beginning.of(request, context, grant)
        try:
            served = self._served(context, request.query_params.get("model"))
            config = session_config({}, served)
            begins = beginning.kept.asked if beginning.kept else grant.session
            for each in (_BEGINS, begins, asked):
                config = config.updated(dict(each), served)
            playback = Playback(context.limits.unsent_s)
            protocol = CallProtocol(served, playback, config.asked, beginning.resumption)
            if refusal := context.refuse_now(grant.name):  # since the request began to come
                raise RefusedError(refusal)
            peer = peer_of(
                offer, context.limits, context.call_network, playback, protocol.is_hands_free
            )
            with context.opening(grant.name):
                answer, session = await self._opened(peer, protocol, beginning)
        except BaseException:
            await beginning.give_back()
            raise
        call = Call(peer, protocol, playback, session, context, grant.name)
        call.keep(beginning.keeper(protocol, session))
        context.connections.add(call)
        call_id = new_id("rtc")
        self._peers[call_id] = grant.name, peer
        task = asyncio.create_task(self._hold(call_id, call, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        headers = {
            "Location": f"{request.url.path}/{call_id}",
            "Access-Control-Expose-Headers": "Location",
            "Cache-Control": "no-store",
        }
        return Response(answer, 201, headers, SDP)

    async def _opened(
        self, peer: "Peer", protocol: CallProtocol, beginning: Beginning
    ) -> tuple[str, SessionProxy]:
        """The answer to an offer, and the session of its call; where one fails neither is left."""
        context = self._context
        session = await beginning.open(context, protocol)
        try:
            answer = await peer.answer()
            if context.unavailable:
                raise RefusedError(context.unavailable)
        except BaseException:
            session.close()
            await peer.end()
            raise
        return answer, session

    async def _hold(self, call_id: str, call: Call, peer: "Peer") -> None:
        """A call, to its end."""
        try:
            await call.run(None)
        except Exception:
            _LOG.exception("a call failed")
        finally:
            del self._peers[call_id]
            await peer.end()


def _peer() -> "type[Peer]":
    """What speaks WebRTC; its libraries are loaded for the first call alone, beside the loop."""
    from mosstalk.server.peer import Peer

    return Peer


async def _offered(request: Request, context: ServerContext) -> tuple[str, dict[str, Any]]:
    """The offer in a request, and the settings that stand beside it.

    Raises:
        RefusedError: the request is too long, or too slow.
        WireError: it holds no offer, or what stands beside it is no JSON.
    """
    limits = context.limits
    body = await read_body(request, limits.large_bytes, limits.header_s)
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() == SDP:
        return _text(body), {}
    if not kind.lower().startswith("multipart/"):
        message = f"send the offer as {SDP}, or a form with the fields sdp and session"
        raise WireError("invalid_content_type", message)
    fields = {part.name: part.content for part in form_parts(kind, body)}
    if "sdp" not in fields:
        raise WireError("missing_required_parameter", "Missing required parameter: 'sdp'.", "sdp")
    session = parse_message(raw := fields.get("session") or b"{}", limits)
    require_plain(session, raw)
    return _text(fields["sdp"]), session


def _text(sdp: bytes) -> str:
    try:
        return sdp.decode()
    except UnicodeDecodeError:
        raise WireError("invalid_value", "Invalid 'sdp': it is no UTF-8.", "sdp") from None
