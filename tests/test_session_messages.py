"""Messages of text and sound, responses to other input, and sound at changing rates."""

from dataclasses import replace

import soxr
from conftest import run
from session_rig import (
    BY_HAND,
    QUESTION,
    RATE,
    WRITTEN,
    Client,
    Offline,
    host,
    pocket,
    require_nothing_held,
    speech,
)

from mosstalk.audio.sound import Samples
from mosstalk.conversation import SpeechSegment, TextSegment, Turn
from mosstalk.session.commands import (
    Commit,
    CreateMessage,
    CreateResponse,
    CreateText,
    Message,
    Sound,
    UpdateSettings,
)
from mosstalk.session.events import ErrorRaised, ItemAdded, ItemDone, ResponseDone, ResponseStatus


def _written(text: str) -> TextSegment:
    return TextSegment(tuple(pocket().tokenizer.encode(text)))


def _spoken(samples: Samples) -> SpeechSegment:
    """What the plain path hears."""
    chat, ids = pocket().chat(speech=False), pocket().ids
    chat.hear(samples)
    heard = [audio for text, audio in chat.conversation.rows if text == ids.modality_pad]
    return SpeechSegment(tuple(heard[:-1]))


def test_a_response_to_other_input_is_the_conversations_next_turn() -> None:
    async def main() -> None:
        async with host() as here:
            async with await here.open(WRITTEN) as session:
                client = Client(session)
                client.do(CreateText("user", "Good morning.", item_id="a"))
                client.do(CreateText("user", "The train is late.", item_id="b"))
                await client.wait(ItemDone, lambda done: done.item.item_id == "b")
                before = client.rows
                said = (_written("What is said here?"), _spoken(speech(QUESTION)))
                heard = Message("user", ("What is said here?", Sound(speech(QUESTION))))
                client.do(CreateResponse("other", input=("a", heard)))
                done = await client.wait(ResponseDone)
                assert done.in_conversation
                offline = Offline(speech=False)
                offline.chat.read("Good morning.")
                offline.chat.conversation.add_turn(Turn("user", said))
                prompt = len(offline.rows)
                assert client.text("other") == offline.answer()[1] != ""
                (item,) = done.items
                reply = offline.rows[prompt:]
                assert client.rows == before + reply, "the input is no part of the conversation"
                assert [i.item.item_id for i in client.all(ItemAdded)] == ["a", "b", item.item_id]
                client.do(CreateMessage(heard, item_id="c"), CreateResponse("next"))
                await client.wait(ResponseDone)
                whole = Offline(speech=False)
                for each in ("Good morning.", "The train is late."):
                    whole.chat.read(each)
                whole.chat.conversation.rows += reply
                whole.chat.conversation.add_turn(Turn("user", said))
                assert client.text("next") == whole.answer()[1]
                client.do(CreateResponse("none", input=()))
                assert (await client.wait(ResponseDone)).status is ResponseStatus.COMPLETED
            require_nothing_held(here)

    run(main())


def test_the_rate_of_what_is_pushed_may_change_at_any_time() -> None:
    """Between turns and within one, hands-free or by hand: nothing is lost and nothing refused."""

    async def main() -> None:
        question = speech(QUESTION)
        at = {rate: soxr.resample(question, RATE, rate) for rate in (24_000, 16_000, 8000)}
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            for rate in (16_000, 8000, 24_000, 8000, 16_000):
                client.do(UpdateSettings(replace(BY_HAND, input_rate=rate)))
                session.push(at[rate])
                client.do(Commit())
                item = (await client.wait(ItemDone)).item
                assert item.audio_ms is not None
                assert abs(item.audio_ms - 1000 * len(question) // RATE) <= 1
            for rate in (8000, 24_000, 16_000):
                third = len(at[rate]) // 3
                session.push(at[rate][:third], rate)
            client.do(Commit())
            item = (await client.wait(ItemDone)).item
            assert item.audio_ms is not None
            assert abs(item.audio_ms - 1000 * len(question) // RATE) <= 1
            assert abs(session.clock - 6 * len(question)) <= 12
            assert not client.all(ErrorRaised)

    run(main())
