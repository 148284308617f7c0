"""``POST /v1/chat/completions``: the unmodified `openai` client and a running server."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import soundfile
from conftest import run
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from server_rig import QUICK, RATE, Server, Talker, ask, question, serving, typed

from mosstalk.server.chat import SpokenReplies
from mosstalk.session.sound import samples_of

URL = "/v1/chat/completions"
ASKED = "What is the capital of France?"
MODALITIES = ["text", "audio"]
STRAYING = {"role": "user", "content": "Count from one to twenty."}
"""What is answered at length, and with much strangeness at a high temperature."""


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server for everybody, which waits a second for a request."""
    limits = ("upload_s=1", "upload_bytes=4000000", "stalled_s=2", "audio_bytes=960000")
    words = (word for limit in limits for word in ("--limit", limit))
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recordings are kept."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def narrow(cache_folder: Path, folder: Path) -> Iterator[Server]:
    """A server with two keys, room for one session, one connection a key, and recordings."""
    words = (
        "--api-key", "alpha", "--max-sessions", "1", "--limit", "per_key=1",
        "--allow-origin", "https://page.example", "--record", str(folder),
    )  # fmt: skip
    with serving(*QUICK, *words, cache=cache_folder, env={"MOSSTALK_API_KEY": "beta"}) as running:
        running.headers = {"Authorization": "Bearer alpha"}
        yield running


def client(server: Server, key: str = "none") -> OpenAI:
    """The client as anybody makes it, but for its patience."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def said(text: str = ASKED, role: str = "user") -> dict[str, Any]:
    """A message of text."""
    return {"role": role, "content": text}


def heard(file: bytes, kind: str = "wav") -> dict[str, Any]:
    """A message of sound."""
    sound = {"data": base64.b64encode(file).decode(), "format": kind}
    return {"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}


def packed(pcm: bytes, kind: str = "WAV", rate: int = RATE) -> bytes:
    """A sound file of samples."""
    file = io.BytesIO()
    soundfile.write(file, samples_of(pcm), rate, format=kind)
    return file.getvalue()


def body(*messages: dict[str, Any], spoken: str | None = None, **more: Any) -> dict[str, Any]:
    """A request; ``spoken`` is a format."""
    asked: dict[str, Any] = {"model": "any", "messages": list(messages or (said(),))}
    if spoken:
        asked |= {"modalities": MODALITIES, "audio": {"voice": "default", "format": spoken}}
    return asked | more


def parsed(kind: type[BaseModel], content: str | bytes) -> Any:
    """An answer that is what the client's type says, with nothing converted and nothing more."""
    found = kind.model_validate_json(content, strict=True)
    assert found.model_dump(exclude_unset=True) == json.loads(content)
    assert not beyond(found)
    return found


def beyond(found: Any) -> list[str]:
    """Fields, however deep, that the client's types do not have."""
    if isinstance(found, list):
        return [name for each in found for name in beyond(each)]
    if not isinstance(found, BaseModel):
        return []
    inner = [name for each in vars(found).values() for name in beyond(each)]
    return [*(found.model_extra or {}), *inner]


def answer(server: Server, *messages: dict[str, Any], key: str = "none", **more: Any) -> Any:
    """The whole answer."""
    create = client(server, key).chat.completions.with_raw_response.create
    response = create(**body(*messages, **more))
    assert response.headers["content-type"] == "application/json"
    return parsed(ChatCompletion, response.text)


def reply(server: Server, *messages: dict[str, Any], **more: Any) -> Any:
    """The message that answers."""
    return answer(server, *messages, **more).choices[0].message


def streamed(server: Server, *messages: dict[str, Any], **more: Any) -> list[Any]:
    """The chunks of an answer."""
    create = client(server).chat.completions.with_streaming_response.create
    with create(**body(*messages, **more), stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [parsed(ChatCompletionChunk, line) for line in lines[:-1]]


def error(found: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which has the form that OpenAI's have."""
    told: dict[str, Any] = found.json()["error"]
    assert set(told) - {"retry_after_s"} == {"message", "type", "param", "code"}
    return told


def sound_of(message: Any) -> bytes:
    """The file in an answer."""
    return base64.b64decode(message.audio.data, validate=True)


def test_an_answer_is_that_of_a_realtime_conversation(server: Server) -> None:
    turns = [said("Speak to a child.", "system"), said(), said("Paris.", "assistant")]
    last = said("What is the capital of Italy?")
    found = answer(server, *turns, last, spoken="pcm16")

    told = dict[str, Any]()

    async def main() -> None:
        async with Talker(server) as talker:
            session = {"type": "realtime", "instructions": turns[0]["content"]}
            await talker.send({"type": "session.update", "session": session})
            said_before = {"type": "output_text", "text": "Paris."}
            item = {"type": "message", "role": "assistant", "content": [said_before]}
            await talker.send(typed(ASKED), {"type": "conversation.item.create", "item": item})
            told.update(await talker.ask(last["content"]), pcm=talker.pcm())

    run(main())
    message, usage = found.choices[0].message, found.usage
    assert message.audio.transcript == told["output"][0]["content"][0]["transcript"]
    assert "Rome" in message.audio.transcript
    assert abs(len(sound_of(message)) - len(told["pcm"])) <= 2 * RATE * 0.08, (
        "the decoder's own rounding"
    )
    assert message.content is None
    assert found.choices[0].finish_reason == "stop"
    assert usage.prompt_tokens == told["usage"]["input_tokens"]
    assert usage.completion_tokens == told["usage"]["output_tokens"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    counted = usage.completion_tokens_details
    assert usage.completion_tokens == counted.audio_tokens + counted.text_tokens


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "opus"])
def test_every_format_is_a_whole_file_of_the_same_sound(server: Server, name: str) -> None:
    whole, message = sound_of(reply(server, spoken="pcm16")), reply(server, spoken=name)
    with soundfile.SoundFile(io.BytesIO(sound_of(message))) as file:
        assert file.frames < 60 * RATE, "the header knows the length"
        samples = file.read(dtype="int16")
    assert file.samplerate == RATE
    assert 0 <= len(samples) - len(whole) // 2 < 0.12 * RATE
    if name in ("wav", "flac"):
        assert samples.tobytes() == whole


@pytest.mark.parametrize("spoken", ["pcm16", None])
def test_a_stream_brings_the_same_answer_in_pieces(server: Server, spoken: str | None) -> None:
    found = answer(server, spoken=spoken)
    chunks = streamed(server, spoken=spoken, stream_options={"include_usage": True})
    first, *middle, end, usage = chunks
    assert len({each.id for each in chunks}) == 1
    assert first.choices[0].delta.role == "assistant"
    assert (usage.choices, usage.usage) == ([], found.usage)
    assert all(each.usage is None for each in chunks[:-1])
    assert end.choices[0].finish_reason == found.choices[0].finish_reason == "stop"
    assert end.choices[0].delta.model_dump(exclude_unset=True) == {}
    message, deltas = found.choices[0].message, [each.choices[0].delta for each in middle]
    if spoken is None:
        assert "".join(each.content for each in deltas) == message.content
        assert message.audio is None
        return
    *made, last = [each.audio for each in deltas]
    assert first.choices[0].delta.audio.id.startswith("audio_")
    assert last.model_dump(exclude_unset=True).keys() == {"expires_at"}
    assert not any(each.id for each in made), "clients join what comes twice"
    assert "".join(each.transcript or "" for each in made) == message.audio.transcript
    pieces = [base64.b64decode(each.data, validate=True) for each in made if each.data]
    assert len(pieces) > 2
    assert b"".join(pieces) == sound_of(message)


def test_a_text_alone_is_answered_unless_sound_is_asked_for(server: Server) -> None:
    message = reply(server)
    assert "Paris" in message.content
    assert reply(server, modalities=["text"]).content == message.content
    assert not any("usage" in each.model_fields_set for each in streamed(server))


@pytest.mark.parametrize(("kind", "name"), [("WAV", "wav"), ("MP3", "mp3")])
def test_sound_is_heard_beside_text(server: Server, kind: str, name: str) -> None:
    message = heard(packed(question(), kind), name)
    message["content"].append({"type": "text", "text": "Answer that."})
    found = answer(server, message, spoken="pcm16")
    seconds = len(question()) / 2 / RATE
    counted = found.usage.prompt_tokens_details
    assert counted.audio_tokens * 0.08 == pytest.approx(seconds, abs=0.2)
    assert found.usage.prompt_tokens == counted.audio_tokens + counted.text_tokens
    assert found.choices[0].message.audio.transcript
    assert len(sound_of(found.choices[0].message)) > RATE // 10


def test_an_earlier_reply_is_named_by_its_id(server: Server) -> None:
    first = reply(server, spoken="wav")
    after = said("And of Italy?")
    by_id = answer(server, said(), {"role": "assistant", "audio": {"id": first.audio.id}}, after)
    whole = answer(server, said(), first.model_dump(), after)
    in_words = answer(server, said(), said(first.audio.transcript, "assistant"), after)
    assert by_id.choices == whole.choices == in_words.choices
    assert by_id.usage == in_words.usage
    without = answer(server, after)
    assert by_id.usage.prompt_tokens > without.usage.prompt_tokens
    chunks = streamed(server, spoken="pcm16")
    named = {"role": "assistant", "audio": {"id": chunks[0].choices[0].delta.audio.id}}
    assert reply(server, said(), named, after) == by_id.choices[0].message


def test_an_id_that_nobody_knows_is_told(server: Server) -> None:
    named = {"role": "assistant", "audio": {"id": "audio_0"}}
    with pytest.raises(openai.BadRequestError, match="no reply 'audio_0' here") as refused:
        reply(server, said(), named, said())
    assert (refused.value.code, refused.value.param) == ("audio_not_found", "messages[1].audio.id")


def test_replies_are_kept_for_an_hour_for_their_key_and_within_bounds() -> None:
    now = [1000.0]
    kept = SpokenReplies(2000, lambda: now[0])
    assert kept.keep("alpha", "one", "Paris.") == 1000 + 3600
    assert (kept.words_of("alpha", "one"), kept.words_of("beta", "one")) == ("Paris.", None)
    now[0] += 3599
    kept.keep("alpha", "two", "Rome.")
    assert kept.words_of("alpha", "one") == "Paris."
    now[0] += 1
    assert (kept.words_of("alpha", "one"), kept.words_of("alpha", "two")) == (None, "Rome.")
    kept.keep("beta", "long", "a" * 1700)
    assert kept.words_of("alpha", "two") == "Rome.", "another key's take no place of its own"
    kept.keep("alpha", "long", "a" * 1700)
    assert (kept.words_of("alpha", "two"), kept.words_of("alpha", "long")) == (None, "a" * 1700)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_reply_that_is_cut_short_says_so(server: Server, name: str) -> None:
    most: dict[str, Any] = {name: 4}
    found = answer(server, **most)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 4
    assert streamed(server, **most)[-1].choices[0].finish_reason == "length"


def test_a_seed_and_a_temperature_are_those_of_the_session(server: Server) -> None:
    def warm(seed: int) -> str:
        text: str = reply(server, STRAYING, temperature=2, top_p=1, seed=seed).content
        return text

    assert warm(1) == warm(1)
    assert len({warm(seed) for seed in range(4)}) > 1
    assert reply(server, temperature=0, seed=7).content == reply(server).content


def test_what_has_no_effect_is_taken(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    more: dict[str, Any] = {
        "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True, "n": 1, "stop": None,
        "frequency_penalty": 0.5, "presence_penalty": 1, "logprobs": False, "user": "me",
        "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logit_bias": {},
        "response_format": {"type": "text"}, "reasoning_effort": "low", "verbosity": "low",
    }  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        said(), {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]  # fmt: skip
    assert answer(server, *messages, **more).usage == answer(server).usage


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
ODD: dict[str, tuple[dict[str, Any], str, str]] = {
    "n": ({"n": 2}, "unsupported_value", "one reply"),
    "json": ({"response_format": {"type": "json_object"}}, "unsupported_value", "no JSON"),
    "logprobs": ({"logprobs": True}, "unsupported_value", "not told"),
    "stop": ({"stop": ["."]}, "unsupported_value", "ends by itself"),
    "tool": ({"tool_choice": "required"}, "unsupported_value", "calls no tools"),
    "hot": ({"temperature": 2.5}, "invalid_value", "0 to 2"),
    "modality": ({"modalities": ["image"]}, "invalid_value", "['audio'] or ['text']"),
    "no sound": ({"audio": None, "modalities": ["audio"]}, "missing_required_parameter", "audio"),
    "no model": ({"model": None}, "missing_required_parameter", "'model'"),
    "messages": ({"messages": []}, "invalid_value", "nothing of a user's"),
    "no turn": ({"messages": [said("Hi.", "system")]}, "invalid_value", "nothing of a user's"),
    "role": ({"messages": [said("Hi.", "narrator")]}, "invalid_value", "'narrator'"),
    "picture": ({"messages": [{"role": "user", "content": [PNG]}]}, "invalid_value", "image_url"),
    "many": ({"messages": [said("Hi.")] * 1025}, "array_above_max_length", "1024"),
    "long": ({"messages": [said("a" * 32_769)]}, "string_above_max_length", "32768"),
    "full": ({"messages": [said("word " * 6000)]}, "context_length_exceeded", "context"),
    "options": ({"stream_options": {"include_usage": True}}, "invalid_value", "'stream'"),
    "unknown": ({"tempo": 2}, "unknown_parameter", "'tempo'"),
}
ODD_SOUND: dict[str, tuple[dict[str, Any], str, str]] = {
    "voice": ({"audio": {"voice": "alloy", "format": "wav"}}, "invalid_value", "'default'"),
    "no voice": ({"audio": {"format": "wav"}}, "missing_required_parameter", "There are: default"),
    "aac": ({"audio": {"voice": "default", "format": "aac"}}, "invalid_value", "'pcm16', 'wav'"),
    "streamed": ({"stream": True, "audio": {"voice": "default", "format": "wav"}},
                 "unsupported_value", "pcm16"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*ODD, *ODD_SOUND])
def test_what_cannot_be_served_is_told_in_openais_form(server: Server, case: str) -> None:
    fields, code, words = (ODD | ODD_SOUND)[case]
    asked = body(spoken="wav" if case in ODD_SOUND else None) | fields
    found = ask("POST", f"{server.url}{URL}", json=asked)
    told = error(found)
    assert (found.status_code, told["type"]) == (400, "invalid_request_error")
    assert told["code"] == code
    assert re.split(r"[.\[]", told["param"])[0] in fields
    assert words in told["message"]


NOT_HEARD: dict[str, tuple[bytes | str, str]] = {
    "base64": ("~~~~", "base64"),
    "empty": (b"", "empty"),
    "webm": (b"\x1a\x45\xdf\xa3" + bytes(400), "this is webm"),
    "damaged": (b"RIFF\xff\xff\xff\x7fWAVE" + bytes(400), "not a readable sound file"),
    "short": (packed(bytes(2000)), "too short"),
    "long": (packed(bytes(31 * 2 * RATE), "FLAC"), "31 s of sound"),
}


@pytest.mark.parametrize("case", NOT_HEARD)
def test_sound_that_cannot_be_heard_is_refused(server: Server, case: str) -> None:
    file, words = NOT_HEARD[case]
    message = heard(file if isinstance(file, bytes) else b"")
    if isinstance(file, str):
        message["content"][0]["input_audio"]["data"] = file
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        reply(server, said(), message)
    assert refused.value.param == "messages[1].content[0].input_audio.data"


def test_many_sounds_may_last_as_long_as_one_and_are_the_users_alone(server: Server) -> None:
    half = heard(packed(bytes(16 * 2 * RATE), "FLAC"))
    with pytest.raises(openai.BadRequestError, match="16 s of sound"):
        reply(server, half, half)
    with pytest.raises(openai.BadRequestError, match="of a user alone"):
        reply(server, said(), {**half, "role": "assistant"})
