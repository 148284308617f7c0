"""Whole conversations in the protocol's words with a real session of the pocket model."""

import base64
from dataclasses import replace

import numpy as np
import pytest
import soxr
from conftest import run
from realtime_rig import Caller, b64, call
from session_rig import BY_HAND, GREEDY, HANDS_FREE, QUESTION, SENTENCE, Offline, silence, speech

from mosstalk.audio.sound import Samples
from mosstalk.server.realtime.validation import A_LAW, MU_LAW, encode_g711
from mosstalk.session.commands import SessionSettings

LONG = replace(BY_HAND, input_rate=24_000, script="speech:200")
"""Replies of 16 s, which last longer than a test cares to listen."""
SPOKEN_TURN = [
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


def at_24_khz(samples: Samples) -> Samples:
    """Samples of 16 kHz as clients send them."""
    return soxr.resample(samples, 16_000, 24_000).astype(np.float32)


def question() -> Samples:
    """A question that someone asks, at 24 kHz."""
    return at_24_khz(speech(QUESTION))


def message(text: str) -> dict[str, object]:
    """A typed item."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def in_order(client: Caller, kinds: list[str]) -> None:
    """Check that events of these kinds came in this order."""
    rest = iter(client.kinds)
    for kind in kinds:
        assert kind in rest, (kind, client.kinds)


def test_spoken_turns_by_hand_are_answered_as_the_plain_path_answers() -> None:
    async def main() -> None:
        async with call() as client:
            await client.until("session.created")
            client.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
            await client.until("session.updated")
            offline, history = Offline(), list[str | None]()
            for samples in (question(), question()[:48_000]):
                client.say(samples)
                client.send("input_audio_buffer.commit")
                client.send("response.create", response={"metadata": {"client_event_id": "q"}})
                done = (await client.until("response.done"))["response"]
                heard = soxr.resample(_as_sent(samples), 24_000, 16_000, quality="HQ")
                offline.chat.hear(heard.astype(np.float32))
                sound, _ = offline.answer()
                assert client.sound(done["id"]) == sound
                assert done["status"] == "completed"
                assert done["metadata"] == {"client_event_id": "q"}
                assert done["mosstalk"]["timings"]["commit_to_first_audio_ms"] > 0
                history += [e["item"]["id"] for e in client.all("conversation.item.done")[-2:]]
            in_order(client, ["session.created", "session.updated", *SPOKEN_TURN, *SPOKEN_TURN])
            added = client.all("conversation.item.added")
            assert [e["item"]["id"] for e in added] == history
            assert [e["previous_item_id"] for e in added] == [None, *history[:-1]]

    run(main())


def _as_sent(samples: Samples) -> Samples:
    pcm = (samples * 32767).astype("<i2").astype(np.float32)
    return pcm / np.float32(32768)


def test_typed_turns_are_answered_in_text() -> None:
    async def main() -> None:
        async with call() as client:
            client.send("session.update", session={"output_modalities": ["text"]})
            client.send("conversation.item.create", item={"id": "mine", **message("Hello.")})
            client.send("conversation.item.retrieve", item_id="mine")
            client.send("response.create")
            done = (await client.until("response.done"))["response"]
            written = "".join(e["delta"] for e in client.all("response.output_text.delta"))
            (content,) = done["output"][0]["content"]
            assert content == {"type": "output_text", "text": written}
            assert written
            offline = Offline(speech=False)
            offline.chat.read("Hello.")
            assert offline.answer()[1] == written
            (got,) = client.all("conversation.item.retrieved")
            assert got["item"]["id"] == "mine"
            assert not client.all("response.output_audio.delta")

    run(main())


def test_a_reply_that_is_interrupted_is_cut_to_what_was_heard_and_the_talk_goes_on() -> None:
    async def main() -> None:
        async with call(defaults=LONG) as client:
            client.say(question())
            client.send("input_audio_buffer.commit")
            client.send("response.create")
            delta = await client.until("response.output_audio.delta")
            item_id = delta["item_id"]
            client.send("response.create", event_id="again")
            client.send("response.cancel")
            client.send("conversation.item.truncate", item_id=item_id, content_index=0,
                        audio_end_ms=99_000)  # fmt: skip
            cut = await client.until("conversation.item.truncated")
            done = client.all("response.done")[0]["response"]
            assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
            sent_ms = len(client.sound(done["id"])) // 48
            assert sent_ms - 80 <= cut["audio_end_ms"] <= sent_ms, "past the end is clamped"
            (error,) = client.all("error")
            assert error["error"]["code"] == "conversation_already_has_active_response"
            assert error["error"]["event_id"] == "again"
            client.send("conversation.item.truncate", item_id=item_id, content_index=0,
                        audio_end_ms=100)  # fmt: skip
            cut = await client.until("conversation.item.truncated")
            assert cut["audio_end_ms"] == 100
            assert cut["mosstalk"]["codes"] == 2
            client.send("response.cancel", event_id="late")
            error = await client.until("error")
            assert error["error"]["code"] == "response_cancel_not_active"
            client.send("conversation.item.create", item=message("And now?"))
            client.send("response.create", response={"max_output_tokens": 30})
            done = (await client.until("response.done"))["response"]
            assert done["status"] == "incomplete"
            assert done["status_details"]["reason"] == "max_output_tokens"
            client.send("conversation.item.delete", item_id=item_id)
            await client.until("conversation.item.deleted", item_id=item_id)

    run(main())


def test_hands_free_speech_is_answered_and_ends_the_answer() -> None:
    own = replace(HANDS_FREE, input_rate=24_000, script="speech:200")

    async def main() -> None:
        async with call(hands_free=True, defaults=own) as client:
            said = np.concatenate([silence(0.5), speech(QUESTION), silence(0.8)])
            client.say(at_24_khz(said))
            delta = await client.until("response.output_audio.delta")
            client.say(at_24_khz(speech(SENTENCE)))
            done = (await client.until("response.done"))["response"]
            assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            client.send("conversation.item.truncate", item_id=delta["item_id"], content_index=0,
                        audio_end_ms=240)  # fmt: skip
            await client.until("conversation.item.truncated")
            vad = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
            in_order(client, [*vad, *SPOKEN_TURN[:8], vad[0], *SPOKEN_TURN[8:]])
            started = client.all("input_audio_buffer.speech_started")[0]
            committed = client.all("input_audio_buffer.committed")[0]
            assert started["item_id"] == committed["item_id"]
            stopped = client.all("input_audio_buffer.speech_stopped")[0]
            assert stopped["mosstalk"]["vad_wait_ms"] >= 500
            assert started["audio_start_ms"] < stopped["mosstalk"]["speech_end_ms"]

    run(main())


def test_a_response_apart_leaves_the_conversation_as_it_was() -> None:
    async def main() -> None:
        async with call() as client:
            assert client.session
            client.send("conversation.item.create", item={"id": "a", **message("Hello.")})
            await client.until("conversation.item.done")
            rows = client.session.conversation_rows()
            response = {
                "conversation": "none",
                "input": [{"type": "item_reference", "id": "a"}, message("Sum it up.")],
                "output_modalities": ["text"],
                "metadata": {"for": "me"},
            }
            client.send("response.create", response=response)
            done = (await client.until("response.done"))["response"]
            assert done["conversation_id"] is None
            assert done["metadata"] == {"for": "me"}
            assert client.session.conversation_rows() == rows
            assert len(client.all("conversation.item.added")) == 1
            assert not client.all("conversation.item.deleted")
            assert not client.all("error")
            bad = {"conversation": "none", "input": [message("x" * 32_000)]}
            client.send("response.create", event_id="bad", response=bad)
            failed = (await client.until("response.done"))["response"]
            assert failed["status"] == "failed"
            code = failed["status_details"]["error"]["code"]
            assert code == "context_length_exceeded"

    run(main())


def test_the_format_may_change_from_turn_to_turn_and_within_one() -> None:
    async def main() -> None:
        async with call(defaults=replace(BY_HAND, input_rate=24_000)) as client:
            lengths_ms = list[int]()
            formats: list[tuple[str, ...]] = [
                ("audio/pcm",), ("audio/pcmu",), ("audio/pcma",), ("audio/pcm",),
                ("audio/pcmu", "audio/pcm", "audio/pcma"),
            ]  # fmt: skip
            for turn in formats:
                for kind in turn:
                    form = {"type": kind, "rate": 24_000} if kind == "audio/pcm" else {"type": kind}
                    client.send("session.update", session={"audio": {"input": {"format": form}}})
                    sound = bytes(48_000) if kind == "audio/pcm" else b"\xd5" * 8000
                    audio = base64.b64encode(sound).decode()
                    client.send("input_audio_buffer.append", audio=audio)
                client.send("input_audio_buffer.commit")
                clock = client.session.clock if client.session else 0
                await client.until("conversation.item.done")
                assert client.session
                lengths_ms.append((client.session.clock - clock) // 16)
            assert lengths_ms == [1000, 1000, 1000, 1000, 3000]
            assert not client.all("error")

    run(main())


@pytest.mark.parametrize(
    # Slow: the other law; ``test_realtime_audio`` has the samples of both.
    "kind",
    [MU_LAW, pytest.param(A_LAW, marks=pytest.mark.slow)],
)
def test_a_telephone_is_heard_and_answered(kind: str) -> None:
    async def main() -> None:
        async with call(defaults=replace(BY_HAND, input_rate=24_000)) as client:
            law = {"type": kind}
            session = {"audio": {"input": {"format": law}, "output": {"format": law}}}
            client.send("session.update", session=session)
            pcm = (soxr.resample(speech(QUESTION), 16_000, 8000) * 32767).astype("<i2").tobytes()
            sound = base64.b64encode(encode_g711(pcm, kind)).decode()
            client.send("input_audio_buffer.append", audio=sound)
            client.send("input_audio_buffer.commit")
            client.send("response.create")
            done = (await client.until("response.done"))["response"]
            heard = client.sound(done["id"])
            assert len(heard) == round(done["mosstalk"]["timings"]["audio_s"] * 8000)
            assert len(set(heard)) > 50, "it is not silence"

    run(main())


def test_what_goes_wrong_in_a_session_is_told_and_the_session_goes_on() -> None:
    async def main() -> None:
        async with call(defaults=replace(BY_HAND, input_rate=24_000)) as client:
            warm = {"mosstalk": {"sampling": {"top_p": 0}}}
            wrong: list[tuple[str, dict[str, object], str | None]] = [
                ("input_audio_buffer.commit", {}, "input_audio_buffer_commit_empty"),
                ("response.cancel", {}, "response_cancel_not_active"),
                (
                    "conversation.item.delete",
                    {"item_id": "x"},
                    "item_delete_invalid_item_id",
                ),
                (
                    "conversation.item.truncate",
                    {"item_id": "x", "content_index": 0, "audio_end_ms": 0},
                    "item_truncate_invalid_item_id",
                ),
                (
                    "conversation.item.create",
                    {"item": message("Hi."), "previous_item_id": "x"},
                    "item_create_invalid_previous_item_id",
                ),
                ("input_audio_buffer.append", {"audio": b64(np.zeros(240, np.float32))}, None),
                ("session.update", {"session": warm}, "invalid_value"),
            ]
            for number, (kind, more, code) in enumerate(wrong):
                client.send(kind, event_id=f"e{number}", **more)
                if code:
                    error = (await client.until("error"))["error"]
                    assert (error["code"], error["event_id"]) == (code, f"e{number}")
            client.send("conversation.item.create", item={"id": "a", **message("Hello.")})
            client.send("conversation.item.create", item={"id": "a", **message("Hello.")})
            await client.until("conversation.item.done")
            client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            client.send("response.create", response={"output_modalities": ["text"]})
            done = (await client.until("response.done"))["response"]
            assert done["status"] in ("completed", "incomplete")

    run(main())


def test_the_session_opens_with_what_the_dialogue_says() -> None:
    async def main() -> None:
        own = SessionSettings(turn_detection=None, sampling=GREEDY)
        async with call(defaults=own) as client:
            assert client.session
            assert client.session.settings == own == client.protocol.settings
            created = await client.until("session.created")
            assert created["session"]["id"] == client.session.session_id

    run(main())
