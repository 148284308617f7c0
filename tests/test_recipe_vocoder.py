"""The pocket recipe's vocoder stage: pitch targets, crops, batched HiFT, and a whole small run."""

import json
import shutil
import subprocess
import wave
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import require_program
from safetensors import safe_open
from torch import Tensor

from mosstalk.config import HiftConfig
from mosstalk.constants import MEL_FRAME_SAMPLES
from mosstalk.models.features import vocoder_mel
from mosstalk.models.hift import HiftVocoder
from recipes.pocket import vocoder
from recipes.pocket.data import Spoken
from recipes.pocket.discriminators import Discriminators, critic_loss, vocoder_loss
from recipes.pocket.training import Budget, Run, load_weights
from recipes.pocket.vocoder import SpectralLoss
from recipes.pocket.vocoder_crops import Cropper, perturbed, pitch
from recipes.pocket.vocoder_network import initial_vocoder

RATE = 24_000
FRAME = 480
CPU = torch.device("cpu")
SMALL = vocoder.SMOKE.config
SENTENCES = (
    "Hello there, how can I help you today?",
    "My favourite colour is blue, because it reminds me of the ocean.",
    "Nothing is as offensive as innocence.",
)


def joined(waves: list[Tensor]) -> Spoken:
    whole = [(wave[: len(wave) // FRAME * FRAME] * 32767).round().short() for wave in waves]
    lengths = torch.tensor([len(wave) for wave in whole])
    return Spoken(torch.cat(whole), lengths.cumsum(0) - lengths, lengths)


def tone(hz: float | Tensor, seconds: float = 1.0) -> Tensor:
    """A voice-like tone: eight harmonics that fall off, at a fixed or moving pitch."""
    turns = (torch.full((int(seconds * RATE),), 1.0, dtype=torch.float64) * hz / RATE).cumsum(0)
    waves = [torch.sin(2 * torch.pi * h * turns) / h for h in range(1, 9)]
    return torch.stack(waves).sum(dim=0).float() * 0.1


def hiss(seconds: float = 1.0, level: float = 0.05, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(seconds * RATE), generator=generator) * level


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    """A few sentences where flite is installed, else tones between noise."""
    if shutil.which("flite") is None:
        parts = [torch.cat([hiss(0.4, seed=n), tone(150 + 20 * n), hiss(0.3)]) for n in range(4)]
        return joined(parts)
    return joined(list(spoken(tmp_path_factory.mktemp("flite"))))


def spoken(folder: Path) -> list[Tensor]:
    found = []
    for number, sentence in enumerate(SENTENCES):
        path = folder / f"{number}.wav"
        subprocess.run(["flite", "-voice", "slt", "-t", sentence, "-o", str(path)], check=True)
        with wave.open(str(path)) as file:
            rate, data = file.getframerate(), file.readframes(file.getnframes())
        pcm = np.frombuffer(data, np.int16).astype(np.float32) / 32768
        # Any resampling does for speech that nobody will hear.
        at = np.arange(len(pcm) * RATE // rate) * (rate / RATE)
        found.append(torch.from_numpy(np.interp(at, np.arange(len(pcm)), pcm)).float())
    return found


@lru_cache
def small_vocoder() -> HiftVocoder:
    torch.manual_seed(0)
    return initial_vocoder(SMALL)


# Pitch.


@pytest.mark.parametrize("hz", [65.0, 100.0, 187.3, 250.0, 390.0])
def test_a_tones_pitch_is_found_to_a_thousandth(hz: float) -> None:
    found = pitch(tone(hz))[2:-2]

    torch.testing.assert_close(found, torch.full_like(found, hz), rtol=1e-3, atol=0)


def test_pitch_belongs_to_the_middle_of_its_frame() -> None:
    seconds = 2.0
    rising = torch.linspace(120, 240, int(seconds * RATE), dtype=torch.float64)

    found = pitch(tone(rising, seconds))
    middles = rising[FRAME // 2 :: FRAME].float()

    # A frame later or earlier would be 1.2 Hz off.
    torch.testing.assert_close(found[2:-2], middles[2:-2], rtol=0, atol=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_silence_have_no_pitch(seed: int) -> None:
    assert not pitch(hiss(5.0, seed=seed)).any()
    assert not pitch(torch.zeros(RATE)).any()
    assert not pitch(tone(200.0) * 1e-3).any()


def test_pitch_is_the_same_for_16_bit_sound_and_however_long_it_is() -> None:
    sound = torch.cat([hiss(0.2), tone(200.0), hiss(0.2, seed=1), tone(120.0)])
    long = torch.cat([sound] * 80)  # more frames than are looked at at once

    whole, once = pitch(long), pitch(sound)

    assert len(whole) > 8192
    torch.testing.assert_close(whole[5 : len(once) - 5], once[5:-5])
    coarse = pitch((sound * 32768).round().short())
    assert float((coarse - once).abs().max()) < 0.1


def test_voices_begin_and_end_where_the_sound_does() -> None:
    found = pitch(torch.cat([hiss(0.4), tone(200.0, 0.4), hiss(0.4, seed=1)]))
    voiced = (found > 0).nonzero()[:, 0]

    assert voiced.tolist() == list(range(int(voiced[0]), int(voiced[-1]) + 1))
    assert abs(int(voiced[0]) - 20) <= 1
    assert abs(int(voiced[-1]) - 39) <= 1


@pytest.mark.system
def test_a_spoken_sentences_pitch_is_a_womans(tmp_path: Path) -> None:
    require_program("flite")
    found = pitch(joined(list(spoken(tmp_path))).waves)
    voiced = found[found > 0]

    assert 0.3 < len(voiced) / len(found) < 0.9
    assert 130 < float(voiced.median()) < 230
    steps = (voiced[1:] / voiced[:-1]).log2().abs()
    assert float((steps > 0.5).float().mean()) < 0.02  # octave jumps


# Batches of HiFT.


def test_a_batch_speaks_as_its_members_do_alone() -> None:
    model, frames = small_vocoder(), 12
    generator = torch.Generator().manual_seed(1)
    mel = torch.randn((3, 80, frames), generator=generator) - 6
    noise = torch.randn((3, frames * FRAME, model.harmonics), generator=generator)

    with torch.no_grad():
        f0 = model.f0_predictor(mel)
        phases = model.phase_steps(f0).cumsum(dim=1)
        source = model.excite(f0, phases, noise)
        sound = model(mel, source)

    for row in range(3):
        alone = model.f0(mel[row])
        torch.testing.assert_close(f0[row], alone, rtol=1e-5, atol=1e-4)
        single = model.source(f0[row], phases[row], noise[row])
        torch.testing.assert_close(source[row], single, rtol=0, atol=1e-6)
        whole = model.synthesise(mel[row], source[row])
        torch.testing.assert_close(sound[row], whole, rtol=0, atol=1e-5)


def test_a_batch_of_mels_is_the_mels_of_its_members() -> None:
    waves = torch.stack([tone(200.0), hiss()])

    both = vocoder_mel(waves)

    for row in range(2):
        torch.testing.assert_close(both[row], vocoder_mel(waves[row]), rtol=0, atol=1e-5)


def test_losses_reach_every_parameter() -> None:
    torch.manual_seed(0)
    model, critics = initial_vocoder(SMALL), Discriminators(4)
    real = torch.stack([tone(200.0, 0.4), hiss(0.4)])
    mel = vocoder_mel(real).mT
    found = model.f0_predictor(mel)
    made = vocoder.speak(model, mel, torch.tensor([[200.0], [0.0]]).expand(2, mel.shape[2]))

    losses = SpectralLoss()(made, real)
    told = vocoder_loss(critics(made, real))
    (sum(losses.values()) + told.score + told.features + found.sum()).backward()

    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert bool(gradient.isfinite().all()), name
        assert float(gradient.abs().max()) > 0, name


def test_a_fresh_vocoder_is_quiet_and_its_gradients_are_not_cut() -> None:
    model, mel = small_vocoder(), vocoder_mel(torch.stack([tone(200.0)])).mT

    with torch.no_grad():
        sound = vocoder.speak(model, mel, torch.full((1, mel.shape[2]), 200.0))

    assert 1e-4 < float(sound.abs().max()) < 0.9 * model.config.audio_limit


def test_centred_inputs_are_the_same_convolution() -> None:
    torch.manual_seed(0)
    plain = HiftVocoder(SMALL).conv_pre
    torch.manual_seed(0)
    centred = initial_vocoder(SMALL).conv_pre
    mel = torch.randn(1, 80, 20) * 2.5 - 6

    inner = slice(3, -3)  # away from the padding
    expected = plain((mel + 6) / 2.5)[..., inner]
    torch.testing.assert_close(centred(mel)[..., inner], expected, rtol=0, atol=1e-5)


# Losses.


def test_the_spectral_loss_hears_level_and_colour_but_not_phase() -> None:
    loss = SpectralLoss()
    real, other = hiss(1.0)[None], hiss(1.0, seed=1)[None]
    flipped, quiet = -real, real * 0.5
    distances = [sum(map(float, loss(x, real).values())) for x in (real, flipped, quiet, other)]

    assert distances[0] == pytest.approx(0, abs=1e-6)
    assert distances[1] == pytest.approx(0, abs=1e-4)
    assert distances[2] > 1
    tones = loss(tone(200.0)[None], tone(300.0)[None])
    assert all(float(value) > 0.3 for value in tones.values())


def test_silence_against_silence_is_no_distance_and_has_finite_gradients() -> None:
    made = torch.zeros((2, RATE // 2), requires_grad=True)

    total = sum(SpectralLoss()(made, torch.zeros(2, RATE // 2)).values())
    assert isinstance(total, Tensor)
    total.backward()

    assert float(total.detach()) == 0
    assert made.grad is not None
    assert bool(made.grad.isfinite().all())


def test_discriminators_learn_to_tell_noise_from_tones() -> None:
    torch.manual_seed(0)
    critics = Discriminators(4)
    optimizer = torch.optim.Adam(critics.parameters(), lr=4e-3)
    real, made = tone(200.0, 0.4).expand(2, -1), hiss(0.8).view(2, -1)

    first = loss = critic_loss(critics(made, real))
    for _ in range(25):
        loss = critic_loss(critics(made, real))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert float(loss.detach()) < 0.5 * float(first.detach())
    # The better they are, the more the vocoder is told.
    assert float(vocoder_loss(critics(made, real)).score.detach()) > 0.5


# Crops.


def test_a_crops_mel_and_pitch_are_those_of_the_whole_recording() -> None:
    moving = torch.linspace(120, 240, 3 * RATE, dtype=torch.float64)
    clips = joined([tone(moving, 3.0), tone(moving.flip(0), 3.0) + hiss(3.0, 0.01)])
    cropper = Cropper(clips, 16)
    second = clips.waves[clips.starts[1] :].float() / 32768
    mel, f0 = vocoder_mel(second), pitch(clips.waves)[150:]

    crops = cropper.draw(8)

    for row in range(8):
        at = find(second, crops.wave[row])
        assert at % FRAME == 0
        first = at // FRAME
        torch.testing.assert_close(crops.mel[row].T, mel[first : first + 16], rtol=0, atol=1e-3)
        torch.testing.assert_close(crops.f0[row], f0[first : first + 16])


def find(whole: Tensor, part: Tensor) -> int:
    starts = whole.unfold(0, len(part), FRAME)
    matches = (starts == part).all(dim=1).nonzero()[:, 0]
    assert len(matches) == 1
    return int(matches[0]) * FRAME


def test_half_of_the_crops_have_the_recordings_own_mel_and_validation_has_none(
    clips: Spoken,
) -> None:
    torch.manual_seed(0)
    other = torch.full((clips.waves.shape[0] // MEL_FRAME_SAMPLES, 80), 99.0)
    cropper = Cropper(clips, 16, other)

    given = (cropper.draw(400).mel == 99.0).flatten(1)

    assert torch.equal(given.all(1), given.any(1))
    assert float(given[:, 0].float().mean()) == pytest.approx(0.5, abs=0.1)
    assert bool((cropper.validation(4, 16).mel == 99.0).all())


def test_recordings_held_out_are_never_drawn() -> None:
    # Recording n is silent but for its level, so that a crop tells where it is from.
    levels = torch.arange(1, 103) / 200
    clips = joined([torch.full((RATE,), float(level)) for level in levels])
    cropper = Cropper(clips, 16)

    drawn = torch.cat([cropper.draw(64).wave[:, 0] for _ in range(20)])
    numbers = set((drawn * 200).round().int().sub(1).tolist())

    assert cropper.held_out == [0, 50, 100]
    assert not numbers & set(cropper.held_out)
    assert len(numbers) > 90
    held = cropper.validation(8, 30).wave
    assert (held[:, 0] * 200).round().int().sub(1).tolist() == [0, 50, 100]


def test_some_mels_are_perturbed_a_little_and_the_others_not_at_all() -> None:
    torch.manual_seed(0)
    mel = torch.randn(400, 80, 8) - 6

    change = (perturbed(mel) - mel).abs().amax(dim=(1, 2))
    touched = change[change > 0]

    assert 0.2 < len(touched) / len(mel) < 0.4
    assert 0.05 < float(touched.median()) < 3


# The stage.


@pytest.mark.slow
def test_the_stage_runs_saves_and_resumes(clips: Spoken, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    budget = Budget(steps=6, minutes=1)

    path = vocoder.train(clips, Run("vocoder", first, budget, smoke=True, seed=1))
    run = Run("vocoder", second, budget, smoke=True, seed=1, resume=path)
    again = vocoder.train(clips, run)

    lines = [json.loads(line) for line in (first / "vocoder.jsonl").read_text().splitlines()]
    figures = lines[-1]
    assert figures["skipped"] == 0
    assert all(np.isfinite(figures[f"held_{name}"]) for name in ("stft", "mel", "f0_hz"))
    assert any("critics" in line for line in lines)
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call,unused-ignore]
        config = HiftConfig.from_dict(json.loads(file.metadata()["info"])["config"])
    assert config == SMALL
    resumed = HiftVocoder(config)
    load_weights(resumed, again)
    sounds = sorted(path.name for path in (first / "vocoder_samples").iterdir())
    assert sounds[:2] == ["0_copy.wav", "0_original.wav"]
    with wave.open(str(first / "vocoder_samples" / "0_copy.wav")) as file:
        assert file.getframerate() == RATE
        assert file.getnframes() % FRAME == 0


@pytest.mark.slow
def test_training_on_one_tone_brings_sound_nearer_to_it() -> None:
    torch.manual_seed(0)
    plan = replace(vocoder.SMOKE, rate=2e-3, pitch_rate=2e-3, critics_from=2.0, own_pitch_from=2.0)
    cropper = Cropper(joined([tone(200.0, 2.0)]), plan.crop_frames)
    trainer = vocoder.Trainer(plan, cropper, CPU)
    before = vocoder.validate(trainer.vocoder, cropper.validation(1, 30), trainer.spectral)

    for _ in range(30):
        trainer.learn(cropper.draw(plan.batch), 0.0)

    after = vocoder.validate(trainer.vocoder, cropper.validation(1, 30), trainer.spectral)
    assert after["held_mel"] < 0.6 * before["held_mel"]
    assert after["held_f0_hz"] < 0.5 * before["held_f0_hz"]


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    torch.manual_seed(0)
    cropper = Cropper(joined([tone(200.0, 2.0)]), vocoder.SMOKE.crop_frames)
    trainer = vocoder.Trainer(vocoder.SMOKE, cropper, CPU)
    crops = cropper.draw(4)
    before = [value.clone() for value in trainer.vocoder.parameters()]

    _, finite = trainer.learn(replace(crops, wave=crops.wave * torch.nan), 0.0)

    assert not finite
    for old, new in zip(before, trainer.vocoder.parameters(), strict=True):
        assert torch.equal(old, new)
