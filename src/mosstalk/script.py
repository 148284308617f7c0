"""Scripted replies: mode changes and length forced, every other draw real.

Random weights never open or end a speech segment by themselves. A script such as
``speech:75`` makes them do so, to exercise the whole path at a known length; whatever is
printed from such a run must say so.
"""

from dataclasses import dataclass, field

from mosstalk.conversation import Mode, SpecialIds
from mosstalk.errors import ScriptError

SYNTAX = "a script is parts 'speech:CODES' or 'text:TOKENS' joined by commas, e.g. speech:75"


@dataclass(frozen=True)
class StepRule:
    """What a script imposes on one step: a forced id, or ids that may not be drawn."""

    text: int | None = None
    audio: int | None = None
    never_text: frozenset[int] = field(default_factory=frozenset)
    never_audio: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Script:
    """Parts of a reply, each a mode with its length in codes or text tokens."""

    parts: tuple[tuple[Mode, int], ...]

    @classmethod
    def parse(cls, text: str) -> "Script":
        """Parse ``speech:75`` or ``text:8,speech:20``; raise ScriptError with the syntax."""
        return cls(tuple(_parse_part(part) for part in text.split(",")))

    def __str__(self) -> str:
        """The script as it is typed."""
        names = {Mode.AUDIO: "speech", Mode.TEXT: "text"}
        return ",".join(f"{names[mode]}:{length}" for mode, length in self.parts)

    def rules(self, first_mode: Mode, ids: SpecialIds) -> list[StepRule]:
        """One rule per step, from the mode of the first one to the ``<|im_end|>`` row."""
        plain_text = StepRule(never_text=ids.stop | {ids.sosp, ids.modality_pad})
        plain_code = StepRule(never_audio=frozenset((ids.eosp,)))
        open_speech = StepRule(text=ids.sosp, never_audio=frozenset((ids.eosp,)))
        close_speech = StepRule(audio=ids.eosp)
        rules: list[StepRule] = []
        mode = first_mode
        for wanted, length in self.parts:
            if mode is not wanted:
                rules.append(open_speech if wanted is Mode.AUDIO else close_speech)
            rules += [plain_code if wanted is Mode.AUDIO else plain_text] * length
            mode = wanted
        if mode is Mode.AUDIO:
            rules.append(close_speech)
        return [*rules, StepRule(text=ids.im_end)]


def _parse_part(part: str) -> tuple[Mode, int]:
    kind, _, length = part.strip().partition(":")
    modes = {"speech": Mode.AUDIO, "text": Mode.TEXT}
    if kind not in modes or not length.isdecimal() or int(length) < 1:
        raise ScriptError(f"script part {part!r} is not understood; {SYNTAX}")
    return modes[kind], int(length)
