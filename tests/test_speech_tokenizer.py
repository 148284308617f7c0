"""The speech tokenizer: how many codes, which ones, how far they see, which weights it reads."""

from pathlib import Path

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mosstalk import Pipeline
from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import codes_in
from mosstalk.errors import CheckpointError
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.weights import fill, open_safetensors
from mosstalk.synthesis.sizes import TINY

CODE = 1280
SEGMENT = 480_000
CPU = torch.device("cpu")


def sound(samples: int, level: float, seed: int = 0) -> Tensor:
    """Noise whose colour changes from code to code, so that codes differ."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(samples, generator=generator) * 2 - 1
    tone = torch.sin(
        torch.cumsum(0.02 + 0.5 * torch.rand(samples // 640 + 1, generator=generator), 0)
    )
    return level * (0.5 * noise + 0.5 * tone.repeat_interleave(640)[:samples])


def loud_first(codes: int) -> Tensor:
    """A loud half second that settles the floor, then quieter sound."""
    return torch.cat([sound(8000, 0.9), sound(CODE * codes - 8000, 0.1, seed=1)])


@pytest.fixture(scope="module")
def tokenizer(pipeline: Pipeline) -> SpeechTokenizer:
    return pipeline.codec.tokenizer


def tiny_weights() -> dict[str, Tensor]:
    """Weights by name for the tiny tokenizer, all of one small value."""
    with torch.device("meta"):
        shapes = SpeechTokenizer(SpeechTokenizerConfig.from_dict(TINY.codec)).state_dict()
    return {name: torch.full(value.shape, 0.01) for name, value in shapes.items()}


def filled(weights: dict[str, Tensor], path: Path) -> SpeechTokenizer:
    save_file(weights, path)
    with torch.device("meta"):
        module = SpeechTokenizer(SpeechTokenizerConfig.from_dict(TINY.codec))
    store = open_safetensors(path)
    fill(module, store, where="here", device=CPU, dtype=torch.float32, unused=module.unused)
    return module


@pytest.mark.parametrize(
    "samples",
    [
        *(1, 41, 640, CODE - 1, CODE, CODE + 1, 2 * CODE, 2 * CODE + 1),
        *(SEGMENT - CODE, SEGMENT - 1, SEGMENT, SEGMENT + 1),
        *(SEGMENT + CODE, SEGMENT + CODE + 1, 2 * SEGMENT + 1),
    ],
)
def test_n_samples_are_n_over_1280_codes_rounded_up(
    tokenizer: SpeechTokenizer, samples: int
) -> None:
    codes = tokenizer.encode(sound(samples, 0.3))

    assert len(codes) == -(-samples // CODE) == codes_in(samples)


@examples(30)
@given(samples=st.integers(1, 40 * CODE))
def test_any_length_gives_its_number_of_codes(pipeline: Pipeline, samples: int) -> None:
    assert len(pipeline.codec.tokenizer.encode(sound(samples, 0.3))) == -(-samples // CODE)


def test_codes_are_ids_of_the_codebook_and_vary_with_the_sound(tokenizer: SpeechTokenizer) -> None:
    codes = tokenizer.encode(sound(60 * CODE, 0.3))

    assert min(codes) >= 0
    assert max(codes) < tokenizer.config.quantize_vocab_size
    assert len(set(codes)) > 5


def test_a_segment_is_thirty_seconds_in_whole_codes(tokenizer: SpeechTokenizer) -> None:
    assert tokenizer.segment_samples == SEGMENT
    assert tokenizer.samples_per_code == CODE


def test_segments_are_encoded_apart(tokenizer: SpeechTokenizer) -> None:
    # The first segment is far louder: shared features, positions or floors would show.
    first, second = sound(SEGMENT, 0.9), sound(9000, 0.05, seed=3)

    codes = tokenizer.encode(torch.cat([first, second]))

    assert codes[:375] == tokenizer.encode(first)
    assert codes[375:] == tokenizer.encode(second)


def test_a_segments_end_is_padded_with_silence(tokenizer: SpeechTokenizer) -> None:
    pcm = sound(5 * CODE - 700, 0.3)
    padded = torch.cat([pcm, torch.zeros(700)])

    assert torch.equal(
        tokenizer.encode_segment(pcm).pooled, tokenizer.encode_segment(padded).pooled
    )


@pytest.mark.parametrize("settled", [7, 12, 25])
def test_sound_after_40_samples_past_a_code_does_not_change_it(
    tokenizer: SpeechTokenizer, settled: int
) -> None:
    whole = loud_first(30)
    heard = tokenizer.encode_segment(whole[: settled * CODE + 40])
    all_heard = tokenizer.encode_segment(whole)

    assert heard.codes[:settled].tolist() == all_heard.codes[:settled].tolist()
    difference = heard.pooled[:settled] - all_heard.pooled[:settled]
    # Products of another length are summed in another order: rounding, nothing more.
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("code", [7, 11, 24])
def test_a_code_hears_no_more_than_its_own_first_1160_samples(
    tokenizer: SpeechTokenizer, code: int
) -> None:
    # The second convolution steps by two and looks only back, so it takes a code's last frame
    # (which reads 40 samples past the code) into the next code. The frame before it ends 120
    # samples before the code does.
    whole = loud_first(30)
    before = tokenizer.encode_segment(whole).pooled

    def change_by_click(at: int) -> float:
        clicked = whole.clone()
        clicked[code * CODE + at] = 0.9
        after = tokenizer.encode_segment(clicked).pooled
        return float((after - before)[: code + 1].abs().max())

    assert change_by_click(1160) < 1e-6
    assert change_by_click(1120) > 1e-4


def test_a_later_louder_part_reaches_earlier_codes_through_the_floor(
    tokenizer: SpeechTokenizer,
) -> None:
    quiet = torch.cat([sound(6 * CODE, 0.004), torch.zeros(4 * CODE)])
    louder = torch.cat([quiet, sound(4 * CODE, 0.9, seed=5)])
    alone, together = (tokenizer.encode_segment(pcm) for pcm in (quiet, louder))
    frames, floor = 9 * 8, together.log_mel.max() - 2  # eight decades below the loudest

    changed = together.log_mel[:, :frames] != alone.log_mel[:, :frames]
    assert bool(changed.any())
    assert torch.all(together.log_mel[:, :frames][changed] == floor)
    assert not torch.equal(together.pooled[:9], alone.pooled[:9])


def test_codes_are_the_nearest_entries_of_the_codebook(tokenizer: SpeechTokenizer) -> None:
    segment = tokenizer.encode_segment(sound(40 * CODE, 0.3))
    points = segment.pooled.double()
    entries = tokenizer.encoder.codebook.weight.double()

    distances = torch.stack([(entries - point).square().sum(1) for point in points])

    assert segment.codes.tolist() == distances.argmin(dim=1).tolist()
    torch.testing.assert_close(segment.distances.double(), distances, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.2.fc1.weight",
        "encoder.layers.31.self_attn.q_proj.bias",
        "encoder.embed_positions2.weight",
        "encoder.ema_count",
        "encoder.ema_weight",
        "encoder.layer_norm.weight",
        "encoder.layer_norm.bias",
    ],
)
def test_published_tensors_past_the_cut_are_accepted_and_ignored(name: str, tmp_path: Path) -> None:
    pcm = sound(10 * CODE, 0.3)
    plain = filled(tiny_weights(), tmp_path / "plain.safetensors")
    # NaN: were it used, it would show.
    more = tiny_weights() | {name: torch.full((3,), float("nan"))}
    with_unused = filled(more, tmp_path / "more.safetensors")

    assert with_unused.state_dict().keys() == plain.state_dict().keys()
    assert with_unused.encode(pcm) == plain.encode(pcm)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.self_attn.k_proj.bias",
        "encoder.layers.1.fc3.weight",
        "encoder.embed_positions3.weight",
        "encoder.conv3.weight",
        "decoder.layers.5.fc1.weight",
        "ema_count",
    ],
)
def test_other_unexpected_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"1 tensor unexpected: {name}"):
        filled(tiny_weights() | {name: torch.zeros(3)}, tmp_path / "more.safetensors")


@pytest.mark.parametrize(
    "name", ["encoder.codebook.weight", "encoder.layers.1.fc2.bias", "encoder.conv1.weight"]
)
def test_a_missing_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights[name]

    with pytest.raises(CheckpointError, match=f"1 tensor missing: {name}"):
        filled(weights, tmp_path / "fewer.safetensors")
