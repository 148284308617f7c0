"""The pocket recipe's parts: codebook, text, labels, batches, examples, slips and losses."""

import math
import random
from collections import Counter
from dataclasses import astuple, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.config import LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.constants import (
    INPUT_SAMPLES_PER_CODE,
    MEL_FRAMES_PER_CODE,
    OUTPUT_SAMPLES_PER_CODE,
)
from mosstalk.models.features import vocoder_mel
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.language_model import LanguageModel
from recipes.pocket import flow, language_model, tokenizer
from recipes.pocket.augment import augment, with_throats
from recipes.pocket.corpus import (
    HELD_OUT,
    SHARES,
    Sources,
    Walks,
    load_sources,
    normalised,
    sentences,
    texts,
)
from recipes.pocket.data import (
    PHONES,
    UNLABELLED,
    Recordings,
    frame_labels,
    length_batches,
    load_recordings,
    until_quiet,
    write_shard,
)
from recipes.pocket.examples import Examples, split_by_text
from recipes.pocket.language_model import (
    SLIPS,
    Batch,
    Listener,
    Slips,
    losses,
    with_slips,
)
from recipes.pocket.quantizer import Quantizer, nearest, perplexity
from recipes.pocket.recorded import Recorded
from recipes.pocket.sizes import SMOKE_CODEC, SMOKE_FLOW, SMOKE_MODEL
from recipes.pocket.training import Averaged, Budget, Run, adamw, fresh
from recipes.pocket.voices import KOKORO, LISTENED, TEACHER, Clip, after_silence

CONFIG = LanguageModelConfig.from_dict(SMOKE_MODEL)
PAD = CONFIG.modality_pad_token_id
AUDIO_PAD = CONFIG.eosp_token_id + 1
WORDS = CONFIG.sosp_token_id - 3


# The codebook.


def clusters(count: int, each: int) -> Tensor:
    """Points (count * each, 2) close to ``count`` places on a circle."""
    turns = torch.arange(count) * (2 * math.pi / count)
    places = 10 * torch.stack([turns.cos(), turns.sin()], dim=1)
    noise = torch.randn((each, count, 2), generator=torch.Generator().manual_seed(0))
    return (places + 0.05 * noise).flatten(0, 1)


def test_a_codebook_finds_separate_clusters() -> None:
    torch.manual_seed(0)
    points, quantizer = clusters(6, 200), Quantizer(8, 2)
    quantizer.begin(points, torch.Generator().manual_seed(0))

    for _ in range(300):
        quantizer(points[None])

    error = (points - quantizer.codebook[nearest(points, quantizer.codebook)]).norm(dim=1)
    assert float(error.max()) < 0.5
    codes = quantizer.eval()(points[None]).codes
    assert perplexity(codes, 8) > 5.5


def test_entries_that_nothing_uses_move_to_where_points_are() -> None:
    torch.manual_seed(0)
    points, quantizer = clusters(4, 50), Quantizer(4, 2)
    quantizer.codebook.copy_(torch.tensor([[10.0, 0.0], [99.0, 0.0], [0.0, 99.0], [99.0, 99.0]]))
    quantizer.sums.copy_(quantizer.codebook)
    quantizer.counts.copy_(torch.tensor([1.0, 0.05, 0.05, 0.05]))

    quantizer(points[None])

    moved = quantizer.codebook[1:]
    assert bool((torch.cdist(moved, points).amin(dim=1) < 1e-6).all())
    assert quantizer.counts[1:].tolist() == [1.0, 1.0, 1.0]


def test_quantising_passes_gradients_on_and_changes_nothing_outside_training() -> None:
    quantizer = Quantizer(4, 2).eval()
    before = quantizer.codebook.clone()
    pooled = torch.randn(2, 3, 2, requires_grad=True)

    found = quantizer(pooled)
    found.values.sum().backward()

    assert pooled.grad is not None
    assert torch.equal(pooled.grad, torch.ones(2, 3, 2))
    torch.testing.assert_close(found.values, before[found.codes])
    assert torch.equal(quantizer.codebook, before)


def test_a_codebook_that_is_not_moving_stays_in_training() -> None:
    quantizer = Quantizer(4, 2)
    quantizer.moving = False
    before = quantizer.codebook.clone()

    found = quantizer(torch.randn(2, 30, 2))

    assert torch.equal(quantizer.codebook, before)
    torch.testing.assert_close(found.values, before[found.codes])


def test_perplexity_counts_entries_in_even_use() -> None:
    assert perplexity(torch.tensor([[0, 1, 2, 3]] * 5), 64) == pytest.approx(4)
    assert perplexity(torch.zeros(9, dtype=torch.long), 64) == pytest.approx(1)


# What teachers read.


WORDNET = """\
  1 This software and database is being provided to you, the LICENSEE, by
00001 03 n 01 cup 0 000 | a small open container (usually of clay); "he put the cup back"; "a cup"
00002 03 n 01 atom 0 000 | the smallest part of an element (as of 1913)
00003 03 n 01 USA 0 000 | a republic of 50 states; "the USA is large"
00004 03 v 01 walk 0 000 | use one's feet to advance; "Walk, don't run!"
00005 03 a 01 old 0 000 | small and old and near; "the old cup is near"
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    (tmp_path / "data.noun").write_text(WORDNET)
    many = replace(load_sources(tmp_path), words=["small", "cup", "near", "old", "walk"])
    return replace(many, held_out=many.held_out | {normalised("He put the cup back.")})


def test_glosses_and_examples_become_sentences_that_can_be_said(sources: Sources) -> None:
    assert sources.examples == ["He put the cup back.", "Walk, don't run!", "The old cup is near."]
    assert sources.glosses == [
        "A small open container.",
        "The smallest part of an element.",
        "Use one's feet to advance.",
        "Small and old and near.",
    ]


def test_texts_are_speakable_and_of_the_kinds_in_their_shares(sources: Sources) -> None:
    found = list(islice(texts(sources, 0), 4000))

    assert all(len(text) <= 90 and text[-1] in ".?!" and text[0].isupper() for text in found)
    assert not any(set(text) & set('()";|0123456789') for text in found)
    glosses = sum(text in sources.glosses for text in found)
    # Texts with the held-out example are drawn again: 2/3 of examples and of pairs remain.
    left = 1 - (SHARES["example"] + SHARES["pair"]) / 3
    assert glosses / len(found) == pytest.approx(SHARES["gloss"] / left, abs=0.03)
    assert sum(SHARES.values()) == pytest.approx(1)
    assert found == list(islice(texts(sources, 0), 4000))
    assert found != list(islice(texts(sources, 1), 4000))


def test_walks_go_on_as_some_line_does_and_are_no_lines() -> None:
    lines = ["The old cup is near.", "I walk to the old lamp!", "Use the lamp."]
    draw = random.Random(0)
    walks = Walks(lines)
    found = [walks.draw(draw) for _ in range(300)]

    told = ["the old cup is near", "i walk to the old lamp", "use the lamp"]
    after = {pair for line in told for pair in pairwise(line.split())}
    assert all(set(pairwise(normalised(text).split())) <= after for text in found)
    assert not set(found) <= set(lines)
    assert {len(text.split()) for text in found} >= {4, 5, 6, 7}
    assert all(text[0].isupper() and text[-1] == "." for text in found)


def test_held_out_sentences_are_never_read_alone_or_in_a_pair(sources: Sources) -> None:
    found = list(islice(texts(sources, 3), 4000))

    assert not any("put the cup back" in text for text in found)
    assert any(text.startswith("Walk, don't run! ") for text in found)  # pairs there are
    bench = {normalised(line) for line in HELD_OUT.read_text().splitlines()}
    assert len(bench) == 100
    assert bench <= sources.held_out


def test_what_is_held_out_is_read_by_no_voice_in_training() -> None:
    lines = [f"Sentence {chr(97 + n // 26)}{chr(97 + n % 26)}." for n in range(300)]
    pairs = [f"{one} {other}" for one, other in zip(lines[:100], lines[100:200], strict=True)]
    bare = [line.lower().rstrip(".") for line in lines]

    all_texts = lines + pairs + bare + lines
    split = split_by_text(all_texts, 0.05, seed=0)

    held = [all_texts[clip] for clip in split.held_out]
    said = frozenset[str]().union(*map(sentences, held))
    assert len({normalised(text) for text in held}) == 20
    assert not any(sentences(all_texts[clip]) & said for clip in split.learned)
    # All voices' readings of a held-out text are held out, and little is lost between.
    counted = Counter(map(normalised, all_texts))
    assert Counter(map(normalised, held)) == {text: counted[text] for text in map(normalised, held)}
    assert len(split.learned) + len(split.held_out) > 0.85 * len(all_texts)
    assert not set(split.learned.tolist()) & set(split.held_out.tolist())


# Labels and batches.


def test_a_frames_label_is_the_phone_at_its_middle() -> None:
    phones = [("h#", 0.03), ("hv", 0.05), ("zzz", 0.09), ("t", 0.10)]

    found = frame_labels(phones, 2).tolist()

    pau, hh, t = (PHONES.index(name) for name in ("pau", "hh", "t"))
    assert found == [pau, hh, UNLABELLED, UNLABELLED, t, pau, pau, pau]
    assert frame_labels([], 3).tolist() == [UNLABELLED] * 12


def test_a_clip_is_silent_from_where_it_stays_quiet() -> None:
    t, pau = PHONES.index("t"), PHONES.index("pau")
    labels = np.full(8, t, dtype=np.uint8)
    heard = np.full(8 * 320 - 100, 30, dtype=np.int16)  # 60 dB below what is loud
    heard[320:640] = heard[1000:1100] = 30_000

    assert until_quiet(labels, heard).tolist() == [t] * 4 + [pau] * 4
    assert until_quiet(labels, np.zeros(0, dtype=np.int16)).tolist() == [pau] * 8


@pytest.mark.parametrize("seed", range(5))
def test_batches_have_every_clip_once_and_stay_small_with_padding(seed: int) -> None:
    codes = np.random.default_rng(seed).integers(3, 90, 200)

    batches = list(length_batches(codes, 400))

    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(batch) * codes[batch].max() <= 400 for batch in batches)
    ends = [codes[batch].max() for batch in batches]
    assert ends == sorted(ends)
    # No batch could have taken the next clip as well.
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * codes[following[0]] > 400


def test_some_rows_are_left_clean_but_for_their_level() -> None:
    clean = torch.randn((64, 4000), generator=torch.Generator().manual_seed(0)) * 0.1
    heard = augment(clean, torch.Generator().manual_seed(0), share=0.5)

    alike = torch.cosine_similarity(heard, clean, dim=1) > 0.9999
    assert 20 <= int(alike.sum()) <= 44
    level = 20 * heard.abs().amax(dim=1).log10()
    assert -30.1 < float(level.min()) < -20
    assert -10 < float(level.max()) <= -0.4


def vowel(hertz: float, formant: float) -> Tensor:
    """A second (1, 16000) of harmonics of ``hertz``, loudest near ``formant``."""
    time, sound = torch.arange(16_000) / 16_000, torch.zeros(16_000)
    for place in range(1, int(7000 / hertz)):
        nearness = math.exp(-(((place * hertz - formant) / 400) ** 2))
        sound += (0.01 + nearness) * torch.sin(2 * math.pi * place * hertz * time)
    return 0.1 * sound[None]


@pytest.mark.parametrize("higher", [0.84, 1.0, 1.19])
def test_a_throat_moves_formants_and_leaves_pitch_and_pace(higher: float) -> None:
    sound = vowel(125, 1500)

    moved = with_throats(sound, torch.tensor([[higher]]))

    assert moved.shape == sound.shape
    spectrum = torch.fft.rfft(moved[0]).abs()  # a hertz each
    between = spectrum[: 7000 // 125 * 125].view(-1, 125)[:, 30:95]
    assert float(between.max()) < 0.05 * float(spectrum.max()), "still harmonics of 125 Hz"
    harmonics = spectrum[125:4000:125].square()
    centre = float((harmonics * torch.arange(125, 4000, 125)).sum() / harmonics.sum())
    assert centre == pytest.approx(1500 * higher, rel=0.07)
    if higher == 1.0:
        torch.testing.assert_close(moved, sound, atol=1e-3, rtol=0)


def test_throats_and_microphones_change_most_rows_and_leave_the_rest_of_the_draw() -> None:
    clean = vowel(125, 1500).repeat(64, 1)

    made = [
        augment(clean, torch.Generator().manual_seed(0), share=0.5, throats=throats)
        for throats in (False, True, True)
    ]

    assert torch.equal(made[1], made[2])
    plain, other = (torch.cosine_similarity(each, clean, dim=1) > 0.9999 for each in made[:2])
    assert int(other.sum()) >= 20, "some are left clean"
    spectra = torch.fft.rfft(made[1][~other])[:, 125:4000:125].abs().square()
    centres = (spectra * torch.arange(125, 4000, 125)).sum(1) / spectra.sum(1)
    assert float(centres.std()) > 60
    assert int(plain.sum()) >= 20


def test_some_clips_begin_with_silence_and_their_phones_later() -> None:
    heard = np.full(16_000, 1000, np.int16)
    clip = Clip("A.", "slt", heard, phones=(("aa", 0.4), ("pau", 1.0)))
    draw = random.Random(0)

    made = [after_silence(clip, draw) for _ in range(400)]

    later = [one for one in made if one is not clip]
    assert 90 <= len(later) <= 150
    silent = [len(one.heard) - 16_000 for one in later]
    assert max(silent) <= 1.2 * 16_000
    assert max(silent) > 16_000
    for one, before in zip(later, silent, strict=True):
        assert not one.heard[:before].any()
        assert np.array_equal(one.heard[before:], heard)
        ends = [before / 16_000 + end for end in (0, 0.4, 1.0)]
        assert [end for _, end in one.phones] == pytest.approx(ends)
        assert [name for name, _ in one.phones] == ["pau", "aa", "pau"]
    untold = [after_silence(Clip("A.", "espeak", heard), draw) for _ in range(20)]
    assert not any(one.phones for one in untold), "what is not known stays unknown"


# A tokenizer that is held.


def test_a_held_tokenizer_is_compared_on_kokoros_sound_alone() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        trainee = tokenizer.Trainee(SpeechTokenizerConfig.from_dict(SMOKE_CODEC), 16)
    earlier = tokenizer.Earlier(trainee)
    sound = torch.randn(2, 6 * INPUT_SAMPLES_PER_CODE) * 0.1
    kokoros = torch.full((2, 6), LISTENED.index(KOKORO))
    batch = tokenizer.Batch(sound, torch.zeros(2, 24, dtype=torch.long), kokoros)
    pooled = trainee.pooled(sound).detach()

    assert float(earlier.apart(pooled, batch)["apart"]) < 1e-9
    kokoros[1] = LISTENED.index("slt")
    pooled = torch.stack([pooled[0], pooled[1] + 9])
    assert float(earlier.apart(pooled, batch)["apart"]) < 1e-9, (
        "the second row is another program's"
    )
    kokoros[1] = LISTENED.index(TEACHER)
    assert float(earlier.apart(pooled, batch)["apart"]) > 1

    with torch.no_grad():
        for parameter in trainee.tokenizer.parameters():
            parameter.add_(0.1)
        changed = trainee.pooled(sound)
    assert float(earlier.apart(changed, batch)["apart"]) > 1e-3, "it keeps what was said"


def test_other_voices_follow_what_whispers_features_tell_of_them() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        trainee = tokenizer.Trainee(SpeechTokenizerConfig.from_dict(SMOKE_CODEC), 16)
    width, heard = trainee.tokenizer.config.d_model, list[tuple[int, ...]]()

    def features(sound: Tensor) -> Tensor:
        heard.append(tuple(sound.shape))
        return torch.randn(2, 1500, width, generator=torch.Generator().manual_seed(1))

    earlier = tokenizer.Earlier(trainee, features).eval()
    sound = torch.randn(2, 6 * INPUT_SAMPLES_PER_CODE) * 0.1
    voices = torch.tensor([[LISTENED.index(KOKORO)] * 6, [LISTENED.index("slt")] * 6])
    batch = tokenizer.Batch(sound, torch.zeros(2, 24, dtype=torch.long), voices)
    told = earlier.told(features(sound), 6)
    with torch.no_grad():
        right = torch.stack([earlier.said(sound)[0], told[1]])
    right.requires_grad_()

    parts = earlier.apart(right, batch)

    assert heard[-1] == (2, 480_000)
    assert float(parts["apart"].detach()) < 1e-9
    assert float(parts["followed"].detach()) < 1e-9
    learned = torch.autograd.grad(parts["told"], [*earlier.tell.parameters()], retain_graph=True)
    assert all(bool(gradient.any()) for gradient in learned), "Kokoro's sound teaches what to tell"
    assert not any(p.requires_grad for p in earlier._tokenizer.parameters())
    worse = earlier.apart(right.detach() + 3, batch)
    assert float(worse["followed"].detach()) > 0.1
    # A row's codes are told of its own features and those before, not of what comes later.
    later = features(sound)
    later[:, 4 * 4 :] += 5
    torch.testing.assert_close(earlier.told(later, 6)[:, :4], told[:, :4])
    assert not torch.allclose(earlier.told(later, 6)[:, 4:], told[:, 4:])


def test_a_group_of_parameters_may_have_a_share_of_the_rate(tmp_path: Path) -> None:
    run = Run("s", tmp_path, Budget(10, 60), warmup_steps=1)
    slow, fast = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = adamw([{"params": [slow], "share": 0.1}, {"params": [fast]}])

    run.set_rate(optimizer, 2e-3)

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [2e-4, 2e-3], rel=1e-3
    )


# The language model's slips and losses.


def conversation(seed: int = 0) -> Batch:
    """Two rows of grid: asked, replied, padded; the first reply spoken, the second written.

    Of the first, six rows before the reply are heard codes whose phones are known.
    """
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(WORDS, (2, 40), generator=draw)
    audio = torch.full((2, 40), AUDIO_PAD)
    text[0, 10:30] = PAD
    audio[0, 10:30] = torch.randint(CONFIG.eosp_token_id, (20,), generator=draw)
    learned = torch.zeros((2, 40), dtype=torch.bool)
    learned[:, 10:30] = True
    phones = torch.full((2, 40, 4), -100)
    phones[0, 3:9] = torch.randint(len(PHONES), (6, 4), generator=draw)
    return Batch(torch.stack([text, audio], dim=-1), learned, phones)


def test_slips_touch_replies_alone_and_as_often_as_they_should() -> None:
    torch.manual_seed(0)
    one = conversation()
    batch = Batch(*(part.repeat(300, *[1] * (part.ndim - 1)) for part in astuple(one)))

    read = with_slips(CONFIG, batch, SLIPS)

    changed = read != batch.rows
    assert not bool(changed[~batch.learned].any())
    spoken, written = changed[0::2, 10:30], changed[1::2, 10:30]
    assert not bool(spoken[..., 0].any())
    assert not bool(written[..., 1].any())
    assert float(spoken[..., 1].float().mean()) == pytest.approx(0.04, abs=0.01)
    assert float(written[..., 0].float().mean()) == pytest.approx(0.15, abs=0.02)
    assert int(read[..., 0][changed[..., 0]].max()) < WORDS
    assert int(read[..., 1][changed[..., 1]].max()) < CONFIG.eosp_token_id


def test_some_of_what_is_heard_slips_and_nothing_of_what_a_user_writes() -> None:
    one = conversation()
    batch = Batch(*(part.repeat(300, *[1] * (part.ndim - 1)) for part in astuple(one)))
    heard = replace(batch, learned=torch.zeros_like(batch.learned))

    read = with_slips(CONFIG, heard, SLIPS)

    changed = read != heard.rows
    codes = (heard.rows[..., 0] == PAD) & (heard.rows[..., 1] < CONFIG.eosp_token_id)
    assert bool(codes.any())
    assert float(changed[..., 1][codes].float().mean()) == pytest.approx(0.08, abs=0.02)
    assert not bool(changed[..., 0].any())
    assert not bool(changed[..., 1][~codes].any())


def test_marks_within_replies_never_slip() -> None:
    batch = conversation()
    batch.rows[0, 29, 1] = CONFIG.eosp_token_id
    batch.rows[1, 29, 0] = CONFIG.sosp_token_id - 1

    read = with_slips(CONFIG, batch, Slips(written=1.0, spoken=1.0))

    assert torch.equal(read[:, 29], batch.rows[:, 29])
    assert bool((read[0, 10:29, 1] != batch.rows[0, 10:29, 1]).any())


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return language_model.new_model(CONFIG, torch.device("cpu")).eval()


@pytest.fixture(scope="module")
def listener() -> Listener:
    torch.manual_seed(1)
    return Listener(CONFIG.hidden_size).eval()


@torch.no_grad()
def test_only_replies_count_and_each_for_its_head(model: LanguageModel, listener: Listener) -> None:
    batch = conversation()
    before = losses(model, listener, batch)

    # The last row is nobody's input: a change of it is a change of a target alone.
    asked = replace(batch, rows=batch.rows.clone())
    asked.rows[:, -1] = torch.tensor([7, 9])
    assert losses(model, listener, asked) == before

    longer = Batch(
        torch.cat([batch.rows, batch.rows[:, :5]], 1),
        torch.cat([batch.learned, torch.zeros(2, 5, dtype=torch.bool)], 1),
        torch.cat([batch.phones, torch.full((2, 5, 4), -100)], 1),
    )
    for name, value in losses(model, listener, longer).items():
        torch.testing.assert_close(value, before[name])

    # The last reply row of the written one is a target of the text head and no other.
    wrong = Batch(batch.rows[:, :30].clone(), batch.learned[:, :30], batch.phones[:, :30])
    wrong.rows[1, 29, 0] = (wrong.rows[1, 29, 0] + 1) % WORDS
    after = losses(model, listener, wrong)
    assert not torch.equal(after["text"], before["text"])
    torch.testing.assert_close(after["audio"], before["audio"])
    torch.testing.assert_close(after["phones"], before["phones"])


@torch.no_grad()
def test_the_audio_head_tells_the_first_code_where_speech_opens(
    model: LanguageModel, listener: Listener
) -> None:
    batch = conversation()
    batch.rows[0, 9, 0] = CONFIG.sosp_token_id
    batch.learned[:] = False
    batch.learned[0, 9:11] = True
    first = int(batch.rows[0, 10, 1])
    logits = model(batch.rows[:1], model.new_cache()).audio[0, 8:10].float()
    wanted = F.cross_entropy(logits, torch.full((2,), first))
    torch.testing.assert_close(losses(model, listener, batch)["audio"], wanted)


@torch.no_grad()
def test_phones_are_told_from_one_row_after_their_code(
    model: LanguageModel, listener: Listener
) -> None:
    batch = conversation()
    before = losses(model, listener, batch)["phones"]

    def after_change_of(row: int) -> Tensor:
        changed = replace(batch, rows=batch.rows.clone())
        changed.rows[0, row, 0] = (changed.rows[0, row, 0] + 1) % WORDS
        return losses(model, listener, changed)["phones"]

    assert torch.equal(after_change_of(10), before)  # two rows after the last code
    assert not torch.equal(after_change_of(9), before)
    silent = replace(batch, phones=torch.full_like(batch.phones, -100))
    assert float(losses(model, listener, silent)["phones"]) == 0.0


@torch.no_grad()
def test_phones_to_be_said_are_told_from_the_row_before(
    model: LanguageModel, listener: Listener
) -> None:
    batch = conversation()
    spoken = batch.learned & (batch.rows[..., 0] == CONFIG.modality_pad_token_id)
    _, place = spoken.nonzero()[-1].tolist()
    phones = torch.full_like(batch.phones, -100)
    phones[spoken.nonzero()[-1][0], place] = 3
    batch = replace(batch, phones=phones)
    before = losses(model, listener, batch)
    assert float(before["said"]) > 0.0
    assert float(before["phones"]) == 0.0, "what is said is not heard"

    def after_change_of(row: int) -> Tensor:
        changed = replace(batch, rows=batch.rows.clone())
        changed.rows[:, row, 1] = (changed.rows[:, row, 1] + 1) % 8
        return losses(model, listener, changed)["said"]

    assert torch.equal(after_change_of(place), before["said"])
    assert not torch.equal(after_change_of(place - 1), before["said"])


def flat(batch: Batch) -> Examples:
    """The two conversations of a batch, one after another."""
    phones = torch.where(batch.phones < 0, UNLABELLED, batch.phones).to(torch.uint8)
    rows, learned = batch.rows.flatten(0, 1), batch.learned.flatten()
    return Examples(rows, learned, phones.flatten(0, 1), np.array([0, 40]), np.array([40, 40]))


def test_the_best_weights_are_kept_and_not_the_last(tmp_path: Path, listener: Listener) -> None:
    examples = flat(conversation())
    mean = Averaged(language_model.new_model(CONFIG, torch.device("cpu")))
    best = language_model.Best(mean, listener, {"held_out": examples}, rows=3_000)
    run = Run("language_model", tmp_path, Budget(10, 1.0))
    best.consider(run)
    kept = language_model.weights_file(tmp_path).read_bytes()

    with torch.no_grad():
        for parameter in mean.module.parameters():
            parameter.mul_(3.0)
    best.consider(run)

    assert language_model.weights_file(tmp_path).read_bytes() == kept
    log = (tmp_path / "language_model.jsonl").read_text().splitlines()
    assert [line.rsplit('"kept": ')[1] for line in log] == ["1.0}", "0.0}"]


# The flow's windows and loss.


def recordings(folder: Path, codes: tuple[int, ...]) -> Recordings:
    """Clips of the teacher's, of so many codes each, whose samples tell their places."""
    draw = np.random.default_rng(0)
    clips = [
        Clip(
            f"Text {number}.",
            TEACHER,
            np.zeros(count * INPUT_SAMPLES_PER_CODE, np.int16),
            draw.integers(-9000, 9000, count * OUTPUT_SAMPLES_PER_CODE).astype(np.int16),
            (),
        )
        for number, count in enumerate(codes)
    ]
    write_shard(folder / f"00-{TEACHER}-00000", clips)
    return load_recordings(folder, torch.device("cpu"), [0])


def test_a_window_of_the_flows_has_the_mel_of_its_codes_and_none_is_held_out(
    tmp_path: Path,
) -> None:
    data = recordings(tmp_path, (20, 30, 40))
    source = flow.FlowData(data, np.arange(90, dtype=np.int16))
    whole = vocoder_mel(data.spoken.float() / 32768)

    torch.manual_seed(0)
    codes, mel = source.draw(50, 12)

    assert codes.shape == (50, 12)
    assert int(codes.min()) > 20  # the first clip is held out
    for row, frames in zip(codes, mel, strict=True):
        first = int(row[0])
        assert row.tolist() == list(range(first, first + 12))
        torch.testing.assert_close(frames, whole[4 * first : 4 * first + 48])
    assert list(source.held_out) == [0]
    codes, mel = source.clip(1)
    assert codes.tolist() == list(range(20, 50))
    assert mel.shape == (120, 80)


def test_the_flow_learns_from_every_frame_that_is_not_its_prompt() -> None:
    torch.manual_seed(0)
    decoder = fresh(FlowDecoder(SMOKE_FLOW)).eval()
    codes = torch.randint(SMOKE_FLOW.vocab_size, (2, 20))
    mel = torch.randn(2, 20 * MEL_FRAMES_PER_CODE, SMOKE_FLOW.mel_bins, requires_grad=True)
    speaker = flow.speaker_embedding(SMOKE_FLOW.spk_embed_dim)

    flow.losses(decoder, codes, mel, speaker, masked=True)["flow"].backward()

    assert mel.grad is not None
    assert bool((mel.grad.abs().sum(-1)[:, -1] > 0).all())


# Steps that a card records.


def test_a_plain_step_has_the_gradients_of_its_own_inputs_alone() -> None:
    layer = torch.nn.Linear(3, 1)
    recorded = Recorded(lambda x, *, twice: told(layer, x, twice), layer.parameters())
    first, second = torch.randn(4, 3), torch.randn(4, 3)

    recorded(first, twice=True)
    losses = recorded(second, twice=False)

    assert not losses["loss"].requires_grad
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[0], second.mean(0))


def told(layer: torch.nn.Linear, x: Tensor, twice: bool) -> dict[str, Tensor]:
    loss = layer(x).mean() * (2 if twice else 1)
    loss.backward()
    return {"loss": loss}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(4, 9), (4, 9, 4)])
def test_recorded_steps_of_several_shapes_are_the_plain_ones(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1).cuda()
    recorded = Recorded(lambda x, *, twice: told(layer, x, twice), layer.parameters())
    for count in rows:
        for twice in (False, True):
            x = torch.randn(count, 3, device="cuda")
            loss = recorded(x, twice=twice)["loss"]
            found = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
            layer.zero_grad()
            wanted = told(layer, x, twice)["loss"].detach()
            torch.testing.assert_close(loss, wanted)
            for mine, parameter in zip(found, layer.parameters(), strict=True):
                torch.testing.assert_close(mine, parameter.grad)


# Groups of few shapes.


def test_every_example_is_in_one_group_whose_rows_hold_it() -> None:
    draw = np.random.default_rng(3)
    lengths = draw.integers(20, 700, 500)

    found = language_model.groups(lengths, 4_000, draw)

    chosen = np.concatenate([group.chosen for group in found])
    assert sorted(chosen[chosen >= 0]) == list(range(500))
    for group in found:
        there = group.chosen[group.chosen >= 0]
        assert lengths[there].max() <= group.width
        assert len(group.chosen) == max(1, 4_000 // group.width)
    assert len({(len(group.chosen), group.width) for group in found}) <= 12


def test_an_example_longer_than_the_model_has_places_is_in_no_group() -> None:
    lengths = np.array([2048, 2049, 9000, 50])

    found = language_model.groups(lengths, 4_000, np.random.default_rng(0))

    assert sorted(int(n) for group in found for n in group.chosen if n >= 0) == [0, 3]


def test_an_empty_place_of_a_group_teaches_nothing() -> None:
    examples = flat(conversation())

    batch = language_model.gather(examples, np.array([1, -1, 0]), 48)

    assert batch.rows.shape == (3, 48, 2)
    assert torch.equal(batch.rows[[2, 0], :40], conversation().rows)
    assert not bool(batch.learned[1].any())
    assert not bool(batch.learned[:, 40:].any())
    assert bool((batch.phones[1] == -100).all())
