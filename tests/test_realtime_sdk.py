"""The unmodified `openai` client against a running server, over a real socket."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from openai import AsyncOpenAI
from server_rig import QUICK, RATE, Server, question, serving, silence
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

SPEECH = question()


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that finds turns by itself."""
    with serving(*QUICK[2:], cache=cache_folder) as running:
        yield running


class Talk:
    """A connection of the `openai` package, and the events that it has parsed."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.events = connection, list[Any]()

    async def until(self, kind: str) -> Any:
        """Listen until an event of that type comes."""
        async for event in self.connection:
            self.events.append(event)
            assert event.type != "error" or kind == "error", event
            if event.type == kind:
                return event
        raise AssertionError("the connection ended")

    async def say(self, pcm: bytes) -> None:
        """Append sound in pieces of 100 ms."""
        for start in range(0, len(pcm), 4800):
            audio = base64.b64encode(pcm[start : start + 4800]).decode()
            await self.connection.input_audio_buffer.append(audio=audio)

    def sound(self, response_id: str) -> bytes:
        """The sound of a response."""
        sent = [e for e in self.events if e.type == "response.output_audio.delta"]
        deltas = [event for event in sent if event.response_id == response_id]
        return b"".join(base64.b64decode(delta.delta) for delta in deltas)


def client(server: Server, **more: str) -> AsyncOpenAI:
    """The client as anybody makes it."""
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **more)  # type: ignore[arg-type]


def typed(text: str) -> Any:
    """An item of text."""
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content}


def test_turns_by_hand_are_answered_cut_and_remembered(server: Server) -> None:
    async def main() -> None:
        async with client(server).realtime.connect(model="gpt-realtime") as connection:
            talk = Talk(connection)
            by_hand: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
            await connection.session.update(session=by_hand)
            await talk.say(SPEECH)
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            done = await talk.until("response.done")
            assert done.response.status == "completed"
            assert done.response.usage.output_token_details.audio_tokens > 0
            assert done.response.mosstalk["timings"]["commit_to_first_audio_ms"] > 0
            sound = talk.sound(done.response.id)
            assert len(sound) > 4800
            (item,) = done.response.output
            await connection.conversation.item.truncate(
                item_id=item.id, content_index=0, audio_end_ms=100_000
            )
            cut = await talk.until("conversation.item.truncated")
            assert cut.audio_end_ms == len(sound) // 48
            await connection.conversation.item.truncate(
                item_id=item.id, content_index=0, audio_end_ms=100
            )
            assert (await talk.until("conversation.item.truncated")).audio_end_ms == 100
            await connection.conversation.item.create(item=typed("And then?"))
            await connection.response.create(response={"output_modalities": ["text"]})
            again = await talk.until("response.done")
            written = [e.delta for e in talk.events if e.type == "response.output_text.delta"]
            assert again.response.output[0].content[0].text == "".join(written)
            first, second = done.response.usage, again.response.usage
            assert second.input_token_details.audio_tokens >= first.input_token_details.audio_tokens

    run(main())


def test_hands_free_turns_are_found_and_their_answers_interrupted(server: Server) -> None:
    async def main() -> None:
        async with client(server).realtime.connect(model="gpt-realtime") as connection:
            talk = Talk(connection)
            await talk.until("session.created")
            await talk.say(silence(0.5) + SPEECH + silence(0.8))
            delta = await talk.until("response.output_audio.delta")
            await connection.response.cancel()
            done = await talk.until("response.done")
            assert done.response.status_details.reason == "client_cancelled"
            await connection.conversation.item.truncate(
                item_id=delta.item_id, content_index=0, audio_end_ms=120
            )
            await talk.until("conversation.item.truncated")
            kinds = [event.type for event in talk.events]
            started = kinds.index("input_audio_buffer.speech_started")
            stopped = kinds.index("input_audio_buffer.speech_stopped")
            assert started < stopped < kinds.index("input_audio_buffer.committed")
            await connection.conversation.item.retrieve(item_id=delta.item_id)
            got = await talk.until("conversation.item.retrieved")
            assert got.item.status == "incomplete"
            await connection.conversation.item.delete(item_id=delta.item_id)
            await talk.until("conversation.item.deleted")
            await connection.response.cancel(event_id="late")
            error = (await talk.until("error")).error
            assert (error.code, error.event_id) == ("response_cancel_not_active", "late")
            await connection.input_audio_buffer.clear()
            await talk.until("input_audio_buffer.cleared")

    run(main())


def test_all_that_the_types_allow_is_served(server: Server) -> None:
    async def main() -> None:
        async with client(server).realtime.connect(model="gpt-realtime") as connection:
            talk = Talk(connection)  # any error fails
            audio = base64.b64encode(SPEECH).decode()
            heard: Any = {"type": "input_audio", "audio": audio}
            text: Any = {"type": "input_text", "text": "What is said here?"}
            mixed: Any = {"type": "message", "role": "user", "content": [text, heard]}
            create = connection.conversation.item.create
            await create(item=mixed)
            added = await talk.until("conversation.item.done")
            assert [part.type for part in added.item.content] == ["input_text", "input_audio"]
            approval: Any = {"type": "mcp_approval_response", "approval_request_id": "r",
                             "approve": True, "id": "mcpa"}  # fmt: skip
            await create(item=approval)
            short: Any = {"output_modalities": ["text"], "max_output_tokens": 8}
            known: Any = {"type": "item_reference", "id": added.item.id}
            for given in ([known, typed("And?")], []):
                asked: Any = {**short, "input": given}
                await connection.response.create(response=asked)
                done = await talk.until("response.done")
                assert done.response.conversation_id is not None
                assert done.response.output[0].id in {
                    event.item.id for event in talk.events if event.type == "conversation.item.done"
                }
            for kind, rate in (("audio/pcmu", 8000), ("audio/pcm", RATE), ("audio/pcma", 8000)):
                form = {"type": kind, **({"rate": RATE} if kind == "audio/pcm" else {})}
                heard = {"format": form, "turn_detection": None}
                session: Any = {"type": "realtime", "audio": {"input": heard}}
                await connection.session.update(session=session)
                sound = b"\x55" * (rate if rate == 8000 else 2 * rate)
                await talk.say(sound)
                await connection.input_audio_buffer.commit()
                await talk.until("input_audio_buffer.committed")
            await talk.until("conversation.item.done")

    run(main())
    server.await_nothing_held()


def test_the_beta_of_the_client_is_closed_with_the_reason(server: Server) -> None:
    async def main() -> None:
        socket = f"{server.url.replace('http', 'ws')}/v1"  # without it the beta dials wss
        beta = client(server, websocket_base_url=socket).beta.realtime
        async with beta.connect(model="gpt-4o-realtime-preview") as connection:
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4000
        assert closed.value.rcvd.reason.startswith("beta_api_shape_disabled: ")

    run(main())


def test_a_page_of_the_beta_is_closed_as_well_and_others_are_served(server: Server) -> None:
    async def main() -> None:
        url = f"{server.url.replace('http', 'ws')}/v1/realtime"
        for protocol, code in (("openai-beta.realtime-v1", 4000), ("openai-other", None)):
            offered: Any = ["realtime", protocol]
            async with connect(url, subprotocols=offered) as socket:
                if code is None:
                    assert "session.created" in str(await socket.recv())
                    continue
                with pytest.raises(ConnectionClosed):
                    await socket.recv()
                assert socket.close_code == code

    run(main())
    server.await_nothing_held()
