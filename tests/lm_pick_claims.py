"""What the kernels that draw tokens must do: the same as the general path, bit for bit.

``test_lm_pick.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/lm_pick_claims.py`` runs the compiled kernels on it.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from lm_pick_cases import AUDIO_IDS, EOSP, TEXT_IDS, Draws, copied, draws
from torch import Tensor

from mosstalk.conversation import Mode, SpecialIds, next_mode
from mosstalk.numerics.rng import gumbel, gumbel_rows
from mosstalk.ops import sampling
from mosstalk.ops.launch import interprets, runs, tl, triton
from mosstalk.ops.sampling import ModeTokens, sample, update_modes
from mosstalk.ops.sampling_parts import (
    AUDIO,
    BAD_KEY,
    ENDED,
    FREE,
    HELD,
    NOT_DRAWN,
    TEXT,
    DrawSettings,
    DrawState,
    few,
    gumbel_at,
)
from mosstalk.ops.tiles import Tile
from mosstalk.runtime.device import pick_device

DEVICE = pick_device("cpu" if interprets() else "cuda")
HALVES = [torch.float16] if interprets() else [torch.float16, torch.bfloat16]
DTYPES = [torch.float32] if interprets() else [torch.float32, *HALVES]
"""Logits are widened when they are read: that the interpreter reads halves, one claim shows."""
ROWS = 8 if interprets() else 2000
SMALL = 300
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that a small vocabulary has several of."""
    monkeypatch.setattr(
        sampling, "CANDIDATE_TILES", {sampling.ANY_TOKENS: Tile(1, HELD, HELD, 1, 1)}
    )
    monkeypatch.setattr(sampling, "SAMPLE_TILES", {sampling.ANY_KEYS: Tile(1, HELD, HELD, 4, 1)})


def small(dtype: torch.dtype, rows: int = ROWS, **how: float) -> Draws:
    case = draws(rows, SMALL, dtype, DEVICE, last_token=SMALL - 20, seed=int(how.get("seed", 0)))
    return replace(case, logits=case.logits * how.get("by", 1.0))


def everybody(case: Draws, **values: float) -> Draws:
    """The same rows, some settings equal in all of them."""
    every = {name: torch.full_like(getattr(case.settings, name), v) for name, v in values.items()}
    return replace(case, settings=replace(case.settings, **every))


def on_cpu(case: Draws) -> Draws:
    """The same draws where the reference runs."""
    settings = {name: value.cpu() for name, value in vars(case.settings).items()}
    latest, mode = (None if v is None else v.cpu() for v in (case.state.latest, case.state.mode))
    return replace(
        case,
        logits=case.logits.cpu(),
        state=DrawState(case.state.seen.cpu(), latest, mode),
        settings=DrawSettings(**settings),
        tokens=case.tokens.cpu(),
        bad=case.bad.cpu(),
    )


def reference(case: Draws, *, masked: bool = False) -> Draws:
    """What the reference writes, from a copy on the CPU."""
    apart = replace(on_cpu(case), state=copied(on_cpu(case).state))
    sample.reference(
        apart.logits, apart.state, apart.settings, apart.tokens, apart.bad,
        channel=apart.channel, last_token=apart.last_token, masked=masked,
    )  # fmt: skip
    return apart


def drawn_alike(case: Draws, *, masked: bool = False) -> Tensor:
    """Draw, check all that is written against the reference, and return the tokens."""
    expected = reference(case, masked=masked)
    case.pick(masked=masked)
    found = on_cpu(case)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.bad.tolist() == expected.bad.tolist()
    assert torch.equal(found.state.seen, expected.state.seen)
    assert found.state.latest is not None
    assert expected.state.latest is not None
    assert torch.equal(found.state.latest, expected.state.latest)
    return found.tokens


def test_kernels_run_here() -> None:
    assert runs(torch.empty(1, device=DEVICE))


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(seed, step, tokens, out, CHANNEL: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    noise = gumbel_at(tl.load(seed), tl.load(step), tl.load(tokens + place), CHANNEL)
    tl.store(out + place, noise)


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (-1, 4999), ((1 << 62) + 12345, 77)])
@pytest.mark.parametrize("channel", [TEXT, AUDIO])
def test_noise_is_that_of_the_reference(seed: int, step: int, channel: int) -> None:
    tokens = torch.randint(0, TEXT_IDS, (256,), generator=torch.Generator().manual_seed(step))
    out = torch.zeros(256, dtype=torch.float64, device=DEVICE)
    given = (torch.tensor([value], device=DEVICE) for value in (seed, step))
    _gumbel[(1,)](*given, tokens.int().to(DEVICE), out, channel, 256)
    expected = gumbel(seed, channel, step, tokens)
    assert torch.allclose(out.cpu(), expected, rtol=1e-12, atol=1e-12)


@every_dtype
@pytest.mark.usefixtures("small_chunks")
def test_the_best_tokens_of_each_chunk_are_kept_in_order(dtype: torch.dtype) -> None:
    case = small(dtype)
    case.logits[0] = case.logits[0].round()
    case.logits[1, 70] = float("nan")
    case.logits[2, SMALL - 1] = float("inf")
    case.logits[3, ::2] *= 0.0
    room = sampling.sample_workspace(ROWS, SMALL, DEVICE)
    how = {"last_token": SMALL - 20}
    sampling.topk_candidates.plan(
        case.logits, case.state, case.settings, room, channel=AUDIO, masked=False, **how
    ).run()
    apart = on_cpu(case)
    expected = torch.empty_like(room, device="cpu")
    sampling.topk_candidates.reference(apart.logits, apart.state, apart.settings, expected, **how)
    assert room.shape[1] > 1
    poisoned = room[1:3, :, 0].eq(BAD_KEY)
    assert poisoned.int().argmax(dim=1).tolist() == [70 // HELD, (SMALL - 1) // HELD]
    room[1:3] = expected[1:3].to(DEVICE)
    assert torch.equal(room.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_ids_are_those_of_the_engine(dtype: torch.dtype) -> None:
    case = small(dtype, seed=1)
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()
    assert expected.max() <= SMALL


@every_dtype
@pytest.mark.parametrize("levels", [1, 2, 4, 40])
@pytest.mark.usefixtures("small_chunks")
def test_equal_logits_are_all_counted_however_many(dtype: torch.dtype, levels: int) -> None:
    case = small(dtype, seed=levels)
    generator = torch.Generator().manual_seed(levels)
    steps = torch.randint(0, levels, case.logits.shape, generator=generator)
    case = replace(case, logits=(steps.to(DEVICE) / 4).to(dtype))
    case = everybody(case, forced=FREE, temperature=0.8)
    case = replace(case, state=DrawState(case.state.seen & (levels > 2), case.state.latest))
    tail = torch.rand(ROWS, generator=generator) * 0.9
    case = replace(case, settings=replace(case.settings, tail=tail.to(DEVICE)))
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()


@pytest.mark.usefixtures("small_chunks")
def test_of_tokens_that_are_not_held_top_p_cuts_neither_too_many_nor_too_few() -> None:
    kept = SMALL - SMALL // 20
    every_step = torch.arange(1, 5000)
    noise = gumbel_rows(
        torch.full_like(every_step, 11), AUDIO, every_step, torch.arange(SMALL)[None]
    )
    # Steps at which the first token that is cut, the last and the first one not held would win.
    wins = {id_: noise[:, : max(kept, id_ + 1)].argmax(dim=1) for id_ in (kept, kept - 1, HELD)}
    steps = torch.cat([every_step[won == id_][:2] for id_, won in wins.items()])
    case = draws(len(steps), SMALL, torch.float32, DEVICE)
    case = everybody(case, forced=FREE, temperature=1, top_k=20, tail=1 - 0.95, seeds=11)
    settings = replace(case.settings, steps=steps.to(DEVICE), never=case.settings.never[:, :0])
    state = DrawState(torch.zeros_like(case.state.seen), case.state.latest)
    logits = torch.ones_like(case.logits)
    found = drawn_alike(replace(case, logits=logits, settings=settings, state=state))
    assert found[2:].tolist() == [kept - 1, kept - 1, HELD, HELD]
    assert kept not in found


@pytest.mark.usefixtures("small_chunks")
def test_of_twenty_equal_tokens_top_p_cuts_the_last() -> None:
    case = everybody(small(torch.float32), forced=FREE, temperature=1, top_k=20, penalty=1)
    logits = torch.full_like(case.logits, -5)
    logits[:, 100:120] = 3
    case = replace(case, logits=logits)
    case = everybody(case, tail=1 - 0.95)
    never = torch.full_like(case.settings.never, FREE)
    case = replace(case, settings=replace(case.settings, never=never))
    found = drawn_alike(case)
    assert found.min() >= 100
    assert found.max() <= 118


@pytest.mark.usefixtures("small_chunks")
def test_greedy_takes_the_lowest_of_equal_tokens_and_zero_has_no_sign() -> None:
    case = everybody(small(torch.float32), forced=FREE, temperature=0, penalty=1)
    logits = torch.full_like(case.logits, -1)
    logits[:, 200], logits[:, 130], logits[:, 140] = 0.0, -0.0, 0.0
    case = replace(case, logits=logits)
    never = torch.full_like(case.settings.never, FREE)
    never[1, 0] = 130
    case = replace(case, settings=replace(case.settings, never=never))
    assert drawn_alike(case)[:3].tolist() == [130, 140, 130]


@every_dtype
def test_a_vocabulary_smaller_than_what_is_held(dtype: torch.dtype) -> None:
    case = draws(min(ROWS, 8), 50, dtype, DEVICE, seed=3)
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()
    case = everybody(draws(4, 50, dtype, DEVICE, seed=4), top_k=HELD, tail=0, temperature=9)
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()


@every_dtype
@pytest.mark.usefixtures("small_chunks")
def test_a_logit_that_is_not_finite_makes_its_row_bad_alone(dtype: torch.dtype) -> None:
    case = everybody(small(dtype, rows=6), forced=FREE)
    whole = reference(case).tokens
    case.logits[1, 3] = float("nan")
    case.logits[2, SMALL - 1] = float("inf")
    case.logits[4, 100] = -float("inf")
    before = copied(case.state)
    found = drawn_alike(case)
    assert case.bad.tolist() == [False, True, True, False, True, False]
    assert found.tolist() == [NOT_DRAWN if n in (1, 2, 4) else int(whole[n]) for n in range(6)]
    slots = case.settings.slots[[1, 2, 4]]
    assert torch.equal(case.state.seen[slots], before.seen[slots])
    assert case.state.latest is not None
    assert (case.state.latest[slots] == -7).all()


@pytest.mark.usefixtures("small_chunks")
def test_rows_of_nobody_and_of_other_modes_write_nothing() -> None:
    case = small(torch.float32, rows=6)
    slots = torch.tensor([-1, 3, 0, 5, -1, 2], device=DEVICE)
    case = replace(case, settings=replace(case.settings, slots=slots))
    modes = [AUDIO, TEXT, TEXT, ENDED, TEXT, AUDIO, AUDIO, AUDIO]
    state = replace(case.state, mode=torch.tensor(modes, dtype=torch.int8, device=DEVICE))
    case = replace(case, state=state)
    unmasked = drawn_alike(replace(case, state=copied(state), tokens=case.tokens.clone()))
    assert [int(i) for i in unmasked[[0, 1, 4]]] == [-9, NOT_DRAWN, -9]
    found = drawn_alike(replace(case, state=copied(state)), masked=True)
    assert found[:2].tolist() == [-9, NOT_DRAWN]
    assert found[4:].tolist() == [-9, NOT_DRAWN]
    assert found[2:4].tolist() == unmasked[2:4].tolist()
    assert case.bad[[0, 4]].all()
    assert not case.bad[[1, 5]].any()


@every_dtype
@pytest.mark.usefixtures("small_chunks")
def test_a_row_draws_the_same_alone_and_in_company(dtype: torch.dtype) -> None:
    case = small(dtype, rows=4, seed=8)
    alone = []
    for row in range(4):
        one = case.rows(torch.tensor([row], device=DEVICE))
        one.pick()
        alone += one.tokens.tolist()
    case.pick()
    assert case.tokens.tolist() == alone


@pytest.mark.usefixtures("small_chunks")
def test_logits_and_results_may_lie_apart() -> None:
    case = small(torch.float32, rows=4, seed=9)
    expected = reference(case).tokens
    wide = torch.full((4, SMALL + 11), float("nan"), device=DEVICE)
    wide[:, 4 : 4 + SMALL] = case.logits
    both = torch.full((4, 2), -9, device=DEVICE)
    bad = torch.ones(4, 2, dtype=torch.bool, device=DEVICE)
    case = replace(case, logits=wide[:, 4 : 4 + SMALL], tokens=both[:, 1], bad=bad[:, 1])
    case.pick()
    assert both[:, 1].tolist() == expected.tolist()
    assert (both[:, 0] == -9).all()
    assert bad.tolist() == [[True, False]] * 4


@pytest.mark.usefixtures("small_chunks")
def test_no_id_need_be_forbidden() -> None:
    case = small(torch.float32, rows=3)
    none = case.settings.never[:, :0]
    drawn_alike(replace(case, settings=replace(case.settings, never=none)))


def test_kernels_take_greedy_rows_and_small_top_k() -> None:
    assert few(0, 0)
    assert few(0.6, HELD)
    assert not few(0.6, 0)
    assert not few(0.6, HELD + 1)


def test_the_audio_channel_at_its_published_size() -> None:
    rows = 1 if interprets() else 500
    case = draws(rows, AUDIO_IDS, torch.float16, DEVICE, last_token=EOSP, seed=2)
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()


@pytest.mark.skipif(interprets(), reason="takes minutes where it is interpreted")
def test_the_text_channel_at_its_published_size() -> None:
    case = draws(100, TEXT_IDS, torch.bfloat16, DEVICE, channel=TEXT, seed=2)
    expected = on_cpu(case).expected()
    assert drawn_alike(case).tolist() == expected.tolist()


IDS = SpecialIds(
    endoftext=1, im_start=0, im_end=2, sosp=3, modality_pad=4, eosp=6, audio_pad=5,
    stop=frozenset((1, 2)),
)  # fmt: skip
MODE_IDS = ModeTokens(sosp=3, eosp=6, modality_pad=4, audio_pad=5)


def settled(
    rows: list[tuple[int, int, int]], *, deferred: bool, bad: list[int] | None = None
) -> DrawState:
    """What follows from rows (mode, text, audio), one a slot; slot 0 is nobody's."""
    mode, *latest = torch.tensor([(TEXT, 3, 0), *rows], device=DEVICE).T
    seen = torch.zeros(len(mode), 8, dtype=torch.bool, device=DEVICE)
    state = DrawState(seen, torch.stack(latest, dim=1), mode.to(torch.int8))
    slots = torch.tensor([-1, *range(len(rows), 0, -1), -1], device=DEVICE)
    damaged = torch.zeros(len(slots), 2, dtype=torch.bool, device=DEVICE)
    damaged[[0, -1]] = True
    for number in bad or []:
        damaged[len(rows) + 1 - number, number % 2] = True
    stop = torch.tensor([1, 2], device=DEVICE)
    other = copied(state)
    update_modes(state, slots, damaged, stop, MODE_IDS, deferred=deferred)
    update_modes.reference(other, slots, damaged, stop, MODE_IDS, deferred=deferred)
    for one, two in zip(vars(state).values(), vars(other).values(), strict=True):
        assert torch.equal(one, two)
    assert state.mode is not None
    assert int(state.mode[0]) == TEXT
    return state


@pytest.mark.parametrize("deferred", [False, True])
def test_modes_follow_from_rows_as_in_conversations(deferred: bool) -> None:
    rows = list(product([TEXT, AUDIO], range(7), range(7)))
    state = settled(rows, deferred=deferred)
    assert state.mode is not None
    assert state.latest is not None
    for place, (mode, text, audio) in enumerate(rows, 1):
        speaking = mode == AUDIO
        row = (
            IDS.modality_pad if speaking else text,
            IDS.audio_pad if deferred and not speaking else audio,
        )
        after = next_mode(Mode.AUDIO if speaking else Mode.TEXT, row, IDS)
        expected = AUDIO if after is Mode.AUDIO else TEXT
        if row[0] in IDS.stop:
            expected = ENDED
        assert int(state.mode[place]) == expected
        assert tuple(state.latest[place].tolist()) == row
        assert state.seen[place].nonzero().tolist() == ([[IDS.modality_pad]] if speaking else [])


def test_a_bad_row_ends_its_slot_and_an_ended_slot_stays() -> None:
    rows = [(TEXT, 0, 0), (AUDIO, 0, 0), (ENDED, 3, 0), (AUDIO, 0, 1)]
    state = settled(rows, deferred=True, bad=[1, 2])
    assert state.mode is not None
    assert state.latest is not None
    assert state.mode.tolist() == [TEXT, ENDED, ENDED, ENDED, AUDIO]
    assert state.latest[1:4].tolist() == [[0, 0], [0, 0], [3, 0]]
    assert state.seen.nonzero().tolist() == [[4, IDS.modality_pad]]
