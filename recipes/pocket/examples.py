"""Conversations to learn from: read aloud, write down, and answer, as grid rows, and their text's
own byte-pair vocabulary.

One flat tensor holds all rows; an example is a stretch of it. ``learned`` marks the rows of
replies: what the model is to produce from the row before.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from recipes.answers.facts import in_words
from recipes.answers.wordings import read_wordings, worded
from recipes.pocket.corpus import normalised, sentences
from recipes.pocket.data import PHONES, UNLABELLED, Recordings, frames_later

_BARE = 0.15
"""Share of typed texts in lower case without marks, as people also type."""
_TYPED = 0.25
"""Share of the questions that are typed though somebody has read them."""
_READ_ALOUD = 0.85
"""Share of the teacher's clips whose text is read aloud; the others are written down."""
_SAID_AGAIN = 0.4
"""Of those, the share whose text is asked for in a chat: then it is written before it is spoken, as
answers are. There are some five times as many such texts as answers."""
_ASK_TO_SAY = read_wordings()["repeat.say"].patterns
_LAST_SILENCE = 1
"""Codes of silence at a reply's end. Any code may stand for silence that lasts, so that none can be
foretold, and one that does not fit those before it is heard as a click: a second one was."""
_PAUSE = PHONES.index("pau")
_INTERRUPTED = 0.2
"""Share of the replies before a dialogue's last that are cut short, as by a user who breaks in. A
model that had seen whole replies alone wrote "S, S, S," without an end after one that was cut."""
_WRITTEN_ALONE = 0.07
"""Share of the dialogues whose answers are asked for in writing."""
_INSTRUCTED = 0.25
"""Share of the dialogues with instructions of a client's own, which ask for nothing new."""
_REPLACED = 0.3
"""Share of those that have no other prompt."""
_INSTRUCTIONS = Path(__file__).with_name("instructions.txt").read_text().splitlines()
_DIGITS = 0.4
"""Share of typed texts with their numbers in digits."""
_ROWS_OF_NO_SPEECH = 2
"""Rows that close a segment of no codes and its reply: the first is the one that opens it."""
_AS_DIGITS = {in_words(number): str(number) for number in range(1001)}
_NUMBER = re.compile(
    r"\b(" + "|".join(sorted(_AS_DIGITS, key=len, reverse=True)) + r")\b(?!-)", re.IGNORECASE
)


@dataclass(frozen=True)
class Examples:
    """On the device ``rows`` (N, 2) int16, ``learned`` (N,) bool and ``phones`` (N, 4) uint8,
    which are those of a code's four frames, 255 elsewhere; stretches on the CPU.
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


class Exchange(NamedTuple):
    """What a user says and is answered, as text that clips read."""

    asked: str
    answer: str


def read_dialogues(path: Path) -> list[list[Exchange]]:
    """Dialogues of a file, a json object with its ``turns`` in each line."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [[Exchange(turn["user"], turn["answer"]) for turn in row["turns"]] for row in rows]


class Take(NamedTuple):
    """A clip in one of its hearings: its first ``codes``, or all of what is said."""

    clip: int
    hearing: int = 0
    codes: int | None = None


class Task(NamedTuple):
    """A turn to learn: the system prompt, what the user says, and the parts of the reply.

    ``heard`` is what the user's speech is of, None for typed text; ``said`` what the reply's is
    of, None where it has none.
    """

    prompt: str
    user: Segment
    reply: tuple[Segment, ...]
    heard: Take | None = None
    said: Take | None = None


class Example(NamedTuple):
    """One conversation: rows (n, 2), ``learned`` (n,), ``phones`` (n, 4) of its speech."""

    rows: NDArray[np.int16]
    learned: NDArray[np.bool_]
    phones: NDArray[np.uint8]


@dataclass
class Maker:
    """Builds examples of clips, drawing tasks by ``draw``.

    ``hearings`` are codes of all of ``data``, as ``encode_all`` makes them.
    """

    data: Recordings
    hearings: list[NDArray[np.int16]]
    tokenizer: TextTokenizer
    ids: SpecialIds
    draw: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        data = self.data
        self.readings = defaultdict[str, list[int]](list)
        for clip in range(data.teacher_clips):
            self.readings[data.texts[clip]].append(clip)
        self.readers = defaultdict[str, list[int]](list)
        for clip in range(data.teacher_clips, len(data.texts)):
            self.readers[data.texts[clip]].append(clip)
        labels = data.labels.cpu().numpy()
        of_the_teacher = labels[: data.teacher_codes * MEL_FRAMES_PER_CODE]
        self.phones = list[NDArray[np.uint8]]()
        for hearing in range(len(self.hearings)):
            moved = np.roll(of_the_teacher, frames_later(hearing))
            moved = np.concatenate([moved, labels[len(moved) :]])
            self.phones.append(moved.reshape(-1, MEL_FRAMES_PER_CODE))

    def turn(self, clip: int) -> Task:
        """A clip's text to read aloud or to say again in a chat, or the clip to write down."""
        if clip < self.data.teacher_clips and self.draw.random() < _READ_ALOUD:
            if self.draw.random() < _SAID_AGAIN:
                return self._said_again(clip)
            take = self.take(clip)
            return Task(SPEAK_PROMPT, self.typed(clip), (self.spoken(take),), said=take)
        take = self.take(clip)
        return Task(TRANSCRIBE_PROMPT, self.heard(take), (self.written(clip),), take)

    def _said_again(self, clip: int) -> Task:
        """A chat in which the clip's text is asked for, written and spoken."""
        asked = worded(self.draw.choice(_ASK_TO_SAY), {"sentence": self.data.texts[clip]})
        take = self.take(clip)
        reply = (self.written(clip), self.spoken(take))
        return Task(SYSTEM_PROMPTS["speech"], self._typed(asked), reply, said=take)

    def answered(self, exchange: Exchange, kind: str = "speech", prompt: str | None = None) -> Task:
        """A question, typed or heard, and its answer: written, and then spoken by the teacher.

        Where the teacher has not read the answer, and for the ``kind`` "text", it is written alone.
        The ``prompt`` is that of its kind if None.
        """
        prompt = SYSTEM_PROMPTS[kind] if prompt is None else prompt
        said: Take | None = None
        reply: tuple[Segment, ...] = (self._text(exchange.answer),)
        if kind == "speech":
            readings = self.readings.get(exchange.answer)
            said = self.take(self.draw.choice(readings)) if readings else None
            reply += (SpeechSegment(()) if said is None else self.spoken(said),)
        heard = self.readers.get(exchange.asked)
        if heard is None or self.draw.random() < _TYPED:
            return Task(prompt, self._typed(exchange.asked), reply, said=said)
        take = self.take(self.draw.choice(heard))
        return Task(prompt, self.heard(take), reply, take, said)

    def typed(self, clip: int) -> TextSegment:
        """The clip's text, now and then without capitals and marks."""
        return self._typed(self.data.texts[clip])

    def _typed(self, text: str) -> TextSegment:
        if self.draw.random() < _DIGITS and {n.lower() for n in _NUMBER.findall(text)} != {"one"}:
            text = _NUMBER.sub(lambda number: _AS_DIGITS[number[0].lower()], text)
        if self.draw.random() < _BARE:
            text = text.lower().rstrip(".?!")
        return self._text(text)

    def written(self, clip: int) -> TextSegment:
        """The clip's text as it stands."""
        return self._text(self.data.texts[clip])

    def take(self, clip: int) -> Take:
        """The clip in any of its hearings."""
        return Take(clip, self.draw.randrange(len(self.hearings)))

    def spoken(self, take: Take) -> SpeechSegment:
        """The teacher's clean codes, of the silence after them the first ``_LAST_SILENCE``."""
        return SpeechSegment(tuple(self.hearings[take.hearing][self._spoken_place(take)].tolist()))

    def heard(self, take: Take) -> SpeechSegment:
        """All of the clip as heard."""
        return SpeechSegment(tuple(self.hearings[take.hearing][self._place(take)].tolist()))

    def _spoken_place(self, take: Take) -> slice:
        place = self._place(take)
        sounding = np.flatnonzero((self.phones[take.hearing][place] != _PAUSE).any(axis=1))
        if not len(sounding):
            return place
        codes = sounding[-1] + 1 + _LAST_SILENCE if take.codes is None else take.codes
        return slice(place.start, min(place.stop, place.start + codes))

    def _place(self, take: Take) -> slice:
        start = self.data.starts[take.clip]
        return slice(start, start + self.data.codes[take.clip])

    def _text(self, text: str) -> TextSegment:
        return TextSegment(tuple(self.tokenizer.encode(text)))

    def example(self, clips: list[int]) -> Example:
        """A conversation about clips; all its turns have the first one's prompt."""
        return self._conversation([self.turn(clip) for clip in clips])

    def dialogue(self, exchanges: list[Exchange]) -> Example:
        """A conversation of questions and answers, most of which are spoken."""
        kind = "text" if self.draw.random() < _WRITTEN_ALONE else "speech"
        prompt = self._prompt(kind)
        return self._conversation([self.answered(each, kind, prompt) for each in exchanges])

    def _prompt(self, kind: str) -> str:
        """The prompt of a ``kind`` of reply, now and then with a client's own instructions.

        They follow it; now and then they stand in the place of that for speech.
        """
        own = SYSTEM_PROMPTS[kind]
        if self.draw.random() >= _INSTRUCTED:
            return own
        instructions = self.draw.choice(_INSTRUCTIONS)
        replaced = kind == "speech" and self.draw.random() < _REPLACED
        return instructions if replaced else f"{own} {instructions}"

    def _conversation(self, tasks: list[Task]) -> Example:
        conversation = Conversation(self.ids, self.tokenizer.encode)
        learned: list[bool] = []
        heard: list[Take] = []
        said: list[Take] = []
        conversation.add_text("system", tasks[0].prompt)
        for task in tasks:
            if task.prompt != tasks[0].prompt:
                break
            heard += [] if task.heard is None else [task.heard]
            conversation.add_turn(Turn("user", (task.user,)))
            conversation.writes_first = len(task.reply) > 1
            reply = self._reply(task.reply)
            conversation.open_reply(isinstance(task.reply[-1], SpeechSegment))
            learned += [False] * (len(conversation.rows) - len(learned))
            if isinstance(task.reply[-1], SpeechSegment) and not task.reply[-1].codes:
                # Nobody has read this answer: what is learned ends with the row that opens speech.
                rows = [*conversation.rows, *reply.rows[: len(reply.rows) - _ROWS_OF_NO_SPEECH]]
                learned += [True] * (len(rows) - len(learned))
                return self._with_phones(rows, learned, heard, said)
            if task is not tasks[-1] and (cut := self._cut(task)) is not None:
                said.append(cut)
                conversation.close_reply(reply, cut.codes)
                learned += self._drawn_anyway(conversation.rows[len(learned) :])
                continue
            said += [] if task.said is None else [task.said]
            learned += [True] * len(reply.rows)
            conversation.close_reply(reply)
        learned += [False] * (len(conversation.rows) - len(learned))
        return self._with_phones(conversation.rows, learned, heard, said)

    def _cut(self, task: Task) -> Take | None:
        """What is heard of a reply that the user interrupts; None of one that is heard whole."""
        speech = task.reply[-1]
        if task.said is None or len(task.reply) < 2 or not isinstance(speech, SpeechSegment):
            return None
        if self.draw.random() >= _INTERRUPTED:
            return None
        return task.said._replace(codes=self.draw.randrange(len(speech.codes)))

    def _drawn_anyway(self, rows: list[Row]) -> list[bool]:
        """Which rows of a reply that was cut the model is to draw: not where it speaks and ends.

        Where speech has ended the reply ends, however early: a model that had learned so of whole
        replies alone wrote on, at random, after a few of its own.
        """
        end = next(place for place, (_, audio) in enumerate(rows) if audio == self.ids.eosp)
        drawn = [text != self.ids.sosp for text, _ in rows[:end]]
        return drawn + [text == self.ids.im_end for text, _ in rows[end:]]

    def _with_phones(
        self, grid: list[Row], learned: list[bool], heard: list[Take], said: list[Take]
    ) -> Example:
        rows, marks = np.array(grid, dtype=np.int16), np.array(learned)
        codes = (rows[:, 0] == self.ids.modality_pad) & (rows[:, 1] < self.ids.eosp)
        phones = np.full((len(rows), MEL_FRAMES_PER_CODE), UNLABELLED, dtype=np.uint8)
        for takes, place, own in (
            (heard, self._place, ~marks),
            (said, self._spoken_place, marks),
        ):
            if takes:
                found = [self.phones[take.hearing][place(take)] for take in takes]
                phones[codes & own] = np.concatenate(found)
        return Example(rows, marks, phones)

    def _reply(self, segments: tuple[Segment, ...]) -> Reply:
        """The rows that the model is to generate after the reply's opening."""
        reply = Reply()
        for place, segment in enumerate(segments):
            rows = segment_rows(segment, self.ids)
            spoken = isinstance(segment, SpeechSegment)
            modes = [Mode.AUDIO if spoken else Mode.TEXT] * len(rows)
            if spoken and place == 0:  # opened by the segment's own first row
                rows, modes = rows[1:], modes[1:]
            elif spoken:
                modes[0] = Mode.TEXT
            reply.rows += rows
            reply.modes += modes
        reply.rows.append((self.ids.im_end, self.ids.audio_pad))
        reply.modes.append(Mode.TEXT)
        return reply


_makers: list[Maker] = []
"""The maker of a worker process, which inherits it: sent with each job it would be copied."""


def _take(maker: Maker) -> None:
    _makers[:] = [maker]


def _build_some(
    clips: NDArray[np.int64], dialogues: Sequence[list[Exchange]], seed: int
) -> tuple[Example, NDArray[np.int64]]:
    """Examples of ``clips`` and of ``dialogues`` joined to one, and their lengths."""
    (maker,) = _makers
    maker.draw = random.Random(seed)
    out: list[Example] = []
    for clip in clips.tolist():
        more = [int(maker.draw.choice(clips))] if maker.draw.random() < 0.33 else []
        out.append(maker.example([clip, *more]))
    out += [maker.dialogue(each) for each in dialogues]
    lengths = np.array([len(one.rows) for one in out], dtype=np.int64)
    return Example(*map(np.concatenate, zip(*out, strict=True))), lengths


def build(
    maker: Maker,
    clips: NDArray[np.int64],
    device: torch.device,
    *,
    seed: int,
    workers: int = 1,
    dialogues: Sequence[list[Exchange]] = (),
) -> Examples:
    """One example for each clip, a third of them with a second turn of the same task, and one for
    each of ``dialogues``.
    """
    parts = max(1, min(workers * 4, (len(clips) + len(dialogues)) // 50))
    chunks, seeds = np.array_split(clips, parts), range(seed, seed + parts)
    talks = [dialogues[part::parts] for part in range(parts)]
    _take(maker)
    if workers == 1:
        built = list(map(_build_some, chunks, talks, seeds))
    else:
        with ProcessPoolExecutor(workers, get_context("fork"), _take, (maker,)) as pool:
            built = list(pool.map(_build_some, chunks, talks, seeds))
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
