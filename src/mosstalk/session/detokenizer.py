"""Text of a reply as it is written, piece by piece and never half a character."""

from mosstalk.models.text_tokenizer import TextTokenizer

_UNFINISHED = "\ufffd"
_MOST_HELD = 8
"""Ids after which bytes that make no character are given as they are: one has four bytes."""


class Detokenizer:
    """Joined, the pieces are the text of all ids together."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that is settled with this id; "" while a character is unfinished."""
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith(_UNFINISHED) and len(self._held) < _MOST_HELD:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """What is left when no id follows."""
        text, self._held = self._tokenizer.decode(self._held), []
        return text
