"""Alignment turns one sequence into another with the fewest edits."""

from hypothesis import given
from hypothesis import strategies as st

from evals.words import Errors, align, count_errors

words = st.lists(st.sampled_from("abcd"), max_size=8)


def errors(reference: str, hypothesis: str) -> Errors:
    return count_errors(align(reference.split(), hypothesis.split()))


def test_each_kind_of_edit_is_counted_as_such() -> None:
    assert errors("the cat sat", "the cat sat") == Errors(0, 0, 0, 3)
    assert errors("the cat sat", "the hat sat") == Errors(1, 0, 0, 3)
    assert errors("the cat sat", "the sat") == Errors(0, 1, 0, 3)
    assert errors("the cat sat", "the black cat sat") == Errors(0, 0, 1, 3)
    assert errors("", "anything at all") == Errors(0, 0, 3, 0)
    assert errors("anything at all", "") == Errors(0, 3, 0, 3)


def test_of_equally_short_ways_the_one_that_keeps_most_is_taken() -> None:
    assert errors("call me back now", "ball me now please") == Errors(1, 1, 1, 4)


@given(words, words)
def test_an_alignment_holds_both_sequences_in_order(first: list[str], second: list[str]) -> None:
    pairs = align(first, second)
    assert [pair.reference for pair in pairs if pair.reference is not None] == first
    assert [pair.hypothesis for pair in pairs if pair.hypothesis is not None] == second
    assert count_errors(pairs).length == len(first)


@given(words, words)
def test_the_other_way_round_takes_as_many_edits(first: list[str], second: list[str]) -> None:
    there, back = count_errors(align(first, second)), count_errors(align(second, first))
    assert there.edits == back.edits
    assert (there.edits == 0) is (first == second)
    assert abs(len(first) - len(second)) <= there.edits <= max(len(first), len(second))


@given(words, words, words)
def test_a_detour_takes_no_fewer_edits(
    first: list[str], second: list[str], third: list[str]
) -> None:
    def edits(one: list[str], other: list[str]) -> int:
        return count_errors(align(one, other)).edits

    assert edits(first, third) <= edits(first, second) + edits(second, third)
