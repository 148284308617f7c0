"""A client's ``response.create`` as a command."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mosstalk.server.realtime.audio import AudioFormat, format_of
from mosstalk.server.realtime.errors import WireError
from mosstalk.server.realtime.items import new_item
from mosstalk.server.realtime.reading import Fields
from mosstalk.server.realtime.settings import (
    MODALITIES,
    Served,
    WireSession,
    instructions_of,
    reply_of,
    rows_of,
    voice_of,
)
from mosstalk.session.commands import CreateResponse, Message
from mosstalk.session.settings import ReplyMode

MOST_INPUTS = 64
"""Items that a response may bring along."""
_MOST_METADATA = 64
_LONGEST_METADATA = 2048


@dataclass(frozen=True)
class Wish:
    """How a response is to be shown, whatever the session knows of it."""

    output_format: AudioFormat
    voice: str
    max_output_tokens: int | str
    metadata: dict[str, str] | None = None
    warnings: tuple[str, ...] = ()
    in_conversation: bool = True

    def shown(self, reply: ReplyMode) -> dict[str, Any]:
        """Its part of the protocol's response."""
        return {
            "output_modalities": MODALITIES[reply],
            "max_output_tokens": self.max_output_tokens,
            "audio": {"output": {"format": self.output_format.wire, "voice": self.voice}},
            "metadata": self.metadata,
        }


def usual(session: WireSession) -> Wish:
    """How a response is shown that nobody has asked for in so many words."""
    settings = session.settings
    return Wish(session.output_format, settings.voice, settings.limits.rows or "inf")


def request_of(
    fields: Fields,
    session: WireSession,
    served: Served,
    command_id: str,
    is_read: Callable[[str], bool | None],
) -> tuple[Wish, CreateResponse]:
    """How a response that a ``response.create`` asks for is shown, and its command.

    ``is_read`` says whether the session has an item; None: there is none of that id.

    Raises:
        WireError: it cannot be served, or means nothing.
    """
    spoken, default = fields.object("audio").object("output"), usual(session)
    voice, longest = voice_of(spoken), rows_of(fields, "max_output_tokens")
    metadata = _metadata(fields)
    together = fields.text("conversation") != "none"
    given, unread = _inputs(fields, session, served, is_read)
    wish = Wish(
        format_of(spoken, "format") or default.output_format,
        default.voice if voice is None else served.voice(voice),
        default.max_output_tokens if longest is None else longest,
        metadata,
        _warnings(fields, served, unread),
        in_conversation=together,
    )
    return wish, CreateResponse(
        reply=reply_of(fields, "output_modalities"),
        instructions=instructions_of(fields, served.limits),
        voice=wish.voice,
        max_rows=longest,
        in_conversation=together,
        input=given,
        metadata=metadata or {},
        command_id=command_id,
    )


def _metadata(fields: Fields) -> dict[str, str] | None:
    """Words that come back as they are; what is no string is written as one."""
    if fields.value.get("metadata") is None:
        return None
    value = fields.object("metadata").value
    told = {name: each if isinstance(each, str) else str(each) for name, each in value.items()}
    if len(told) > _MOST_METADATA or any(len(each) > _LONGEST_METADATA for each in told.values()):
        raise WireError(
            "invalid_value",
            f"Invalid '{fields.path('metadata')}': at most {_MOST_METADATA} values of "
            f"{_LONGEST_METADATA} characters.",
            fields.path("metadata"),
        )
    return told


def _warnings(fields: Fields, served: Served, unread: int) -> tuple[str, ...]:
    """What is asked for and has no effect."""
    warnings = []
    if tools := fields.objects("tools"):
        warnings.append(f"tools are taken, but this model calls none ({len(tools)})")
    voice = voice_of(fields.object("audio").object("output"))
    if voice is not None and served.voice(voice) != voice:
        warnings.append("the voice is unknown: the default one speaks")
    inert = [name for name in ("prompt", "temperature", "reasoning") if fields.value.get(name)]
    if inert:
        warnings.append(f"without effect: {', '.join(inert)}")
    if unread:
        warnings.append(f"of the input {unread} items are not read by the model")
    return tuple(warnings)


def _inputs(
    fields: Fields,
    session: WireSession,
    served: Served,
    is_read: Callable[[str], bool | None],
) -> tuple[tuple[str | Message, ...] | None, int]:
    """What the response answers in place of the conversation, and how much is left out of it."""
    if fields.value.get("input") is None:
        return None, 0
    given, inputs = list[str | Message](), fields.objects("input")
    if len(inputs) > MOST_INPUTS:
        path = fields.path("input")
        raise WireError(
            "array_above_max_length", f"Invalid '{path}': at most {MOST_INPUTS} items.", path
        )
    for each in inputs:
        item_id = each.text("id")
        known = None if item_id is None else is_read(item_id)
        if item_id is not None and known:
            given.append(item_id)
        elif each.text("type") != "item_reference":
            item = new_item(each, session.input_format, served.limits)
            given += [item.message] if item.message else []
        elif known is None:
            raise WireError(
                "invalid_item_id", f"There is no item '{item_id}' to read.", each.path("id")
            )
    return tuple(given), len(inputs) - len(given)
