"""The bench of repairs: varied speech, the same each time, and tables of what it cost."""

import numpy as np
import pytest
from live_rig import CODE, LIVE, quiet, speech

from evals.codec_parts import (
    CONDITIONS,
    LONGEST_S,
    SHORTEST_S,
    Conversation,
    Corpus,
    measure_repairs,
    repair_tables,
    varied_speech,
)
from mosstalk.constants import INPUT_RATE


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """A few minutes of the people whose recordings are at hand."""
    return varied_speech(3, seed=4, voices=())


def test_varied_speech_is_as_much_as_was_asked_for_in_turns_of_every_length(
    corpus: Corpus,
) -> None:
    lengths = [len(turn) / INPUT_RATE for talk in corpus.conversations for turn in talk.turns]

    assert 180 <= sum(lengths) < 180 + 5 * LONGEST_S
    assert min(lengths) >= SHORTEST_S
    assert max(lengths) <= LONGEST_S
    assert max(lengths) > 4 * min(lengths)
    assert all(turn.dtype == np.float32 for talk in corpus.conversations for turn in talk.turns)


def test_varied_speech_is_the_same_each_time(corpus: Corpus) -> None:
    again = varied_speech(3, seed=4, voices=())

    for one, other in zip(corpus.conversations, again.conversations, strict=True):
        assert (one.speaker, one.condition) == (other.speaker, other.condition)
        assert all(map(np.array_equal, one.turns, other.turns))


def test_each_conversation_is_as_loud_as_its_condition_says(corpus: Corpus) -> None:
    for talk in corpus.conversations:
        for turn in talk.turns:
            peak_db = 20 * np.log10(np.abs(turn).max())
            assert peak_db < talk.condition.peak_db + 4
            if talk.condition.rise_db == 0:
                assert peak_db > talk.condition.peak_db - 1
            assert np.abs(turn).min() < np.abs(turn).max() / 100


def test_who_is_not_installed_is_named_and_the_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")

    corpus = varied_speech(0.05, voices=("flite-slt",))

    assert corpus.conversations
    assert any("flite is not installed; apt install flite" in each for each in corpus.missing)


def test_repairs_are_counted_by_condition_with_and_without_the_last_maximum() -> None:
    rising, steady = (
        (np.concatenate([quiet(5 * CODE).numpy(), speech(20 * CODE).numpy()]),) * 2,
        (np.tile(speech(5 * CODE, start=9000).numpy(), 4),) * 2,
    )
    talks = (Conversation("a", CONDITIONS[0], rising), Conversation("b", CONDITIONS[1], steady))

    figures = measure_repairs(LIVE["goldens"], Corpus(talks, ("nobody",)))

    assert figures.valid
    loud, usual, all_of_them = (
        figures.fresh[CONDITIONS[0].name],
        figures.fresh[CONDITIONS[1].name],
        repair_tables(figures)[0].rows[2],
    )
    assert (loud.clips, usual.clips) == (2, 2)
    assert loud.repaired_clips == 2
    assert len(figures.known[CONDITIONS[0].name].repairs) < len(loud.repairs)
    assert all_of_them[:2] == ("knows nothing: all", "4")
    assert all_of_them[-1] == "4/4"


def test_the_tables_say_when_repairs_came_and_who_was_missing() -> None:
    nearer = np.concatenate([quiet(10 * CODE).numpy(), speech(10 * CODE).numpy()])
    talks = (Conversation("a", CONDITIONS[0], (nearer,)),)
    figures = measure_repairs(LIVE["goldens"], Corpus(talks, ("nobody at all",)))

    costs, times = repair_tables(figures)

    assert "nobody at all" in costs.note
    count = len(figures.fresh[CONDITIONS[0].name].repairs)
    assert times.rows[0][:2] == ("knows nothing", str(count))
    shares = [int(share) for share in times.rows[0][2:9]]
    assert shares == sorted(shares)
    assert shares[-1] == 100
