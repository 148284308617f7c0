"""A conversation as the engine keeps it: the grid of its turns and the K and V of its rows."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mosstalk.constants import codes_heard
from mosstalk.conversation import Conversation, Row
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import OptionError


@dataclass(frozen=True)
class Edit:
    """``rows`` that take the place of a conversation's rows from ``start`` on."""

    start: int
    rows: tuple[Row, ...]


@dataclass
class CachedConversation:
    """``conversation`` says what the rows are, ``sequence`` what of them has been read.

    Both hold the same list of rows: an edit changes it from its first row on, and a reply under
    way appends to it. Between turns the sequence keeps its blocks as long as there is room for
    them. The rows that close a turn are read with the next one.
    """

    conversation: Conversation
    sequence: Sequence

    def __post_init__(self) -> None:
        assert not self.sequence.rows, "a conversation begins with a sequence of its own"
        self.sequence.rows = self.conversation.rows

    def rewrite(self, edit: Edit) -> None:
        """Change what was said; K and V of the rows before the change stay."""
        self.conversation.rewrite(edit.start, edit.rows)
        self.sequence.free_from(edit.start)

    def open_reply(self, *, speech: bool) -> None:
        """Begin a reply: its opening rows are the sequence's last."""
        self.conversation.open_reply(speech)

    @contextmanager
    def reply_opened(self, *, speech: bool) -> Iterator[None]:
        """``open_reply``, taken back if what is done with it fails."""
        self.open_reply(speech=speech)
        try:
            yield
        except Exception:
            self.sequence.free_from(self.conversation.withdraw_reply())
            raise

    def close_reply(self, request: Request, heard_ms: float | None = None) -> None:
        """Make history of an ended reply, of which the listener heard ``heard_ms``."""
        assert request.state is State.DONE, "the reply is still being made: cancel it first"
        codes = None if heard_ms is None else _codes(heard_ms)
        self.sequence.free_from(self.conversation.close_reply(request.reply, codes))

    def truncate(self, heard_ms: float) -> None:
        """Cut the reply that was closed last to what was heard of it.

        Changes nothing while the next reply is being made: cancel that and close it first.
        """
        if not self.conversation.reply_is_open:
            self.sequence.free_from(self.conversation.cut_last_reply(_codes(heard_ms)))


def _codes(heard_ms: float) -> int:
    """Codes of which anything was heard; a client's clock may be behind the reply's start."""
    if not math.isfinite(heard_ms):
        raise OptionError(f"what was heard must be a number of milliseconds, not {heard_ms}")
    return codes_heard(max(0.0, heard_ms))
