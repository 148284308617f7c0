"""Making a voice: a sample of someone's speech becomes codes, mel and x-vector."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import soundfile
import torch

from mosstalk.audio.loudness import Jump, loudness_jump
from mosstalk.audio.sound import LOWEST_RATE, Recording, read_audio
from mosstalk.config import WEIGHTS_KIND_KEY
from mosstalk.constants import CODE_MS, INPUT_RATE
from mosstalk.errors import AudioError, OutputError, VoiceError
from mosstalk.files import require_target
from mosstalk.models.codec_folder import Codec
from mosstalk.models.features import FLOW_MEL, vocoder_mel
from mosstalk.models.voices import (
    CODEC_KEY,
    SUFFIX,
    X_VECTOR_FILE,
    Voice,
    require_packages,
    trimmed,
    x_vector,
)

SHORTEST_S = 1.0
LONGEST_S = 30.0
"""Every reply reads the whole voice, or its cache, so a longer one costs time at each."""
_ADVICE = "record 3 to 15 s of one person speaking"
_LONGEST_NAME_BYTES = 200


@dataclass(frozen=True)
class Sample:
    """A recording to make a voice from, at 16 kHz for the codes and 24 kHz for the mel."""

    path: Path
    heard: Recording
    spoken: Recording
    sha256: str


@dataclass(frozen=True)
class MadeVoice:
    """A new voice, and what its maker should know: a jump in the sample's loudness, or None."""

    voice: Voice
    sample: Sample
    jump: Jump | None


def read_sample(path: Path, *, channel: int | None = None) -> Sample:
    """Read a voice sample: any sound file of 1 to 30 s; ``channel`` (from 1) picks one.

    Raises:
        AudioError: shorter, longer, or nothing that ``read_audio`` takes.
    """
    seconds = _seconds_in_header(path)
    if seconds > LONGEST_S:
        raise AudioError(
            f"{path}: {seconds:.1f} s are too long for a voice, at most {LONGEST_S:.0f} s; "
            "cut it: every reply reads the whole voice, and 3 to 15 s are enough"
        )
    heard, spoken = (
        read_audio(path, rate, channel=channel, longest_s=LONGEST_S)
        for rate in (INPUT_RATE, FLOW_MEL.rate)
    )
    if heard.seconds < SHORTEST_S:
        raise AudioError(
            f"{path}: {heard.seconds:.2f} s of sound are too short for a voice; {_ADVICE}"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Sample(path, heard, spoken, digest)


def make_voice(codec: Codec, sample: Sample, name: str) -> MadeVoice:
    """Make a voice for ``codec``, cut to whole blocks of 5 codes.

    ``info`` says name, source file and its SHA-256, seconds kept, the codec's fingerprint and
    what kind of weights it has.

    Raises:
        VoiceError: a package is not installed, the codec's flow has another mel, or the
            x-vector is not finite.
        CheckpointError: the codec's ``flow/campplus.onnx`` is missing, damaged or foreign.
    """
    require_packages()
    flow = codec.flow.config
    if flow.mel_bins != FLOW_MEL.bins:
        raise VoiceError(
            f"{codec.folder}: its flow has {flow.mel_bins} mel bins; voices are made with "
            f"{FLOW_MEL.bins}"
        )
    samples = torch.from_numpy(sample.heard.samples)
    voice = trimmed(
        torch.tensor(codec.tokenizer.encode(samples)),
        vocoder_mel(torch.from_numpy(sample.spoken.samples)),
        x_vector(codec.folder / "flow" / X_VECTOR_FILE, sample.heard.samples, flow.spk_embed_dim),
        {},
    )
    weights = codec.tokenizer.config.extra.get(WEIGHTS_KIND_KEY, "unlabelled")
    info = {
        "name": name,
        "source": sample.path.name,
        "source_sha256": sample.sha256,
        "seconds": f"{len(voice.codes) * CODE_MS / 1000:.2f}",
        CODEC_KEY: codec.fingerprint,
        "weights": str(weights),
    }
    voice = replace(voice, info=info)
    return MadeVoice(voice, sample, loudness_jump(sample.heard.samples, INPUT_RATE))


def new_voice_path(name: str, folder: Path, out: Path | None, *, force: bool = False) -> Path:
    """Where a new voice goes: ``folder/NAME.safetensors``, or ``out``.

    Raises:
        OutputError: the name is no plain file name, ``out`` has another suffix or no folder,
            or something stands there already (a voice gives way to ``force``).
    """
    plain = bool(name) and Path(name).name == name and "\\" not in name
    if not plain or not name.isprintable() or name.startswith(".") or name.endswith(SUFFIX):
        raise OutputError(f"{name!r} is no name for a voice; give a plain one such as ada")
    path = out or folder / f"{name}{SUFFIX}"
    if path.suffix != SUFFIX:
        raise OutputError(f"{path}: a voice file's name ends in {SUFFIX}")
    if len(path.name.encode()) > _LONGEST_NAME_BYTES:
        raise OutputError(
            f"{path.name[:20]}...: a voice's name is too long; take at most "
            f"{_LONGEST_NAME_BYTES - len(SUFFIX)} bytes"
        )
    if out or path.parent.is_dir():
        require_target(path, replace=force)
    return path


def _seconds_in_header(path: Path) -> float:
    """The length that a file claims; 0 where it cannot be read, which ``read_audio`` explains."""
    try:
        info = soundfile.info(path) if path.is_file() else None
        return float(info.duration) if info and info.samplerate >= LOWEST_RATE else 0.0
    except (soundfile.LibsndfileError, OSError, TypeError):
        return 0.0
