"""Varied speech as turns of conversations: people and synthetic voices, loud and soft, in noise.

Whatever is installed is taken; what is not is named, with what brings it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mosstalk.audio.sound import Samples, resample
from mosstalk.bench.people import asset_recordings, librivox_clips, telephone_prompts
from mosstalk.bench.readings import Reading
from mosstalk.bench.sentences import read_sentences
from mosstalk.bench.voices import VOICES, SyntheticVoice, read_aloud
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError

SHORTEST_S, LONGEST_S = 1.0, 65.0
"""Turns are drawn from between these, short ones as often as long ones on a scale of ratios."""
_PAUSE_S = (0.1, 1.5)
_TURNS = 5
"""Turns of one speaker before the next one speaks."""
_SENTENCES = 12
_PROMPTS = 120
_ROOM_DB = -75.0
"""Noise of every recording place, below full scale: pauses are never digital silence."""


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
    speakers, missing = _speakers(voices)
    draw = np.random.default_rng(seed)
    conversations: list[Conversation] = []
    while sum(each.seconds for each in conversations) < 60 * minutes:
        number = len(conversations)
        speaker = speakers[number % len(speakers)]
        # Each time round, every speaker meets the next condition.
        condition = CONDITIONS[(number + number // len(speakers)) % len(CONDITIONS)]
        turns = tuple(_turn(speaker, condition, draw) for _ in range(_TURNS))
        conversations.append(Conversation(speaker.name, condition, turns))
    return Corpus(tuple(conversations), missing)


def _speakers(voices: Sequence[str]) -> tuple[list[Reading], tuple[str, ...]]:
    sentences = read_sentences()[:_SENTENCES]
    sources: list[Callable[[], Reading]] = [
        asset_recordings,
        librivox_clips,
        lambda: telephone_prompts(_PROMPTS),
    ]
    sources += [_reader(VOICES[name], sentences) for name in voices]
    found: list[Reading] = []
    missing: list[str] = []
    for source in sources:
        try:
            found.append(source())
        except BenchError as error:
            missing.append(str(error))
    if not found:
        raise BenchError(f"there is nobody to listen to ({'; '.join(missing)})")
    return found, tuple(missing)


def _reader(voice: SyntheticVoice, sentences: Sequence[str]) -> Callable[[], Reading]:
    return lambda: read_aloud(voice, sentences)


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
