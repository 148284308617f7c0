"""Scripted replies: syntax and the rule that each step gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.conversation import Mode, SpecialIds
from mosstalk.errors import ScriptError
from mosstalk.reply_options import Script

IDS = SpecialIds(256, 257, 258, 259, 260, 1024, 512, stop=frozenset((256, 258)))
PARTS = st.lists(
    st.tuples(st.sampled_from(["speech", "text"]), st.integers(1, 20)), min_size=1, max_size=4
)


@given(parts=PARTS)
def test_a_script_reads_back_as_it_was_typed(parts: list[tuple[str, int]]) -> None:
    typed = ",".join(f"{kind}:{length}" for kind, length in parts)
    assert str(Script.parse(typed)) == typed


@given(parts=PARTS, first=st.sampled_from(Mode))
def test_a_script_ends_with_im_end_and_closes_every_speech_part(
    parts: list[tuple[str, int]], first: Mode
) -> None:
    rules = Script.parse(",".join(f"{k}:{n}" for k, n in parts)).rules(first, IDS)
    opened = sum(rule.text == IDS.sosp for rule in rules) + (first is Mode.AUDIO)
    closed = sum(rule.audio == IDS.eosp for rule in rules)
    assert opened == closed
    assert rules[-1].text == IDS.im_end
    assert all(rule.text != IDS.im_end for rule in rules[:-1])


def test_speech_alone_is_its_codes_eosp_and_im_end() -> None:
    rules = Script.parse("speech:3").rules(Mode.AUDIO, IDS)
    assert [(rule.text, rule.audio) for rule in rules] == [
        (None, None),
        (None, None),
        (None, None),
        (None, IDS.eosp),
        (IDS.im_end, None),
    ]
    assert all(IDS.eosp in rule.never_audio for rule in rules[:3])


def test_free_text_may_not_end_or_open_anything() -> None:
    rule = Script.parse("text:1").rules(Mode.TEXT, IDS)[0]
    assert rule.never_text == {IDS.endoftext, IDS.im_end, IDS.sosp, IDS.modality_pad}


@pytest.mark.parametrize(
    "typed", ["", "speech", "speech:0", "song:3", "speech:-1", "text:1,,text:2"]
)
def test_a_wrong_script_is_told_the_syntax(typed: str) -> None:
    with pytest.raises(ScriptError, match="speech:CODES"):
        Script.parse(typed)
