"""What a checkpoint makes for the bench: whole sounds, hop by hop, scripted where random."""

import numpy as np
import pytest
from conftest import QUESTION, ROOT

from evals.readings import Reading
from evals.takes import Way, read_texts, resynthesise, write_down
from mosstalk import Pipeline
from mosstalk.audio.sound import read_audio
from mosstalk.constants import OUTPUT_RATE, OUTPUT_SAMPLES_PER_CODE

TOLD: list[tuple[str, int, int]] = []


def tell(what: str, done: int, total: int) -> None:
    TOLD.append((what, done, total))


@pytest.fixture
def way(pipeline: Pipeline) -> Way:
    return Way(pipeline, pipeline.codec.voice("default"))


@pytest.fixture(scope="module")
def recordings() -> Reading:
    paths = (QUESTION, ROOT / "assets" / "librivox.flac")
    sounds = tuple(read_audio(path, OUTPUT_RATE).samples for path in paths)
    return Reading("people", ("Which folder?", "He was not."), sounds)


def test_text_is_read_aloud_hop_by_hop_with_the_time_it_took(way: Way) -> None:
    taken = read_texts(way, ["Good morning.", "Good night."], tell)
    assert way.scripted
    for sound, seams in zip(taken.reading.sounds, taken.seams, strict=True):
        assert len(sound) == 25 * OUTPUT_SAMPLES_PER_CODE
        assert len(seams) >= 3
        assert list(seams) == sorted({*seams})
        assert 0 < seams[0] < seams[-1] < len(sound)
    assert len(taken.first_audio_ms) == len(taken.real_time_factors) == 2
    assert min(*taken.first_audio_ms, *taken.real_time_factors) > 0
    assert ("reading aloud", 1, 2) in TOLD


def test_a_resynthesis_is_as_long_streamed_as_at_once(way: Way, recordings: Reading) -> None:
    at_once, streamed = resynthesise(way, recordings, tell)
    assert at_once.texts == streamed.reading.texts == recordings.texts
    both = zip(recordings.sounds, at_once.sounds, streamed.reading.sounds, strict=True)
    for recorded, whole, hops in both:
        assert len(whole) == len(hops)
        assert 0 <= len(whole) - len(recorded) < OUTPUT_SAMPLES_PER_CODE
        assert not np.array_equal(whole, hops)
    assert all(len(seams) >= 5 for seams in streamed.seams)


# Slow: reads three times; ``test_tasks`` shows it of the same way of reading.
@pytest.mark.slow
def test_the_same_seed_makes_the_same_sound(way: Way) -> None:
    first, again = (read_texts(way, ["Hello."], tell).reading.sounds[0] for _ in range(2))
    assert np.array_equal(first, again)
    other = Way(way.pipeline, way.voice, seed=1)
    assert not np.array_equal(first, read_texts(other, ["Hello."], tell).reading.sounds[0])


def test_every_sound_is_written_down(way: Way, recordings: Reading) -> None:
    texts = write_down(way, recordings, tell)
    assert len(texts) == 2
    assert all(texts)
