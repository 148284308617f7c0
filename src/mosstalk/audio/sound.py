"""Sound files in and out: anything libsndfile reads becomes 16 kHz mono, or a clear error."""

import io
import math
import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from mosstalk.constants import INPUT_RATE
from mosstalk.errors import AudioError, AudioWarning, OutputError
from mosstalk.files import require_target

Samples = npt.NDArray[np.float32]

SHORTEST_MS = 100
SILENCE_PEAK = 16 / 32768
"""Peak below which a recording is taken for silence: -66 dB of full scale."""
LOWEST_RATE, HIGHEST_RATE = 4_000, 768_000
"""Samples a second that sound files have; a header that claims others is wrong."""
MIXED_CHANNELS = 2
"""Up to this many channels are averaged; of more, the user must pick one."""

OUTPUT_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
}
WHOLE, SOON = "HQ", "QQ"
"""Qualities of soxr. The first is for what is kept: at 24 kHz it holds sound back for 21 ms, 37 at
most, at 8 kHz for 64, 115 at most. The second, a cubic curve, holds back nothing; it is good
enough to tell speech by."""
_BLOCK_FRAMES = 65536
_RIFF_SIZE_AT, _DATA_SIZE_AT = 4, 40
_LOUDEST_PEAK = 2.0**31
"""Float samples beyond any integer format's are no sound."""
_UNKNOWN_BYTES = 2**31 - 2**16
"""Recorders that stream cannot know the length, and claim about this or more."""
_CLAIMED_BYTES = re.compile(r"^\s*(?:data|SSND|Data Size)\s*: (\d+) \(should be (\d+)\)$", re.M)
"""What libsndfile notes of a wav, aiff or au file that is shorter than its header says."""
_UNKNOWN_FRAMES = 2**63 - 1
"""What libsndfile says of an Ogg file whose end it does not find."""
_LAST_PAGE = 4
"""Flag of the last page of an Ogg stream (RFC 3533)."""
_LONGEST_PAGE_BYTES = 65_307
_CONTEXT = "do not fit into the model's context, which holds"
_BOUND = "are longer than a file may be here:"
"""Why sound is too long."""


@dataclass(frozen=True, repr=False)
class Recording:
    """A recording as it was found, and its samples (n,) mono at ``rate`` Hz after resampling."""

    samples: Samples
    rate: int
    source_rate: int
    source_channels: int

    def __repr__(self) -> str:
        found = f"{self.source_rate} Hz, channels: {self.source_channels}"
        return f"<Recording: {self.seconds:.2f} s at {self.rate} Hz, was {found}>"

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return len(self.samples) / self.rate


def read_audio(
    path: Path | str,
    rate: int,
    *,
    channel: int | None = None,
    longest_s: float = math.inf,
    content: bytes | None = None,
) -> Recording:
    """Read a sound file as mono float samples at ``rate`` Hz.

    ``channel`` (from 1) picks one; otherwise mono and stereo are averaged. The length is
    checked against ``longest_s`` before anything is decoded. Of a file that was cut short, what
    is there is used, and an ``AudioWarning`` says so. With ``content``, a file's bytes, nothing is
    read from ``path``, which names them in messages.

    Raises:
        AudioError: not a sound file, damaged, of an impossible rate, empty, too short or long,
            silent, not finite, or with more than two channels and none picked.
    """
    path = Path(path)
    with _open(path, content) as (file, source):
        _check_header(path, file, channel, longest_s)
        blocks = list(_mono_blocks(path, file, channel, longest_s))
        samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
        source_rate, channels = file.samplerate, file.channels
        cut = _cut_short(source, file, len(samples))
    _check_sound(path, samples, source_rate)
    if cut:
        warnings.warn(f"{path}: {cut}", AudioWarning, stacklevel=2)
    resampled = resample(samples, source_rate, rate)
    return Recording(resampled, rate, source_rate, channels)


def audio_blocks(content: bytes, rate: int, longest_s: float) -> Iterator[Samples]:
    """Decode a sound file's bytes to mono float samples (n,) at ``rate`` Hz, block by block.

    No more than a block is held at a time. Joined, the blocks are the samples that ``read_audio``
    reads, be they silent or none. A file that was cut short is read as far as it goes.

    Raises:
        AudioError: no wav, flac, ogg or mp3; damaged, of an impossible rate, not finite, longer
            than ``longest_s``, or with more than two channels. What the header does not tell is
            told once it is met.
    """
    path = Path("file")
    _check_kind(content)
    with _open(path, content) as (file, _):
        if file.channels > MIXED_CHANNELS:
            raise AudioError(f"{path}: has {file.channels} channels; send mono or stereo")
        _check_header(path, file, None, longest_s, _BOUND)
        stream = soxr.ResampleStream(file.samplerate, rate, 1, "float32", "VHQ")
        for block in _mono_blocks(path, file, None, longest_s, _BOUND):
            if np.abs(block).max() > _LOUDEST_PEAK:
                raise AudioError(f"{path}: samples beyond {_LOUDEST_PEAK:.0e} are no sound")
            yield np.asarray(stream.resample_chunk(block), np.float32)
        yield np.asarray(stream.resample_chunk(np.zeros(0, np.float32), last=True), np.float32)


def _check_kind(content: bytes) -> None:
    """Refuse what is none of the kinds of file that are taken, before a decoder sees it."""
    wave = content[:4] in (b"RIFF", b"RF64") and content[8:12] == b"WAVE"
    frame = content[:1] == b"\xff" and content[1:2] >= b"\xe0"
    if wave or frame or content[:4] in (b"fLaC", b"OggS") or content[:3] == b"ID3":
        return
    known = "it is empty" if not content else "it is none of these"
    if content[:4] == b"\x1a\x45\xdf\xa3":
        known = "this is webm"
    elif content[4:8] == b"ftyp":
        known = "this is mp4 or m4a"
    raise AudioError(f"file: send wav, flac, ogg (Vorbis or Opus) or mp3; {known}")


def resample(samples: Samples, source_rate: int, rate: int) -> Samples:
    """Band-limited resampling (soxr, very high quality) of (n,) samples."""
    if source_rate == rate:
        return samples
    return np.asarray(soxr.resample(samples, source_rate, rate, quality="VHQ"), np.float32)


class Resampler:
    """A stream at ``rate`` Hz, which may change, to 16 kHz; the same samples however it is cut.

    They are those of ``soxr.resample`` with this ``quality`` on the whole stretch from one
    ``flush``, or change of the rate, to the next.
    """

    def __init__(self, rate: int, quality: str = WHOLE) -> None:
        self._quality = quality
        self._tune(rate)
        self._rest = np.zeros(0, np.float32)
        """What was held back of earlier rates, at 16 kHz."""

    def push(self, samples: Samples, rate: int | None = None) -> Samples:
        """What can be given after samples (n,) at ``rate`` Hz, or at the one before; more later."""
        if rate and rate != self.rate:
            self._rest = self.flush()
            self._tune(rate)
        if self._stream:
            samples = np.asarray(self._stream.resample_chunk(samples), np.float32)
        return self._after_rest(samples)

    def flush(self) -> Samples:
        """What was held back; what comes next begins anew."""
        rest = np.zeros(0, np.float32)
        if self._stream:
            rest = np.asarray(self._stream.resample_chunk(rest, last=True), np.float32)
        self._tune(self.rate)
        return self._after_rest(rest)

    def _tune(self, rate: int) -> None:
        self.rate, self._stream = rate, None
        if rate != INPUT_RATE:
            self._stream = soxr.ResampleStream(rate, INPUT_RATE, 1, "float32", self._quality)

    def _after_rest(self, samples: Samples) -> Samples:
        rest, self._rest = self._rest, np.zeros(0, np.float32)
        return np.concatenate([rest, samples]) if len(rest) else samples


@contextmanager
def _open(
    path: Path, content: bytes | None
) -> Iterator[tuple[soundfile.SoundFile, Path | io.BytesIO]]:
    """The sound file, and where its bytes can be read."""
    try:
        source = path if content is None else io.BytesIO(content)
        if source is path and not path.exists():
            raise AudioError(f"{path}: no such file")
        if source is path and not path.is_file():
            raise AudioError(f"{path}: not a file; give a sound file (wav, flac, ogg, mp3, ...)")
        if not (path.stat().st_size if content is None else content):
            raise AudioError(f"{path}: the file is empty (0 bytes); record it again")
        with soundfile.SoundFile(source) as file:
            yield file, source
    except (soundfile.LibsndfileError, TypeError) as error:
        reason = str(getattr(error, "error_string", error)).strip().rstrip(".")
        raise AudioError(
            f"{path}: not a readable sound file ({reason}); "
            "convert it to wav or flac, or export it again"
        ) from None
    except OSError as error:
        raise AudioError(f"{path}: cannot be read ({error.strerror or error})") from None


def _check_header(
    path: Path,
    file: soundfile.SoundFile,
    channel: int | None,
    longest_s: float,
    bound: str = _CONTEXT,
) -> None:
    if not LOWEST_RATE <= file.samplerate <= HIGHEST_RATE:
        raise AudioError(
            f"{path}: claims {file.samplerate} samples a second, and sound has {LOWEST_RATE} to "
            f"{HIGHEST_RATE}; export it again"
        )
    channels = file.channels
    if channel is not None and not 1 <= channel <= channels:
        raise AudioError(f"{path}: has {channels} channels; --channel {channel} is not one of them")
    if channel is None and channels > MIXED_CHANNELS:
        raise AudioError(
            f"{path}: has {channels} channels; say which one to hear with --channel 1..{channels}"
        )
    if file.frames < _UNKNOWN_FRAMES:
        _check_length(path, file.frames / file.samplerate, longest_s, bound)


def _check_length(path: Path, seconds: float, longest_s: float, bound: str) -> None:
    if seconds > longest_s:
        raise AudioError(
            f"{path}: {seconds:.0f} s of sound {bound} at most {longest_s:.0f} s; cut the recording"
        )


def _mono_blocks(
    path: Path,
    file: soundfile.SoundFile,
    channel: int | None,
    longest_s: float,
    bound: str = _CONTEXT,
) -> Iterator[Samples]:
    """Decode block by block, so that a wrong header cannot make us read without end."""
    frames = 0
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        bad = ~np.isfinite(block).all(axis=1)
        if bad.any():
            at = (frames + int(bad.argmax())) / file.samplerate
            raise AudioError(
                f"{path}: holds NaN or infinite samples (first at {at:.3f} s); export it again"
            )
        frames += len(block)
        _check_length(path, frames / file.samplerate, longest_s, bound)
        yield block.mean(axis=1) if channel is None else block[:, channel - 1].copy()


def _cut_short(source: Path | io.BytesIO, file: soundfile.SoundFile, frames: int) -> str | None:
    """Why a file of which ``frames`` were decoded is not whole; None if it may be."""
    there_s = frames / file.samplerate
    promised_s = there_s if file.frames >= _UNKNOWN_FRAMES else file.frames / file.samplerate
    if sizes := _CLAIMED_BYTES.search(file.extra_info):
        claimed, present = map(int, sizes.groups())
        if present and claimed < _UNKNOWN_BYTES:
            promised_s = there_s * claimed / present
    if promised_s - there_s > SHORTEST_MS / 1000:
        return (
            f"the file is cut short: its header promises {promised_s:.1f} s of sound, and the "
            f"{there_s:.1f} s that are there are used; fetch it again for the rest"
        )
    if file.format == "OGG" and not _has_last_page(source):
        return (
            f"the file is cut short: its last page is missing, and the {there_s:.1f} s that are "
            "there are used; fetch it again for the rest"
        )
    return None


def _has_last_page(source: Path | io.BytesIO) -> bool:
    with source.open("rb") if isinstance(source, Path) else source as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_PAGE_BYTES))
        end = file.read()
    page = end.rfind(b"OggS")
    return page >= 0 and len(end) > page + 5 and bool(end[page + 5] & _LAST_PAGE)


def _check_sound(path: Path, samples: Samples, rate: int) -> None:
    if len(samples) == 0:
        raise AudioError(f"{path}: holds no samples; record it again")
    length_ms = 1000 * len(samples) / rate
    if length_ms < SHORTEST_MS:
        raise AudioError(
            f"{path}: {length_ms:.0f} ms of sound is too short to be heard; "
            f"record at least {SHORTEST_MS} ms"
        )
    peak = float(np.abs(samples).max())
    if peak > _LOUDEST_PEAK:
        raise AudioError(f"{path}: samples up to {peak:.0e} are no sound; export it again")
    if peak < SILENCE_PEAK:
        raise AudioError(f"{path}: is silent (its peak is {_decibels(peak)}); check the microphone")


def _decibels(peak: float) -> str:
    return f"{20 * math.log10(peak):.0f} dB" if peak > 0 else "zero"


class AudioWriter:
    """Writes a sound file that grows: ``NAME.part`` until ``close`` renames it to its name.

    A file that stood under the name before stays as it was until then. ``discard`` deletes
    the part; ``abandon`` closes it and keeps it for the user. A growing wav can be played at
    any time, flac and ogg once they are closed.
    """

    def __init__(self, path: Path | str, rate: int) -> None:
        self.path = path = Path(path)
        self.part = path.with_name(path.name + ".part")
        file_format, subtype = output_format(path)
        try:
            self._file = soundfile.SoundFile(
                self.part, "w", rate, 1, format=file_format, subtype=subtype
            )
        except (soundfile.LibsndfileError, OSError) as error:
            raise OutputError(f"{self.part}: cannot be written ({error})") from None

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else f"grows as {self.part.name}"
        return f"<AudioWriter: {self.path}, {self._file.samplerate} Hz, {state}>"

    def write(self, samples: Samples) -> None:
        """Append mono samples (n,) in [-1, 1]; they are on disk when this returns."""
        try:
            self._file.write(samples)
            self._file.flush()
            self._update_header()
        except (soundfile.LibsndfileError, OSError) as error:
            raise OutputError(
                f"{self.part}: cannot be written ({error}); is the disk full?"
            ) from None

    def _update_header(self) -> None:
        """Put the length so far into a wav header, which libsndfile does at the end alone."""
        if self.path.suffix.lower() != ".wav":
            return
        with self.part.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for place, counted in ((_RIFF_SIZE_AT, size - 8), (_DATA_SIZE_AT, size - 44)):
                file.seek(place)
                file.write(counted.to_bytes(4, "little"))

    def close(self) -> None:
        """Finish the file and put it in place of what stood under its name."""
        self._file.close()
        self.part.replace(self.path)

    def abandon(self) -> Path:
        """Finish the part as a playable file without renaming it; return where it is."""
        self._file.close()
        return self.part

    def discard(self) -> None:
        """Delete the part."""
        self._file.close()
        self.part.unlink(missing_ok=True)


class WavStream:
    """Writes a wav to a pipe; its header claims 2 GiB, as those of recorders that stream do."""

    def __init__(self, stream: BinaryIO, rate: int) -> None:
        self._stream, self._rate = stream, rate
        stream.write(wav_header(rate, 2**31 - 2**12))

    def write(self, samples: Samples) -> None:
        """Append mono samples (n,) in [-1, 1]; they are in the pipe when this returns."""
        pcm = io.BytesIO()
        soundfile.write(pcm, samples, self._rate, "PCM_16", "LITTLE", format="RAW")
        self._stream.write(pcm.getvalue())
        self._stream.flush()


WAV_UNKNOWN = 2**32 - 1
"""The length in a wav's header that stands for none."""


def wav_header(rate: int, size: int) -> bytes:
    """The header of a wav with ``size`` bytes of mono int16."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    riff = struct.pack("<4sI4s", b"RIFF", min(size + 36, WAV_UNKNOWN), b"WAVE")
    return riff + form + struct.pack("<4sI", b"data", size)


def output_format(path: Path, *, replace: bool = True) -> tuple[str, str]:
    """libsndfile's format and subtype for an output file's suffix.

    Raises:
        OutputError: the suffix is none we write, the folder does not exist, or the file does and
            is not to be replaced.
    """
    found = OUTPUT_FORMATS.get(path.suffix.lower())
    if found is None:
        raise OutputError(f"{path}: write to one of {', '.join(OUTPUT_FORMATS)}")
    require_target(path, replace=replace)
    return found
