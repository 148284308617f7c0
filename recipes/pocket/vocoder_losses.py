"""What the vocoder's sound is compared by: spectra and mels at several resolutions."""

import torch
from torch import Tensor, nn

from mosstalk.constants import OUTPUT_RATE
from mosstalk.models.features import mel_filters

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


def pitch_distance(found: Tensor, real: Tensor) -> Tensor:
    """Mean distance in Hz of f0 (B, T) from its target, in which unvoiced frames are 0."""
    return _distance(found, real)
