"""Transcription sessions: the unmodified `openai` client against a running server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require_package, run
from openai.types.realtime import RealtimeTranscriptionSessionCreateRequest
from realtime_rig import caller
from server_rig import QUICK, Server, Talker, append, ask, question, sentence, serving, silence
from test_realtime_sdk import Talk, client

from mosstalk.server.realtime.session_config import TranscriberInfo
from mosstalk.session.commands import CreateResponse, DeleteItem
from mosstalk.session.events import Closed, CloseReason, Item, ItemAdded, ItemDone

SPEECH = question()
DELTA, COMPLETED, FAILED = (
    f"conversation.item.input_audio_transcription.{end}" for end in ("delta", "completed", "failed")
)
BY_HAND: Any = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that finds turns by itself, and where the model writes down what is said."""
    with serving(*QUICK[2:], cache=cache_folder) as running:
        yield running


def of_one(talk: Talk, item_id: str) -> str:
    """What the deltas of an item say."""
    sent = [event for event in talk.events if event.type == DELTA and event.item_id == item_id]
    return "".join(event.delta for event in sent)


async def by_hand(talk: Talk, pcm: bytes) -> Any:
    """What is written down of a turn that the client ends."""
    await talk.say(pcm)
    await talk.connection.input_audio_buffer.commit()
    return await talk.until(COMPLETED)


def connecting(server: Server) -> Any:
    """A connection as clients that transcribe make it."""
    return client(server).realtime.connect(extra_query={"intent": "transcription"})


def test_turns_by_hand_are_written_down_in_their_order_and_never_answered(server: Server) -> None:
    async def main() -> None:
        async with connecting(server) as connection:
            talk = Talk(connection)
            created = await talk.until("session.created")
            assert type(created.session) is RealtimeTranscriptionSessionCreateRequest
            await connection.session.update(session=BY_HAND)
            updated = (await talk.until("session.updated")).session
            assert updated.audio.input.turn_detection is None
            for pcm in (SPEECH, sentence()):  # the second waits for the first
                await talk.say(pcm)
                await connection.input_audio_buffer.commit()
            first, second = await talk.until(COMPLETED), await talk.until(COMPLETED)
            committed = [e for e in talk.events if e.type == "input_audio_buffer.committed"]
            assert [first.item_id, second.item_id] == [each.item_id for each in committed]
            for heard in (first, second):
                assert heard.transcript == of_one(talk, heard.item_id) != ""
                assert heard.usage.type == "tokens"
                assert heard.usage.input_token_details.audio_tokens > 0
            assert len([e for e in talk.events if e.type == DELTA]) > 8, "as it is written"
            assert not [e.type for e in talk.events if e.type.startswith("response.")]
            await connection.conversation.item.retrieve(item_id=first.item_id)
            got = (await talk.until("conversation.item.retrieved")).item
            assert got.content[0].transcript == first.transcript
            again = await by_hand(talk, SPEECH)
            assert again.transcript == first.transcript, "each turn is read by itself"

    run(main())
    server.await_nothing_held()


def test_turns_that_the_server_finds_are_written_down(server: Server) -> None:
    async def main() -> None:
        async with connecting(server) as connection:
            talk = Talk(connection)
            await connection.session.update(session={"type": "transcription"})
            await talk.say(silence(0.5) + SPEECH + silence(1.0))
            heard = await talk.until(COMPLETED)
            kinds = [event.type for event in talk.events if event.type != DELTA]
            assert kinds == [
                "session.created", "session.updated", "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped", "input_audio_buffer.committed",
                "conversation.item.added", "conversation.item.done", COMPLETED,
            ]  # fmt: skip
            assert heard.transcript

    run(main())
    server.await_nothing_held()


def test_what_belongs_to_conversations_is_refused_and_the_session_goes_on(server: Server) -> None:
    async def main() -> None:
        async with connecting(server) as connection:
            talk = Talk(connection)
            await connection.session.update(session=BY_HAND)
            await connection.response.create(event_id="mine")
            refused = (await talk.until("error")).error
            assert (refused.code, refused.event_id) == ("invalid_value", "mine")
            assert "connect anew" in refused.message
            await connection.session.update(session={"type": "realtime"})
            assert (await talk.until("error")).error.param == "session.type"
            assert (await by_hand(talk, SPEECH)).transcript

    run(main())


def test_a_conversation_that_asks_to_transcribe_does_from_there_on(server: Server) -> None:
    async def main() -> None:
        async with client(server).realtime.connect(model="any") as connection:
            talk = Talk(connection)
            await connection.session.update(session=BY_HAND)
            assert (await talk.until("session.updated")).session.type == "transcription"
            assert (await by_hand(talk, SPEECH)).transcript

    run(main())


def test_a_page_may_have_a_key_that_transcribes(server: Server) -> None:
    body = {"session": BY_HAND}
    made = ask("POST", f"{server.url}/v1/realtime/client_secrets", json=body).json()
    assert made["session"]["object"] == "realtime.transcription_session"
    shown: dict[str, Any] = {
        "subprotocols": ["realtime", f"openai-insecure-api-key.{made['value']}"]
    }

    async def main() -> None:
        async with Talker(server, **shown) as talker:
            assert talker.events[0]["session"]["type"] == "transcription"
            await talker.say(SPEECH)
            await talker.send({"type": "input_audio_buffer.commit"})
            assert (await talker.wait(COMPLETED))["transcript"]

    run(main())


@pytest.mark.system
def test_the_transcriber_writes_where_there_is_one_and_hears_the_language(
    cache_folder: Path,
) -> None:
    require_package("faster_whisper", "transcribe")

    async def main(server: Server) -> None:
        async with connecting(server) as connection:
            talk = Talk(connection)
            await connection.session.update(session=BY_HAND)
            heard = await by_hand(talk, SPEECH)
            assert "folder" in heard.transcript.lower()
            assert heard.transcript == of_one(talk, heard.item_id)
            assert (heard.usage.type, heard.usage.seconds) == ("duration", 2.866)
            chinese: Any = {"type": "transcription", "audio": {"input": {
                "transcription": {"language": "zh"}}}}  # fmt: skip
            await connection.session.update(session=chinese)
            assert (await by_hand(talk, SPEECH)).usage.type == "tokens", "the model's"

    with serving(*QUICK, "--transcriber", "whisper-tiny", cache=cache_folder) as server:
        run(main(server))
        server.await_nothing_held()


def turn(name: str) -> tuple[ItemAdded, ItemDone]:
    """A turn of the user's that is whole."""
    item = Item(name, "user", audio_ms=500)
    return ItemAdded(item, None, clock=0), ItemDone(item, None, clock=0)


def test_rows_of_turns_are_freed_and_null_writes_nothing_down() -> None:
    off = {"type": "transcription", "audio": {"input": {"transcription": None}}}
    listener = caller(transcriber=TranscriberInfo("whisper-tiny", "en"), begins=off)
    listener.hear(*turn("a"))
    assert isinstance(listener.commands[-1], DeleteItem)
    assert not [each for each in listener.commands if isinstance(each, CreateResponse)]
    (got,) = listener.send("conversation.item.retrieve", item_id="a")
    assert got["item"]["id"] == "a", "for the client it is there"


def test_an_end_that_the_server_decides_on_is_no_error_to_a_client_that_would_not_come_back() -> (
    None
):
    listener = caller(begins={"type": "transcription"})
    assert not listener.hear(Closed(CloseReason.IDLE, clock=0))
    assert caller().hear(Closed(CloseReason.IDLE, clock=0))


def test_turns_come_as_they_are_said_while_many_wait(server: Server) -> None:
    """Eight turns at once: more than a session's responses may be at a time."""

    async def main() -> None:
        async with Talker(server, model="any&intent=transcription") as talker:
            await talker.send({"type": "session.update", "session": BY_HAND})
            for _ in range(8):
                await talker.send(append(SPEECH), {"type": "input_audio_buffer.commit"})
            heard = [await talker.wait(COMPLETED) for _ in range(8)]
            assert len({each["transcript"] for each in heard}) == 1
            assert FAILED not in talker.kinds()

    run(main())
    server.await_nothing_held()
