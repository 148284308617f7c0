"""Conversations by hand: what a session answers is what the plain path answers."""

import asyncio
import gc
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import soxr
from conftest import run
from session_rig import (
    BY_HAND,
    QUESTION,
    SENTENCE,
    WRITTEN,
    Client,
    Offline,
    decoder,
    host,
    pocket,
    require_nothing_held,
    silence,
    speech,
)

from mosstalk.audio.sound import Samples
from mosstalk.reply_options import Limits
from mosstalk.session.commands import (
    ROOT,
    CancelResponse,
    CreateAudio,
    CreateResponse,
    CreateText,
    DeleteItem,
    Playback,
    ReplyLimits,
    ReplyMode,
    SessionSettings,
    Truncate,
    UpdateSettings,
)
from mosstalk.session.events import (
    AudioDelta,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemStatus,
    ItemTruncated,
    Reason,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    SessionOpened,
    SettingsUpdated,
    TextDelta,
    TurnCommitted,
)
from mosstalk.session.host import Host
from mosstalk.session.response import Response


def test_a_spoken_turn_is_answered_as_offline_and_so_is_the_next_one() -> None:
    async def main() -> None:
        async with host() as here:
            async with await here.open(BY_HAND) as session:
                client, offline = Client(session), Offline()
                for path in (QUESTION, SENTENCE):
                    done = await client.turn(speech(path))
                    offline.chat.hear(speech(path))
                    sound, _ = offline.answer()
                    assert done.status is ResponseStatus.COMPLETED
                    assert client.pcm(done.response_id) == sound
                    assert client.rows == offline.rows
                opened, *_ = client.events
                assert isinstance(opened, SessionOpened)
                assert opened.settings == BY_HAND
                items = [event.item for event in client.all(ItemDone)]
                assert [item.role for item in items] == ["user", "assistant"] * 2
                assert [item.audio_ms for item in items][::2] == [2866, 2990]
                assert [bool(item.text) for item in items] == [False, True] * 2
                assert [e.previous_item_id for e in client.all(ItemAdded)] == [
                    None, *(item.item_id for item in items[:-1])
                ]  # fmt: skip
            require_nothing_held(here)

    run(main())


def test_by_the_time_of_the_commit_all_but_the_last_block_has_been_read() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.say(speech(QUESTION)[:-1600])
            client.do(DeleteItem("none"))
            await client.error()  # all that was said before has been heard
            while here.engine.core.has_work:  # the engine need only get round to reading it
                client.do(DeleteItem("none"))
                await client.error()
            done = await client.turn(speech(QUESTION)[-1600:])
            prompt = done.usage.input_text + done.usage.input_audio
            assert done.usage.input_audio == 36 + 1
            assert prompt - done.usage.cached <= 5 + 4  # a block, eosp, im_end, newline
            assert done.timings.commit_to_first_audio_ms
            assert done.timings.audio_s == len(client.pcm(done.response_id)) / 2 / 24_000

    run(main())


def test_all_rows_that_the_first_sound_needs_are_asked_for_at_once_on_a_gpu() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client, first_rows = Client(session), list[int]()
            kinds = ((False, ReplyMode.AUDIO), (True, ReplyMode.AUDIO), (True, ReplyMode.TEXT))
            for here.on_gpu, reply in kinds:
                client.do(CreateText("user", "Hello."), CreateResponse(reply=reply))
                await client.wait(ResponseStarted)
                response = session._responses.current
                assert response
                first_rows.append(response.params.first_rows)
                await client.wait(ResponseDone)
            spoken = decoder().open(pocket().codec.voice("default"))
            assert first_rows == [1, spoken.codes_needed, 1]

    run(main())


# Slow: two talks and what they should be; ``test_realtime_talk`` speaks at both rates.
@pytest.mark.slow
def test_sound_at_any_rate_in_any_pieces_is_the_same_turn() -> None:
    def at(rate: int) -> Samples:
        return soxr.resample(speech(QUESTION), 16_000, rate, quality="VHQ").astype(np.float32)

    async def main() -> None:
        async with host() as here:
            for rate in (24_000, 8_000):
                heard = soxr.resample(at(rate), rate, 16_000, quality="HQ").astype(np.float32)
                expected = Offline()
                expected.chat.hear(heard)
                sound, _ = expected.answer(limits=Limits(9))
                settings = replace(BY_HAND, input_rate=rate, limits=ReplyLimits(rows=9))
                async with await here.open(settings) as session:
                    client = Client(session)
                    client.say(at(rate)[:333], piece=7)
                    done = await client.turn(at(rate)[333:])
                    assert client.pcm(done.response_id) == sound
                    assert client.rows == expected.rows

    run(main())


def test_a_typed_turn_is_answered_in_sound_or_in_writing() -> None:
    async def main() -> None:
        async with host() as here:
            for settings in (BY_HAND, WRITTEN):
                spoken = settings.reply is ReplyMode.AUDIO
                async with await here.open(settings) as session:
                    client, offline = Client(session), Offline(speech=spoken)
                    client.do(CreateText("user", "Good morning.", item_id="mine"))
                    client.do(CreateResponse(response_id="answer", metadata={"a": "b"}))
                    done = await client.wait(ResponseDone)
                    offline.chat.read("Good morning.")
                    sound, text = offline.answer()
                    assert client.pcm("answer") == sound
                    assert client.text("answer") == text
                    assert text, "this model writes what it says"
                    assert client.rows == offline.rows
                    assert done.metadata == client.all(ResponseStarted)[0].metadata == {"a": "b"}
                    (item,) = done.items
                    assert (item.text or "") == text
                    assert item.status is ItemStatus.COMPLETED
                    assert (done.usage.output_audio > 0) is spoken

    run(main())


def test_an_interrupted_reply_is_cut_to_what_was_heard_and_the_talk_goes_on() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client, offline = Client(session), Offline()
            client.say(speech(QUESTION))
            done = await client.turn(silence(0.1))
            whole = len(client.pcm(done.response_id)) // 2 // 24
            item_id = done.items[0].item_id
            client.do(Truncate(item_id, whole + 5000), Truncate(item_id, 1000.0))
            client.do(Truncate(item_id, 1600.0), Truncate(item_id, -3.0 + 1000))
            cuts = [await client.wait(ItemTruncated) for _ in range(4)]
            assert [cut.audio_ms for cut in cuts] == [whole, 1000, 1040, 997]
            assert [cut.codes for cut in cuts][1:] == [13, 13, 13]
            offline.chat.hear(np.concatenate([speech(QUESTION), silence(0.1)]))
            offline.answer()
            offline.chat.conversation.cut_last_reply(13)
            assert client.rows == offline.rows
            fresh = pocket().chat()
            codes = [audio for text, audio in client.rows if text == pocket().ids.modality_pad]
            heard = codes.index(pocket().ids.eosp)
            assert len(codes[heard + 1 : -1]) == 13
            fresh.conversation.rows = list(client.rows)  # read afresh
            done = await client.turn(speech(SENTENCE))
            fresh.hear(speech(SENTENCE))
            offline.chat = fresh
            sound, _ = offline.answer()
            assert client.pcm(done.response_id) == sound

    run(main())


def test_cancelling_ends_a_reply_at_once_and_keeps_what_was_sent() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(CreateText("user", "Good morning."), CreateResponse())
            await client.wait(AudioDelta)
            client.do(CancelResponse())
            done = await client.wait(ResponseDone)
            assert done.status is ResponseStatus.CANCELLED
            assert done.reason is Reason.CLIENT_CANCELLED
            sent = len(client.pcm(done.response_id)) // 2
            (item,) = done.items
            assert item.audio_ms == sent * 1000 // 24_000
            assert item.status is ItemStatus.INCOMPLETE
            pad, eosp = pocket().ids.modality_pad, pocket().ids.eosp
            kept = [audio for text, audio in client.rows if text == pad and audio != eosp]
            assert len(kept) == -(-sent // 1920)
            client.do(Truncate(item.item_id, 80.0), CreateText("user", "Go on."), CreateResponse())
            done = await client.wait(ResponseDone)
            assert done.status is ResponseStatus.COMPLETED
            assert not [e for e in client.events if isinstance(e, AudioDelta | TextDelta)
                        and e.item_id == item.item_id and client.events.index(e)
                        > client.events.index(client.all(ResponseDone)[0])]  # fmt: skip

    run(main())


def test_the_sessions_own_clock_says_what_was_heard() -> None:
    async def main() -> None:
        settings = SessionSettings(
            input_rate=16_000, turn_detection=None, sampling=BY_HAND.sampling,
            playback=Playback.SESSION,
        )  # fmt: skip
        async with host(clock=lambda: 0.0) as here, await here.open(settings) as session:
            client = Client(session)
            client.do(CreateText("user", "Good morning."), CreateResponse())
            done = await client.wait(ResponseDone)
            client.say(silence(0.5))
            client.do(Truncate(done.items[0].item_id))
            cut = await client.wait(ItemTruncated)
            assert (cut.audio_ms, cut.codes) == (500, 7)

    run(main())


def test_items_are_put_in_order_deleted_and_heard() -> None:
    async def main() -> None:
        async with host() as here, await here.open(WRITTEN) as session:
            client = Client(session)
            client.do(
                CreateText("user", "Three.", item_id="3"),
                CreateText("system", "One.", item_id="1", previous_item_id=ROOT),
                CreateText("assistant", "Two.", item_id="2", previous_item_id="1"),
                CreateText("user", "Never.", item_id="x"),
                DeleteItem("x"),
                CreateAudio(speech(QUESTION), item_id="4"),
            )
            await client.wait(ItemDeleted)
            await client.wait(ItemDone)
            chat = pocket().chat(speech=False)
            for role, text in (("system", "One."), ("assistant", "Two."), ("user", "Three.")):
                chat.conversation.add_text(role, text)
            chat.hear(speech(QUESTION))
            assert client.rows == chat.conversation.rows
            client.do(CreateResponse())
            done = await client.wait(ResponseDone)
            offline = Offline(speech=False)
            offline.chat = chat
            assert client.text(done.response_id) == offline.answer()[1]

    run(main())


def test_a_response_apart_leaves_the_conversation_as_it_was() -> None:
    async def main() -> None:
        async with host() as here:
            async with await here.open(BY_HAND) as session:
                client = Client(session)
                client.do(CreateText("user", "Good morning.", item_id="a"))
                client.do(CreateText("user", "The train is late.", item_id="b"))
                client.do(CreateResponse("own"))
                client.do(
                    CreateResponse(
                        "apart", reply=ReplyMode.TEXT, in_conversation=False, input=("a",)
                    )
                )
                done = {(await client.wait(ResponseDone)).response_id for _ in range(2)}
                assert done == {"own", "apart"}
                apart = next(d for d in client.all(ResponseDone) if d.response_id == "apart")
                assert not apart.in_conversation
                offline = Offline(speech=False)
                offline.chat.read("Good morning.")
                assert client.text("apart") == offline.answer()[1]
                own = pocket().ids
                spoken = [audio for text, audio in client.rows if text == own.modality_pad]
                assert len(spoken) * 1920 == len(client.pcm("own")) // 2 + 1920
            require_nothing_held(here)

    run(main())


def test_a_response_apart_is_no_turn_whose_first_sound_a_host_counts() -> None:
    async def main() -> None:
        settings = replace(BY_HAND, limits=ReplyLimits(longest_s=0.8))
        async with host() as here, await here.open(settings) as session:
            client, counted = Client(session), list[bool]()
            client.do(CreateText("user", "Good morning."))
            for in_conversation in (False, True):
                client.do(CreateResponse(in_conversation=in_conversation))
                done = await client.wait(ResponseDone)
                assert done.timings.commit_to_first_audio_ms
                counted.append(here.first_audio_ms is not None)
            assert counted == [False, True]

    run(main())


def test_an_id_may_be_used_again_at_the_moment_in_which_its_response_ends() -> None:
    async def main() -> None:
        async with host() as here:
            async with await here.open(WRITTEN) as session:
                client, manager, post = Client(session), session._responses, session._post

                def ends(response: Response) -> None:
                    """It has ended, and before the session knows its client has asked again."""
                    manager._on_end = post
                    client.do(CancelResponse("again"), CreateResponse("again"))
                    post(response)

                manager._on_end = ends
                client.do(CreateText("user", "Good morning."), CreateResponse("again"))
                done = [await client.wait(ResponseDone) for _ in range(2)]
                assert [each.status for each in done] == [ResponseStatus.COMPLETED] * 2
                assert done[0].items[0].item_id != done[1].items[0].item_id
                assert not session.is_answering
            require_nothing_held(here)

    run(main())


def test_settings_change_what_comes_after_them() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(UpdateSettings(WRITTEN), CreateText("user", "Hello."), CreateResponse())
            await client.wait(SettingsUpdated)
            done = await client.wait(ResponseDone)
            assert session.settings == WRITTEN
            offline = Offline(speech=False)
            offline.chat.read("Hello.")
            assert client.text(done.response_id) == offline.answer()[1] != ""
            assert client.rows == offline.rows

    run(main())


def test_four_at_once_answer_as_each_would_alone() -> None:
    settings = replace(BY_HAND, limits=ReplyLimits(rows=9))
    turns = [
        [speech(QUESTION), speech(SENTENCE)[:20_000]],
        [speech(SENTENCE), speech(QUESTION)[:25_000]],
        [speech(QUESTION)[:20_000]],
        [speech(SENTENCE)[5_000:]],
    ]

    async def talk(client: Client, number: int) -> list[bytes]:
        done = [await client.turn(turn) for turn in turns[number]]
        return [client.pcm(each.response_id) for each in done]

    async def main() -> None:
        async with host() as here:
            clients = [Client(await here.open(settings)) for _ in turns]
            heard = await asyncio.gather(*(talk(client, n) for n, client in enumerate(clients)))
            for client, spoken, sounds in zip(clients, turns, heard, strict=True):
                offline = Offline()
                for turn, sound in zip(spoken, sounds, strict=True):
                    offline.chat.hear(turn)
                    assert offline.answer(limits=Limits(9))[0] == sound
                assert client.rows == offline.rows
                await client.session.close()
            require_nothing_held(here)

    run(main())


def test_sound_alone_can_be_listened_to() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            session.do(CreateText("user", "Good morning."))
            session.do(CreateResponse())
            first = await anext(session.audio())
            assert first.dtype == np.int16
            assert len(first) == 5 * 1920 - 3840

    run(main())


def test_committed_turns_name_their_items() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            done = await client.turn(speech(QUESTION))
            committed = client.all(TurnCommitted)[0]
            assert committed.item_id == client.all(ItemAdded)[0].item.item_id
            assert committed.previous_item_id is None
            assert done.items[0].response_id == done.response_id

    run(main())


def test_what_a_session_computed_with_is_freed_without_a_search_for_cycles() -> None:
    def held() -> dict[str, int]:
        kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
        return {kind: kinds[kind] for kind in ("LiveCodes", "SpokenReply", "RowState")}

    async def talk(here: Host) -> None:
        async with await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(CreateText("user", "Good morning."), CreateResponse())
            await client.wait(AudioDelta)
            client.do(CancelResponse())
            client.say(speech(QUESTION))
            await client.wait(ResponseDone)
            client.do(CreateResponse())
            await client.wait(AudioDelta)

    async def until_held(expected: dict[str, int]) -> None:
        """A worker's thread may still compute for a session that was just closed."""
        end_s = time.monotonic() + 20
        while (now := held()) | expected != now:
            assert time.monotonic() < end_s, (now, expected)
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with host() as here:
            gc.collect()
            before = held()
            await talk(here)  # makes what stays: a voice's own RowState
            gc.collect()
            await until_held({kind: before[kind] for kind in ("LiveCodes", "SpokenReply")})
            before = held()
            gc.disable()
            try:
                for _ in range(2):
                    await talk(here)
                await until_held(before)
            finally:
                gc.enable()

    run(main())
