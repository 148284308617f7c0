"""Checkpoints that write a spoken reply before they speak it: rows, cuts, sessions, the wire."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import run
from hypothesis import given
from hypothesis import strategies as st
from realtime_rig import Caller, call
from session_rig import BY_HAND, Client, host, pocket, spoken

from mosstalk import Pipeline
from mosstalk.constants import CODE_MS
from mosstalk.conversation import (
    Conversation,
    Mode,
    Reply,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    segment_rows,
)
from mosstalk.errors import ConfigError
from mosstalk.offline.defaults import FILE, read_defaults
from mosstalk.reply_options import Script
from mosstalk.session.commands import (
    CreateResponse,
    CreateText,
    ReplyLimits,
    ReplyMode,
    Truncate,
)
from mosstalk.session.events import (
    AudioDelta,
    Item,
    ItemTruncated,
    Reason,
    ResponseDone,
    ResponseStatus,
    TextDelta,
)

IDS = SpecialIds(256, 257, 258, 259, 260, 1024, 512, stop=frozenset((256, 258)))
CODES = st.lists(st.integers(0, IDS.eosp - 1), min_size=1, max_size=12).map(tuple)
WORDS = st.lists(st.integers(0, 255), max_size=12).map(tuple)
TEXT, SPEECH = 6, 20
SCRIPTED = replace(BY_HAND, script=f"text:{TEXT},speech:{SPEECH}")


def encode(text: str) -> list[int]:
    return list(text.encode())


def written_and_spoken(words: tuple[int, ...], codes: tuple[int, ...]) -> Reply:
    """The rows that a model draws which writes first."""
    rows = [*segment_rows(TextSegment(words), IDS), *segment_rows(SpeechSegment(codes), IDS)]
    modes = [Mode.TEXT] * (len(words) + 1) + [Mode.AUDIO] * (len(codes) + 1)
    return Reply([*rows, (IDS.im_end, IDS.audio_pad)], [*modes, Mode.TEXT])


@given(WORDS, CODES, st.data())
def test_a_cut_keeps_as_much_of_the_text_as_of_the_speech(
    words: tuple[int, ...], codes: tuple[int, ...], data: st.DataObject
) -> None:
    heard = data.draw(st.integers(0, len(codes)))
    conversation, fresh = (Conversation(IDS, encode, writes_first=True) for _ in range(2))
    conversation.add_text("user", "Hello.")
    conversation.open_reply(speech=True)
    opened = list(conversation.rows)
    assert opened[-1] != (IDS.sosp, IDS.audio_pad), "the model opens speech itself"
    reply = written_and_spoken(words, codes)
    kept = conversation.close_reply(reply, heard)
    fresh.add_text("user", "Hello.")
    share = -(-len(words) * heard // len(codes))
    fresh.add_turn(Turn("assistant", (TextSegment(words[:share]), SpeechSegment(codes[:heard]))))
    assert conversation.rows == fresh.rows
    assert conversation.rows[:kept] == [*opened, *reply.rows][:kept]
    conversation.cut_last_reply(0)
    assert IDS.sosp in [text for text, _ in conversation.rows[len(opened) :][:1]]


def test_a_written_reply_and_other_checkpoints_are_as_before() -> None:
    usual, first = Conversation(IDS, encode), Conversation(IDS, encode, writes_first=True)
    for conversation in (usual, first):
        conversation.open_reply(speech=False)
    assert usual.rows == first.rows
    usual.withdraw_reply()
    usual.open_reply(speech=True)
    assert usual.rows[-1] == (IDS.sosp, IDS.audio_pad)
    reply = written_and_spoken((1, 2, 3, 4), (5, 6))
    usual.close_reply(reply, 1)
    assert [text for text, _ in usual.rows if text in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_the_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"mosstalk": {"chat": {"writes_first": true}}}')
    assert read_defaults(tmp_path).writes_first
    assert not read_defaults(tmp_path / "none").writes_first
    (tmp_path / FILE).write_text('{"mosstalk": {"chat": {"writes_first": "yes"}}}')
    with pytest.raises(ConfigError, match="writes_first"):
        read_defaults(tmp_path)
    (tmp_path / FILE).write_text('{"mosstalk": {"speak": {"writes_first": true}}}')
    with pytest.raises(ConfigError, match="unknown key"):
        read_defaults(tmp_path)


@lru_cache
def writing_first() -> Pipeline:
    """The pocket model, asked to write first."""
    return replace(pocket(), defaults=replace(pocket().defaults, writes_first=True))


def item_of(done: ResponseDone) -> Item:
    (item,) = done.items
    return item


def test_a_session_writes_then_speaks_and_cuts_both() -> None:
    async def main() -> None:
        async with host(pipeline=writing_first()) as here, await here.open(SCRIPTED) as session:
            client = Client(session)
            client.do(CreateText("user", "Good morning."), CreateResponse("one"))
            done = await client.wait(ResponseDone)
            item, kinds = item_of(done), [type(e) for e in client.events]
            assert item.text_is_spoken
            assert item.text == client.text("one")
            assert all(delta.spoken for delta in client.all(TextDelta))
            last_text = max(at for at, kind in enumerate(kinds) if kind is TextDelta)
            assert last_text < kinds.index(AudioDelta)
            assert done.usage.output_text == TEXT + 2, "with what opens speech and ends the reply"
            assert done.usage.output_audio == SPEECH + 1
            times = done.timings
            assert times.commit_to_first_text_ms is not None
            assert times.commit_to_first_audio_ms is not None
            assert times.commit_to_first_text_ms < times.commit_to_first_audio_ms
            assert item.audio_ms == SPEECH * CODE_MS
            pad = writing_first().ids.modality_pad
            codes = tuple(audio for text, audio in client.rows if text == pad)
            assert client.pcm("one") == spoken(codes[:SPEECH], 0)
            before = client.rows
            client.do(Truncate(item.item_id, SPEECH * CODE_MS / 2))
            await client.wait(ItemTruncated)
            after = client.rows
            assert len(after) == len(before) - TEXT // 2 - SPEECH // 2
            # What follows is the answer to these rows, read afresh.
            chat = writing_first().chat()
            chat.conversation.rows = list(after)
            chat.read("Go on.")
            client.do(CreateText("user", "Go on."), CreateResponse("two"))
            again = await client.wait(ResponseDone)
            assert again.usage.cached > 0
            options = replace(writing_first().defaults.of("chat").options(), temperature=0)
            answer = chat.answer(options=options, script=Script.parse(SCRIPTED.script or ""))
            list(answer)
            assert answer.text == item_of(again).text
            assert client.pcm("two") == spoken(tuple(answer.codes), 0)

    run(main())


def test_speech_is_as_long_as_it_may_be_however_little_was_written() -> None:
    limits = ReplyLimits(longest_s=SPEECH // 2 * CODE_MS / 1000)

    async def main() -> None:
        settings = replace(SCRIPTED, limits=limits)
        async with host(pipeline=writing_first()) as here, await here.open(settings) as session:
            client = Client(session)
            for _ in range(2):
                client.do(CreateText("user", "Good morning."), CreateResponse())
                done = await client.wait(ResponseDone)
                assert (done.status, done.reason) == (ResponseStatus.INCOMPLETE, Reason.MAX_LENGTH)
                assert item_of(done).audio_ms == SPEECH // 2 * CODE_MS
                assert item_of(done).text

    run(main())


def test_a_written_reply_of_such_a_checkpoint_is_no_transcript() -> None:
    async def main() -> None:
        async with host(pipeline=writing_first()) as here:
            settings = replace(SCRIPTED, reply=ReplyMode.TEXT, script="text:4")
            async with await here.open(settings) as session:
                client = Client(session)
                client.do(CreateText("user", "Good morning."), CreateResponse())
                done = await client.wait(ResponseDone)
                assert not item_of(done).text_is_spoken
                assert not any(delta.spoken for delta in client.all(TextDelta))

    run(main())


def test_offline_it_is_the_same_reply() -> None:
    chat = writing_first().chat()
    chat.read("Good morning.")
    answer = chat.answer(script=Script.parse(f"text:{TEXT},speech:{SPEECH}"))
    samples = sum(len(hop) for hop in answer)
    assert samples > 0
    assert len(answer.codes) == SPEECH
    assert answer.text
    assert answer.reply.modes[:TEXT] == [Mode.TEXT] * TEXT
    reading = writing_first().chat()
    reading.read("Good morning.")
    aloud = reading.answer(task="speak", script=Script.parse("speech:5"))
    list(aloud)
    assert aloud.reply.modes[0] is Mode.AUDIO, "reading aloud needs no writing"


def test_clients_get_the_text_as_the_transcript_of_the_sound() -> None:
    async def main() -> None:
        async with call(defaults=SCRIPTED, pipeline=writing_first()) as client:
            content = [{"type": "input_text", "text": "Good morning."}]
            item = {"type": "message", "role": "user", "content": content}
            client.send("conversation.item.create", item=item)
            client.send("response.create")
            done = (await client.until("response.done"))["response"]
            kinds = client.kinds
            delta, sound = "response.output_audio_transcript.delta", "response.output_audio.delta"
            last = max(place for place, kind in enumerate(kinds) if kind == delta)
            assert last < kinds.index(sound), "all of it is written before any of it is heard"
            said = "".join(event["delta"] for event in client.all(delta))
            assert said
            (ended,) = client.all("response.output_audio_transcript.done")
            assert ended["transcript"] == said
            (part,) = done["output"][0]["content"]
            assert part == {"type": "output_audio", "transcript": said}
            item_id = done["output"][0]["id"]
            client.send("conversation.item.retrieve", item_id=item_id)
            found = client.all("conversation.item.retrieved")[-1]["item"]
            assert found["content"] == done["output"][0]["content"]

    run(main())


def asked(client: Caller) -> None:
    """A typed turn, and a response to it."""
    content = [{"type": "input_text", "text": "Good morning."}]
    item = {"type": "message", "role": "user", "content": content}
    client.send("conversation.item.create", item=item)
    client.send("response.create")


def retrieved(client: Caller, item_id: str) -> str | None:
    """The transcript of an item as it stands."""
    (got,) = client.send("conversation.item.retrieve", item_id=item_id)
    said: str | None = got["item"]["content"][0]["transcript"]
    return said


def test_a_transcript_is_cut_with_its_sound() -> None:
    async def main() -> None:
        async with call(defaults=SCRIPTED, pipeline=writing_first()) as client:
            asked(client)
            done = (await client.until("response.done"))["response"]
            item_id, whole = done["output"][0]["id"], done["output"][0]["content"][0]["transcript"]
            texts = [whole]
            for heard_ms in (SPEECH * CODE_MS * 2 // 3, SPEECH * CODE_MS // 3, 0):
                client.send(
                    "conversation.item.truncate", item_id=item_id, content_index=0,
                    audio_end_ms=heard_ms,
                )  # fmt: skip
                await client.until("conversation.item.truncated")
                texts.append(retrieved(client, item_id) or "")
            assert texts[-1] == ""
            for longer, shorter in pairwise(texts):
                assert longer.startswith(shorter)
                assert len(longer) > len(shorter)

    run(main())


def test_an_interrupted_reply_tells_the_words_of_the_sound_that_was_sent() -> None:
    async def main() -> None:
        settings = replace(SCRIPTED, script="text:60,speech:60")
        async with call(defaults=settings, pipeline=writing_first()) as client:
            asked(client)
            await client.until("response.output_audio.delta")
            client.send("response.cancel")
            done = (await client.until("response.done"))["response"]
            written = "".join(
                event["delta"] for event in client.all("response.output_audio_transcript.delta")
            )
            said = done["output"][0]["content"][0]["transcript"]
            assert written.startswith(said)
            assert 0 < len(said) < len(written)
            (ended,) = client.all("response.output_audio_transcript.done")
            (item,) = client.all("response.output_item.done")
            assert ended["transcript"] == item["item"]["content"][0]["transcript"] == said
            assert retrieved(client, done["output"][0]["id"]) == said

    run(main())
