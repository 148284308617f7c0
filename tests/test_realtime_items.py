"""Items: whose ids they keep, where they stand, and which the model reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from realtime_rig import Caller, Wire, b64, caller, obeyed, tone

from mosstalk.server.limits import Limits
from mosstalk.server.realtime.items import ItemList
from mosstalk.server.realtime.protocol import Transcript
from mosstalk.server.realtime.server_events import Message
from mosstalk.server.realtime.session_config import TranscriberInfo
from mosstalk.session.commands import (
    ROOT,
    CreateAudio,
    CreateMessage,
    CreateResponse,
    CreateText,
    DeleteItem,
    Truncate,
)
from mosstalk.session.events import (
    ContextDropped,
    ErrorCode,
    ErrorRaised,
    Item,
    ItemAdded,
    ItemDone,
    TurnCommitted,
)

OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"}


def message(text: str, item_id: str | None = None, role: str = "user") -> Wire:
    """A typed item."""
    kind = "output_text" if role == "assistant" else "input_text"
    item: Wire = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    return item | ({"id": item_id} if item_id else {})


def obey(client: Caller) -> list[Wire]:
    """Have the session do the latest command."""
    return client.hear(*obeyed(client.commands[-1]))


def create(client: Caller, item: Wire, after: str | None = None) -> list[Wire]:
    """Create an item, and have the session do it if it hears of it."""
    before = len(client.commands)
    at_once = client.send("conversation.item.create", item=item, previous_item_id=after)
    return at_once or (obey(client) if len(client.commands) > before else [])


def order(client: Caller) -> list[str]:
    """Ids in the order in which a client has put them by ``previous_item_id``."""
    ids: list[str] = []
    for event in client.all("conversation.item.added"):
        before = event["previous_item_id"]
        ids.insert(0 if before is None else ids.index(before) + 1, event["item"]["id"])
    return ids


@pytest.mark.parametrize(
    ("item", "role", "text"),
    [
        (message("Hello"), "user", "Hello"),
        (message("Be brief.", role="system"), "system", "Be brief."),
        (message("Hi there.", role="assistant"), "assistant", "Hi there."),
        (message("Hi.", role="developer"), "system", "Hi."),
        (
            {"role": "assistant", "content": [{"type": "output_audio", "transcript": "Said."}]},
            "assistant",
            "Said.",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "transcript": "Asked."}]},
            "user",
            "Asked.",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "Old."}]}, "user", "Old."),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "One"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                    {"type": "input_text", "text": "two"},
                ],
            },
            "user",
            "One\ntwo",
        ),
    ],
)
def test_typed_items_of_every_kind_reach_the_model(item: Wire, role: str, text: str) -> None:
    client = caller()
    added, done = create(client, item | {"id": "mine"})
    command = client.commands[-1]
    assert isinstance(command, CreateText)
    assert (command.role, command.text, command.item_id) == (role, text, "mine")
    assert added["type"] == "conversation.item.added"
    assert done["type"] == "conversation.item.done"
    assert added["item"] == done["item"]
    assert added["item"]["id"] == "mine"
    assert added["item"]["status"] == "completed"
    assert "image_url" not in str(added)


def test_a_recording_reaches_the_model_and_does_not_come_back() -> None:
    client = caller()
    sound = {"type": "input_audio", "audio": b64(tone(0.5)), "transcript": "la"}
    added, _ = create(client, {"type": "message", "role": "user", "content": [sound]})
    command = client.commands[-1]
    assert isinstance(command, CreateAudio)
    assert (len(command.pcm), command.rate) == (24_000, 24_000)
    assert added["item"]["content"] == [{"type": "input_audio", "transcript": "la"}]
    assert added["item"]["id"] == command.item_id


def test_text_and_sound_of_one_item_reach_the_model_in_their_order() -> None:
    client = caller()
    sound = {"type": "input_audio", "audio": b64(tone(0.5)), "transcript": "not for the model"}
    said = {"type": "input_audio", "transcript": "Said before."}
    texts = [{"type": "input_text", "text": text} for text in ("One", "two", " ", "three")]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    content = [*texts[:2], sound, sound, texts[2], image, sound, said, texts[3]]
    added, done = create(client, {"type": "message", "role": "user", "content": content})
    (command,) = client.commands
    assert isinstance(command, CreateMessage)
    assert command.item_id == added["item"]["id"]
    heard = [part if isinstance(part, str) else len(part.pcm) for part in command.message.parts]
    assert heard == ["One\ntwo", 48_000, 24_000, "Said before.\nthree"]
    assert all(part.rate == 24_000 for part in command.message.parts if not isinstance(part, str))
    kinds = [part["type"] for part in content]
    assert [part["type"] for part in done["item"]["content"]] == kinds
    assert client.all("error") == []


def test_pictures_are_shown_as_what_they_are() -> None:
    client = caller()
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    text = {"type": "input_text", "text": "Look:"}
    added, *_ = create(client, {"type": "message", "role": "user", "content": [text, image]})
    kinds = [part["type"] for part in added["item"]["content"]]
    assert kinds == ["input_text", "input_image"]


def test_an_answer_to_what_was_never_asked_is_ignored() -> None:
    client = caller()
    item = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    assert client.send("conversation.item.create", item=item) == []
    assert client.commands == []
    assert client.notes == ["an mcp_approval_response is ignored"]
    client.send("response.create", response={"input": [item, message("Go on.")]})
    (command,) = client.commands
    assert isinstance(command, CreateResponse)
    assert len(command.input or ()) == 1
    assert client.all("error") == []


@pytest.mark.parametrize(
    "item",
    [
        OUTPUT,
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "message", "role": "user", "content": []},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "  "}]},
        {"type": "message", "role": "user", "content": [{"type": "input_audio"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image"}]},
    ],
)
def test_what_the_model_cannot_read_is_kept_and_said_to_be_unread(item: Wire) -> None:
    client = caller()
    added, done = create(client, item | {"id": "mine"})
    assert client.commands == []
    assert added["item"]["mosstalk"]["warnings"]
    assert len(client.notes) == 1
    assert "weather" not in client.notes[0]
    client.send("conversation.item.truncate", item_id="mine", content_index=0, audio_end_ms=0)
    (got,) = client.send("conversation.item.retrieve", item_id="mine")
    assert got["item"] == done["item"]
    (gone,) = client.send("conversation.item.delete", item_id="mine")
    assert (gone["type"], gone["item_id"]) == ("conversation.item.deleted", "mine")
    (error,) = client.send("conversation.item.retrieve", item_id="mine")
    assert error["error"]["code"] == "item_retrieve_invalid_item_id"


def test_items_stand_where_the_client_put_them() -> None:
    client = caller()
    create(client, message("a", "a"))
    create(client, OUTPUT | {"id": "f"}, "a")
    create(client, message("c", "c"))
    create(client, message("b", "b"), "a")
    create(client, message("first", "first"), ROOT)
    create(client, message("last", "last"), "f")
    assert order(client) == ["first", "a", "b", "f", "last", "c"]
    where = {c.item_id: c.previous_item_id for c in client.commands if isinstance(c, CreateText)}
    # The session does not know "f": what comes after it comes after "b".
    assert where == {"a": None, "c": None, "b": "a", "first": ROOT, "last": "b"}
    (error,) = create(client, OUTPUT, "nobody")
    assert error["error"]["code"] == "item_create_invalid_previous_item_id"


def test_a_turn_follows_all_that_stands_there() -> None:
    client = caller()
    create(client, OUTPUT | {"id": "f"})
    item = Item("spoken", "user", audio_ms=500)
    committed, added, done = client.hear(
        TurnCommitted("spoken", None, clock=0),
        ItemAdded(item, None, clock=0),
        ItemDone(item, None, clock=0),
    )
    assert [e["previous_item_id"] for e in (committed, added, done)] == ["f", "f", "f"]
    assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]


def test_what_is_answered_here_waits_for_what_the_session_is_doing() -> None:
    client = caller()
    client.send("conversation.item.create", item=message("a", "a"))
    assert client.send("conversation.item.retrieve", item_id="a", event_id="r") == []
    assert client.send("conversation.item.create", item=OUTPUT | {"id": "f"}) == []
    client.send("conversation.item.create", item=message("b", "b"), previous_item_id="f")
    client.send("response.create")
    assert len(client.commands) == 1, "nothing overtakes what waits"
    kinds = [event["type"].removeprefix("conversation.item.") for event in obey(client)]
    assert kinds == ["added", "done", "retrieved", "added", "done"]
    _, second, third = client.commands
    assert isinstance(second, CreateText)
    assert second.previous_item_id == "a"
    assert isinstance(third, CreateResponse)
    client.hear(*obeyed(second))
    assert order(client) == ["a", "f", "b"]


def test_an_id_is_taken_once() -> None:
    client = caller()
    client.send("conversation.item.create", item=message("a", "a"))
    (error,) = client.send("conversation.item.create", item=message("a", "a"), event_id="e")
    assert error["error"]["code"] == "item_create_duplicate_item_id"
    assert error["error"]["event_id"] == "e"
    assert len(client.commands) == 1
    obey(client)
    (error,) = client.send("conversation.item.create", item=OUTPUT | {"id": "a"})
    assert error["error"]["code"] == "item_create_duplicate_item_id"


def test_items_that_made_room_are_still_there_for_the_client() -> None:
    client = caller()
    reply = Item("reply", "assistant", audio_ms=900)
    create(client, message("a", "a"))
    client.hear(ItemAdded(reply, "a", clock=0), ItemDone(reply, "a", clock=0))
    client.hear(ContextDropped(("a", "reply"), 12, clock=0))
    before = len(client.commands)
    (cut,) = client.send(
        "conversation.item.truncate", item_id="reply", content_index=0, audio_end_ms=400
    )
    assert (cut["type"], cut["audio_end_ms"]) == ("conversation.item.truncated", 400)
    (got,) = client.send("conversation.item.retrieve", item_id="a")
    assert got["item"]["content"][0]["text"] == "a"
    (gone,) = client.send("conversation.item.delete", item_id="a")
    assert gone["type"] == "conversation.item.deleted"
    assert len(client.commands) == before, "the session has none of them"
    create(client, message("b", "b"), "reply")
    command = client.commands[-1]
    assert isinstance(command, CreateText)
    assert command.previous_item_id == ROOT


def test_what_only_the_client_sees_is_bounded() -> None:
    client = caller(limits=Limits(kept_chars=5000))
    for number in range(100):
        create(client, OUTPUT | {"id": f"f{number}", "output": "x" * 100})
    there = [
        client.send("conversation.item.retrieve", item_id=f"f{number}")[0]["type"]
        for number in range(100)
    ]
    kept = there.count("conversation.item.retrieved")
    assert 5 < kept < 25
    assert set(there[-kept:]) == {"conversation.item.retrieved"}, "the latest are kept"


IDS = st.sampled_from([f"item-{n}" for n in range(8)])


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), IDS, IDS | st.just(ROOT))))
def test_the_list_of_items_is_as_a_plain_list_has_it(steps: list[tuple[str, str, str]]) -> None:
    listed, plain = ItemList(10**6), list[tuple[str, bool]]()
    for step, item_id, after in steps:
        ids = [each for each, _ in plain]
        if step == "add" and item_id not in ids:
            place = 0 if after == ROOT else ids.index(after) + 1 if after in ids else len(ids)
            plain.insert(place, (item_id, item_id < after))
            listed.add(Message(id=item_id, role="user"), after, read=item_id < after)
        elif step == "remove":
            plain = [each for each in plain if each[0] != item_id]
            listed.remove(item_id)
        elif step == "forget":
            plain = [(each, read and each != item_id) for each, read in plain]
            listed.forget(item_id)
    ids = [each for each, _ in plain]
    assert [(each.item.id, each.read) for each in listed] == plain
    assert listed.last_id == (ids[-1] if ids else None)
    for place, item_id in enumerate(ids):
        assert item_id in listed
        assert listed.before(item_id) == (ids[place - 1] if place else None)
        read = [each for each, read in plain[: place + 1] if read]
        assert listed.read_before(item_id) == (read[-1] if read else ROOT)


def test_deleting_and_cutting_go_to_the_session() -> None:
    client = caller()
    create(client, message("a", "a"))
    assert client.send("conversation.item.delete", item_id="a") == []
    (gone,) = obey(client)
    assert gone["type"] == "conversation.item.deleted"
    client.send("conversation.item.delete", item_id="nobody")
    assert isinstance(client.commands[-1], DeleteItem)
    client.send("conversation.item.truncate", item_id="x", content_index=0, audio_end_ms=-5)
    command = client.commands[-1]
    assert isinstance(command, Truncate)
    assert command.heard_ms == 0


def test_an_item_is_replaced_by_deleting_it_and_making_it_anew() -> None:
    client = caller()
    for name in ("a", "b"):
        create(client, message(name, name))
    client.send("conversation.item.delete", item_id="a")
    client.send("conversation.item.create", item=message("A", "a"), previous_item_id="root")
    client.send("response.create")
    *_, deletion = client.commands
    assert isinstance(deletion, DeleteItem), "what follows waits until the id is free"
    (gone,) = client.hear(*obeyed(deletion))
    assert gone["type"] == "conversation.item.deleted"
    creation, answer = client.commands[-2:]
    assert isinstance(creation, CreateText)
    assert (creation.item_id, creation.text, creation.previous_item_id) == ("a", "A", ROOT)
    assert isinstance(answer, CreateResponse)
    added, _ = client.hear(*obeyed(creation))
    assert added["previous_item_id"] is None


def test_an_item_that_cannot_be_deleted_keeps_nobody_waiting() -> None:
    client = caller()
    client.send("conversation.item.delete", item_id="nobody", event_id="d")
    client.send("conversation.item.create", item=message("a", "a"))
    refused = client.commands[-1].command_id
    (error,) = client.hear(
        ErrorRaised(ErrorCode.UNKNOWN_ITEM, "no", "DeleteItem", command_id=refused, clock=0)
    )
    assert error["error"]["code"] == "item_delete_invalid_item_id"
    assert [event["type"] for event in obey(client)] == [
        "conversation.item.added", "conversation.item.done",
    ]  # fmt: skip


def transcript_of(client: Caller, item_id: str) -> Any:
    """What an item says of its sound."""
    (got,) = client.send("conversation.item.retrieve", item_id=item_id)
    return got["item"]["content"][0]["transcript"]


def test_transcripts_are_told_where_someone_has_made_them_and_nowhere_else() -> None:
    client = caller(transcriber=TranscriberInfo("whisper-tiny", "en"))
    item = Item("spoken", "user", audio_ms=500)
    client.hear(ItemAdded(item, None, clock=0), ItemDone(item, None, clock=0))
    assert transcript_of(client, "spoken") is None
    step = client.protocol.from_transcript(Transcript("spoken", "Good morning.", 0.5))
    (event,) = client.take(step)
    assert event["type"] == "conversation.item.input_audio_transcription.completed"
    assert event["usage"] == {"type": "duration", "seconds": 0.5}
    assert transcript_of(client, "spoken") == "Good morning."
    failed = Transcript("spoken", failed="no speech in it")
    (event,) = client.take(client.protocol.from_transcript(failed))
    assert event["type"] == "conversation.item.input_audio_transcription.failed"
    assert not client.take(client.protocol.from_transcript(Transcript("nobody", "?")))
    session = {"audio": {"input": {"transcription": {"model": "whisper-1"}}}}
    client.send("session.update", session=session)
    (event,) = obey(client)
    assert event["session"]["mosstalk"]["warnings"] == []
