"""Stage "vocoder": mel frames to sound, a small HiFT trained on the recordings alone.

Spectral losses first, then also against discriminators; the pitch predictor is trained beside
it from pitch found in the recordings. Writes ``vocoder.safetensors`` (averaged weights, plain),
``vocoder_critics.safetensors`` (to resume with) and ``vocoder_samples/``.
"""

from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch
from torch import Tensor, nn

from mosstalk.config import HiftConfig
from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import mel_filters, vocoder_mel
from mosstalk.models.hift import HiftVocoder
from mosstalk.numerics.rng import normal
from recipes.pocket.data import Spoken
from recipes.pocket.discriminators import Discriminators, critic_loss, vocoder_loss
from recipes.pocket.recorded import Recorded
from recipes.pocket.sizes import HIFT, SMOKE_HIFT
from recipes.pocket.training import Averaged, Budget, Run, adamw, load_weights, save_weights
from recipes.pocket.vocoder_crops import Cropper, Crops, perturbed
from recipes.pocket.vocoder_network import initial_vocoder, load_vocoder

STFT_SIZES = (512, 1024, 2048)
"""FFT sizes of the spectral loss (Yamamoto et al. 2020, Parallel WaveGAN)."""

MEL_BINS = {64: 10, 128: 20, 256: 40, 512: 80, 1024: 128, 2048: 160}
"""Bins of the mel loss at each FFT size, up to 12 kHz (as in Kumar et al. 2023, DAC)."""

_POWER_FLOOR = 1e-7
_MEL_FLOOR = 1e-5


class SpectralLoss(nn.Module):
    """Distance of sounds by their magnitudes alone: phases are free."""

    def __init__(self) -> None:
        super().__init__()
        for n_fft, bins in MEL_BINS.items():
            window = torch.hann_window(n_fft)
            filters = mel_filters(OUTPUT_RATE, n_fft, bins, 0.0, OUTPUT_RATE / 2)
            self.register_buffer(f"window_{n_fft}", window, persistent=False)
            self.register_buffer(f"filters_{n_fft}", filters, persistent=False)

    def forward(self, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Losses of sounds ``made`` (B, N) against ``real`` (B, N), in float32.

        ``stft``: spectral convergence and the distance of log magnitudes, mean over
        ``STFT_SIZES``; ``mel``: the distance of log mels, mean over ``MEL_BINS``.
        """
        both = torch.cat([made, real]).float()
        spectral, mel = [], []
        for n_fft in MEL_BINS:
            magnitude = self._magnitude(both, n_fft)
            if n_fft in STFT_SIZES:
                spectral.append(_spectral_distance(*magnitude.chunk(2)))
            filters: Tensor = self.get_buffer(f"filters_{n_fft}")
            log_mel = (filters @ magnitude).clamp_min(_MEL_FLOOR).log()
            mel.append(_distance(*log_mel.chunk(2)))
        return {"stft": torch.stack(spectral).mean(), "mel": torch.stack(mel).mean()}

    def _magnitude(self, waves: Tensor, n_fft: int) -> Tensor:
        """(B, N) to magnitudes (B, n_fft // 2 + 1, frames), a quarter window between frames."""
        window = self.get_buffer(f"window_{n_fft}")
        spectrum = torch.stft(waves, n_fft, n_fft // 4, window=window, return_complex=True)
        # The root's slope has no bound at zero, and digital silence is common.
        return (spectrum.real.square() + spectrum.imag.square() + _POWER_FLOOR).sqrt()


def _distance(made: Tensor, real: Tensor) -> Tensor:
    return (made - real).abs().mean()


def _spectral_distance(made: Tensor, real: Tensor) -> Tensor:
    convergence = (made - real).norm() / real.norm()
    return convergence + _distance(made.log(), real.log())


# Training.


WEIGHTS_FILE = "vocoder.safetensors"
CRITICS_FILE = "vocoder_critics.safetensors"
SAMPLES_FOLDER = "vocoder_samples"

_MEL_WEIGHT, _STFT_WEIGHT, _SCORE_WEIGHT, _FEATURES_WEIGHT = 15.0, 1.0, 2.0, 6.0
_SAVE_EVERY_S = 60.0
_STEEPEST = 100.0
"""Norm to which gradients are cut."""
_VALIDATION_CROPS, _VALIDATION_FRAMES = 16, 150
_SAMPLES, _LONGEST_SAMPLE_FRAMES = 3, 500


@dataclass(frozen=True)
class Plan:
    """Sizes and rates of one training."""

    config: HiftConfig
    crop_frames: int
    """About a call of the streaming vocoder, so that it is used to a call's ends."""
    batch: int
    critic_width: int
    rate: float = 5e-4
    critic_rate: float = 2e-4
    pitch_rate: float = 1e-3
    critics_from: float = 0.1
    """Share of the budget after which the discriminators join."""
    own_pitch_from: float = 0.05
    """Share of the budget after which the source follows the predicted pitch."""


POCKET = Plan(HIFT, 32, 32, 32)
SMOKE = Plan(SMOKE_HIFT, 10, 4, 4)
_SMOKE_STEPS, _SMOKE_MINUTES = 12, 2.0


def train(data: Spoken, run: Run, mels: Tensor | None = None) -> Path:
    """Train the vocoder on ``data``; return the weights' path.

    ``mels`` (frames, 80) of all of ``data`` take the place of its own: those of the flow. Weights
    to resume from are used with the discriminators that lie beside them, if any. In smoke every
    part runs once, at a toy size.
    """
    torch.manual_seed(run.seed)
    torch.backends.cudnn.benchmark = True
    plan, folder = SMOKE if run.smoke else POCKET, run.folder
    cropper = Cropper(data, plan.crop_frames, mels)
    trainer = Trainer(plan, cropper, data.waves.device, run.resume, plain=run.plain)
    if run.smoke:
        steps, minutes = min(run.budget.steps, _SMOKE_STEPS), run.budget.minutes
        run.budget = Budget(steps, min(minutes, _SMOKE_MINUTES))
    run.log(parameters=sum(p.numel() for p in trainer.vocoder.parameters()))
    saved_s = 0.0
    for _ in run.steps():
        trainer.step(run)
        if run.elapsed_s - saved_s >= _SAVE_EVERY_S:
            saved_s = run.elapsed_s
            trainer.save(run)
    trainer.save(run)
    _write_samples(trainer.best, cropper, folder / SAMPLES_FOLDER)
    return folder / WEIGHTS_FILE


def speak(vocoder: HiftVocoder, mel: Tensor, f0: Tensor) -> Tensor:
    """Sound (B, N) of mels (B, 80, T) at pitch ``f0`` (B, T).

    The fundamental begins at a random phase and its harmonics with it, as in the middle of a
    reply; the noise is random.
    """
    batch, frames = f0.shape
    steps = vocoder.phase_steps(f0.detach().float())
    harmonic = torch.arange(1, vocoder.harmonics + 1, device=f0.device)
    begin = torch.rand((batch, 1, 1), device=f0.device, dtype=torch.float64) * harmonic
    noise = torch.randn((batch, frames * MEL_FRAME_SAMPLES, vocoder.harmonics), device=f0.device)
    return vocoder(mel, vocoder.excite(f0.detach(), begin + steps.cumsum(dim=1), noise))


class Trainer:
    """The vocoder, its average, its discriminators and their optimisers."""

    def __init__(
        self,
        plan: Plan,
        cropper: Cropper,
        device: torch.device,
        resume: Path | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.plan, self.cropper, self.device = plan, cropper, device
        self.vocoder = initial_vocoder(plan.config).to(device)
        self.critics = Discriminators(plan.critic_width).to(device)
        self.seasoned = False
        if resume:
            load_vocoder(self.vocoder, resume)
            beside = resume.with_name(CRITICS_FILE)
            self.seasoned = beside.exists()
            if self.seasoned:
                load_weights(self.critics, beside)
        self.spectral = SpectralLoss().to(device)
        self.average = Averaged(self.vocoder)
        self.skipped = 0
        pitch = list(self.vocoder.f0_predictor.parameters())
        others = [
            parameter
            for name, parameter in self.vocoder.named_parameters()
            if not name.startswith("f0_predictor.")
        ]
        critics = list(self.critics.parameters())
        self._gradients = Recorded(
            self._losses, [*self.vocoder.parameters(), *critics], plain=plain
        )
        self._pitch, self._others, self._critics = (
            adamw(parameters, betas=(0.8, 0.99)) for parameters in (pitch, others, critics)
        )

    @property
    def best(self) -> HiftVocoder:
        """The averaged vocoder."""
        return self.average.module

    def step(self, run: Run) -> None:
        """One batch; a step whose gradients are not finite changes nothing and is counted."""
        plan = self.plan
        run.set_rate(self._others, plan.rate)
        run.set_rate(self._pitch, plan.pitch_rate)
        run.set_rate(self._critics, plan.critic_rate)
        crops = self.cropper.draw(plan.batch)
        try:
            losses, finite = self.learn(crops, run.progress)
        except torch.OutOfMemoryError:
            # Another process may share the card, and its need may pass.
            torch.cuda.empty_cache()
            finite, losses = False, {}
        if finite:
            self.average.update(self.vocoder)
            run.record(**losses)
        else:
            self.skipped += 1

    def learn(self, crops: Crops, progress: float) -> tuple[dict[str, Tensor], bool]:
        """Take one optimiser step on ``crops``; return its losses and whether it was taken.

        ``progress`` is the share of the budget used: it says which losses there are.
        """
        own = progress >= self.plan.own_pitch_from
        judged = self.seasoned or progress >= self.plan.critics_from
        losses = self._gradients(perturbed(crops.mel), crops.wave, crops.f0, own=own, judged=judged)
        if judged and not _descend(self._critics):
            self.skipped += 1
        return losses, _descend(self._others, self._pitch)

    def _losses(
        self, mel: Tensor, wave: Tensor, f0: Tensor, *, own: bool, judged: bool
    ) -> dict[str, Tensor]:
        """Fill all gradients; ``own``: the source has the pitch that is found, not ``f0``."""
        found = self.vocoder.f0_predictor(mel)
        made = speak(self.vocoder, mel, found if own else f0)
        losses = self.spectral(made, wave) | {"f0": _distance(found, f0)}
        total = _MEL_WEIGHT * losses["mel"] + _STFT_WEIGHT * losses["stft"] + losses["f0"]
        if judged:
            losses["critics"] = critic_loss(self._features(made.detach(), wave, learning=True))
            losses["critics"].backward()
            told = vocoder_loss(self._features(made, wave, learning=False))
            losses |= {"score": told.score, "features": told.features}
            total = total + _SCORE_WEIGHT * told.score + _FEATURES_WEIGHT * told.features
        total.backward()
        return losses

    def _features(
        self, made: Tensor, real: Tensor, *, learning: bool
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        self.critics.requires_grad_(learning)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.critics(made, real)

    def save(self, run: Run) -> None:
        """Write the average and the discriminators; log how the average does on held-out sound."""
        crops = self.cropper.validation(_VALIDATION_CROPS, _VALIDATION_FRAMES)
        figures = validate(self.best, crops, self.spectral)
        run.log(**figures, skipped=self.skipped)
        info = {"config": self.plan.config.to_dict(), "step": run.step, "validation": figures}
        save_weights(self.best, run.folder / WEIGHTS_FILE, info)
        save_weights(self.critics, run.folder / CRITICS_FILE, {"step": run.step})


def _descend(*optimizers: torch.optim.Optimizer) -> bool:
    """Step every optimizer; touch nothing and return False if a gradient is not finite."""
    norms = [
        nn.utils.clip_grad_norm_(group["params"], _STEEPEST)
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    if not bool(torch.stack(norms).isfinite().all()):
        return False
    for optimizer in optimizers:
        optimizer.step()
    return True


@torch.no_grad()
def validate(vocoder: HiftVocoder, crops: Crops, spectral: SpectralLoss) -> dict[str, float]:
    """Losses of copy-synthesis from the predicted pitch, and of that pitch.

    ``held_f0_hz`` is the mean error where both find a voice, ``held_voicing`` the share of
    frames where one of them does alone.
    """
    found = vocoder.f0_predictor(crops.mel)
    losses = spectral(speak(vocoder, crops.mel, found), crops.wave)
    voiced, expected = found > vocoder.config.nsf_voiced_threshold, crops.f0 > 0
    both = voiced & expected
    error = ((found - crops.f0).abs() * both).sum() / both.sum().clamp_min(1)
    figures = {f"held_{name}": float(value) for name, value in losses.items()}
    wrong = (voiced != expected).float().mean()
    return figures | {"held_f0_hz": float(error), "held_voicing": float(wrong)}


def _write_samples(vocoder: HiftVocoder, cropper: Cropper, folder: Path) -> None:
    """Copy-synthesis of the first recordings held out, each beside its original."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, index in enumerate(cropper.held_out[:_SAMPLES]):
        original = cropper.recording(index, _LONGEST_SAMPLE_FRAMES)
        mel = vocoder_mel(original).mT
        positions = torch.arange(original.shape[0], device=original.device)
        copy = vocoder.vocode(mel, normal(0, 0, positions, vocoder.harmonics))
        for name, sound in (("original", original), ("copy", copy)):
            path = folder / f"{number}_{name}.wav"
            soundfile.write(path, sound.clamp(-1, 1).cpu().numpy(), OUTPUT_RATE, "PCM_16")
