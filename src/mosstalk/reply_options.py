"""What may be asked of a reply: how it is drawn, how long it is, its script, and how it sounds.

Random weights never open or end a speech segment by themselves. A script such as
``speech:75`` makes them do so, to exercise the whole path at a known length: mode changes and
length are forced, every other draw is real; whatever is printed from such a run must say so.
Plain values, without torch.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from mosstalk.conversation import Mode, SpecialIds
from mosstalk.errors import OptionError, ScriptError


@dataclass(frozen=True)
class SamplingOptions:
    """How ids are drawn; the defaults are the public demo's. Temperature 0 is greedy."""

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
    repetition_penalty: float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise OptionError for values no distribution follows from."""
        if not 0 <= self.temperature < math.inf:
            raise OptionError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise OptionError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")


@dataclass(frozen=True)
class Limits:
    """How long a reply may be, in rows; ``min_new_rows`` holds eosp back, as published."""

    max_new_rows: int = 1024
    min_new_rows: int = 0

    def __post_init__(self) -> None:
        """Raise OptionError where no row could ever be generated."""
        if self.max_new_rows < 1:
            raise OptionError(f"max_new_rows must be at least 1, not {self.max_new_rows}")


SCRIPT_SYNTAX = "a script is parts 'speech:CODES' or 'text:TOKENS' joined by commas, e.g. speech:75"


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
        raise ScriptError(f"script part {part!r} is not understood; {SCRIPT_SYNTAX}")
    return modes[kind], int(length)


VOCODERS = ("hift", "bigvgan")
CONTEXT_S = 2.0
"""What a reply remembers of itself unless something else is asked for. At the published sizes that
is 227 MiB in 16 bit; with the pocket model replies of 11 s lost nothing that judges could hear
(docs/codec.md). Everything is kept where 0 is asked for."""


@dataclass(frozen=True)
class SoundRequest:
    """Choices of flow and vocoder; None leaves one to the device or the codec.

    ``context_s``: seconds of its own sound that a reply remembers besides its voice, 0 for all
    of it, None for ``CONTEXT_S``. ``steps``:
    Euler steps of the flow. ``dtype``: float32, float16 or bfloat16. ``memory_mib``: of a GPU,
    for voices and replies. ``graphs``: replay CUDA graphs. ``vocoder``: one of ``VOCODERS``;
    ``vocoder_folder`` holds BigVGAN's ``config.json`` and ``bigvgan_generator.pt``.

    Raises:
        OptionError: a vocoder that is unknown, or a folder too many or missing.
    """

    context_s: float | None = None
    steps: int | None = None
    dtype: str | None = None
    memory_mib: int | None = None
    graphs: bool = True
    vocoder: str = "hift"
    vocoder_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.vocoder not in VOCODERS:
            raise OptionError(f"--vocoder {self.vocoder}: choose of {', '.join(VOCODERS)}")
        if self.vocoder == "bigvgan" and self.vocoder_folder is None:
            raise OptionError(
                "--vocoder bigvgan needs --vocoder-dir: a folder with NVIDIA's config.json and "
                "bigvgan_generator.pt"
            )
        if self.vocoder == "hift" and self.vocoder_folder is not None:
            raise OptionError("--vocoder-dir belongs to --vocoder bigvgan")

    @property
    def plain(self) -> bool:
        """Whether nothing was asked for."""
        return self == SoundRequest()
