"""Conversations to learn from: read aloud, write down, and repeat, as grid rows.

One flat tensor holds all rows; an example is a stretch of it. ``learned`` marks the rows of
replies: what the model is to produce from the row before.
"""

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from mosstalk.model.tokenizer import TextTokenizer
from mosstalk.tasks import SPEAK_PROMPT, TRANSCRIBE_PROMPT
from recipes.pocket.corpus import normalised, sentences
from recipes.pocket.data import Recordings

_BARE = 0.15
"""Share of typed texts in lower case without marks, as people also type."""


@dataclass(frozen=True)
class Examples:
    """``rows`` (N, 2) int16 and ``learned`` (N,) bool on the device; stretches on the CPU."""

    rows: Tensor
    learned: Tensor
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Clips' texts and codes: ``clean`` and several ``noisy`` hearings, in the data's order."""

    texts: list[str]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    teacher_clips: int
    clean: NDArray[np.int16]
    noisy: list[NDArray[np.int16]]

    @classmethod
    def of(cls, data: Recordings, hearings: list[NDArray[np.int16]]) -> "Corpus":
        """The tables of ``data`` with its codes, the first hearing being the clean one."""
        clean, *noisy = hearings
        return cls(data.texts, data.starts, data.codes, data.teacher_clips, clean, noisy)

    def codes(self, clip: int, hearing: int | None = None) -> tuple[int, ...]:
        """Codes of a clip, clean or as heard the ``hearing``-th time."""
        source = self.clean if hearing is None else self.noisy[hearing]
        start = self.starts[clip]
        return tuple(source[start : start + self.counts[clip]].tolist())


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

    def example(self, clips: list[int]) -> tuple[list[Row], list[bool]]:
        """Rows and marks of a conversation; all its turns have the first one's prompt."""
        conversation = Conversation(self.ids, self.tokenizer.encode)
        learned: list[bool] = []
        first: str | None = None
        for clip in clips:
            prompt, user, segment = self.turn(clip)
            if first is None:
                first = prompt
                conversation.add_text("system", prompt)
            elif prompt != first:
                break
            conversation.add_turn(Turn("user", (user,)))
            reply = self._reply(segment)
            conversation.open_reply(isinstance(segment, SpeechSegment))
            learned += [False] * (len(conversation.rows) - len(learned))
            learned += [True] * len(reply.rows)
            conversation.close_reply(reply)
        return conversation.rows, learned + [False] * (len(conversation.rows) - len(learned))

    def _reply(self, segment: Segment) -> Reply:
        """The rows that the model is to generate after the reply's opening."""
        spoken = isinstance(segment, SpeechSegment)
        # A spoken reply is opened by the segment's own first row.
        rows = segment_rows(segment, self.ids)[spoken:]
        modes = [Mode.AUDIO if spoken else Mode.TEXT] * len(rows)
        return Reply([*rows, (self.ids.im_end, self.ids.audio_pad)], [*modes, Mode.TEXT])


_Built = tuple[list[NDArray[np.int16]], list[NDArray[np.bool_]]]


def _build_some(maker: Maker, clips: NDArray[np.int64], seed: int) -> _Built:
    maker.draw = random.Random(seed)
    rows: list[NDArray[np.int16]] = []
    learned: list[NDArray[np.bool_]] = []
    for clip in clips.tolist():
        more = [int(maker.draw.choice(clips))] if maker.draw.random() < 0.33 else []
        grid, marks = maker.example([clip, *more])
        rows.append(np.array(grid, dtype=np.int16))
        learned.append(np.array(marks, dtype=np.bool_))
    return rows, learned


def build(
    maker: Maker, clips: NDArray[np.int64], device: torch.device, *, seed: int, workers: int = 1
) -> Examples:
    """One example for each clip, a third of them with a second turn of the same task."""
    chunks = np.array_split(clips, max(1, min(workers * 4, len(clips) // 50)))
    jobs = [(maker, chunk, seed + number) for number, chunk in enumerate(chunks)]
    if workers == 1:
        built = [_build_some(*job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers) as pool:
            built = list(pool.map(_build_some, *zip(*jobs, strict=True)))
    rows = [grid for some, _ in built for grid in some]
    learned = [marks for _, some in built for marks in some]
    lengths = np.array([len(grid) for grid in rows], dtype=np.int64)
    return Examples(
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(np.concatenate(learned)).to(device),
        np.concatenate([[0], lengths.cumsum()[:-1]]),
        lengths,
    )
