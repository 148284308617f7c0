"""The reference network: incremental equals whole, batches equal singles, embeddings."""

from itertools import pairwise

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk import Pipeline
from mosstalk.models.language_model import LanguageModel
from mosstalk.numerics.rope import rotary_tables, rotate

CLOSE = 2e-5


@pytest.fixture(scope="module")
def model(pipeline: Pipeline) -> LanguageModel:
    return pipeline.model


def random_rows(model: LanguageModel, count: int, seed: int) -> torch.Tensor:
    """Rows (1, count, 2), about half of them audio."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    text = torch.randint(config.vocab_size, (count,), generator=generator)
    is_audio = torch.rand(count, generator=generator) < 0.5
    text[is_audio] = config.modality_pad_token_id
    audio = torch.randint(config.eosp_token_id + 1, (count,), generator=generator)
    return torch.stack([text, audio], dim=-1)[None]


def pieces(rows: torch.Tensor, cuts: set[int]) -> list[torch.Tensor]:
    bounds = [0, *sorted(cut for cut in cuts if cut < rows.shape[1]), rows.shape[1]]
    return [rows[:, a:b] for a, b in pairwise(bounds) if b > a]


@given(
    count=st.integers(1, 60), cuts=st.sets(st.integers(1, 59), max_size=20), seed=st.integers(0, 99)
)
@examples(25)
def test_decoding_over_random_cuts_equals_one_pass(
    model: LanguageModel, count: int, cuts: set[int], seed: int
) -> None:
    rows = random_rows(model, count, seed)
    with torch.inference_mode():
        whole = model(rows, model.new_cache())
        cache = model.new_cache()
        parts = [model(part, cache) for part in pieces(rows, cuts)]
    assert cache.rows == count
    for head in ("text", "audio"):
        joined = torch.cat([getattr(part, head) for part in parts], dim=1)
        torch.testing.assert_close(joined, getattr(whole, head), rtol=0, atol=CLOSE)


@given(kept=st.integers(0, 40), other=st.integers(1, 40), seed=st.integers(0, 99))
@examples(25)
def test_truncating_the_cache_forgets_what_came_after(
    model: LanguageModel, kept: int, other: int, seed: int
) -> None:
    first, second = random_rows(model, 40, seed), random_rows(model, other, seed + 1000)
    with torch.inference_mode():
        cache = model.new_cache()
        model(first, cache)
        cache.truncate(kept)
        again = model(second, cache).audio
        fresh = model(torch.cat([first[:, :kept], second], dim=1), model.new_cache()).audio
    torch.testing.assert_close(again, fresh[:, kept:], rtol=0, atol=CLOSE)


def test_the_cache_grows_past_its_first_capacity(model: LanguageModel) -> None:
    rows = random_rows(model, 600, 3)
    with torch.inference_mode():
        cache = model.new_cache()
        parts = [model(part, cache).text for part in rows.split(97, dim=1)]
        whole = model(rows, model.new_cache()).text
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=CLOSE)


def test_a_batch_equals_its_sequences_alone(model: LanguageModel) -> None:
    rows = torch.cat([random_rows(model, 20, seed) for seed in range(3)])
    with torch.inference_mode():
        together = model(rows, model.new_cache()).text
        alone = torch.cat([model(row[None], model.new_cache()).text for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=CLOSE)


def test_last_only_is_the_last_row_of_the_whole(model: LanguageModel) -> None:
    rows = random_rows(model, 12, 5)
    with torch.inference_mode():
        whole, last = model(rows, model.new_cache()), model(rows, model.new_cache(), last_only=True)
    torch.testing.assert_close(last.text, whole.text[:, -1:], rtol=0, atol=CLOSE)
    torch.testing.assert_close(last.audio, whole.audio[:, -1:], rtol=0, atol=CLOSE)


def test_only_the_embedded_id_of_a_row_matters(model: LanguageModel) -> None:
    pad = model.config.modality_pad_token_id
    text = torch.tensor([[[7, 1], [pad, 5]]])
    assert torch.equal(model.embed(text)[0, 0], model.embed(torch.tensor([[[7, 900]]]))[0, 0])
    assert torch.equal(model.embed(text)[0, 1], model.model.audio_embed.weight[5])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1)).unbind()
    scores = []
    for offset in (0, 5, 300):
        tables = rotary_tables(torch.tensor([offset, offset + 9]), 16, 10_000.0)
        turned_query = rotate(query, (tables[0][:1], tables[1][:1]))
        turned_key = rotate(key, (tables[0][1:], tables[1][1:]))
        scores.append(float((turned_query * turned_key).sum()))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)
