"""Parts of ``bench codec`` that need speech: curves of errors, and repairs of live codes.

Turns are of people and synthetic voices, loud and soft, in noise. Whatever is installed is taken;
what is not is named, with what brings it.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from evals.readings import TEACHER, VOICES, Reading, asset_recordings, read_aloud, speakers
from mosstalk.audio.sound import Samples, resample
from mosstalk.bench.codec import OfSpeech
from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveTokenizer, Sound
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE, OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice
from mosstalk.reporting.sentences import read_sentences
from mosstalk.reporting.tables import NONE, Table, figure

SHORTEST_S, LONGEST_S = 1.0, 65.0
"""Turns are drawn from between these, short ones as often as long ones on a scale of ratios."""
_PAUSE_S = (0.1, 1.5)
_TURNS = 5
"""Turns of one speaker before the next one speaks."""
_SENTENCES = 12
_PROMPTS = 120
_ROOM_DB = -75.0
"""Noise of every recording place, below full scale: pauses are never digital silence."""
PUSH_SAMPLES = 5 * INPUT_SAMPLES_PER_CODE
"""What sessions push: 400 ms."""
WITHIN_S = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30.0)
"""Seconds into a turn by which repairs are counted."""
CONTEXTS_S = (0.4, 0.8, 1.2, 1.6, 2.0, 3.2, 4.8, 8.0)
STEPS, _MOST_STEPS = (2, 3, 4, 5, 6, 8), 10
_MINUTES = 30.0
_REPLIES, _OF_A_REPLY = 6, 4
"""Replies, and sentences of each, which is then some 11 s long."""


@dataclass(frozen=True)
class Condition:
    """How a speaker is heard: peak in dB of full scale, noise and what the level does.

    ``noise_db`` is how far white noise lies below the speech, None: only what a silent room has;
    ``rise_db`` by how much the level has risen by the end of a turn, as when someone comes nearer.
    """

    name: str
    peak_db: float
    noise_db: float | None = None
    rise_db: float = 0.0


CONDITIONS = (
    Condition("loud", -1),
    Condition("usual", -12),
    Condition("soft", -36),
    Condition("usual, noise 20 dB below", -12, noise_db=20),
    Condition("usual, noise 8 dB below", -12, noise_db=8),
    Condition("coming nearer, 20 dB", -3, rise_db=20),
)


@dataclass(frozen=True)
class Conversation:
    """One speaker's turns, each (n,) float32 at 16 kHz, in order."""

    speaker: str
    condition: Condition
    turns: tuple[Samples, ...]

    @property
    def seconds(self) -> float:
        """Length of all turns."""
        return sum(map(len, self.turns)) / INPUT_RATE


@dataclass(frozen=True)
class Corpus:
    """Conversations, and what could not be had for them."""

    conversations: tuple[Conversation, ...]
    missing: tuple[str, ...]


def varied_speech(minutes: float, seed: int = 0, voices: Sequence[str] = tuple(VOICES)) -> Corpus:
    """At least so much speech, the same for the same seed and the same programs.

    Raises:
        BenchError: nothing that speaks is installed.
    """
    sentences = read_sentences()[:_SENTENCES]
    people, missing = speakers(_PROMPTS, sentences, (VOICES[name] for name in voices))
    if not people:
        raise BenchError(f"there is nobody to listen to ({'; '.join(missing)})")
    draw = np.random.default_rng(seed)
    conversations: list[Conversation] = []
    while sum(each.seconds for each in conversations) < 60 * minutes:
        number = len(conversations)
        speaker = people[number % len(people)]
        # Each time round, every speaker meets the next condition.
        condition = CONDITIONS[(number + number // len(people)) % len(CONDITIONS)]
        turns = tuple(_turn(speaker, condition, draw) for _ in range(_TURNS))
        conversations.append(Conversation(speaker.name, condition, turns))
    return Corpus(tuple(conversations), tuple(missing))


def _turn(speaker: Reading, condition: Condition, draw: np.random.Generator) -> Samples:
    """Utterances with pauses between them, cut where the turn is long enough."""
    length = math.exp(draw.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))
    samples = round(length * INPUT_RATE)
    speech = np.concatenate(list(_utterances(speaker, samples, draw)))[:samples]
    speech *= _amplitude(condition.peak_db) / max(float(np.abs(speech).max()), 1e-9)
    power = float(np.square(speech).mean())
    speech *= 10 ** (np.linspace(-condition.rise_db, 0, samples) / 20)
    noise = draw.standard_normal(samples) * _amplitude(_ROOM_DB)
    if condition.noise_db is not None:
        level = math.sqrt(power) * _amplitude(-condition.noise_db)
        noise += draw.standard_normal(samples) * level
    return np.asarray(speech + noise, np.float32).clip(-1, 1)


def _utterances(speaker: Reading, samples: int, draw: np.random.Generator) -> Iterator[Samples]:
    total = 0
    while total < samples:
        sound = speaker.sounds[int(draw.integers(len(speaker.sounds)))]
        pause = np.zeros(round(draw.uniform(*_PAUSE_S) * INPUT_RATE), np.float32)
        for part in (resample(sound, OUTPUT_RATE, INPUT_RATE), pause):
            total += len(part)
            yield part


def _amplitude(level_db: float) -> float:
    return float(10 ** (level_db / 20))


@dataclass(frozen=True)
class RepairedPush:
    """A push, or a clip's end, at which codes were encoded again.

    ``at_s`` after the clip's beginning and ``to_end_s`` before its end; ``rows_again`` rows of
    20 ms were encoded once more, ``codes_changed`` codes were taken back, and all of it took
    ``ms``. ``ending``: nothing could be done about it before the turn was over.
    """

    at_s: float
    to_end_s: float
    rows_again: int
    codes_changed: int
    ms: float
    ending: bool


@dataclass
class LiveFigures:
    """What live codes of some clips cost, and how many clips were repaired, or got offline codes.

    ``push_ms`` are pushes that repaired nothing, ``finish_ms`` the clips' ends, repairs or not.
    ``rows`` counts all rows of 20 ms encoded, those of repairs too, ``ties`` the segments that
    were encoded whole at their end because rounding could choose between two codes.
    """

    clips: int = 0
    valid: int = 0
    repaired_clips: int = 0
    seconds: float = 0.0
    codes: int = 0
    rows: int = 0
    ties: int = 0
    push_ms: list[float] = field(default_factory=list)
    finish_ms: list[float] = field(default_factory=list)
    repairs: list[RepairedPush] = field(default_factory=list)

    @property
    def rows_again(self) -> int:
        """Rows of 20 ms that repairs encoded again."""
        return sum(repair.rows_again for repair in self.repairs)

    @property
    def again_share(self) -> float:
        """Those rows for each row that had to be encoded anyhow; 0 where nothing was."""
        needed = self.rows - self.rows_again
        return self.rows_again / needed if needed else 0.0

    @property
    def late_repairs(self) -> int:
        """Repairs that were left to the clip's end, when someone waits."""
        return sum(repair.ending for repair in self.repairs)


def together(parts: Iterable[LiveFigures]) -> LiveFigures:
    """The figures of all their clips."""
    values = zip(*(vars(part).values() for part in parts), strict=True)
    return LiveFigures(*(reduce(add, each) for each in values))


def live_codes(
    live: LiveTokenizer,
    clips: Iterable[Sound],
    *,
    push_samples: int = INPUT_SAMPLES_PER_CODE,
    one_speaker: bool = False,
    figures: LiveFigures | None = None,
) -> LiveFigures:
    """Push each clip (n,) float at 16 kHz in pieces of ``push_samples``, and compare the codes.

    ``one_speaker``: clips are the turns of one speaker, so each begins with the maximum of the
    one before. The offline codes are computed after the clip, outside all times. ``figures``
    are those of other clips, to go on with.
    """
    figures = figures or LiveFigures()
    maximum: float | None = None
    for clip in clips:
        sound = torch.as_tensor(clip)
        state = live.open(maximum if one_speaker else None)
        before = len(figures.repairs)
        _hear(live, state, sound, push_samples, figures)
        figures.repaired_clips += len(figures.repairs) > before
        maximum = state.maximum
        figures.clips += 1
        figures.valid += state.codes == live.tokenizer.encode(sound)
        figures.seconds += state.seconds
        figures.codes += len(state.codes)
        figures.rows += state.rows
        figures.ties += state.ties
    return figures


def _hear(
    live: LiveTokenizer, state: LiveCodes, sound: torch.Tensor, piece: int, figures: LiveFigures
) -> None:
    calls: list[Callable[[], Change]]
    calls = [partial(live.push, state, part) for part in sound.split(piece)]
    calls.append(partial(live.finish, state))
    for call in calls:
        ending = call is calls[-1]
        codes, again = len(state.codes), state.rows_again
        start = time.perf_counter()
        change = call()
        ms = 1000 * (time.perf_counter() - start)
        if ending:
            figures.finish_ms.append(ms)
        elif not change.repaired:
            figures.push_ms.append(ms)
        if change.repaired:
            figures.repairs.append(
                RepairedPush(
                    at_s=state.seconds,
                    to_end_s=sound.shape[0] / INPUT_RATE - state.seconds,
                    rows_again=state.rows_again - again,
                    codes_changed=codes - change.kept,
                    ms=ms,
                    ending=ending,
                )
            )


@dataclass(frozen=True)
class RepairFigures:
    """Repairs on varied speech: ``fresh`` begins every turn knowing nothing of the speaker.

    ``known`` begins with the maximum of the speaker's last turn, as sessions do. Both are by
    the name of the condition in which they were heard. ``missing``: what could not be had.
    """

    fresh: dict[str, LiveFigures]
    known: dict[str, LiveFigures]
    missing: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """Whether every turn got the offline codes."""
        parts = (*self.fresh.values(), *self.known.values())
        return all(part.valid == part.clips for part in parts)


def measure_repairs(live: LiveTokenizer, corpus: Corpus) -> RepairFigures:
    """Hear every conversation of ``corpus`` twice, in pushes of 400 ms."""
    ways: list[dict[str, LiveFigures]] = []
    for one_speaker in (False, True):
        each = {condition.name: LiveFigures() for condition in CONDITIONS}
        for talk in corpus.conversations:
            live_codes(
                live, talk.turns, push_samples=PUSH_SAMPLES, one_speaker=one_speaker,
                figures=each[talk.condition.name],
            )  # fmt: skip
        ways.append(each)
    return RepairFigures(ways[0], ways[1], corpus.missing)


def repair_tables(figures: RepairFigures) -> list[Table]:
    """How often a repair was needed, at what cost, and when."""
    ways = (("knows nothing", figures.fresh), ("last turn's maximum", figures.known))
    rows = [
        (f"{name}: {condition}", *_costs(part))
        for name, way in ways
        for condition, part in (*way.items(), ("all", together(way.values())))
        if part.clips
    ]
    return [
        Table(
            "Repairs of live codes, pushed by 400 ms",
            "Turns with a repair, repairs a turn, those left to the turn's end, codes that "
            "changed for each repair, rows of 20 ms encoded again in % of all that had to be, and "
            "segments encoded whole at their end because rounding could choose. Valid: turns "
            "with the offline codes." + "".join(f" Missing: {each}." for each in figures.missing),
            ("", "turns", "min", "repaired %", "a turn", "at end", "codes", "rows again %", "whole",
             "valid"),
            rows,
        ),
        Table(
            "When live codes were repaired",
            "Share in % of all repairs that came within so many seconds of the turn's beginning, "
            "their cost in ms beside that of other pushes (median), and the latest.",
            ("", "n", *(f"{limit:g} s" for limit in WITHIN_S), "latest s", "repair ms", "push ms"),
            [(name, *_times(together(way.values()))) for name, way in ways],
        ),
    ]  # fmt: skip


def _costs(part: LiveFigures) -> tuple[str, ...]:
    clips, repairs = part.clips, part.repairs
    changed = sum(repair.codes_changed for repair in repairs) / max(len(repairs), 1)
    return (
        str(clips),
        f"{part.seconds / 60:.1f}",
        f"{100 * part.repaired_clips / clips:.0f}",
        f"{len(repairs) / clips:.2f}",
        str(part.late_repairs),
        f"{changed:.1f}",
        f"{100 * part.again_share:.1f}",
        str(part.ties),
        f"{part.valid}/{clips}",
    )


def _times(part: LiveFigures) -> tuple[str, ...]:
    repairs = part.repairs
    at = np.array([repair.at_s for repair in repairs])
    shares = [f"{100 * (at <= limit).mean():.0f}" if repairs else NONE for limit in WITHIN_S]
    return (
        str(len(repairs)),
        *shares,
        figure(at.max() if repairs else None, 1),
        figure(np.median([repair.ms for repair in repairs]) if repairs else None, 1),
        figure(np.median(part.push_ms) if part.push_ms else None, 1),
    )


@torch.inference_mode()
def flow_curve(
    flow: FlowDecoder,
    replies: Sequence[tuple[Voice, Sequence[int]]],
    ways: Mapping[float, FlowOptions],
    full: FlowOptions,
) -> dict[float, list[float]]:
    """What each of ``ways`` costs: each reply's relative error of the mel, by the way's name.

    ||mel - truth|| / ||truth - its mean||, truth being the mel by the options ``full``.
    """

    def mels(options: FlowOptions) -> list[Tensor]:
        batched = batched_flow(flow, options)
        return [_whole_reply(batched, voice, codes) for voice, codes in replies]

    truths = mels(full)
    return {
        value: [
            float((mel - truth).norm() / (truth - truth.mean()).norm())
            for mel, truth in zip(mels(options), truths, strict=True)
        ]
        for value, options in ways.items()
    }


def _whole_reply(batched: BatchedFlow, voice: Voice, codes: Sequence[int]) -> Tensor:
    """Mel (80, frames) of a whole reply, hop by hop."""
    reply = batched.open(voice)
    hops = reply.push(codes)
    last = reply.finish()
    reply.close()
    return torch.cat(hops if last is None else [*hops, last], dim=1)


def curve_tables(codec: Codec, voice: Voice) -> tuple[list[Table], dict[str, dict[str, float]]]:
    """Errors by context and by steps, as tables and as plain values."""
    speech = _speech()
    replies = [codec.tokenizer.encode(torch.from_numpy(sound)) for sound in speech.heard]
    spoken, full = [(voice, codes) for codes in replies], FlowOptions()
    ways = {context_s: replace(full, context_s=context_s) for context_s in CONTEXTS_S}
    contexts = flow_curve(codec.flow, spoken, ways, full)
    ways = {float(steps): replace(full, steps=steps) for steps in STEPS}
    steps = flow_curve(codec.flow, spoken, ways, replace(full, steps=_MOST_STEPS))
    note = (
        f"Relative error of the mel, its mean taken out, over {len(replies)} replies of "
        f"{min(map(len, replies)) / 12.5:.1f} to {max(map(len, replies)) / 12.5:.1f} s: "
        f"{speech.name}."
    )
    tables = [
        _table("Own history that a reply remembers, s", note, contexts),
        _table("Euler steps", note, steps),
    ]
    values = {
        "context_s": {f"{at:g}": float(np.mean(errors)) for at, errors in contexts.items()},
        "steps": {f"{at:g}": float(np.mean(errors)) for at, errors in steps.items()},
    }
    return tables, values


def _table(title: str, note: str, curve: dict[float, list[float]]) -> Table:
    rows = tuple(
        (f"{at:g}", f"{np.mean(errors):.3f}", f"{max(errors):.3f}") for at, errors in curve.items()
    )
    return Table(title, note, ("", "mean", "max"), rows)


def _speech() -> Reading:
    """Festival's voice, or people's recordings."""
    texts = read_sentences()[-_OF_A_REPLY * _REPLIES :]
    pieces = [texts[at : at + _OF_A_REPLY] for at in range(0, len(texts), _OF_A_REPLY)]
    try:
        return read_aloud(TEACHER, [" ".join(piece) for piece in pieces])
    except BenchError:
        return asset_recordings()


def _repairs(codec: Codec, _: Voice) -> tuple[list[Table], dict[str, dict[str, float]]]:
    figures = measure_repairs(LiveTokenizer(codec.tokenizer), varied_speech(_MINUTES))
    return repair_tables(figures), {}


PARTS: dict[str, OfSpeech] = {"curves": curve_tables, "repairs": _repairs}
"""By the name that ``--part`` takes."""
