"""Calls over Twilio Media Streams: who may call, and a conversation in Twilio's messages.

A call is a hands-free conversation of ``/v1/realtime`` in other words: nothing here knows how one
is held. The messages are those of bidirectional streams (``<Connect><Stream>``), mu-law at 8 kHz.
After each piece of sound a mark is sent, which Twilio sends back once that piece was played.
"""

import base64
import json
from typing import Any, Literal

from starlette.websockets import WebSocket

from mosstalk.server.admission import LONGEST_NAMED, Refusal, ServerContext
from mosstalk.server.keys import Grant
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.protocol import ProtocolOutput, RealtimeProtocol
from mosstalk.server.realtime.session_config import TranscriptionConfig
from mosstalk.server.realtime.validation import MU_LAW, WireError, parse_message
from mosstalk.session.commands import Close
from mosstalk.session.events import Event

TWILIO = "/v1/telephony/twilio"
_SAMPLES_PER_MS = 8
_FORMAT = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
_LONGEST_SID = 64
GRANT = Grant(
    "twilio",
    {
        "type": "realtime",
        "audio": {"input": {"format": {"type": MU_LAW}}, "output": {"format": {"type": MU_LAW}}},
        "mosstalk": {"echo_gate": False},  # telephone networks cancel echo
    },
)
"""What every call may, and how its session begins."""
_CLOSED = Refusal(
    403,
    "telephony",
    "no calls are taken here; this server's owner may start it with MOSSTALK_TWILIO_AUTH_TOKEN or "
    "--twilio-auth-token",
)
_NO_DETECTOR = Refusal(
    403, "vad", "calls are hands-free; this server's owner may start it without --vad none"
)


def granted(socket: WebSocket, context: ServerContext) -> Grant | Refusal:
    """What a call may that asks to be let in: all the same, if Twilio has signed it."""
    if context.twilio is None:
        return _CLOSED
    path = socket.scope["raw_path"].decode("ascii", "replace")
    if query := socket.scope["query_string"].decode("ascii", "replace"):
        path += f"?{query}"
    url = context.twilio.url_of(path, socket.headers)
    if not context.twilio.has_signed(url, socket.headers):
        return Refusal(
            403,
            "signature",
            f"no X-Twilio-Signature for {ascii(url)[:LONGEST_NAMED]} is shown; if Twilio calls "
            "another address, this server's owner may name it with --public-url",
        )
    if context.unavailable is None and context.session_defaults.turn_detection is None:
        return _NO_DETECTOR
    return GRANT


class TwilioMessage(told.Event):
    """A message to Twilio: ``body`` stands under the name of its ``type``, if there is one."""

    type: Literal["media", "mark", "clear"]
    stream_sid: str
    body: dict[str, str] | None = None

    def to_json(self) -> str:
        """The message."""
        body = {} if self.body is None else {self.type: self.body}
        return json.dumps({"event": self.type, "streamSid": self.stream_sid} | body)


class TwilioProtocol(RealtimeProtocol):
    """A call in Twilio's words, its conversation as ``RealtimeProtocol`` holds it.

    Twilio has no message for errors, so they become notes for the log.
    """

    _stream_sid = ""
    _sending: tuple[str, int] = ("", 0)
    """The item whose sound is sent, and how many samples of it were."""
    _heard: tuple[str, int] = ("", 0)
    """The item that was played last, and how many samples of it are known to have been."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """Make what ``RealtimeProtocol`` makes of the same arguments."""
        super().__init__(*args, **more)
        self._unplayed: dict[str, tuple[str, int]] = {}
        """By name, marks that have not come back: the item, and its samples up to there."""

    @property
    def transcription(self) -> TranscriptionConfig:
        """Nothing: Twilio has no message for it."""
        return TranscriptionConfig()

    def from_client(self, raw: str | bytes) -> ProtocolOutput:
        """What a message of Twilio's leads to."""
        try:
            message = parse_message(raw, self._state.served.limits)
        except WireError as error:
            return ProtocolOutput(notes=[f"no message of Twilio's: {error.code}"])
        match message:
            case {"event": "media", "media": {"payload": str(payload), **about}}:
                if self._stream_sid and about.get("track", "inbound") == "inbound":
                    return self._ask(type="input_audio_buffer.append", audio=payload)
            case {"event": "mark", "mark": {"name": str(name)}}:
                self._heard = self._unplayed.pop(name, self._heard)
            case {"event": "start", "streamSid": str(sid), "start": dict(start)}:
                if not self._stream_sid and len(sid) <= _LONGEST_SID:
                    return self._begin(sid, start)
            case {"event": "stop"}:
                return ProtocolOutput([Close()])
            case {"event": "connected" | "dtmf"}:
                pass
            case _:
                return ProtocolOutput(notes=["a message of Twilio's is unknown or not whole"])
        return ProtocolOutput()

    def from_session(self, event: Event) -> ProtocolOutput:
        """What an event of the session leads to."""
        return self._translated(super().from_session(event))

    def _ask(self, **event: Any) -> ProtocolOutput:
        """What an event of a Realtime client leads to."""
        return self._translated(super().from_client(json.dumps(event)))

    def _begin(self, stream_sid: str, start: dict[str, Any]) -> ProtocolOutput:
        """The stream begins: its parameters choose how the conversation is held."""
        form, chosen = start.get("mediaFormat"), start.get("customParameters")
        if form != _FORMAT:
            return ProtocolOutput([Close()], notes=["a call in another format than mu-law, 8 kHz"])
        self._stream_sid = stream_sid
        session: dict[str, Any] = {}
        match chosen:
            case {"instructions": instructions}:
                session["instructions"] = instructions
        match chosen:
            case {"voice": voice}:
                session["audio"] = {"output": {"voice": voice}}
        if not session:
            return ProtocolOutput()
        return self._ask(type="session.update", session={"type": "realtime"} | session)

    def _translated(self, output: ProtocolOutput) -> ProtocolOutput:
        """What a Realtime client would be told, as Twilio is."""
        translated = ProtocolOutput(output.commands, notes=output.notes)
        for event in output.events:
            match event:
                case told.Delta(type="response.output_audio.delta"):
                    translated.events += self._play(event)
                case told.SpeechEvent(type="input_audio_buffer.speech_started"):
                    self._interrupt(translated)
                case told.Error():
                    translated.notes.append(f"refused: {event.error.code}")
        return translated

    def _play(self, delta: told.Delta) -> list[TwilioMessage]:
        """A piece of sound, and the mark behind it."""
        item_id, sent = self._sending
        sent = sent if item_id == delta.item_id else 0
        self._sending = delta.item_id, sent + len(base64.b64decode(delta.delta))
        name = f"{delta.item_id}:{self._sending[1]}"
        self._unplayed[name] = self._sending
        return [self._message("media", payload=delta.delta), self._message("mark", name=name)]

    def _interrupt(self, output: ProtocolOutput) -> None:
        """The caller speaks: what was not played is taken back, and out of the conversation.

        The session has ended the reply that it was making. Marks that come back from now on say
        that Twilio has thrown their sound away, or has played it a moment too late to tell.
        """
        unplayed = dict.fromkeys(item_id for item_id, _ in self._unplayed.values())
        if not unplayed:
            return
        self._unplayed.clear()
        output.events.append(self._message("clear"))
        for item_id in unplayed:
            samples = self._heard[1] if self._heard[0] == item_id else 0
            cut = self._ask(
                type="conversation.item.truncate",
                item_id=item_id,
                content_index=0,
                audio_end_ms=samples // _SAMPLES_PER_MS,
            )
            output.commands += cut.commands
            output.notes += cut.notes

    def _message(self, kind: Literal["media", "mark", "clear"], **body: str) -> TwilioMessage:
        return TwilioMessage(type=kind, stream_sid=self._stream_sid, body=body or None)
