"""Hearing for many sessions: each stream's codes are the offline ones, whoever shares its run."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from live_rig import CODE, LIVE, quiet, rising, speech

from mosstalk.session.senses import Senses

TOKENIZER = LIVE["goldens"].tokenizer


@pytest.fixture
def senses() -> Iterator[Senses]:
    """Hears codes alone."""
    senses = Senses(TOKENIZER, None)
    yield senses
    senses.stop()


def test_turns_that_end_and_turns_that_go_on_share_a_run(senses: Senses) -> None:
    clips = [kind(9 * CODE + 77 * n).numpy() for n, kind in enumerate((speech, rising, quiet))]
    states = [senses.open() for _ in clips]

    async def hear() -> None:
        firsts = [senses.encode(s, c[: 4 * CODE]) for s, c in zip(states, clips, strict=True)]
        await asyncio.gather(*firsts)
        rests = [
            senses.encode(state, clip[4 * CODE :], last=place != 1)
            for place, (state, clip) in enumerate(zip(states, clips, strict=True))
        ]
        await asyncio.gather(*rests)
        assert [state.finished for state in states] == [True, False, True]
        await senses.encode(states[1], np.zeros(0, np.float32), last=True)

    asyncio.run(hear())
    assert [state.codes for state in states] == [
        TOKENIZER.encode(torch.from_numpy(c)) for c in clips
    ]


def test_no_sound_is_no_work(senses: Senses) -> None:
    state = senses.open()

    asyncio.run(senses.encode(state, np.zeros(0, np.float32)))

    assert (state.samples, state.blocks, state.finished) == (0, 0, False)


def test_a_whole_turn_has_the_offline_codes(senses: Senses) -> None:
    clip = rising(11 * CODE + 5)

    assert asyncio.run(senses.codes_of(clip.numpy())) == TOKENIZER.encode(clip)


def test_warming_asks_a_cpu_for_nothing(senses: Senses) -> None:
    asyncio.run(senses.warm(64))

    assert senses._live.pages.count == 0
