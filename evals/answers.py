"""Questions put to a checkpoint, typed and spoken: what it wrote, what was heard, what is right.

The sound of an answer is written down by the judge of words and judged by its keywords
(``evals.questions``); the text that the checkpoint wrote is judged alike, so that one sees whether
writing or speaking failed. Beside both stands what the judge makes of right answers in the
teacher's voice: what no checkpoint can surpass.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np

from evals.intervals import Estimate, percent
from evals.judges import WhisperJudge
from evals.kokoro_voices import HELD_OUT, read_in_turn
from evals.media import player
from evals.questions import INSIDE, OUTSIDE, Question, judge, rates
from evals.readings import TEACHER, read_aloud
from evals.takes import Way, reply_to
from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.progress import Progress
from mosstalk.reporting.tables import Table

TYPED, SPOKEN = "typed", "spoken"
SHOWN_OF_GROUP = 3
"""Answers of a group that can be heard on the page, for each way of asking; wrong ones first."""
_TOLD = 25
"""After so many questions a line says how it goes."""


@dataclass(frozen=True)
class AnswerLine:
    """One question and its answer; ``voice`` asked it, empty where it was typed.

    ``written``: the text of the reply; ``heard``: what the judge heard of its sound; ``teacher``:
    what the judge heard of a right answer in the teacher's voice, None without that.
    """

    asked: str
    voice: str
    group: str
    turns: tuple[str, ...]
    written: str
    heard: str
    written_right: bool
    heard_right: bool
    teacher: str | None
    teacher_right: bool | None


@dataclass(frozen=True)
class AnswerRow:
    """Shares of right answers to a group's questions; ``teacher`` None without the control."""

    asked: str
    group: str
    n: int
    heard: Estimate
    written: Estimate
    teacher: Estimate | None


@dataclass(frozen=True)
class Answers:
    """Rates by way of asking and group, and every answer."""

    rows: list[AnswerRow]
    lines: list[AnswerLine]


class Asker:
    """Asks, listens and judges; ``skipped`` says what could not be done, and why."""

    def __init__(self, way: Way, whisper: WhisperJudge, tell: Progress) -> None:
        self.way, self.whisper, self.tell = way, whisper, tell
        self.skipped: list[str] = []

    def ask(self, questions: Sequence[Question]) -> tuple[Answers, list[Samples]]:
        """Put every question typed, then spoken by held-out voices in turn.

        Returns the answers and the sound (n,) at 24 kHz of each of their lines.
        """
        control = self._control(questions)
        ways = [TYPED, *([SPOKEN] if self._voices_are_there() else [])]
        rows, lines, sounds = list[AnswerRow](), list[AnswerLine](), list[Samples]()
        for asked in ways:
            found = list(self._asked(asked, questions, control))
            lines += [line for line, _ in found]
            sounds += [sound for _, sound in found]
            rows += rows_of(asked, questions, [line for line, _ in found])
        return Answers(rows, lines), sounds

    def _voices_are_there(self) -> bool:
        try:
            read_in_turn(HELD_OUT, ["Hello."])
        except BenchError as error:
            self.skipped.append(f"spoken questions: {error}")
            return False
        return True

    def _control(self, questions: Sequence[Question]) -> Mapping[int, str]:
        """What the judge hears of right answers in the teacher's voice, by the question's place."""
        self.tell("right answers in the teacher's voice", 0, len(questions))
        try:
            reading = read_aloud(TEACHER, [question.answers[-1] for question in questions])
        except BenchError as error:
            self.skipped.append(f"right answers in the teacher's voice: {error}")
            return {}
        heard = dict[int, str]()
        for place, sound in enumerate(reading.sounds):
            self.tell("listening to right answers", place, len(questions))
            heard[place] = self.whisper.transcribe(sound, OUTPUT_RATE)
        right = sum(judge(questions[place], text) for place, text in heard.items())
        _say(f"right answers, {TEACHER.name}: {right} of {len(questions)} understood")
        return heard

    def _asked(
        self, asked: str, questions: Sequence[Question], control: Mapping[int, str]
    ) -> Iterator[tuple[AnswerLine, Samples]]:
        right = 0
        for place, question in enumerate(questions):
            self.tell(f"answering, {asked}", place, len(questions))
            voice = HELD_OUT[place % len(HELD_OUT)] if asked == SPOKEN else ""
            turns = _spoken(voice, question.turns) if voice else list(question.turns)
            written, sound = reply_to(self.way, turns)
            heard, taught = self.whisper.transcribe(sound, OUTPUT_RATE), control.get(place)
            line = AnswerLine(
                asked, voice, question.group, question.turns, written, heard,
                judge(question, written), judge(question, heard),
                taught, None if taught is None else judge(question, taught),
            )  # fmt: skip
            right += line.heard_right
            yield line, sound
            if (place + 1) % _TOLD == 0 or place + 1 == len(questions):
                _say(f"{asked}: {place + 1} of {len(questions)} asked, {right} right")


def _spoken(voice: str, turns: Sequence[str]) -> list[str | Samples]:
    """Turns (n,) at 16 kHz, read by one voice."""
    read = read_in_turn((voice,), turns)
    return [np.asarray(resample(sound, OUTPUT_RATE, INPUT_RATE), np.float32) for sound in read]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rows_of(
    asked: str, questions: Sequence[Question], lines: Sequence[AnswerLine]
) -> list[AnswerRow]:
    """Rates of answers to ``questions``, by group and of all, as ``evals.questions.rates`` has."""
    both = list(zip(questions, lines, strict=True))
    heard = rates([(question, line.heard_right) for question, line in both])
    written = rates([(question, line.written_right) for question, line in both])
    taught = [(question, line.teacher_right) for question, line in both]
    known = [(question, right) for question, right in taught if right is not None]
    teacher = {each.group: each.rate for each in rates(known)}
    return [
        AnswerRow(asked, one.group, one.rate.n, one.rate, other.rate, teacher.get(one.group))
        for one, other in zip(heard, written, strict=True)
    ]


def answers_headline(answers: Answers) -> str:
    """Questions answered right, by way of asking, inside the domain and outside it."""
    parts = []
    for asked, rows in groupby(answers.rows, lambda row: row.asked):
        rates = [
            f"{percent(row.heard)} % of {row.n} {'inside' if row.group == INSIDE else 'outside'}"
            for row in rows
            if row.group in (INSIDE, OUTSIDE)
        ]
        parts += [f"{asked} {', '.join(rates)}"] if rates else []
    return f"answered right: {'; '.join(parts)} the domain" if parts else ""


def answers_tables(answers: Answers) -> list[Table]:
    """A table for each way of asking."""
    return [
        Table(
            f"Questions, {asked}: answered right",
            "In %. said: what the judge heard of the sound; wrote: the text of the same reply; "
            "right answers: what the judge understands of them in the teacher's voice, the most "
            "that can be reached. Groups are of single questions. In brackets 95% intervals.",
            ("", "n", "said", "wrote", "right answers"),
            [
                (row.group, str(row.n), *map(percent, (row.heard, row.written, row.teacher)))
                for row in rows
            ],
        )
        for asked, rows in groupby(answers.rows, lambda row: row.asked)
    ]


def answers_html(answers: Answers, sounds: Sequence[Samples]) -> Iterator[str]:
    """Answers to hear, some of each group and way of asking, wrong ones first."""
    both = sorted(
        zip(answers.lines, sounds, strict=True),
        key=lambda each: (each[0].group, each[0].asked, each[0].heard_right),
    )
    yield "<h2>Answers</h2>"
    yield (
        f'<p class="note">Of each group up to {SHOWN_OF_GROUP} for each way of asking, wrong ones '
        "first: what was asked, what the reply wrote, what the judge heard of its sound.</p>"
    )
    for group, some in groupby(both, lambda each: each[0].group):
        yield f"<h3>{escape(group)}</h3>"
        for _, chosen in groupby(some, lambda each: each[0].asked):
            for line, sound in list(chosen)[:SHOWN_OF_GROUP]:
                yield _answer(line, sound)


def _answer(line: AnswerLine, sound: Samples) -> str:
    by = f"{line.asked}, {line.voice}" if line.voice else line.asked
    turns = " … ".join(map(escape, line.turns))
    return (
        f'<section class="example"><h4>{turns} <small>({escape(by)})</small></h4>\n'
        f"{player(sound)}\n<p>wrote, {_verdict(line.written_right)}: {escape(line.written)}</p>"
        f"<p>heard, {_verdict(line.heard_right)}: {escape(line.heard)}</p></section>"
    )


def _verdict(right: bool) -> str:
    return "right" if right else '<span class="fault">wrong</span>'
