"""Conversations to learn from: read aloud, write down, and repeat, as grid rows, and their text's
own byte-pair vocabulary.

One flat tensor holds all rows; an example is a stretch of it. ``learned`` marks the rows of
replies: what the model is to produce from the row before.
"""

import json
import random
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from mosstalk.constants import MEL_FRAMES_PER_CODE
from mosstalk.conversation import (
    SYSTEM_PROMPTS,
    Conversation,
    Mode,
    Reply,
    Row,
    Segment,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    segment_rows,
)
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.offline.pipeline import SPEAK_PROMPT, TRANSCRIBE_PROMPT
from mosstalk.synthesis.small_parts import byte_alphabet, write_tokenizer
from recipes.pocket.corpus import normalised, sentences
from recipes.pocket.data import UNLABELLED, Recordings

_BARE = 0.15
"""Share of typed texts in lower case without marks, as people also type."""


@dataclass(frozen=True)
class Examples:
    """On the device ``rows`` (N, 2) int16, ``learned`` (N,) bool and ``phones`` (N, 4) uint8,
    which are those of a heard code's four frames, 255 elsewhere; stretches on the CPU.
    """

    rows: Tensor
    learned: Tensor
    phones: Tensor
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Numbers of the clips to learn from and of those to validate with."""

    learned: NDArray[np.int64]
    held_out: NDArray[np.int64]


def split_by_text(texts: list[str], share: float, seed: int) -> Split:
    """Hold out all clips of ``share`` of the texts.

    A clip that shares one sentence with them, in whatever voice, is in neither half: what is
    validated with was never read in training.
    """
    different = list(dict.fromkeys(map(normalised, texts)))
    count = max(1, round(len(different) * share))
    held = set(random.Random(seed).sample(different, count))
    said = frozenset[str]().union(*(sentences(text) for text in texts if normalised(text) in held))
    chosen = np.array([normalised(text) in held for text in texts])
    near = np.array([bool(sentences(text) & said) for text in texts])
    order = np.random.default_rng(seed).permutation(len(texts))
    return Split(order[~near[order]], order[chosen[order]])


class Example(NamedTuple):
    """One conversation: rows (n, 2), ``learned`` (n,), ``phones`` (n, 4) of what is heard."""

    rows: NDArray[np.int16]
    learned: NDArray[np.bool_]
    phones: NDArray[np.uint8]


@dataclass
class Maker:
    """Builds examples of clips, drawing tasks by ``draw``.

    ``hearings`` are codes of all of ``data``, the first as heard clean, the others in rooms.
    """

    data: Recordings
    hearings: list[NDArray[np.int16]]
    tokenizer: TextTokenizer
    ids: SpecialIds
    draw: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        data = self.data
        self.by_text = {data.texts[clip]: clip for clip in range(data.teacher_clips)}
        self.phones = data.labels.view(-1, MEL_FRAMES_PER_CODE).cpu().numpy()

    def turn(self, clip: int) -> tuple[str, Segment, Segment]:
        """A task for a clip: system prompt, what the user says, the reply."""
        data = self.data
        teacher = clip < data.teacher_clips
        kind = self.draw.random()
        if teacher and kind < 0.50:
            return SPEAK_PROMPT, self.typed(clip), self.spoken(clip)
        if teacher and kind < 0.56:
            return SYSTEM_PROMPTS["speech"], self.typed(clip), self.spoken(clip)
        original = self.by_text.get(data.texts[clip])
        if kind < (0.64 if teacher else 0.2) and original is not None:
            return SYSTEM_PROMPTS["speech"], self.heard(clip), self.spoken(original)
        if kind < (0.68 if teacher else 0.24):
            return SYSTEM_PROMPTS["text"], self.heard(clip), self.written(clip)
        if kind < (0.69 if teacher else 0.25):
            return SYSTEM_PROMPTS["text"], self.written(clip), self.written(clip)
        return TRANSCRIBE_PROMPT, self.heard(clip), self.written(clip)

    def typed(self, clip: int) -> TextSegment:
        """The clip's text, now and then without capitals and marks."""
        text = self.data.texts[clip]
        if self.draw.random() < _BARE:
            text = text.lower().rstrip(".?!")
        return self._text(text)

    def written(self, clip: int) -> TextSegment:
        """The clip's text as it stands."""
        return self._text(self.data.texts[clip])

    def spoken(self, clip: int) -> SpeechSegment:
        """The teacher's clean codes."""
        return self._codes(clip, 0)

    def heard(self, clip: int) -> SpeechSegment:
        """The clip as heard, clean or in one of its rooms."""
        return self._codes(clip, self.draw.randrange(len(self.hearings)))

    def _codes(self, clip: int, hearing: int) -> SpeechSegment:
        return SpeechSegment(tuple(self.hearings[hearing][self._place(clip)].tolist()))

    def _place(self, clip: int) -> slice:
        start = self.data.starts[clip]
        return slice(start, start + self.data.codes[clip])

    def _text(self, text: str) -> TextSegment:
        return TextSegment(tuple(self.tokenizer.encode(text)))

    def example(self, clips: list[int]) -> Example:
        """A conversation; all its turns have the first one's prompt."""
        conversation = Conversation(self.ids, self.tokenizer.encode)
        learned: list[bool] = []
        heard: list[int] = []
        first: str | None = None
        for clip in clips:
            prompt, user, segment = self.turn(clip)
            if first is None:
                first = prompt
                conversation.add_text("system", prompt)
            elif prompt != first:
                break
            heard += [clip] if isinstance(user, SpeechSegment) else []
            conversation.add_turn(Turn("user", (user,)))
            reply = self._reply(segment)
            conversation.open_reply(isinstance(segment, SpeechSegment))
            learned += [False] * (len(conversation.rows) - len(learned))
            learned += [True] * len(reply.rows)
            conversation.close_reply(reply)
        learned += [False] * (len(conversation.rows) - len(learned))
        return self._with_phones(conversation.rows, learned, heard)

    def _with_phones(self, grid: list[Row], learned: list[bool], heard: list[int]) -> Example:
        rows, marks = np.array(grid, dtype=np.int16), np.array(learned)
        codes = (rows[:, 0] == self.ids.modality_pad) & (rows[:, 1] < self.ids.eosp) & ~marks
        phones = np.full((len(rows), MEL_FRAMES_PER_CODE), UNLABELLED, dtype=np.uint8)
        if heard:
            phones[codes] = np.concatenate([self.phones[self._place(clip)] for clip in heard])
        return Example(rows, marks, phones)

    def _reply(self, segment: Segment) -> Reply:
        """The rows that the model is to generate after the reply's opening."""
        spoken = isinstance(segment, SpeechSegment)
        # A spoken reply is opened by the segment's own first row.
        rows = segment_rows(segment, self.ids)[spoken:]
        modes = [Mode.AUDIO if spoken else Mode.TEXT] * len(rows)
        return Reply([*rows, (self.ids.im_end, self.ids.audio_pad)], [*modes, Mode.TEXT])


_makers: list[Maker] = []
"""The maker of a worker process, which inherits it: sent with each job it would be copied."""


def _take(maker: Maker) -> None:
    _makers[:] = [maker]


def _build_some(clips: NDArray[np.int64], seed: int) -> tuple[Example, NDArray[np.int64]]:
    """Examples of ``clips`` joined to one, and their lengths."""
    (maker,) = _makers
    maker.draw = random.Random(seed)
    out: list[Example] = []
    for clip in clips.tolist():
        more = [int(maker.draw.choice(clips))] if maker.draw.random() < 0.33 else []
        out.append(maker.example([clip, *more]))
    lengths = np.array([len(one.rows) for one in out], dtype=np.int64)
    return Example(*map(np.concatenate, zip(*out, strict=True))), lengths


def build(
    maker: Maker, clips: NDArray[np.int64], device: torch.device, *, seed: int, workers: int = 1
) -> Examples:
    """One example for each clip, a third of them with a second turn of the same task."""
    chunks = np.array_split(clips, max(1, min(workers * 4, len(clips) // 50)))
    seeds = range(seed, seed + len(chunks))
    _take(maker)
    if workers == 1:
        built = list(map(_build_some, chunks, seeds))
    else:
        with ProcessPoolExecutor(workers, get_context("fork"), _take, (maker,)) as pool:
            built = list(pool.map(_build_some, chunks, seeds))
    rows, learned, phones = map(np.concatenate, zip(*(some for some, _ in built), strict=True))
    lengths = np.concatenate([lengths for _, lengths in built])
    return Examples(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(learned).to(device),
        torch.from_numpy(phones).to(device),
        np.concatenate([[0], lengths.cumsum()[:-1]]),
        lengths,
    )


def train_text_tokenizer(
    lines: Iterable[str], folder: Path, model: dict[str, Any]
) -> TextTokenizer:
    """Train on ``lines`` and write ``folder/tokenizer.json`` for ``model`` (its config)."""
    room = model["sosp_token_id"] - 3
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=byte_alphabet(), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(lines, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in learned["merges"]]
    alphabet = set(byte_alphabet())
    pieces = [token for token in learned["vocab"] if token not in alphabet]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, model, sorted(pieces, key=learned["vocab"].__getitem__), merges)
    return TextTokenizer.from_folder(folder, model["vocab_size"])
