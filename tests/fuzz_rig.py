"""A client of the Realtime protocol that sends legal, wrong and broken events, from a seed."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from realtime_rig import Wire

from mosstalk.session.sound import pcm_of

ITEM_IDS = [f"i{number}" for number in range(8)]
"""Few, so that items are taken, cut and deleted that are there."""
FORM = ("invalid_json", "invalid_type", "missing_required_parameter", "string_above_max_length")
"""Codes for an event that is wrong in itself, whatever is going on."""
STRICT = (
    ("session.update", "session", "an object"),
    ("session.update", "session.instructions", "a string"),
    ("session.update", "session.audio", "an object"),
    ("session.update", "session.audio.input", "an object"),
    ("session.update", "session.audio.input.turn_detection.threshold", "a number"),
    ("session.update", "session.audio.input.turn_detection.silence_duration_ms", "a number"),
    ("session.update", "session.audio.input.turn_detection.create_response", "a flag"),
    ("session.update", "session.audio.output.voice.id", "a string"),
    ("session.update", "session.audio.output.speed", "a number"),
    ("session.update", "session.tools", "a list"),
    ("session.update", "session.mosstalk.sampling.top_p", "a number"),
    ("session.update", "session.mosstalk.sampling.greedy", "a flag"),
    ("input_audio_buffer.append", "audio", "a string"),
    ("conversation.item.create", "item", "an object"),
    ("conversation.item.create", "item.id", "a string"),
    ("conversation.item.create", "item.role", "a string"),
    ("conversation.item.create", "item.content", "a list"),
    ("conversation.item.create", "previous_item_id", "a string"),
    ("conversation.item.retrieve", "item_id", "a string"),
    ("conversation.item.truncate", "item_id", "a string"),
    ("conversation.item.delete", "item_id", "a string"),
    ("response.create", "response", "an object"),
    ("response.create", "response.instructions", "a string"),
    ("response.create", "response.input", "a list"),
    ("response.create", "response.metadata", "an object"),
    ("response.create", "response.audio.output", "an object"),
    ("response.cancel", "response_id", "a string"),
)
"""Fields of which another kind is refused, with the path that the error must name."""
REQUIRED = (
    ("session.update", "session"),
    ("input_audio_buffer.append", "audio"),
    ("conversation.item.create", "item"),
    ("conversation.item.retrieve", "item_id"),
    ("conversation.item.truncate", "item_id"),
    ("conversation.item.delete", "item_id"),
)
_KINDS: dict[str, Any] = {
    "an object": {"type": "message"}, "a string": "x", "a number": 3, "a flag": True,
    "a list": [{"type": "message", "content": []}],
}  # fmt: skip
BROKEN: tuple[str | bytes, ...] = (
    "", "{", "null", "[]", "7", '"text"', "[" * 5000, '{"a":' * 500 + "1" + "}" * 500,
    '{"type": "response.cancel", "event_id": "\\ud800"}',
    '{"type": "session.update", "session": {"instructions": "\\udfff"}}',
    '{"type": "response.create", "response": {"metadata": {"a": NaN}}}',
    '{"type": "response.cancel"} and more', b"\xff\xfe\x00", b'{"type": "\xed\xa0\x80"}',
    '{"type":"response.cancel"}'.encode("utf-16"),
)  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A message, and what is known of its answer.

    Attributes:
        event_id: what an error about it must name; None for a message that is no event.
        code, param: of the error that it must lead to, if it must lead to one.
        legal: it may be refused for what is going on, and never for its form.
    """

    message: str | bytes
    event_id: str | None = None
    code: str | None = None
    param: str | None = None
    legal: bool = False


class Fuzzer:
    """Makes messages; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random, self._number = Random(seed), 0
        self._legal: tuple[tuple[Callable[[], Wire], int], ...] = (
            (self._update, 4), (self._append, 8), (self._item, 6), (self._about_an_item, 4),
            (self._respond, 2), (self._plain, 4),
        )  # fmt: skip

    def next(self) -> Sent:
        """The next message."""
        self._number += 1
        event_id = f"e{self._number}"
        (make,) = self._random.choices(
            (self._as_it_is, self._wrong, self._mutated, self._broken), (50, 20, 25, 5)
        )
        return make(event_id)

    # What is made of an event.

    def _as_it_is(self, event_id: str) -> Sent:
        return Sent(json.dumps(self._event() | {"event_id": event_id}), event_id, legal=True)

    def _wrong(self, event_id: str) -> Sent:
        """An event with one field that is missing, of another kind or unknown."""
        event: Wire
        which = self._random.random()
        if which < 0.15:
            event, code, param = {"type": "input_audio_buffer.magic"}, "invalid_value", "type"
        elif which < 0.4:
            kind, param = self._random.choice(REQUIRED)
            event, code = {"type": kind}, "missing_required_parameter"
        else:
            kind, param, wanted = self._random.choice(STRICT)
            wrong = self._random.choice([v for name, v in _KINDS.items() if name != wanted])
            event, code = {"type": kind, **_at(param, wrong)}, "invalid_type"
            if param == "previous_item_id":
                event["item"] = {"type": "message", "role": "user", "content": []}
            elif ".turn_detection." in param:
                event["session"]["audio"]["input"]["turn_detection"]["type"] = "server_vad"
        return Sent(json.dumps(event | {"event_id": event_id}), event_id, code, param)

    def _mutated(self, event_id: str) -> Sent:
        """A legal event in which anything may have become anything."""
        event = json.loads(json.dumps(self._event()))
        for _ in range(self._random.randint(1, 3)):
            self._spoil(event)
        message = json.dumps(event | {"event_id": event_id})
        return Sent(message.replace("Infinity", "1e999"), event_id)

    def _broken(self, _: str) -> Sent:
        return Sent(self._random.choice(BROKEN), code="invalid_json")

    def _spoil(self, value: Any) -> None:
        """Change one place, however deep."""
        random = self._random
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = random.choice(keys)
            inner = value[key]
            if isinstance(inner, dict | list) and inner and random.random() < 0.7:
                value = inner
            elif random.random() < 0.3:
                del value[key]
                return
            else:
                value[key] = random.choice(
                    [None, True, "", "x" * 40_000, "audio", -1, 0, 1e999, 10**30, 0.5, [], {},
                     [None], {"type": "message"}, "\u2028\U0001f600", inner]
                )  # fmt: skip
                return

    # Legal events.

    def _event(self) -> Wire:
        makers, weights = zip(*self._legal, strict=True)
        (make,) = self._random.choices(makers, weights)
        return dict(make())

    def _some(self, **fields: Any) -> Wire:
        """Each of these fields, or not."""
        return {name: value for name, value in fields.items() if self._random.random() < 0.4}

    def _text(self) -> str:
        texts = ("Hello.", "What time is it?", "\u4f60\u597d", "Zo\u00eb \U0001f600", "a" * 500)
        return self._random.choice(texts)

    def _sound(self) -> str:
        """Some tenths of a second, which can be read in every format."""
        random = self._random
        loud = np.sin(np.arange(random.randint(1, 4800)) * random.random()) * random.random()
        return base64.b64encode(pcm_of(loud.astype(np.float32))).decode()

    def _update(self) -> Wire:
        choose = self._random.choice
        form = choose([{"type": "audio/pcm", "rate": 24_000}, {"type": "audio/pcmu"}, "g711_alaw"])
        turns = choose(
            [None, {"type": "server_vad", "silence_duration_ms": choose([0, 200, 500])},
             {"type": "semantic_vad", "eagerness": "high"}, {"create_response": False}]
        )  # fmt: skip
        tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
        heard = self._some(
            format=form, turn_detection=turns, noise_reduction={"type": "near_field"},
            transcription={"model": "whisper-1"},
        )  # fmt: skip
        spoken = self._some(format=form, voice=choose(["marin", {"id": "alto"}]), speed=1.25)
        session = self._some(
            instructions=choose(["Be brief.", ""]), output_modalities=[choose(["audio", "text"])],
            audio=self._some(input=heard, output=spoken), tools=[tool] * choose([0, 1, 3]),
            tool_choice=choose(["auto", "none"]), tracing="auto", model="gpt-realtime",
            max_output_tokens=choose([1, 4, 8]), truncation=choose(["auto", "disabled"]),
            mosstalk={"playback": choose(["client", "session"]), "sampling": {"seed": 3}},
        )  # fmt: skip
        return {"type": "session.update", "session": {"type": "realtime", **session}}

    def _append(self) -> Wire:
        return {"type": "input_audio_buffer.append", "audio": self._sound()}

    def _content(self) -> list[Wire]:
        parts: list[Wire] = [
            {"type": "input_text", "text": self._text()},
            {"type": "input_audio", "audio": self._sound()},
            {"type": "input_audio", "transcript": self._text()},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        ]
        return [self._random.choice(parts) for _ in range(self._random.randint(0, 3))]

    def _new_item(self) -> Wire:
        items: list[Wire] = [
            {"type": "message", "role": "user", "content": self._content()},
            {"type": "message", "role": "user", "content": self._content()},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": self._text()}]},
            {"type": "message", "role": "system",
             "content": [{"type": "input_text", "text": self._text()}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
        ]  # fmt: skip
        return self._random.choice(items) | self._some(id=self._random.choice(ITEM_IDS))

    def _item(self) -> Wire:
        where = self._some(previous_item_id=self._random.choice([None, "root", *ITEM_IDS]))
        return {"type": "conversation.item.create", "item": self._new_item(), **where}

    def _about_an_item(self) -> Wire:
        kind = self._random.choice(["retrieve", "truncate", "delete"])
        about: Wire = {"item_id": self._random.choice(ITEM_IDS)}
        if kind == "truncate":
            about |= {"content_index": 0, "audio_end_ms": self._random.choice([0, 100, 99_999])}
        return {"type": f"conversation.item.{kind}", **about}

    def _respond(self) -> Wire:
        choose = self._random.choice
        known: Wire = {"type": "item_reference", "id": choose(ITEM_IDS)}
        given = [choose([known, self._new_item()]) for _ in range(self._random.randint(0, 3))]
        asked = self._some(
            conversation=choose(["auto", "none"]), input=given, metadata={"a": "b"},
            instructions=self._text(), output_modalities=[choose(["audio", "text"])],
            audio={"output": {"format": {"type": "audio/pcma"}}},
        )  # fmt: skip
        return {"type": "response.create", "response": {"max_output_tokens": 4, **asked}}

    def _plain(self) -> Wire:
        kinds = ("commit", "clear")
        events = [{"type": f"input_audio_buffer.{kind}"} for kind in kinds]
        more = ["output_audio_buffer.clear", "response.cancel"]
        return self._random.choice([*events, *({"type": kind} for kind in more)])


def _at(path: str, value: Any) -> Wire:
    """An object in which the value stands at this path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)
