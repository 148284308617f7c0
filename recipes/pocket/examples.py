"""Conversations to learn from: read aloud, write down, and repeat, as grid rows.

One flat tensor holds all rows; an example is a stretch of it. ``learned`` marks the rows of
replies: what the model is to produce from the row before.
"""

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
class Corpus:
    """Clips' texts and codes: ``clean`` and several ``noisy`` hearings, in the data's order.

    ``phones`` (codes, 4) uint8 are what is said in each code.
    """

    texts: list[str]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    teacher_clips: int
    clean: NDArray[np.int16]
    noisy: list[NDArray[np.int16]]
    phones: NDArray[np.uint8]

    @classmethod
    def of(cls, data: Recordings, hearings: list[NDArray[np.int16]]) -> "Corpus":
        """The tables of ``data`` with its codes, the first hearing being the clean one."""
        clean, *noisy = hearings
        phones = data.labels.view(-1, MEL_FRAMES_PER_CODE).cpu().numpy()
        return cls(data.texts, data.starts, data.codes, data.teacher_clips, clean, noisy, phones)

    def codes(self, clip: int, hearing: int | None = None) -> tuple[int, ...]:
        """Codes of a clip, clean or as heard the ``hearing``-th time."""
        source = self.clean if hearing is None else self.noisy[hearing]
        return tuple(source[self._place(clip)].tolist())

    def said(self, clip: int) -> NDArray[np.uint8]:
        """Phones (codes, 4) of a clip."""
        return self.phones[self._place(clip)]

    def _place(self, clip: int) -> slice:
        return slice(self.starts[clip], self.starts[clip] + self.counts[clip])


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
    """Builds examples from a corpus, drawing tasks by ``draw``."""

    corpus: Corpus
    tokenizer: TextTokenizer
    ids: SpecialIds
    draw: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        data = self.corpus
        self.by_text = {data.texts[clip]: clip for clip in range(data.teacher_clips)}

    def turn(self, clip: int) -> tuple[str, Segment, Segment]:
        """A task for a clip: system prompt, what the user says, the reply."""
        data = self.corpus
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
        text = self.corpus.texts[clip]
        if self.draw.random() < _BARE:
            text = text.lower().rstrip(".?!")
        return self._text(text)

    def written(self, clip: int) -> TextSegment:
        """The clip's text as it stands."""
        return self._text(self.corpus.texts[clip])

    def spoken(self, clip: int) -> SpeechSegment:
        """The teacher's clean codes."""
        return SpeechSegment(self.corpus.codes(clip))

    def heard(self, clip: int) -> SpeechSegment:
        """The clip as heard, clean or in one of its rooms."""
        hearing = self.draw.randrange(-1, len(self.corpus.noisy))
        return SpeechSegment(self.corpus.codes(clip, None if hearing < 0 else hearing))

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
            phones[codes] = np.concatenate([self.corpus.said(clip) for clip in heard])
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
