"""A conversation's events without what differs from run to run, and sound as hashes."""

import base64
import re
from typing import Any

import numpy as np

from .results import Results, masked
from .wire import RATE

_ID = re.compile(
    r"\b(?:(event|item|resp|sess|conv)_[0-9a-f]{8,}(?:_\d+)?\b|(resume)_[\w-]{43}(?![\w-]))"
)
"""What the server makes up anew: ids, and tokens with which a conversation goes on."""
_TIMINGS = ("_first_audio_ms", "_first_text_ms", "total_ms", "real_time_factor", "expires_at")
_TIME_DEPENDENT = ("cached_tokens",)
"""How much was read ahead, beside those above."""
_CUT = ("_tokens", "audio_s", "codes")
"""What depends, of a response that was interrupted, on how far it had come."""
_SOUND = ("response.output_audio.delta", "response.audio.delta")


def transcript(
    events: list[dict[str, Any]], results: Results, heard_samples: int = 0
) -> list[dict[str, Any]]:
    """Events in their order, a response's deltas as one, ids and tokens numbered as they come.

    Of an interrupted response the first ``heard_samples`` alone are kept.
    """
    cut = {
        event["response"]["id"]
        for event in events
        if event["type"] == "response.done" and event["response"]["status"] == "cancelled"
    }
    told: list[dict[str, Any]] = []
    eight_bit = set[str]()
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        event = {name: value for name, value in event.items() if name != "event_id"}
        response = event.get("response_id") or event.get("response", {}).get("id")
        if event["type"] == "response.created" and re.search(r"pcm[ua]|g711", str(event)):
            eight_bit.add(response)
        delta, key = event.pop("delta", None), (response, event["type"])
        if response in cut and delta is None:
            event = masked(event, _CUT, ())
        event = masked(event, _TIMINGS + _TIME_DEPENDENT, ())
        if delta is not None:
            delta = base64.b64decode(delta) if event["type"] in _SOUND else delta
            if key in joined:
                joined[key]["delta"] += delta
                continue
            joined[key] = event | {"delta": delta}
            event = joined[key]
        told.append(event)
    for (response, kind), event in joined.items():
        if kind in _SOUND:
            pcm = event["delta"][: 2 * heard_samples if response in cut else None]
            eight = response in eight_bit
            samples = np.frombuffer(pcm, np.uint8) if eight else np.frombuffer(pcm, np.int16)
            event["delta"] = results.sound(samples, RATE)
        elif response in cut:
            event["delta"] = "#"
    return _numbered(told)


def _numbered(told: Any) -> Any:
    """Ids and tokens that the server made, by their kind and the order in which they came up.

    They are random, so they differ between any two runs. By their numbers a token that changes
    within a conversation is still told from one that stays.
    """
    numbers: dict[str, dict[str, int]] = {}

    def name(match: re.Match[str]) -> str:
        kind = match[1] or match[2]
        known = numbers.setdefault(kind, {})
        return f"{kind}#{known.setdefault(match[0], len(known) + 1)}"

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        return _ID.sub(name, value) if isinstance(value, str) else value

    return walk(told)
