"""``mosstalk voice``: making voices and looking at them."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument, add_command
from mosstalk.cli.options import argument, option
from mosstalk.constants import CODE_MS
from mosstalk.environment import this_command
from mosstalk.errors import CheckpointError, OutputError, VoiceError

if TYPE_CHECKING:
    from mosstalk.models.voices import Voice
    from mosstalk.offline.make_voice import MadeVoice

CONSENT = "a voice made from someone's speech needs that person's permission"
_FITS = {
    True: "this codec",
    False: "another codec, not this one: make it again",
    None: "it names no codec; its codes are in the range of this one",
}


@dataclass(frozen=True, eq=False, repr=False)
class Create:
    """Make a voice from a recording, for replies to be spoken in.

    mosstalk voice create ada sample.wav --codec MOSS-Speech-Codec

    mosstalk voice create ada sample.wav --out ada.safetensors

    mosstalk chat --text hello --voice ada.safetensors

    It becomes codes, mel and x-vector in CODEC/voices, and fits that codec
    alone. A codec that knows one voice, as pocket's does, is refused.

    Needs the extra "voices".

    A voice made from someone's speech needs that person's permission.
    """

    name: str = argument("The new voice's name, such as ada.")
    sample: Path = argument("1 to 30 s of one person speaking; best 3 to 15 s.")
    codec: opt.CodecAlone = None
    out: Path | None = option(
        None,
        "Write this .safetensors file instead of CODEC/voices/NAME. With the codec that "
        "ships with mosstalk: NAME.safetensors here.",
        "--out",
        "-o",
    )
    channel: opt.Channel = None
    device: opt.Device = "auto"
    force: opt.Force = False

    def run(self) -> None:
        """Make a voice, save it and print what it is; whatever can be refused early is."""
        from mosstalk.models.codec_folder import load_codec
        from mosstalk.models.voices import require_packages, save_voice
        from mosstalk.offline.make_voice import make_voice, new_voice_path, read_sample
        from mosstalk.prepared.default_models import is_synthetic
        from mosstalk.progress import loading
        from mosstalk.runtime.device import pick_device

        folder = _codec_folder(self.codec)
        _require_voices(folder)
        out = self._file(folder)
        path = new_voice_path(self.name, folder / "voices", out, force=self.force)
        sample = read_sample(self.sample, channel=self.channel)
        require_packages()
        device = pick_device(self.device)
        if is_synthetic(folder):
            _complete_synthetic(folder)
        with loading() as (status, tell):
            codec = load_codec(folder, device=device, progress=tell)
            status.update("making the voice")
            made = make_voice(codec, sample, self.name)
        if out is None:
            with _or_refused(path.parent, "made"):
                path.parent.mkdir(exist_ok=True)
        save_voice(made.voice, path)
        _print_made(made, path)
        self._print_use(str(out or self.name))

    def _file(self, folder: Path) -> Path | None:
        """The file to write; None for the codec's own folder of voices."""
        from mosstalk.models.voices import SUFFIX
        from mosstalk.prepared.default_models import is_shipped

        return Path(f"{self.name}{SUFFIX}") if not self.out and is_shipped(folder) else self.out

    def _print_use(self, voice: str) -> None:
        from mosstalk.prepared.default_models import NAMES

        codec = shlex.quote(str(self.codec or ""))
        where = f"--model {codec} " if codec in NAMES else f"--model MODEL --codec {codec} "
        where = where if self.codec else ""
        print(f"try: {this_command()} chat {where}--text hello --voice {shlex.quote(voice)}")


@dataclass(frozen=True, eq=False, repr=False)
class List(WritesDocument):
    """List a codec's voices: name, codes, seconds, and what each was made from.

    mosstalk voice list --codec MOSS-Speech-Codec
    """

    codec: opt.CodecAlone = None

    def run(self) -> None:
        """Print every voice of a codec; one that cannot be used is listed with the reason."""
        from mosstalk.models.voices import list_voices

        with self.printing():
            reader = _VoiceReader(_codec_folder(self.codec))
            voices = [_about(reader, name) for name in list_voices(reader.voices)]
        lines = [f"{reader.voices}: {len(voices)} voices", *map(_line, voices)]
        self.deliver(
            {"folder": str(reader.voices), "codec": reader.fingerprint, "voices": voices},
            "\n".join(lines) + "\n",
        )


@dataclass(frozen=True, eq=False, repr=False)
class Inspect(WritesDocument):
    """Say what a voice holds, and whether it fits the codec.

    mosstalk voice inspect ada

    Exit code 1: it was made for another codec. 2: it cannot be read.
    """

    voice: str = argument(
        "A voice, or a voice file.", metavar="NAME|FILE", autocompletion=opt.offered_voices
    )
    codec: opt.CodecAlone = None

    def run(self) -> int:
        """Print what a voice holds; 1 when it was made for another codec."""
        from mosstalk.models.voices import CODEC_KEY, find_voice

        with self.printing():
            reader = _VoiceReader(_codec_folder(self.codec))
            path = find_voice(self.voice, reader.voices)
            voice = reader.load(path, of_any_codec=True)
        made_for = voice.info.get(CODEC_KEY)
        fits = None if made_for is None else made_for == reader.fingerprint
        parts = ("codes", "mel", "embedding")
        shapes = {part: list(getattr(voice, part).shape) for part in parts}
        document = {
            "file": str(path),
            "shapes": shapes,
            "seconds": _seconds(voice),
            "info": voice.info,
            "codec": reader.fingerprint,
            "fits": fits,
        }
        facts = {**shapes, **voice.info, "fits": f"{_FITS[fits]} ({reader.fingerprint})"}
        lines = [f"{path}: {_seconds(voice):.2f} s"]
        lines += [f"  {name:<14} {value}" for name, value in facts.items()]
        self.deliver(document, "\n".join(lines) + "\n")
        return 1 if fits is False else 0


def _codec_folder(chosen: Path | None) -> Path:
    """The codec that was asked for, else the default model's."""
    from mosstalk.prepared.default_models import chosen_codec

    folder = chosen_codec(chosen)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the codec's folder with --codec")
    return folder


def _require_voices(folder: Path) -> None:
    """Refuse a codec whose flow was trained on one voice: a new one would change nothing."""
    from mosstalk.config import SpeechTokenizerConfig
    from mosstalk.models.codec_folder import ONE_VOICE_KEY

    if SpeechTokenizerConfig.from_folder(folder).extra.get(ONE_VOICE_KEY):
        raise VoiceError(
            f"{folder}: this codec knows one voice, and would speak with it whatever the sample; "
            "name another with --codec: MOSS-Speech's, or synthetic to try the command out"
        )


def _complete_synthetic(folder: Path) -> None:
    """Add the x-vector model to a synthetic codec that was written before ``onnx`` was there."""
    from mosstalk.models.codec_folder import STREAMING_FLOW, read_flow_config
    from mosstalk.models.voices import X_VECTOR_FILE
    from mosstalk.synthesis.small_parts import write_x_vector_model

    path = folder / "flow" / X_VECTOR_FILE
    if not path.exists():
        size = read_flow_config(folder, STREAMING_FLOW).spk_embed_dim
        with _or_refused(path, "written"):
            write_x_vector_model(path, size, seed=0)


@contextmanager
def _or_refused(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be {done} ({error.strerror or error})") from None


def _print_made(made: "MadeVoice", path: Path) -> None:
    from mosstalk.models.voices import CODEC_KEY

    voice, sample = made.voice, made.sample
    info, norm = voice.info, float(voice.embedding.norm())
    print(
        f"{info['name']}: {len(voice.codes)} codes = {info['seconds']} s of "
        f"{sample.heard.seconds:.2f} s -> {path}"
    )
    print(f"  mel        {list(voice.mel.shape)}, x-vector {len(voice.embedding)}, norm {norm:.3f}")
    print(
        f"  made from  {sample.path} ({sample.heard.source_rate} Hz, "
        f"{sample.heard.source_channels} ch), sha256 {sample.sha256}"
    )
    print(f"  made for   codec {info[CODEC_KEY]}, weights {info['weights']}")
    if made.jump:
        print(
            f"  note       the speech is {made.jump.decibels:.0f} dB louder around "
            f"{made.jump.loud_s:.1f} s than around {made.jump.quiet_s:.1f} s: if that is another "
            "person or a moved microphone, cut the sample there"
        )
    print(f"  consent    {CONSENT}")


class _VoiceReader:
    """Reads voices for a codec whose weights are not loaded."""

    def __init__(self, folder: Path) -> None:
        from mosstalk.config import SpeechTokenizerConfig
        from mosstalk.models.codec_folder import STREAMING_FLOW, read_flow_config

        self.folder = folder
        self.voices = folder / "voices"
        self._speech = SpeechTokenizerConfig.from_folder(folder)
        self._flow = read_flow_config(folder, STREAMING_FLOW)

    @cached_property
    def fingerprint(self) -> str:
        from mosstalk.models.codec_folder import read_fingerprint

        return read_fingerprint(self.folder)

    def load(self, path: Path, *, of_any_codec: bool = False) -> "Voice":
        from mosstalk.models.voices import load_voice

        return load_voice(
            path,
            code_limit=self._speech.quantize_vocab_size,
            mel_bins=self._flow.mel_bins,
            embedding_size=self._flow.spk_embed_dim,
            fingerprint=None if of_any_codec else lambda: self.fingerprint,
        )


def _about(reader: _VoiceReader, name: str) -> dict[str, Any]:
    """What a codec's voice is, or why it cannot be used."""
    from mosstalk.models.voices import SUFFIX

    try:
        voice = reader.load(reader.voices / f"{name}{SUFFIX}")
    except VoiceError as error:
        return {"name": name, "problem": str(error)}
    source = voice.info.get("source")
    return {"name": name, "codes": len(voice.codes), "seconds": _seconds(voice), "source": source}


def _line(voice: dict[str, Any]) -> str:
    if "problem" in voice:
        return f"  {voice['name']:<20} PROBLEM {voice['problem']}"
    source = voice["source"] or "source not named"
    return f"  {voice['name']:<20} {voice['codes']:4} codes {voice['seconds']:6.2f} s  {source}"


def _seconds(voice: "Voice") -> float:
    return len(voice.codes) * CODE_MS / 1000


app = typer.Typer(help="Make voices from recordings, and look at them.", no_args_is_help=True)
add_command(app, "create", Create)
add_command(app, "list", List)
add_command(app, "inspect", Inspect)
