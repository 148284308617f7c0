"""Options of the commands that have a model reply; what they do with it is ``reply_run``."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mosstalk.cli import options as opt
from mosstalk.cli.command import STANDARD, WritesDocument
from mosstalk.cli.options import option
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.reply_options import SoundRequest

STDOUT = Path(STANDARD)
_REPLIES = "system temperature top_k top_p repetition_penalty seed max_rows script"
_MODEL = "model codec device dtype vocoder vocoder_dir"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DrawsReplies(WritesDocument):
    """A command that draws replies with a model.

    ``panels``: in which box of the help an option stands that few need, below the others.
    """

    panels: ClassVar[dict[str, str]] = (
        dict.fromkeys(_MODEL.split(), "Model and machine")
        | dict.fromkeys(_REPLIES.split(), "Replies")
        | dict.fromkeys(("stats", "trace"), "Figures")
    )
    model: opt.Model = None
    codec: opt.Codec = None
    system: str | None = option(None, "System prompt; '' for none. Default: this command's.")
    temperature: float | None = option(
        None,
        "Of the sampling; 0 is greedy. Default: the checkpoint's, else 0.6.",
    )
    top_k: int | None = option(
        None, "Sample from the K likeliest tokens; 0 is off. Default: the checkpoint's, else 20."
    )
    top_p: float | None = option(
        None,
        "Nucleus sampling of probability P; 1 is off. Default: the checkpoint's, else 0.95.",
    )
    repetition_penalty: float | None = option(
        None, "Against tokens drawn before; 1 is off. Default: the checkpoint's, else 1.1."
    )
    seed: opt.Seed = 0
    max_rows: int | None = option(
        None,
        "Longest reply in rows, of 80 ms of speech or a text token. Default: the checkpoint's, "
        "else 1024.",
    )
    script: opt.ReplyScript = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    stats: bool = option(
        False,
        "Also show how replies ended, the time of every stage and to the first sound, the "
        "real-time factor and the peak memory.",
    )
    trace: Path | None = option(
        None,
        "Write the time of every stage run as a Chrome trace, for ui.perfetto.dev.",
    )

    def __post_init__(self) -> None:
        """Refuse what can be refused before a model is read."""
        if self.max_rows is not None and self.max_rows < 1:
            raise OptionError(f"--max-rows must be at least 1, not {self.max_rows}")

    def outputs(self) -> list[Path]:
        """The files that the command is to write, its sound apart."""
        return [*super().outputs(), *([self.trace] if self.trace else [])]

    def sound_request(self) -> "SoundRequest":
        """How sound is made of codes."""
        from mosstalk.reply_options import SoundRequest

        return SoundRequest()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SpeaksReplies(DrawsReplies):
    """A command whose replies are spoken.

    ``usual_out``: where the sound goes unless ``out`` says; with a number where that exists.
    """

    usual_out: ClassVar[Path]
    out: Path | None = option(
        None,
        "Where the sound goes: .wav, .flac or .ogg; - is stdout, as wav. Of several "
        "answers each has a number in its name. Default: a new file in this folder.",
        "--out",
        "-o",
        metavar="FILE|-",
    )
    voice: opt.VoiceName = "default"
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None

    def takes_stdout(self) -> bool:
        """Whether stdout is kept for a document or for sound."""
        spoken = self.out == STDOUT
        if spoken and super().takes_stdout():
            raise OptionError("--out - and --json - both want stdout; give one of them a file")
        return spoken or super().takes_stdout()

    def sounds(self, count: int = 1, *, replace: bool = False) -> list[Path]:
        """Where the sound of so many answers goes.

        Raises:
            OptionError: they are several, and ``out`` is stdout.
            OutputError: ``out`` cannot be written; or exists, without ``--force`` or ``replace``.
        """
        from mosstalk.audio.sound import output_format

        if self.out is None:
            stem = self.usual_out.stem
            names = (self.usual_out.with_stem(f"{stem}-{n}") for n in itertools.count(2))
            choices = (_numbered(name, count) for name in itertools.chain([self.usual_out], names))
            return next(
                paths for paths in choices if self.force or not any(map(Path.exists, paths))
            )
        if self.out == STDOUT:
            if count > 1:
                raise OptionError("--out - takes one answer; give one turn, or a file for each")
            return [STDOUT]
        paths = _numbered(self.out, count)
        for path in paths:
            output_format(path, replace=self.force or replace)
        return paths

    def sound_request(self) -> "SoundRequest":
        """How sound is made of codes."""
        from mosstalk.reply_options import SoundRequest

        return SoundRequest(vocoder=self.vocoder, vocoder_folder=self.vocoder_dir)


def _numbered(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]
