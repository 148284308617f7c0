"""Conversations to calibrate and to measure on: read from a file, laid out as grid rows.

A file has a conversation on each line, as JSON. A turn has a role and text or speech codes::

    {"turns": [{"role": "user", "text": "Hello."}, {"role": "assistant", "codes": [7, 912, 3]}]}

A system turn is a turn like any other; ``mosstalk chat --json`` prints the codes of what it hears
and says. Figures are taken where the assistant speaks, or everywhere if it never does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.conversation import (
    SYSTEM_PROMPTS,
    Conversation,
    Encode,
    Reply,
    Row,
    Segment,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    segment_rows,
)
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json
from mosstalk.models.language_model import LanguageModel
from mosstalk.offline.defaults import Choices
from mosstalk.offline.pipeline import SPEAK_PROMPT, TRANSCRIBE_PROMPT
from mosstalk.progress import Progress
from mosstalk.reply_options import Limits
from mosstalk.reporting.sentences import HELD_OUT, read_sentences

ADVISED = 500
"""Prompts to calibrate on; fewer are allowed, and said."""
ROLES = ("system", "user", "assistant")
_HELD_OUT = 10
"""One in so many is measured on and not calibrated on."""
NAME = "default-1"
"""Changes whenever the sentences do."""
SENTENCES, MEASURED = 135, 15
_AT_ONCE = 32
_ROOM = 256
"""Rows of a prompt with its reply."""
_WHO = "my sister|the doctor|our neighbour|her uncle|the driver|a friend|the teacher|my boss"
_DID = "found|sold|painted|forgot|borrowed|repaired|washed|ordered|carried|returned"
_WHAT = "the bicycle|an old map|two tickets|the kitchen table|a warm coat|the letters|a small lamp"
_WHEN = "yesterday|last night|before dinner|two weeks ago|this morning|on Sunday|after the storm"
_CAN = "help me find|tell me about|show me|explain|choose|describe|compare"
_OF = (
    "the fastest train|a good book|the weather in spring|cheap hotels|the history of tea|the stars"
)
_FORMS = (
    (_WHO, _DID, _WHAT, _WHEN, "."),
    ("Could you|Can you|Would you|Please", _CAN, _OF, "today|tomorrow|for a child|in short", "."),
    ("Why has|When has", _WHO, _DID, _WHAT, "?"),
)


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
        # Not splitlines: json may hold other ends of lines, such as U+2028, in a text.
        lines = path.read_text(encoding="utf-8").split("\n")
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


def sentences(count: int, seed: int = 0) -> list[str]:
    """So many different sentences of a small grammar, always the same ones."""
    draws, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        words = [draws.choice(slot.split("|")) for slot in draws.choice(_FORMS)]
        text = " ".join(words[:-1]) + words[-1]
        found[text[0].upper() + text[1:]] = None
    return list(found)


@dataclass(frozen=True)
class Speaker:
    """The model that draws the replies of at most ``longest_rows``, and how to talk to it."""

    model: LanguageModel
    ids: SpecialIds
    encode: Encode
    chosen: Choices
    longest_rows: int = 64

    def default_prompts(self, tell: Progress) -> Prompts:
        """Calibrate on sentences of a grammar, measure on the quality bench's held-out ones."""
        texts = [*sentences(SENTENCES), *read_sentences(HELD_OUT)[:MEASURED]]
        kinds = self.conversations(texts, tell)
        by_text = [kind[place] for place in range(len(texts)) for kind in kinds]
        cut = len(kinds) * SENTENCES
        return Prompts(
            tuple(by_text[:cut]),
            tuple(by_text[cut:]),
            f"{NAME}: {len(by_text)} conversations, typed and spoken, all replies and all speech "
            "drawn by the model itself; those measured on are of other sentences",
        )

    def conversations(self, texts: Sequence[str], tell: Progress) -> list[list[Prompt]]:
        """Four kinds of each text: typed or spoken, answered by speech or in writing."""
        typed: list[Segment] = [self._words(text) for text in texts]
        aloud = self._asked(typed, (SPEAK_PROMPT, SYSTEM_PROMPTS["speech"]))
        said = [self._codes(reply) for reply in self._replies(aloud, True, tell)]
        kinds = [self._laid_out(aloud, said)]
        for segments, systems, speech in (
            (typed, (SYSTEM_PROMPTS["text"],), False),
            (said, (TRANSCRIBE_PROMPT, SYSTEM_PROMPTS["text"]), False),
            (said, (SYSTEM_PROMPTS["speech"],), True),
        ):
            asked = self._asked(segments, systems)
            replies = self._replies(asked, speech, tell)
            as_segment = self._codes if speech else self._written
            kinds.append(self._laid_out(asked, [as_segment(reply) for reply in replies]))
        return kinds

    def _words(self, text: str) -> Segment:
        return TextSegment(tuple(self.encode(text)))

    def _codes(self, reply: Reply) -> Segment:
        return SpeechSegment(tuple(reply.codes(self.ids)))

    def _written(self, reply: Reply) -> Segment:
        return TextSegment(tuple(reply.text_ids(self.ids)))

    def _asked(self, segments: Sequence[Segment], systems: Sequence[str]) -> list[list[Turn]]:
        """What comes before each reply; system prompts take turns."""
        return [
            [
                Turn("system", (self._words(systems[place % len(systems)]),)),
                Turn("user", (segment,)),
            ]
            for place, segment in enumerate(segments)
        ]

    def _laid_out(self, asked: Sequence[list[Turn]], replies: Sequence[Segment]) -> list[Prompt]:
        return [
            lay_out([*turns, Turn("assistant", (reply,))], self.ids, self.encode)
            for turns, reply in zip(asked, replies, strict=True)
        ]

    def _replies(self, asked: Sequence[list[Turn]], speech: bool, tell: Progress) -> list[Reply]:
        """A reply to each, many at once; each is drawn by a seed of its own.

        Raises:
            PoisonedError: the model's logits are not finite.
        """
        blocks = _AT_ONCE * _ROOM // EngineOptions().block_rows
        core = EngineCore(self.model, self.ids, EngineOptions(blocks=blocks))
        made = list[Request]()
        for start in range(0, len(asked), _AT_ONCE):
            tell("drawing replies", start, len(asked))
            some = asked[start : start + _AT_ONCE]
            begun = [
                self._begun(core, turns, speech, seed) for seed, turns in enumerate(some, start)
            ]
            core.run()
            for request in begun:
                if request.error:
                    raise request.error
                core.close(request.sequence)
            made += begun
        return [request.reply for request in made]

    def _begun(self, core: EngineCore, turns: list[Turn], speech: bool, seed: int) -> Request:
        conversation = Conversation(self.ids, self.encode)
        for turn in turns:
            conversation.add_turn(turn)
        conversation.open_reply(speech)
        ask = ReplyParams(self.chosen.options(seed=seed), Limits(self.longest_rows))
        return core.submit(core.open(conversation.rows), ask)
