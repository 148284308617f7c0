"""Turns and grid rows: what the model reads, and how a reply becomes history.

A row is ``(text id, audio id)`` and one position. Everything here is plain Python: the
same code makes prompts for the reference and for every faster engine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from mosstalk.config import LanguageModelConfig

Row = tuple[int, int]

SYSTEM_PROMPTS = {
    "speech": "You are a helpful voice assistant. "
    "Answer the user's questions with spoken responses.",
    "text": "You are a helpful assistant. Answer the user's questions with text.",
}
"""System prompts of the public demo, by the kind of reply that is wanted."""


class Mode(IntEnum):
    """Which head's draw a row carries: in audio mode the text becomes ``modality_pad``."""

    TEXT = 0
    AUDIO = 1


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a meaning of their own: text channel first, then audio channel."""

    endoftext: int
    im_start: int
    im_end: int
    sosp: int
    modality_pad: int
    eosp: int
    audio_pad: int
    stop: frozenset[int]
    """Text ids that end a reply; the row that carries one is part of it."""

    @classmethod
    def of(cls, config: LanguageModelConfig, added_tokens: dict[str, int]) -> "SpecialIds":
        """Join the config's ids with the tokenizer's added tokens."""
        return cls(
            endoftext=added_tokens["<|endoftext|>"],
            im_start=added_tokens["<|im_start|>"],
            im_end=added_tokens["<|im_end|>"],
            sosp=config.sosp_token_id,
            modality_pad=config.modality_pad_token_id,
            eosp=config.eosp_token_id,
            audio_pad=config.audio_pad_token_id,
            stop=frozenset((added_tokens["<|endoftext|>"], added_tokens["<|im_end|>"])),
        )


@dataclass(frozen=True)
class TextSegment:
    """Tokenised text, without special ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class SpeechSegment:
    """Speech codes, 80 ms each, without ``eosp``."""

    codes: tuple[int, ...]


Segment = TextSegment | SpeechSegment


@dataclass(frozen=True)
class Turn:
    """What one role said."""

    role: str
    segments: tuple[Segment, ...]


def start_mode(last_prompt_row: Row, ids: SpecialIds) -> Mode:
    """Mode before the first step: audio after a modality_pad row, text after an audio_pad one."""
    text, audio = last_prompt_row
    if audio == ids.audio_pad:
        return Mode.TEXT
    return Mode.AUDIO if text == ids.modality_pad else Mode.TEXT


def next_mode(mode: Mode, last_row: Row, ids: SpecialIds) -> Mode:
    """Mode of the step that follows ``last_row``: sosp opens speech, eosp closes it.

    Both tests apply to the same row in that order, so (sosp, eosp) goes there and back.
    """
    text, audio = last_row
    if mode is Mode.TEXT and text == ids.sosp:
        mode = Mode.AUDIO
    if mode is Mode.AUDIO and audio == ids.eosp:
        mode = Mode.TEXT
    return mode


def segment_rows(segment: Segment, ids: SpecialIds) -> list[Row]:
    """Rows of a segment: n text ids are n rows, n codes are n + 2."""
    if isinstance(segment, TextSegment):
        return [(token, ids.audio_pad) for token in segment.ids]
    body = [(ids.modality_pad, code) for code in (*segment.codes, ids.eosp)]
    return [(ids.sosp, ids.audio_pad), *body]


Encode = Callable[[str], Sequence[int]]


@dataclass
class Reply:
    """A reply as it was generated: its rows with the mode each was drawn in."""

    rows: list[Row] = field(default_factory=list)
    modes: list[Mode] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def codes(self, ids: SpecialIds) -> list[int]:
        """Speech codes in the order they are heard."""
        return [
            audio
            for (_, audio), mode in zip(self.rows, self.modes, strict=True)
            if mode is Mode.AUDIO and audio != ids.eosp
        ]

    def text_ids(self, ids: SpecialIds) -> list[int]:
        """Text ids of text-mode rows, special ones of the grid and the stop left out."""
        skipped = {ids.sosp, ids.modality_pad, *ids.stop}
        return [
            text
            for (text, _), mode in zip(self.rows, self.modes, strict=True)
            if mode is Mode.TEXT and text not in skipped
        ]


class Conversation:
    """The grid of one conversation, turn by turn, always equal to a freshly built prompt.

    ``rows`` is what the model has read or will read next; it stays the same list, so an engine
    may hold it. ``open_reply`` puts the reply prefix there, the model may append to it, and
    ``close_reply`` turns what was generated into history: rows whose K and V exist already are
    kept as they are wherever the embedding allows it, so a new turn prefills only what is new.

    ``writes_first`` is for checkpoints that write a spoken reply before they speak it: the prefix
    leaves it to the model to open speech, and a cut takes as much of the text as of the speech.
    """

    def __init__(self, ids: SpecialIds, encode: Encode, *, writes_first: bool = False) -> None:
        self.ids = ids
        self.encode = encode
        self.writes_first = writes_first
        self.rows: list[Row] = []
        self._last: tuple[int, Reply] | None = None
        self._before_reply: tuple[int, tuple[int, Reply] | None] | None = None
        self._prompt_rows = 0

    @property
    def reply_is_open(self) -> bool:
        """Whether a reply is being made, between ``open_reply`` and ``close_reply``."""
        return self._before_reply is not None

    def add_turn(self, turn: Turn) -> None:
        """Append a finished turn of any role."""
        self._require(open_reply=False)
        self._last = None
        self.rows += self._opening(turn.role)
        for segment in turn.segments:
            self.rows += segment_rows(segment, self.ids)
        self.rows += self._closing()

    def add_text(self, role: str, text: str) -> None:
        """Append a turn of typed text; special-token strings in it stay text."""
        self.add_turn(Turn(role, (TextSegment(tuple(self.encode(text))),)))

    def add_speech(self, role: str, codes: Iterable[int]) -> None:
        """Append a spoken turn."""
        self.add_turn(Turn(role, (SpeechSegment(tuple(codes)),)))

    def rewrite(self, start: int, rows: Iterable[Row]) -> None:
        """Put ``rows`` in place of those from ``start`` on: they hold whole turns, and a last one
        may still be under way. What was closed last cannot be cut any more.
        """
        self._require(open_reply=False)
        assert 0 <= start <= len(self.rows), f"there are {len(self.rows)} rows, not {start}"
        self._last = None
        self.rows[start:] = rows

    def open_reply(self, speech: bool) -> None:
        """Append the reply prefix.

        For speech it ends with the segment's own opening row, unless the model writes first.
        """
        self._require(open_reply=False)
        self._before_reply, self._last = (len(self.rows), self._last), None
        self.rows += self._opening("assistant")
        if speech and not self.writes_first:
            self.rows.append((self.ids.sosp, self.ids.audio_pad))
        self._prompt_rows = len(self.rows)

    def withdraw_reply(self) -> int:
        """Take back ``open_reply``; return how many rows there are again."""
        self._require(open_reply=True)
        assert self._before_reply
        (rows, self._last), self._before_reply = self._before_reply, None
        del self.rows[rows:]
        return rows

    def close_reply(self, reply: Reply, heard_codes: int | None = None) -> int:
        """Turn a generated reply into history and return how many leading rows are unchanged.

        K and V of the rows before the returned index stay valid; later ones, if any exist,
        must be dropped. ``heard_codes`` cuts the reply after that many codes (an
        interruption); a cut past its end changes nothing.
        """
        self._require(open_reply=True)
        self._last, self._before_reply = (self._prompt_rows, reply), None
        return self._close(self._prompt_rows, reply, heard_codes)

    def cut_last_reply(self, heard_codes: int) -> int:
        """Cut the reply that was closed last after ``heard_codes`` codes, as if closed so.

        Returns how many leading rows are unchanged. What an earlier cut took stays gone, a
        cut past the end changes nothing, and so does one after the next turn has begun.
        """
        if self._last is None:
            return len(self.rows)
        prompt, reply = self._last
        closed = self.rows[prompt:]
        kept = self._close(prompt, reply, heard_codes)
        if len(self.rows) >= prompt + len(closed):
            self.rows[prompt:] = closed
            return len(self.rows)
        return kept

    def _close(self, prompt: int, reply: Reply, heard_codes: int | None) -> int:
        ids = self.ids
        prefix, written = self.rows[prompt - 1], self.writes_first
        rows, mode = cut_reply(reply, heard_codes, ids, prefix, writes_first=written)
        history = [_as_history(row, ids) for row in rows]
        if not history or history[-1][0] != ids.im_end:
            if mode is Mode.AUDIO:
                history.append((ids.modality_pad, ids.eosp))
            history.append((ids.im_end, ids.audio_pad))
        self.rows[prompt:] = history + self._text("\n")
        # The last row drawn was never read by the model: it has no K and V.
        return prompt + min(common_rows(rows, reply.rows), max(len(reply.rows) - 1, 0))

    def _opening(self, role: str) -> list[Row]:
        return [(self.ids.im_start, self.ids.audio_pad), *self._text(f"{role}\n")]

    def _closing(self) -> list[Row]:
        return [(self.ids.im_end, self.ids.audio_pad), *self._text("\n")]

    def _text(self, text: str) -> list[Row]:
        return [(token, self.ids.audio_pad) for token in self.encode(text)]

    def _require(self, *, open_reply: bool) -> None:
        assert self.reply_is_open is open_reply, (
            "a reply is open: close it first" if self.reply_is_open else "no reply is open"
        )


def cut_reply(
    reply: Reply,
    heard_codes: int | None,
    ids: SpecialIds,
    prefix_row: Row,
    *,
    writes_first: bool = False,
) -> tuple[list[Row], Mode]:
    """Return the rows up to code ``heard_codes`` and the mode in which a next row would be.

    ``prefix_row`` is the row before the reply. Rows after the last code heard go; a cut at
    or past the last code keeps the reply whole. With ``writes_first`` the text before the first
    code is what the codes say, and the same share of it stays, rounded up to whole ids.
    """
    rows, modes = reply.rows, reply.modes
    spoken = [
        place
        for place, ((_, audio), mode) in enumerate(zip(rows, modes, strict=True))
        if mode is Mode.AUDIO and audio != ids.eosp
    ]
    if heard_codes is not None and heard_codes < len(spoken):
        # Before the first code stands the row that opens speech, and before that the text.
        text = max(spoken[0] - 1, 0) if writes_first else 0
        kept = -(-text * heard_codes // len(spoken))
        return rows[:kept] + rows[text : spoken[heard_codes]], Mode.AUDIO
    if not rows:
        return [], next_mode(start_mode(prefix_row, ids), prefix_row, ids)
    return rows, next_mode(modes[-1], rows[-1], ids)


def _as_history(row: Row, ids: SpecialIds) -> Row:
    """A generated row as a fresh prompt has it; the embedding does not change."""
    text, audio = row
    if text == ids.endoftext:
        text = ids.im_end
    return (text, audio if text == ids.modality_pad else ids.audio_pad)


_STRIDE = 256


def common_rows(some: list[Row], others: list[Row]) -> int:
    """How many leading rows are the same."""
    most, start = min(len(some), len(others)), 0
    while start < most and some[start : start + _STRIDE] == others[start : start + _STRIDE]:
        start += _STRIDE
    start = min(start, most)
    while start < most and some[start] == others[start]:
        start += 1
    return start
