"""``mosstalk voice``: what the commands do and print."""

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import CODE_MS
from mosstalk.errors import CheckpointError, OutputError, VoiceError
from mosstalk.files import as_text
from mosstalk.models.codec_folder import (
    STREAMING_FLOW,
    load_codec,
    read_fingerprint,
    read_flow_config,
)
from mosstalk.models.voices import (
    CODEC_KEY,
    SUFFIX,
    Voice,
    find_voice,
    list_voices,
    load_voice,
    save_voice,
)
from mosstalk.models.x_vector import X_VECTOR_FILE, require_packages
from mosstalk.offline.make_voice import MadeVoice, make_voice, new_voice_path, read_sample
from mosstalk.prepared.default_models import NAMES, chosen_codec, is_shipped, is_synthetic
from mosstalk.progress import loading
from mosstalk.runtime.device import pick_device
from mosstalk.synthesis.small_x_vector import write_x_vector_model

CONSENT = "a voice made from someone's speech needs that person's permission"
_FITS = {
    True: "this codec",
    False: "another codec, not this one: make it again",
    None: "it names no codec; its codes are in the range of this one",
}


@dataclass(frozen=True)
class CreateRequest:
    """Everything ``mosstalk voice create`` was asked for."""

    name: str
    sample: Path
    codec: Path | None
    out: Path | None
    channel: int | None
    device: str
    force: bool


def run_create(request: CreateRequest) -> None:
    """Make a voice, save it and print what it is; whatever can be refused early is."""
    folder = _codec_folder(request.codec)
    if request.out is None and is_shipped(folder):
        request = replace(request, out=Path(f"{request.name}{SUFFIX}"))
    path = new_voice_path(request.name, folder / "voices", request.out, force=request.force)
    sample = read_sample(request.sample, channel=request.channel)
    require_packages()
    device = pick_device(request.device)
    if is_synthetic(folder):
        _complete_synthetic(folder)
    with loading() as (status, tell):
        codec = load_codec(folder, device=device, progress=tell)
        status.update("making the voice")
        made = make_voice(codec, sample, request.name)
    if request.out is None:
        _make_folder(path.parent)
    save_voice(made.voice, path)
    _print_made(made, path)
    _print_use(request)


def _codec_folder(chosen: Path | None) -> Path:
    """The codec that was asked for, else the default model's."""
    folder = chosen_codec(chosen)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the codec's folder with --codec")
    return folder


def _complete_synthetic(folder: Path) -> None:
    """Add the x-vector model to a synthetic codec that was written before ``onnx`` was there."""
    path = folder / "flow" / X_VECTOR_FILE
    if not path.exists():
        size = read_flow_config(folder, STREAMING_FLOW).spk_embed_dim
        try:
            write_x_vector_model(path, size, seed=0)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror or error})") from None


def _print_made(made: MadeVoice, path: Path) -> None:
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


def _print_use(request: CreateRequest) -> None:
    codec = str(request.codec or "")
    named = (
        f"--model {codec} " if codec in NAMES else f"--model MODEL --codec {shlex.quote(codec)} "
    )
    where = named if codec else ""
    voice = shlex.quote(str(request.out or request.name))
    print(f"try: mosstalk chat {where}--text hello --voice {voice}")


class _VoiceReader:
    """Reads voices for a codec whose weights are not loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.voices = folder / "voices"
        self._speech = SpeechTokenizerConfig.from_folder(folder)
        self._flow = read_flow_config(folder, STREAMING_FLOW)

    @cached_property
    def fingerprint(self) -> str:
        return read_fingerprint(self.folder)

    def load(self, path: Path, *, of_any_codec: bool = False) -> Voice:
        return load_voice(
            path,
            code_limit=self._speech.quantize_vocab_size,
            mel_bins=self._flow.mel_bins,
            embedding_size=self._flow.spk_embed_dim,
            fingerprint=None if of_any_codec else lambda: self.fingerprint,
        )


def run_list(codec: Path | None, *, as_json: bool) -> None:
    """Print every voice of a codec; one that cannot be used is listed with the reason."""
    reader = _VoiceReader(_codec_folder(codec))
    lines = [_line(reader, name) for name in list_voices(reader.voices)]
    if as_json:
        document = {"folder": str(reader.voices), "codec": reader.fingerprint, "voices": lines}
        print(as_text(document), end="")
        return
    print(f"{reader.voices}: {len(lines)} voices")
    for line in lines:
        if "problem" in line:
            print(f"  {line['name']:<20} PROBLEM {line['problem']}")
        else:
            print(
                f"  {line['name']:<20} {line['codes']:4} codes {line['seconds']:6.2f} s  "
                f"{line['source'] or 'source not named'}"
            )


def _line(reader: _VoiceReader, name: str) -> dict[str, Any]:
    try:
        voice = reader.load(reader.voices / f"{name}{SUFFIX}")
    except VoiceError as error:
        return {"name": name, "problem": str(error)}
    source = voice.info.get("source")
    return {"name": name, "codes": len(voice.codes), "seconds": _seconds(voice), "source": source}


def _seconds(voice: Voice) -> float:
    return len(voice.codes) * CODE_MS / 1000


def run_inspect(name: str, codec: Path | None, *, as_json: bool) -> int:
    """Print what a voice holds; return 1 when it was made for another codec."""
    reader = _VoiceReader(_codec_folder(codec))
    path = find_voice(name, reader.voices)
    voice = reader.load(path, of_any_codec=True)
    made_for = voice.info.get(CODEC_KEY)
    fits = None if made_for is None else made_for == reader.fingerprint
    document = {
        "file": str(path),
        "shapes": {
            part: list(getattr(voice, part).shape) for part in ("codes", "mel", "embedding")
        },
        "seconds": _seconds(voice),
        "info": voice.info,
        "codec": reader.fingerprint,
        "fits": fits,
    }
    print(as_text(document), end="") if as_json else _print_facts(document)
    return 1 if fits is False else 0


def _print_facts(facts: dict[str, Any]) -> None:
    print(f"{facts['file']}: {facts['seconds']:.2f} s")
    for part, shape in facts["shapes"].items():
        print(f"  {part:<14} {shape}")
    for key, value in facts["info"].items():
        print(f"  {key:<14} {value}")
    print(f"  {'fits':<14} {_FITS[facts['fits']]} ({facts['codec']})")
