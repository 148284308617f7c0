"""Draws on the device: kernels keep what ``lm_pick_claims.py`` says, and so does the reference."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from claims_rig import outcomes_of, require_kept
from lm_pick_cases import Draws, copied, draws

from mosstalk.ops.sampling import sample
from mosstalk.ops.sampling_parts import FREE

CPU = torch.device("cpu")
VOCABULARY = 500
ROWS = 200
CLAIMS = "lm_pick_claims.py"
LEAST_CLAIMS = 11
ONLY_COMPILED = "test_the_text_channel_at_its_published_size"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interpreted_kernels_draw_as_the_reference_and_the_engine_do(tmp_path: Path) -> None:
    outcomes = outcomes_of(CLAIMS, tmp_path, interpret=True, limit_s=600)
    require_kept(outcomes, skipped=[ONLY_COMPILED], least=LEAST_CLAIMS)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_draw_as_the_reference_and_the_engine_do(tmp_path: Path) -> None:
    outcomes = outcomes_of(CLAIMS, tmp_path, interpret=False, limit_s=600)
    require_kept(outcomes, least=LEAST_CLAIMS)


def drawn_by_reference(case: Draws) -> Draws:
    """The same draws, made by the reference."""
    found = replace(
        case, state=copied(case.state), tokens=case.tokens.clone(), bad=torch.ones_like(case.bad)
    )
    sample.reference(
        found.logits, found.state, found.settings, found.tokens, found.bad,
        channel=found.channel, last_token=found.last_token,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_draws_what_the_engine_draws_for_any_top_k(dtype: torch.dtype) -> None:
    case = draws(ROWS, VOCABULARY, dtype, CPU, last_token=VOCABULARY - 9)
    top_k = case.settings.top_k.clone()
    top_k[::3] = 0
    top_k[1::3] *= 4
    case = replace(case, settings=replace(case.settings, top_k=top_k))
    found = drawn_by_reference(case)
    assert found.tokens.tolist() == case.expected().tolist()
    assert not found.bad.any()


def test_the_reference_remembers_what_it_drew_and_nothing_else() -> None:
    case = draws(ROWS, VOCABULARY, torch.float32, CPU)
    slots = case.settings.slots.clone()
    slots[::4] = -1
    logits = case.logits.clone()
    logits[1, 7] = float("nan")
    case = replace(case, logits=logits, settings=replace(case.settings, slots=slots))
    found = drawn_by_reference(case)
    seen, latest = case.state.seen.clone(), torch.full((ROWS + 2, 2), -7)
    for row in range(2, ROWS):
        if row % 4:
            seen[slots[row], found.tokens[row]] = True
            latest[slots[row], case.channel] = found.tokens[row]
    assert torch.equal(found.state.seen, seen)
    assert found.state.latest is not None
    assert torch.equal(found.state.latest, latest)
    assert found.bad.tolist() == [row % 4 == 0 or row == 1 for row in range(ROWS)]


def test_where_nobody_draws_the_reference_writes_nothing() -> None:
    case = draws(5, VOCABULARY, torch.float32, CPU)
    nobody = torch.full_like(case.settings.slots, -1)
    never = torch.full_like(case.settings.never, FREE)
    case = replace(case, settings=replace(case.settings, slots=nobody, never=never))
    found = drawn_by_reference(case)
    assert (found.tokens == -9).all()
    assert torch.equal(found.state.seen, case.state.seen)
    assert found.state.latest is not None
    assert (found.state.latest == -7).all()
