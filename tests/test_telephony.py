"""Calls over Twilio Media Streams: a real server, and a client that sends what Twilio publishes."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile
import soxr
from conftest import ROOT, require_package, run
from realtime_rig import response
from server_rig import QUICK, RATE, Server, question, serving, silence
from typer.testing import CliRunner
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mosstalk.cli import app
from mosstalk.errors import OptionError
from mosstalk.server.keys import TwilioAccount
from mosstalk.server.realtime.protocol import ProtocolOutput
from mosstalk.server.realtime.session_config import ServedModel
from mosstalk.server.realtime.validation import MU_LAW, decode_g711, encode_g711
from mosstalk.server.telephony import GRANT, TwilioProtocol
from mosstalk.session.commands import Close, CreateResponse, Push, Truncate, UpdateSettings
from mosstalk.session.events import SpeechStarted

TOKEN = "12345"
PATH = "/v1/telephony/twilio"
PUBLIC = "https://talk.example.org/voice"
SID = "MZXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXX"
CALL = "CAXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXX"
FORMAT = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
LONG = ("--temperature", "0", "--seed", "0", "--script", "speech:700")
"""Replies of 56 s, which are under way when somebody interrupts them."""
FRAME = 160
"""Bytes of 20 ms, as Twilio sends them."""
PLAYED = 3
"""Pieces that were played before the caller interrupts."""


def mu_law(pcm: bytes) -> bytes:
    """PCM at 24 kHz as telephones send it."""
    low = soxr.resample(np.frombuffer(pcm, "<i2"), RATE, 8000).astype("<i2")
    return encode_g711(low.tobytes(), MU_LAW)


def signature(url: str, token: str = TOKEN) -> dict[str, str]:
    """The header with which Twilio signs a WebSocket's handshake."""
    digest = hmac.new(token.encode(), url.encode(), hashlib.sha1).digest()
    return {"X-Twilio-Signature": base64.b64encode(digest).decode()}


class Phone:
    """Twilio's end of a call.

    ``marks`` are those that it has and has not sent back, each with the bytes of sound before it.
    """

    def __init__(self, server: Server, **parameters: str) -> None:
        self.sound: dict[str, bytes] = {}
        """By the item that its marks name, the sound that came."""
        self.marks: dict[str, int] = {}
        self.played = 0
        """Bytes of the sound that was played."""
        self._url, self._parameters = server.url.replace("http", "ws", 1) + PATH, parameters
        self._open: ClientConnection | None = None
        self._sent, self._chunks = 0, 0

    @property
    def socket(self) -> ClientConnection:
        """The connection."""
        assert self._open
        return self._open

    async def __aenter__(self) -> "Phone":
        signed = signature(f"wss://talk.example.org/voice{PATH}")
        self._open = await connect(self._url, additional_headers=signed)
        await self.send("connected", protocol="Call", version="1.0.0")
        start = {
            "accountSid": "AC", "streamSid": SID, "callSid": CALL, "tracks": ["inbound"],
            "mediaFormat": FORMAT, "customParameters": self._parameters,
        }  # fmt: skip
        await self.send("start", start=start, streamSid=SID)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.socket.close()

    async def send(self, event: str, **more: Any) -> None:
        """Send a message; all but the first are numbered."""
        number = {"sequenceNumber": str(self._sent)} if self._sent else {}
        self._sent += 1
        await self.socket.send(json.dumps({"event": event, **number, **more}))

    async def say(self, sound: bytes) -> None:
        """Send the caller's sound, frame by frame."""
        for start in range(0, len(sound), FRAME):
            self._chunks += 1
            media = {
                "track": "inbound", "chunk": str(self._chunks), "timestamp": str(20 * self._chunks),
                "payload": base64.b64encode(sound[start : start + FRAME]).decode(),
            }  # fmt: skip
            await self.send("media", media=media, streamSid=SID)

    async def play(self, count: int) -> None:
        """The oldest pieces have been played: send their marks back."""
        for name in list(self.marks)[:count]:
            self.played += self.marks.pop(name)
            await self.send("mark", streamSid=SID, mark={"name": name})

    async def hear(self) -> str:
        """Take a message; what it was."""
        message = json.loads(await self.socket.recv())
        assert message["streamSid"] == SID
        if message["event"] == "media":
            assert set(message["media"]) == {"payload"}
            sound = base64.b64decode(message["media"]["payload"])
            mark = json.loads(await self.socket.recv())
            assert mark["event"] == "mark", "a mark stands behind each piece"
            name = mark["mark"]["name"]
            self.marks[name] = len(sound)
            item = name.partition(":")[0]
            self.sound[item] = self.sound.get(item, b"") + sound
            assert name == f"{item}:{len(self.sound[item])}", "each reply counts from its beginning"
        return str(message["event"])

    async def hang_up(self) -> int:
        """The call ends: Twilio says so; the code with which the server closes."""
        await self.send("stop", streamSid=SID, stop={"accountSid": "AC", "callSid": CALL})
        with suppress(ConnectionClosed):
            while True:
                await self.socket.recv()
        return self.socket.close_code or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps recordings."""
    return tmp_path_factory.mktemp("kept") / "recordings"


@pytest.fixture(scope="module")
def server(cache_folder: Path, folder: Path) -> Iterator[Server]:
    """A server that takes one call at a time and keeps it, with a key that calls need not show."""
    require_package("silero_vad", "vad")
    words = ("--max-sessions", "1", "--record", str(folder), "--public-url", PUBLIC)
    env = {"MOSSTALK_TWILIO_AUTH_TOKEN": TOKEN, "MOSSTALK_API_KEY": "a-key"}
    with serving(*LONG, *words, cache=cache_folder, env=env) as running:
        running.headers = {"Authorization": "Bearer a-key"}
        yield running


def test_a_caller_is_answered_interrupts_and_is_cut_at_what_was_played(
    server: Server, folder: Path
) -> None:
    phone, played = Phone(server), list[int]()
    asked = interrupting = mu_law(question() + silence(1.0))

    async def main() -> None:
        async with phone:
            await phone.say(asked)
            while len(phone.marks) <= PLAYED:
                assert await phone.hear() == "media"
            await phone.play(PLAYED)
            played.append(phone.played)
            await phone.say(interrupting)
            while await phone.hear() == "media":
                pass  # on its way until the server has heard the caller
            await phone.play(len(phone.marks))  # as Twilio does of what it throws away
            while len(phone.sound) < 2:
                assert await phone.hear() == "media"
            assert await phone.hang_up() == 1000

    run(main())
    server.await_nothing_held()
    assert server.metrics()['mosstalk_sessions_closed_total{reason="client"}'] == 1
    kept = server.await_folder(folder)[-1]
    first, second = phone.sound
    lines = [json.loads(line) for line in (kept / "session.jsonl").read_text().splitlines()]
    commands = [line["command"] for line in lines if "command" in line]
    events = [line["event"] for line in lines if "event" in line]
    (cut,) = [each for each in commands if each["type"] == "Truncate"]
    assert (cut["item_id"], cut["heard_ms"]) == (first, played[0] // 8)
    (done,) = [each for each in events if each["type"] == "ItemTruncated"]
    assert (done["item_id"], done["by_session"]) == (first, False)
    assert done["codes"] == -(-cut["heard_ms"] // 80)
    ended = next(each for each in events if each["type"] == "ResponseDone")
    assert (ended["status"], ended["reason"]) == ("cancelled", "turn_detected")
    assert len(phone.sound[first]) // 8 > cut["heard_ms"] + 80, "more was sent than was played"
    assert second in {e["item_id"] for e in events if e["type"] == "AudioDelta"}
    heard, rate = soundfile.read(kept / "input-8000.wav", dtype="int16")
    said = np.frombuffer(decode_g711(asked + interrupting, MU_LAW), "<i2")
    assert (rate, heard.tolist()) == (8000, said.tolist())
    made, _ = soundfile.read(kept / "output-24000.wav", dtype="int16", frames=RATE)
    got = np.frombuffer(decode_g711(phone.sound[first], MU_LAW), "<i2")[:7500].astype(np.float64)
    meant = soxr.resample(made.astype(np.float64), RATE, 8000)[:7500]
    assert np.corrcoef(got, meant)[0, 1] > 0.99
    assert not server.faults()


def test_a_full_server_refuses_a_call_at_once_and_one_that_is_lost_frees_its_place(
    server: Server,
) -> None:
    async def main() -> None:
        async with Phone(server) as first:
            with pytest.raises(InvalidStatus) as refused:
                await Phone(server).__aenter__()
            answer = refused.value.response
            assert answer.status_code == 503
            assert json.loads(answer.body)["error"]["code"] == "full"
            await first.say(mu_law(question() + silence(1.0)))
            assert await first.hear() == "media"
            first.socket.transport.abort()  # the line is dead, in the middle of a reply

    run(main())
    server.await_nothing_held()

    async def again() -> None:
        async with Phone(server) as phone:
            assert await phone.hang_up() == 1000

    run(again())
    server.await_nothing_held()


def test_a_call_is_let_in_by_the_signature_of_its_public_address_alone(server: Server) -> None:
    url, right = server.url.replace("http", "ws", 1) + PATH, f"wss://talk.example.org/voice{PATH}"

    def status(headers: dict[str, str], query: str = "") -> tuple[int, str]:
        async def main() -> tuple[int, str]:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url + query, additional_headers=headers)
            answer = refused.value.response
            return answer.status_code, json.loads(answer.body)["error"]["message"]

        return asyncio.run(main())

    wrong: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer a-key"},
        signature(right, "another-token"),
        signature(right.replace("wss", "https")),
        signature(url),
        {"X-Twilio-Signature": "\u00e9" * 28},
    )
    for headers in wrong:
        code, message = status(headers)
        assert code == 403
        assert right in message
        assert "--public-url" in message
    assert status(signature(right), "?to=somewhere")[0] == 403, "the query is signed too"
    assert server.metrics()['mosstalk_refusals_total{reason="signature"}'] == len(wrong) + 1
    assert not server.faults()


def test_without_a_token_no_call_is_taken_and_the_option_that_takes_them_is_named(
    cache_folder: Path,
) -> None:
    with serving(*QUICK, cache=cache_folder) as closed:

        async def main() -> None:
            url = closed.url.replace("http", "ws", 1) + PATH
            signed = signature(url.replace("ws", "wss", 1), "")
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=signed)
            answer = refused.value.response
            assert answer.status_code == 403
            assert "--twilio-auth-token" in json.loads(answer.body)["error"]["message"]

        run(main())


def test_the_signature_is_that_of_the_published_example() -> None:
    # The example is of a form, whose fields are signed behind the URL.
    fields = "CallSidCA1234567890ABCDECaller+14158675309Digits1234From+14158675309To+18005551212"
    shown = {"x-twilio-signature": "RSOYDt4T1cUTdK1PDd93/VVr8B8="}
    account = TwilioAccount(TOKEN)
    assert account.has_signed(f"https://mycompany.com/myapp.php?foo=1&bar=2{fields}", shown)
    assert not account.has_signed("https://mycompany.com/myapp.php?foo=1&bar=2", shown)
    assert account.url_of(PATH, {"host": "a.example:8443"}) == f"wss://a.example:8443{PATH}"
    named = TwilioAccount(TOKEN, "https://talk.example.org/")
    assert named.url_of(PATH, {"host": "inner"}) == f"wss://talk.example.org{PATH}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--twilio-auth-token", " "), "the Twilio auth token is empty"),
        (("--twilio-auth-token", "t", "--vad", "none"), "calls are hands-free"),
        (("--twilio-auth-token", "t", "--public-url", "talk.example.org"), "--public-url talk"),
        (("--public-url", PUBLIC), "none are taken"),
    ],
)
def test_what_takes_no_calls_is_said_at_the_start(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--print-config", *words])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert message in line


def test_the_token_is_not_printed_and_the_public_name_is_answered_under() -> None:
    words = ["serve", "--print-config", "--twilio-auth-token", "secret", "--public-url", PUBLIC]
    printed = CliRunner().invoke(app, words).stdout
    config = json.loads(printed)
    assert config["twilio"] == {"public_url": PUBLIC}
    assert "talk.example.org" in config["hosts"]
    assert "secret" not in printed
    with pytest.raises(OptionError):
        TwilioAccount("")


def test_the_page_connects_a_call_and_names_every_message() -> None:
    page = (ROOT / "docs" / "telephony.md").read_text()
    (twiml,) = re.findall(r"```xml\n(.+?)```", page, re.DOTALL)
    (stream,) = ElementTree.fromstring(twiml.encode()).findall("./Connect/Stream")
    public = re.findall(r"--public-url (\S+)", page)[0]
    assert stream.get("url") == TwilioAccount(TOKEN, public).url_of(PATH, {})
    parameters = {each.get("name", ""): each.get("value") for each in stream}
    (command,) = begun(customParameters=parameters)[1].commands
    assert isinstance(command, UpdateSettings)
    assert command.settings.instructions == parameters["instructions"]
    assert command.settings.voice == parameters["voice"]
    said, told_by = page.split("| from Twilio |")[1].split("| to Twilio |")
    for kind in ("connected", "start", "media", "mark", "dtmf", "stop"):
        assert f"| `{kind}` |" in said
    for kind in ("media", "mark", "clear"):
        assert f"| `{kind}` |" in told_by


# The translation, without a socket.


def call() -> TwilioProtocol:
    """A call that has just been let in."""
    return TwilioProtocol(ServedModel("house"), begins=GRANT.session)


def told(protocol: TwilioProtocol, event: str, **more: Any) -> ProtocolOutput:
    """What a message of Twilio's leads to."""
    return protocol.from_client(json.dumps({"event": event, **more}))


def begun(**start: Any) -> tuple[TwilioProtocol, ProtocolOutput]:
    """A call whose stream has begun, and what that led to."""
    protocol = call()
    return protocol, told(protocol, "start", streamSid=SID, start={"mediaFormat": FORMAT, **start})


def test_a_reply_that_is_whole_and_not_yet_played_is_taken_back_too() -> None:
    for played, heard_ms in ((0, 0), (1, None)):
        protocol, _ = begun()
        wire = [
            e for event in response(CreateResponse()) for e in protocol.from_session(event).events
        ]
        messages = [json.loads(each.to_json()) for each in wire]
        marks = [m["mark"]["name"] for m in messages if m["event"] == "mark"]
        assert [m["event"] for m in messages] == ["media", "mark"] * len(marks)
        last_ms = int(marks[-1].partition(":")[2]) // 8
        assert last_ms == 80
        for name in marks[:played]:
            assert told(protocol, "mark", streamSid=SID, mark={"name": name}) == ProtocolOutput()
        if heard_ms is None:
            heard_ms = int(marks[0].partition(":")[2]) // 8
        output = protocol.from_session(SpeechStarted("item_u", 0, clock=0))
        if played == len(marks):
            assert output == ProtocolOutput(), "all was heard"
            continue
        assert [json.loads(each.to_json()) for each in output.events] == [
            {"event": "clear", "streamSid": SID}
        ]
        (cut,) = output.commands
        assert isinstance(cut, Truncate)
        assert (cut.item_id, cut.heard_ms) == ("item_r", heard_ms)
        assert protocol.from_session(SpeechStarted("item_v", 0, clock=0)) == ProtocolOutput()
        for name in marks:  # thrown away by Twilio, which sends their marks back all the same
            told(protocol, "mark", streamSid=SID, mark={"name": name})
        assert protocol.from_session(SpeechStarted("item_v", 0, clock=0)) == ProtocolOutput()


def test_parameters_choose_instructions_and_voice() -> None:
    _, output = begun(customParameters={"instructions": "Be brief.", "voice": "x", "other": "y"})
    (command,) = output.commands
    assert isinstance(command, UpdateSettings)
    assert command.settings.instructions == "Be brief."
    assert not command.settings.echo_gate, "and all else is as it was"
    assert command.settings.input_rate == 8_000, "the formats are those that the call began with"
    assert output.notes == ["the voice is unknown: the default one speaks"]
    assert begun(customParameters={})[1] == begun()[1] == ProtocolOutput()
    assert begun(customParameters={"instructions": "x" * 100_000})[1].notes


def test_what_is_no_message_of_a_call_changes_nothing() -> None:
    protocol = call()
    media = {"track": "inbound", "payload": base64.b64encode(bytes(FRAME)).decode()}
    assert not told(protocol, "media", streamSid=SID, media=media).commands, "nothing has begun"
    protocol, _ = begun()
    assert isinstance(told(protocol, "media", media=media).commands[0], Push)
    assert not told(protocol, "media", media=media | {"track": "outbound"}).commands
    dtmf = {"track": "inbound_track", "digit": "1"}
    assert told(protocol, "dtmf", streamSid=SID, dtmf=dtmf) == ProtocolOutput()
    assert told(protocol, "mark", mark={"name": "another's"}) == ProtocolOutput()
    assert told(protocol, "start", streamSid="MZ2", start={"mediaFormat": FORMAT}).events == []
    long = json.dumps({"event": "connected", "protocol": "x" * (1 << 20)})
    for raw in (
        long,
        "{",
        "[]",
        '{"event": "magic"}',
        '{"event": "media"}',
        "{}",
        b"\xff",
        "[" * 10_000,
    ):
        output = protocol.from_client(raw)
        assert output.notes
        assert not output.commands
    assert told(protocol, "media", media={"payload": "no base64"}).notes == [
        "refused: invalid_value"
    ]
    assert told(protocol, "stop").commands == [Close()]
    wrong = FORMAT | {"encoding": "audio/l16"}
    assert told(call(), "start", streamSid=SID, start={"mediaFormat": wrong}).commands == [Close()]
