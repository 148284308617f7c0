"""HiFT: mel frames to 24 kHz sound through a harmonic source and an inverse STFT.

HiFTNet (Li et al. 2023) in CosyVoice2's sizes and the published tensor names, with weight
norm folded into plain weights. Shapes: B sequences, T mel frames, N = 480 T samples, K =
harmonics + 1. The modules take batches and pass gradients on, for training; speech is made
one sequence at a time by ``f0``, ``source``, ``synthesise`` and ``vocode``. ``HiftStream`` goes hop
by hop: eight mel frames kept, their sound held back and cross-faded.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import HiftConfig
from mosstalk.numerics.rng import normal

_F0_LAYERS = 5
LAST_LEAKY_SLOPE = 0.01
MAGNITUDE_LIMIT = 100.0
_SNAKE_EPS = 1e-9


class F0Predictor(nn.Module):
    """Five same-padded convolutions and a linear layer: fundamental frequency in Hz."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        width, parts, inputs = config.f0_channels, list[nn.Module](), config.in_channels
        for _ in range(_F0_LAYERS):
            parts += [nn.Conv1d(inputs, width, 3, padding=1), nn.ELU()]
            inputs = width
        self.condnet = nn.Sequential(*parts)
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """``mel`` (B, 80, T) to f0 (B, T), zero or positive."""
        hidden = self.condnet(mel).transpose(1, 2)
        return self.classifier(hidden)[..., 0].abs()


class Snake(nn.Module):
    """x + sin^2(a x) / a with one a per channel (Ziyin et al. 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, L) to the same."""
        alpha = self.alpha[None, :, None]
        return x + (alpha * x).sin().square() / (alpha + _SNAKE_EPS)


class SnakeResidual(nn.Module):
    """Per dilation: x += conv(snake(dilated conv(snake(x)))), all same-padded."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2)
            for d in dilations
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) // 2) for _ in dilations
        )
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, L) to the same."""
        for act1, conv1, act2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = x + conv2(act2(conv1(act1(x))))
        return x


class HarmonicMixer(nn.Module):
    """Mixes the sinusoids of the fundamental and its harmonics into one source."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """(..., N, K) to (..., N) in float32."""
        weight, bias = self.l_linear.weight.float(), self.l_linear.bias.float()
        return torch.tanh(F.linear(waves, weight, bias))[..., 0]


def _window(config: HiftConfig, device: torch.device) -> Tensor:
    return torch.hann_window(config.istft_n_fft, device=device)


class HiftVocoder(nn.Module):
    """The whole vocoder; ``f0``, ``source`` and ``synthesise`` are its three stages.

    In batches they are ``f0_predictor``, ``excite`` and the module itself.
    """

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        self.config = config
        base, spectrum = config.base_channels, config.istft_n_fft + 2
        widths = [base >> (stage + 1) for stage in range(len(config.upsample_rates))]
        self.f0_predictor = F0Predictor(config)
        self.m_source = HarmonicMixer(config)
        self.conv_pre = nn.Conv1d(config.in_channels, base, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(2 * width, width, kernel, rate, padding=(kernel - rate) // 2)
            for width, rate, kernel in zip(
                widths, config.upsample_rates, config.upsample_kernel_sizes, strict=True
            )
        )
        self.source_downs = nn.ModuleList(
            _source_down(spectrum, width, math.prod(config.upsample_rates[stage + 1 :]))
            for stage, width in enumerate(widths)
        )
        self.source_resblocks = nn.ModuleList(
            SnakeResidual(width, kernel, dilations)
            for width, kernel, dilations in zip(
                widths,
                config.source_resblock_kernel_sizes,
                config.source_resblock_dilation_sizes,
                strict=True,
            )
        )
        self.resblocks = nn.ModuleList(
            SnakeResidual(width, kernel, dilations)
            for width in widths
            for kernel, dilations in zip(
                config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
            )
        )
        self.conv_post = nn.Conv1d(widths[-1], spectrum, 7, padding=3)

    @property
    def harmonics(self) -> int:
        """K: the fundamental and its harmonics."""
        return self.config.nb_harmonics + 1

    @torch.inference_mode()
    def f0(self, mel: Tensor) -> Tensor:
        """Fundamental frequency (T,) in Hz, float32, of a mel (80, T)."""
        return self.f0_predictor(mel[None].to(self.conv_pre.weight.dtype))[0].float()

    def phase_steps(self, f0: Tensor) -> Tensor:
        """Turns that each harmonic advances in each frame of ``f0`` (..., T).

        Returns (..., T, K) float64.
        """
        harmonic = torch.arange(1, self.harmonics + 1, device=f0.device)
        per_sample = (f0[..., None] * harmonic / self.config.sampling_rate) % 1
        return per_sample.double() * self.config.samples_per_frame

    @torch.inference_mode()
    def source(self, f0: Tensor, phases: Tensor, noise: Tensor) -> Tensor:
        """``excite`` for one sequence: (N,) from (T,), (T, K) and (N, K)."""
        return self.excite(f0[None], phases[None], noise[None])[0]

    def excite(self, f0: Tensor, phases: Tensor, noise: Tensor) -> Tensor:
        """Excitation (B, N) float32 from f0 (B, T), phases (B, T, K) and noise (B, N, K).

        ``phases`` are turns at the frames' centres, float64, in between linear, held before
        the first and after the last. Where f0 is above the threshold the sinusoids sound
        with a little noise, elsewhere noise alone.
        """
        config = self.config
        frames = f0.repeat_interleave(config.samples_per_frame, dim=1)[..., None]
        voiced = (frames > config.nsf_voiced_threshold).float()
        turns = F.interpolate(
            phases.transpose(1, 2), scale_factor=float(config.samples_per_frame), mode="linear"
        ).transpose(1, 2)
        sines = torch.sin(2 * torch.pi * (turns % 1)).float() * config.nsf_alpha
        level = config.nsf_sigma * voiced + config.nsf_alpha / 3 * (1 - voiced)
        return self.m_source(sines * voiced + level * noise)

    @torch.inference_mode()
    def synthesise(self, mel: Tensor, source: Tensor) -> Tensor:
        """Sound (N,) float32 at 24 kHz from a mel (80, T) and a source (N,), clamped."""
        return self(mel[None], source[None])[0]

    def forward(self, mel: Tensor, source: Tensor) -> Tensor:
        """Sound (B, N) float32 at 24 kHz from mels (B, 80, T) and sources (B, N), clamped."""
        dtype = self.conv_pre.weight.dtype
        spectrum = self._source_spectrum(source).to(dtype)
        x = self.conv_pre(mel.to(dtype))
        kernels, last = len(self.config.resblock_kernel_sizes), len(self.ups) - 1
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, self.config.lrelu_slope))
            if stage == last:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            branches = self.resblocks[stage * kernels : (stage + 1) * kernels]
            x = torch.stack([branch(x) for branch in branches]).mean(dim=0)
        x = self.conv_post(F.leaky_relu(x, LAST_LEAKY_SLOPE))
        return self._inverse_stft(x.float())

    def vocode(self, mel: Tensor, noise: Tensor) -> Tensor:
        """Sound (N,) of a whole mel (80, T) at once, with ``noise`` (N, K)."""
        f0 = self.f0(mel)
        return self.synthesise(mel, self.source(f0, self.phase_steps(f0).cumsum(0), noise))

    def _source_spectrum(self, source: Tensor) -> Tensor:
        """STFT of sources (B, N): real then imaginary parts, (B, n_fft + 2, 120 T + 1)."""
        config = self.config
        spectrum = torch.stft(
            source.float(),
            config.istft_n_fft,
            config.istft_hop,
            window=_window(config, source.device),
            return_complex=True,
        )
        return torch.cat([spectrum.real, spectrum.imag], dim=1)

    def _inverse_stft(self, x: Tensor) -> Tensor:
        """From log magnitudes and phase sines (B, n_fft + 2, frames) to sound, clamped."""
        config = self.config
        log_magnitude, phase = x.chunk(2, dim=1)
        magnitude, angle = log_magnitude.exp().clamp_max(MAGNITUDE_LIMIT), phase.sin()
        wave = self.inverse_stft(torch.complex(magnitude * angle.cos(), magnitude * angle.sin()))
        return wave.clamp(-config.audio_limit, config.audio_limit)

    def inverse_stft(self, spectrum: Tensor) -> Tensor:
        """Sound (B, hop (frames - 1)) of spectra (B, n_fft // 2 + 1, frames), complex."""
        config = self.config
        window = _window(config, spectrum.device)
        return torch.istft(spectrum, config.istft_n_fft, config.istft_hop, window=window)


def _source_down(spectrum: int, width: int, stride: int) -> nn.Conv1d:
    if stride == 1:
        return nn.Conv1d(spectrum, width, 1)
    return nn.Conv1d(spectrum, width, 2 * stride, stride, padding=stride // 2)


KEPT_FRAMES = 8
"""Mel frames of a call that the next call computes again."""

NOISE_STREAM = 1
"""Keeps the vocoder's noise apart from other draws of the same seed."""


def crossfade(kept: Tensor, new: Tensor) -> Tensor:
    """Fade from ``kept`` (n,) into the first n samples of ``new`` with a Hamming window.

    The window's halves add to 1.08, as in the published code.
    """
    overlap = kept.shape[0]
    window = torch.hamming_window(2 * overlap, periodic=False, device=new.device)
    faded = new[:overlap] * window[:overlap] + kept * window[overlap:]
    return torch.cat([faded, new[overlap:]])


@dataclass
class _Kept:
    """What one call leaves for the next: its last eight frames, their sound and source."""

    mel: Tensor
    f0: Tensor
    phases: Tensor
    source: Tensor
    wave: Tensor


class HiftStream:
    """Sound of one reply, from mel frames as they come; total samples are 480 a frame.

    Noise is a function of (seed, sample index), so the same reply sounds the same however
    it was cut. The kept source is used again but for its last half frame, which was held
    for want of a next frame: it is drawn anew so that the phase runs on without a jump.
    """

    def __init__(self, vocoder: HiftVocoder, seed: int = 0) -> None:
        self.vocoder = vocoder
        self.seed = seed
        self.frames_done = 0
        self._kept: _Kept | None = None

    def push(self, mel: Tensor, *, final: bool = False) -> Tensor:
        """Take new frames (80, T) and return the sound that is now settled, float32.

        Unless ``final``, the last 3840 samples are held back for the next call, and T must
        be at least 8 at the first one.
        """
        limit = self.vocoder.config.audio_limit
        source, f0, phases, whole = self._source(mel)
        return self._emit(whole, source, f0, phases, final=final).clamp(-limit, limit)

    def push_with_source(self, mel: Tensor, source: Tensor, *, final: bool = False) -> Tensor:
        """As ``push``, with the source (samples of kept and new frames) given from outside.

        Not clamped after the cross-fade, as published.
        """
        whole = torch.cat([self._kept.mel, mel], dim=1) if self._kept else mel
        nothing = source.new_zeros(whole.shape[1])
        return self._emit(whole, source, nothing, nothing[:, None], final=final)

    def _source(self, mel: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        vocoder, kept = self.vocoder, self._kept
        whole = torch.cat([kept.mel, mel], dim=1) if kept else mel
        f0 = vocoder.f0(whole)
        if kept:
            f0 = torch.cat([kept.f0, f0[KEPT_FRAMES:]])
        steps = vocoder.phase_steps(f0)
        if kept:
            new = (kept.phases[-1] % 1) + steps[KEPT_FRAMES:].cumsum(0)
            phases = torch.cat([kept.phases - kept.phases[-1].floor(), new])
        else:
            phases = steps.cumsum(0)
        source = vocoder.source(f0, phases, self._noise(whole.shape[1], kept is not None))
        if kept:
            settled = kept.source.shape[0] - vocoder.config.samples_per_frame // 2
            source = torch.cat([kept.source[:settled], source[settled:]])
        return source, f0, phases, whole

    def _noise(self, frames: int, continued: bool) -> Tensor:
        per_frame = self.vocoder.config.samples_per_frame
        start = self.frames_done * per_frame - (KEPT_FRAMES * per_frame if continued else 0)
        device = self.vocoder.conv_pre.weight.device
        positions = torch.arange(start, start + frames * per_frame, device=device)
        return normal(self.seed, NOISE_STREAM, positions, self.vocoder.harmonics)

    def _emit(
        self, mel: Tensor, source: Tensor, f0: Tensor, phases: Tensor, *, final: bool
    ) -> Tensor:
        wave = self.vocoder.synthesise(mel, source)
        fresh = mel.shape[1] - (KEPT_FRAMES if self._kept else 0)
        if self._kept:
            wave = crossfade(self._kept.wave, wave)
        self.frames_done += fresh
        if final:
            self._kept = None
            return wave
        held = KEPT_FRAMES * self.vocoder.config.samples_per_frame
        assert mel.shape[1] >= KEPT_FRAMES, "a first call needs at least 8 frames"
        self._kept = _Kept(
            mel[:, -KEPT_FRAMES:],
            f0[-KEPT_FRAMES:],
            phases[-KEPT_FRAMES:],
            source[-held:],
            wave[-held:],
        )
        return wave[:-held]
