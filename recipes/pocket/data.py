"""The data stage: text read by all voices into shards, and these on the training device.

Every clip is a whole number of codes long. All sound of one rate is one long tensor and clips
follow one another in it; a clip's place is counted in codes, from which samples (1280 or 1920), mel
frames (4) and labels follow.
"""

import json
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.constants import (
    INPUT_SAMPLES_PER_CODE,
    MEL_FRAME_SAMPLES,
    MEL_FRAMES_PER_CODE,
    OUTPUT_RATE,
    OUTPUT_SAMPLES_PER_CODE,
    codes_in,
)
from recipes.pocket.corpus import Sources, load_sources, texts
from recipes.pocket.voices import LISTENED, TEACHER, Clip, Programs, speak

FRAME_SECONDS = MEL_FRAME_SAMPLES / OUTPUT_RATE
_PHONES = (
    "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t "
    "th uh uw v w y z zh axr ix el em en dx nx"
)
PHONES = tuple(_PHONES.split())
"""Radio phones as flite and festival name them, silence first."""
UNLABELLED = 255
_FRAME_SAMPLES = INPUT_SAMPLES_PER_CODE // MEL_FRAMES_PER_CODE
_QUIET = 1e-4
"""Of the loudest frame's power."""
_BATCH = {"slt_hts": 50, "kal_diphone": 50, "ked_diphone": 50}
_DEFAULT_BATCH = 100
SHARES = {
    "slt_hts": 0.08,
    "slt": 0.15,
    "rms": 0.17,
    "kal16": 0.15,
    "awb": 0.15,
    "kal_diphone": 0.10,
    "espeak": 0.20,
}
"""Share of the texts that each voice reads."""
_SAME_TEXTS = ("slt_hts", "slt", "rms", "kal16")
"""These read from one list, so that pairs of voices for the same words exist."""
_IDS = {name: index for index, name in enumerate(PHONES)}


@dataclass(frozen=True)
class Spoken:
    """The teacher's sound at 24 kHz, clips end to end, on the device that trains.

    ``waves`` int16 (n,); ``starts`` and ``lengths`` (clips,) int64 in samples, multiples of 480.
    """

    waves: Tensor
    starts: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Recordings:
    """Clips: teacher's first. Tensors are on the training device, tables on the CPU.

    ``heard`` int16 at 16 kHz; ``labels`` uint8 per 20 ms, 255 where unknown; ``voices`` uint8
    per code; ``starts`` and ``codes`` (n,) int64 in codes; ``spoken`` int16 at 24 kHz covers
    the first ``teacher_clips`` clips, at 1920 samples for each of their codes. ``shards`` are
    the names of the shards in this order, with the codes that each has.
    """

    heard: Tensor
    labels: Tensor
    voices: Tensor
    starts: NDArray[np.int64]
    codes: NDArray[np.int64]
    texts: list[str]
    clip_voices: list[str]
    spoken: Tensor
    teacher_clips: int
    shards: dict[str, int]

    @property
    def teacher_codes(self) -> int:
        """Codes of the teacher's clips, which come first."""
        return int(self.codes[: self.teacher_clips].sum())

    def spoken_clips(self) -> Spoken:
        """The teacher's clips as the vocoder's training wants them."""
        size = OUTPUT_SAMPLES_PER_CODE
        places, lengths = self.starts[: self.teacher_clips], self.codes[: self.teacher_clips]
        device = self.spoken.device
        return Spoken(
            self.spoken,
            torch.as_tensor(places * size, device=device),
            torch.as_tensor(lengths * size, device=device),
        )


def side_by_side(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    device: torch.device,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Places (B, width) of stretches of a flat tensor, and whether each is inside its own.

    Past a stretch's end the place is 0. The longest is the ``width`` where none is given.
    """
    offsets = torch.arange(width or int(lengths.max()), device=device)
    inside = offsets < torch.as_tensor(lengths, device=device)[:, None]
    places = torch.as_tensor(starts, device=device)[:, None] + offsets
    return torch.where(inside, places, 0), inside


def padded_sound(waves: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
    """Stretches of int16 sound as floats (B, longest), zero past each one's end."""
    places, inside = side_by_side(starts, lengths, waves.device)
    return torch.where(inside, waves[places].float() / 32768, 0.0)


def length_batches(codes: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Clip numbers in groups of like length, at most ``most`` codes each with padding."""
    order = np.argsort(codes, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        full = end == len(order) or (end + 1 - start) * codes[order[end]] > most
        if full:
            yield order[start:end]
            start = end


def load_recordings(
    folder: Path,
    device: torch.device,
    parts: Iterable[int],
    sound: Container[str] = ("heard", "spoken"),
) -> Recordings:
    """Read the finished shards of ``parts``; raise FileNotFoundError where there are none.

    Those of the teacher come first. Only the ``sound`` that is named is read; the rest stays empty.
    """
    wanted = set(parts)
    tables = sorted(path for path in folder.glob("*.json") if int(path.name[:2]) in wanted)
    ordered = [table for name in LISTENED for table in tables if _voice(table) == name]
    if not ordered:
        raise FileNotFoundError(f"{folder}: no finished shards of parts {sorted(wanted)}")
    return _read_shards(ordered, device, sound)


def _read_shards(tables: list[Path], device: torch.device, sound: Container[str]) -> Recordings:
    """The clips of shards in this order, the teacher's first."""
    shards = [_read_shard(path, sound) for path in tables]
    rows = [row for shard in shards for row in shard.rows]
    codes = np.array([row["codes"] for row in rows], dtype=np.int64)
    names = [row["voice"] for row in rows]
    return Recordings(
        heard=_joined([s.heard for s in shards if s.heard is not None], device),
        labels=_joined([shard.labels for shard in shards], device),
        voices=torch.as_tensor(
            np.repeat([LISTENED.index(n) if n in LISTENED else 0 for n in names], codes),
            dtype=torch.uint8,
        ).to(device),
        starts=np.concatenate([[0], codes.cumsum()[:-1]]),
        codes=codes,
        texts=[row["text"] for row in rows],
        clip_voices=names,
        spoken=_joined([s.spoken for s in shards if s.spoken is not None], device),
        teacher_clips=sum(name == TEACHER for name in names),
        shards={
            path.stem: sum(row["codes"] for row in shard.rows)
            for path, shard in zip(tables, shards, strict=True)
        },
    )


@dataclass(frozen=True)
class TeacherClip:
    """One text read by the teacher: ``heard`` int16 at 16 kHz, ``spoken`` int16 at 24 kHz."""

    text: str
    voice: str
    heard: Tensor
    spoken: Tensor


def teacher_clip(folder: Path, codes: int) -> TeacherClip:
    """The teacher's first clip of at least ``codes`` codes, else the longest of the first shard.

    Raises FileNotFoundError where there is no shard of the teacher's.
    """
    tables = sorted(path for path in folder.glob("*.json") if _voice(path) == TEACHER)
    if not tables:
        raise FileNotFoundError(f"{folder}: no finished shard of {TEACHER}")
    data = _read_shards(tables[:1], torch.device("cpu"), ("heard", "spoken"))
    chosen = int(data.codes.clip(max=codes).argmax())
    place = torch.arange(data.codes[chosen]) + int(data.starts[chosen])
    return TeacherClip(
        data.texts[chosen],
        data.clip_voices[chosen],
        data.heard.view(-1, INPUT_SAMPLES_PER_CODE)[place].flatten(),
        data.spoken.view(-1, OUTPUT_SAMPLES_PER_CODE)[place].flatten(),
    )


@dataclass(frozen=True)
class _Shard:
    rows: list[dict[str, Any]]
    heard: NDArray[np.int16] | None
    labels: NDArray[np.uint8]
    spoken: NDArray[np.int16] | None


def _voice(table: Path) -> str:
    return table.stem.split("-", 1)[1].rsplit("-", 1)[0]


def _joined(pieces: list[NDArray[Any]], device: torch.device) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=torch.int16, device=device)
    return torch.from_numpy(np.concatenate(pieces)).to(device)


def _read_shard(table: Path, sound: Container[str]) -> _Shard:
    rows = json.loads(table.read_text())
    for row in rows:
        row["codes"] = codes_in(row["length"])

    def read(name: str, suffix: str, length: str, per_code: int) -> NDArray[np.int16] | None:
        path = table.with_suffix(suffix)
        if name not in sound or not path.exists():
            return None
        return _padded(np.load(path), [row[length] for row in rows], rows, per_code)

    return _Shard(
        rows,
        read("heard", ".16k.npy", "length", INPUT_SAMPLES_PER_CODE),
        np.load(table.with_suffix(".labels.npy")),
        read("spoken", ".24k.npy", "length24", OUTPUT_SAMPLES_PER_CODE),
    )


def _padded(
    sound: NDArray[np.int16], lengths: list[int], rows: list[dict[str, Any]], per_code: int
) -> NDArray[np.int16]:
    """Every clip with zeros (or cut by rounding) to its whole number of codes."""
    clips = np.split(sound, np.cumsum(lengths)[:-1])
    out = [np.zeros(row["codes"] * per_code, dtype=np.int16) for row in rows]
    for target, clip in zip(out, clips, strict=True):
        count = min(len(target), len(clip))
        target[:count] = clip[:count]
    return np.concatenate(out)


def frames_later(hearing: int) -> int:
    """Frames of 20 ms by which the teacher begins later in a hearing: each fits the codes' grid of
    80 ms in another way, so that one clip has four sequences of codes.
    """
    return hearing % MEL_FRAMES_PER_CODE


def frame_labels(phones: Sequence[tuple[str, float]], codes: int) -> NDArray[np.uint8]:
    """The phone at the middle of every 20 ms, silence after the last; 255 without phones."""
    frames = codes * MEL_FRAMES_PER_CODE
    if not phones:
        return np.full(frames, UNLABELLED, dtype=np.uint8)
    ends = np.array([end for _, end in phones])
    ids = np.array([*(_IDS.get(_plain(name), UNLABELLED) for name, _ in phones), 0], dtype=np.uint8)
    middles = (np.arange(frames) + 0.5) * FRAME_SECONDS
    return ids[np.searchsorted(ends, middles, side="right")]


def until_quiet(labels: NDArray[np.uint8], heard: NDArray[np.int16]) -> NDArray[np.uint8]:
    """Labels of a clip, silence after the last 20 ms within 40 dB of the loudest.

    A synthesiser counts to its last phone what is quiet after it, some 200 ms: of such codes the
    last are anyone's guess, and a guess can be heard.
    """
    frames = np.zeros(len(labels) * _FRAME_SAMPLES, dtype=np.float32)
    frames[: len(heard)] = heard
    level = np.square(frames.reshape(len(labels), -1)).mean(axis=1)
    loud = np.flatnonzero(level > _QUIET * level.max())
    quiet = loud[-1] + 1 if len(loud) else 0
    return np.concatenate([labels[:quiet], np.full(len(labels) - quiet, _IDS["pau"], np.uint8)])


def _labels_of(clip: Clip) -> NDArray[np.uint8]:
    labels = frame_labels(clip.phones, codes_in(len(clip.heard)))
    return until_quiet(labels, clip.heard) if clip.phones else labels


def _plain(name: str) -> str:
    return {"#": "pau", "h#": "pau", "ssil": "pau", "brth": "pau", "hv": "hh"}.get(name, name)


@dataclass(frozen=True)
class Job:
    """One shard to make."""

    part: int
    index: int
    voice: str
    texts: tuple[str, ...]
    speech_root: Path
    folder: Path

    @property
    def stem(self) -> Path:
        """Path of the shard without suffix."""
        return self.folder / f"{self.part:02}-{self.voice}-{self.index:05}"


def jobs(sources: Sources, part: int, count: int, speech_root: Path, out: Path) -> Iterator[Job]:
    """Jobs for ``count`` texts of one part, voices in turn so that any beginning is a mix."""
    waiting: list[tuple[float, Job]] = []
    for number, (voice, share) in enumerate(SHARES.items()):
        seed = 1000 * part + (0 if voice in _SAME_TEXTS else number)
        lines = texts(sources, seed)
        batch = _BATCH.get(voice, _DEFAULT_BATCH)
        shards = max(1, round(count * share / batch))
        for index in range(shards):
            job = Job(part, index, voice, tuple(islice(lines, batch)), speech_root, out)
            waiting.append(((index + 0.5) / shards, job))
    return (job for _, job in sorted(waiting, key=lambda item: item[0]))


def make_shard(job: Job) -> tuple[int, float]:
    """Write one shard unless it is there; return clips and seconds of sound."""
    table = job.stem.with_suffix(".json")
    if not table.exists():
        with tempfile.TemporaryDirectory() as scratch:
            programs = Programs.under(job.speech_root)
            seed = 1000 * job.part + job.index
            clips = speak(programs, job.voice, list(job.texts), Path(scratch), seed)
        write_shard(job.stem, clips)
    lengths = [row["length"] for row in json.loads(table.read_text())]
    return len(lengths), sum(lengths) / 16_000


def write_shard(stem: Path, clips: list[Clip]) -> None:
    """Write ``stem``.16k.npy, .24k.npy for the teacher, .labels.npy and .json.

    Sound is one array per rate, labels one for each 20 ms; the table goes last, so a shard with
    a table is whole.
    """
    rows = [
        {
            "text": clip.text,
            "voice": clip.voice,
            "length": len(clip.heard),
            "length24": 0 if clip.spoken is None else len(clip.spoken),
        }
        for clip in clips
    ]
    np.save(f"{stem}.16k.npy", np.concatenate([clip.heard for clip in clips]))
    np.save(f"{stem}.labels.npy", np.concatenate([_labels_of(clip) for clip in clips]))
    spoken = [clip.spoken for clip in clips if clip.spoken is not None]
    if spoken:
        np.save(f"{stem}.24k.npy", np.concatenate(spoken))
    part = stem.with_suffix(".part")
    part.write_text(json.dumps(rows))
    part.rename(stem.with_suffix(".json"))


def make_data(
    out: Path, wordnet: Path, speech_root: Path, *, part: int, count: int, workers: int
) -> None:
    """Make one part: ``count`` texts, each read by one voice; again does only what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    work = list(jobs(load_sources(wordnet), part, count, speech_root, out))
    started, clips, seconds = time.monotonic(), 0, 0.0
    with ProcessPoolExecutor(workers) as pool:
        running = [pool.submit(make_shard, job) for job in work]
        for done, future in enumerate(as_completed(running), 1):
            new_clips, new_seconds = future.result()
            clips, seconds = clips + new_clips, seconds + new_seconds
            if done % 50 == 0 or done == len(work):
                took = time.monotonic() - started
                print(
                    f"data part {part}  {done}/{len(work)} shards  {clips} clips  "
                    f"{seconds / 3600:.2f} h of sound in {took:.0f} s",
                    flush=True,
                )
