"""The sounds of English text in the International Phonetic Alphabet, by espeak-ng's library."""

import ctypes
import re
from ctypes.util import find_library

ACCENTS = {"a": b"en-us", "b": b"en"}
"""espeak-ng's voice for American and for British English, by the first letter of Kokoro's."""
_MARKS = re.compile(r"([,.?!;:]+)")
_LETTERS = (("ʲ", "j"), ("r", "ɹ"), ("x", "k"), ("ɬ", "l"), ("\u0361", ""), ("_", ""))
_RETRIEVE, _UTF8, _IPA = 1, 1, 2


class Phonetics:
    """espeak-ng's own reading of English, through its library.

    Raises:
        FileNotFoundError: the library is not installed (Debian: ``libespeak-ng1``).
    """

    def __init__(self) -> None:
        name = find_library("espeak-ng")
        if name is None:
            raise FileNotFoundError("espeak-ng is not installed: apt install espeak-ng")
        self._library = ctypes.CDLL(name)
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_Initialize(_RETRIEVE, 0, None, 0)
        self._accent = ""

    def sounds(self, text: str, accent: str) -> str:
        """The sounds of ``text``, its punctuation kept where it was."""
        if accent != self._accent:
            if self._library.espeak_SetVoiceByName(ACCENTS[accent]):
                raise FileNotFoundError(f"espeak-ng has no voice {ACCENTS[accent].decode()}")
            self._accent = accent
        parts = _MARKS.split(text)
        spoken = [
            part if place % 2 else self._of(part)
            for place, part in enumerate(parts)
            if part.strip()
        ]
        joined = " ".join(spoken)
        joined = re.sub(r" +([,.?!;:])", r"\1", joined)
        for old, new in _LETTERS:
            joined = joined.replace(old, new)
        return joined.strip()

    def _of(self, text: str) -> str:
        place = ctypes.c_char_p(text.encode())
        pointer = ctypes.pointer(place)
        found = []
        while place.value is not None:
            found.append(self._library.espeak_TextToPhonemes(pointer, _UTF8, _IPA).decode())
        return " ".join(piece.strip() for piece in found)
