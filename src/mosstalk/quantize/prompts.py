"""Conversations to calibrate and to measure on: read from a file, laid out as grid rows.

A file has a conversation on each line, as JSON. A turn has a role and text or speech codes::

    {"turns": [{"role": "user", "text": "Hello."}, {"role": "assistant", "codes": [7, 912, 3]}]}

A system turn is a turn like any other; ``mosstalk chat --json`` prints the codes of what it hears
and says. Figures are taken where the assistant speaks, or everywhere if it never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.conversation import (
    Conversation,
    Encode,
    Row,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    segment_rows,
)
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json

ADVISED = 500
"""Prompts to calibrate on; fewer are allowed, and said."""
ROLES = ("system", "user", "assistant")
_HELD_OUT = 10
"""One in so many is measured on and not calibrated on."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as ``rows``; at ``text`` and ``audio`` places each head's draw counts.

    A place is that of the row before the one that is drawn.
    """

    rows: tuple[Row, ...]
    text: tuple[int, ...]
    audio: tuple[int, ...]


@dataclass(frozen=True)
class Prompts:
    """Prompts to calibrate on, others to measure on, and what they are, for people."""

    calibrated: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]
    about: str

    def warning(self) -> str | None:
        """What to say of too few prompts."""
        count = len(self.calibrated)
        if count >= ADVISED:
            return None
        return f"warning: only {count} prompts to calibrate on; {ADVISED} or more are advised"


def read_prompts(path: Path, ids: SpecialIds, encode: Encode, longest: int) -> Prompts:
    """Read a file of conversations of at most ``longest`` rows; every tenth is held out.

    Raises:
        OptionError: the file cannot be read, holds fewer than two conversations, or a line is
            none; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as text ({error})") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}: line {number}"
            prompt = lay_out(_turns(line, where, ids, encode), ids, encode)
            if len(prompt.rows) > longest:
                raise OptionError(f"{where}: {len(prompt.rows)} rows; the context holds {longest}")
            prompts.append(prompt)
    if len(prompts) < 2:
        raise OptionError(f"{path}: give at least two conversations, one on each line")
    held = set(range(_HELD_OUT - 1, len(prompts), _HELD_OUT)) or {len(prompts) - 1}
    return Prompts(
        tuple(prompt for place, prompt in enumerate(prompts) if place not in held),
        tuple(prompts[place] for place in sorted(held)),
        f"{len(prompts)} conversations of {path.name}, every tenth measured on",
    )


def lay_out(turns: Sequence[Turn], ids: SpecialIds, encode: Encode) -> Prompt:
    """A conversation's rows, and where each head's draws count."""
    conversation, drawn = Conversation(ids, encode), list[int]()
    for turn in turns:
        start = len(conversation.rows) + 1 + len(encode(f"{turn.role}\n"))
        conversation.add_turn(turn)
        if turn.role == "assistant":
            length = sum(len(segment_rows(segment, ids)) for segment in turn.segments)
            drawn += range(start, start + length + 1)
    rows = conversation.rows
    # A row that opens speech is given, not drawn.
    wanted = [
        place for place in drawn or range(1, len(rows)) if place and rows[place][0] != ids.sosp
    ]
    spoken = {place for place in wanted if rows[place][0] == ids.modality_pad}
    return Prompt(
        tuple(rows),
        tuple(place - 1 for place in wanted if place not in spoken),
        tuple(place - 1 for place in sorted(spoken)),
    )


def _turns(line: str, where: str, ids: SpecialIds, encode: Encode) -> list[Turn]:
    try:
        values = parse_json(line)
    except ConfigError as error:
        raise OptionError(f"{where}: no JSON ({error})") from None
    turns = values.get("turns") if isinstance(values, dict) else None
    if not isinstance(turns, list) or not turns:
        raise OptionError(f'{where}: give {{"turns": [...]}} with at least one turn')
    return [_turn(turn, where, ids, encode) for turn in turns]


def _turn(values: Any, where: str, ids: SpecialIds, encode: Encode) -> Turn:
    role = values.get("role") if isinstance(values, dict) else None
    if role not in ROLES or set(values) not in ({"role", "text"}, {"role", "codes"}):
        raise OptionError(
            f"{where}: a turn has a role ({', '.join(ROLES)}) and either text or codes"
        )
    text, codes = values.get("text"), values.get("codes")
    if isinstance(text, str) and text:
        return Turn(role, (TextSegment(tuple(encode(text))),))
    known = isinstance(codes, list) and codes and all(type(code) is int for code in codes)
    if not known or not 0 <= min(codes) <= max(codes) < ids.eosp:
        raise OptionError(f"{where}: text must be words, codes numbers from 0 to {ids.eosp - 1}")
    return Turn(role, (SpeechSegment(tuple(codes)),))
