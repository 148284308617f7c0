"""The data stage: text read by all voices on every core, into shards that training reads."""

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from recipes.pocket.corpus import Sources, load_sources, texts
from recipes.pocket.data import codes_of, frame_labels
from recipes.pocket.voices import TEACHER, Clip, Programs, speak

_BATCH = {TEACHER: 50, "kal_diphone": 50, "ked_diphone": 50}
_DEFAULT_BATCH = 100
SHARES = {
    TEACHER: 0.38,
    "slt": 0.10,
    "rms": 0.11,
    "kal16": 0.10,
    "awb": 0.10,
    "kal_diphone": 0.08,
    "espeak": 0.13,
}
"""Share of the texts that each voice reads."""
_SAME_TEXTS = (TEACHER, "slt", "rms", "kal16")
"""These read from one list, so that pairs of voices for the same words exist."""


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
    labels = [frame_labels(clip.phones, codes_of(len(clip.heard))) for clip in clips]
    np.save(f"{stem}.labels.npy", np.concatenate(labels))
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
