"""Fit the linear map from the flow's mel to BigVGAN's: ``python -m recipes.mel_bridge --out FILE``

Needs the voices and recordings of scripts/system-packages.txt, and the package ``av`` (extra
quality). The error on recordings that are held out is printed for each of the three published mels.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
from safetensors.torch import save_file
from torch import Tensor

from evals.readings import (
    OLDER,
    TEACHER,
    UNSEEN,
    Reading,
    asset_recordings,
    librivox_clips,
    read_aloud,
    telephone_prompts,
)
from mosstalk.audio.sound import Samples
from mosstalk.codec.bigvgan_stream import (
    SHIPPED,
    TAPS,
    MelBridge,
    frames_in,
    interpolation,
    mel_name,
)
from mosstalk.constants import OUTPUT_RATE
from mosstalk.models.features import FLOW_MEL, MelSpec, mel_filters, vocoder_mel
from mosstalk.reporting.sentences import read_sentences

SPECS = (
    MelSpec(22_050, 1024, 256, 80, 0.0, 8000.0),
    MelSpec(22_050, 1024, 256, 80, 0.0, 11_025.0),
    MelSpec(24_000, 1024, 256, 100, 0.0, 12_000.0),
)
"""BigVGAN-v2's 22 kHz/80 fmax8k, 22 kHz/80 and 24 kHz/100."""
_NARROW_HZ = 7600.0
"""Recordings at 16 kHz say nothing above."""
_WIDE_DB = -60.0
_RIDGE = 0.1
_FORMANTS = "espeak"
_LOUD = -7.0
_HERE = slice(FLOW_MEL.bins * TAPS.index(0), FLOW_MEL.bins * (TAPS.index(0) + 1))
"""Features of the place itself."""
_LEVELS = (1.0, 0.3)
"""Loudness of what is fitted, relative to the recording: the map should hold when it is quieter."""
_DB = 20 / np.log(10)
_PROMPTS = 150


@dataclass(frozen=True)
class Pair:
    """Features (taps 80, M) and the true mel (bins, M) of one recording."""

    features: Tensor
    mel: Tensor
    wide: bool
    """Whether the recording has sound above 8 kHz."""
    voiced_by: str
    """The reading's name, up to its first hyphen."""


def training() -> list[Reading]:
    """Five synthetic voices, and a person's prompts but for the one in assets/."""
    sentences = read_sentences()
    datasets = [read_aloud(voice, sentences[:70]) for voice in (TEACHER, *OLDER)]
    prompts = telephone_prompts(_PROMPTS)
    kept = [text for text in prompts.texts if "folder should i save" not in text.lower()]
    return [*datasets, prompts.only(kept)]


def held_out() -> list[Reading]:
    """People and a voice that nothing was fitted to, and a fitted voice on other sentences."""
    sentences = read_sentences()[70:]
    return [
        asset_recordings(),
        librivox_clips(),
        read_aloud(UNSEEN, sentences),
        read_aloud(TEACHER, sentences),
    ]


def pair(sound: Samples, spec: MelSpec, level: float, name: str) -> Pair:
    """What the bridge reads and what it should give, of a sound at 24 kHz."""
    sound = sound[: len(sound) // FLOW_MEL.hop * FLOW_MEL.hop] * level
    flow = vocoder_mel(torch.from_numpy(sound)).mT
    resampled = sound if spec.rate == OUTPUT_RATE else soxr.resample(sound, OUTPUT_RATE, spec.rate)
    count = frames_in(spec, flow.shape[1])
    padded = np.pad(resampled, (0, count * spec.hop - len(resampled))).astype(np.float32)
    mel = vocoder_mel(torch.from_numpy(padded), spec).mT
    weights = torch.from_numpy(interpolation(spec, 0, count, 0, flow.shape[1]))
    around = (flow @ weights).unflatten(1, (-1, count)).transpose(0, 1).flatten(0, 1)
    return Pair(around, mel, _is_wide(sound), name.partition("-")[0])


def _is_wide(sound: Samples) -> bool:
    power = np.abs(np.fft.rfft(sound)) ** 2
    above = power[int(len(power) * 8200 / (OUTPUT_RATE / 2)) :].sum()
    return bool(10 * np.log10(above / power.sum() + 1e-30) > _WIDE_DB)


def pairs_of(
    datasets: Sequence[Reading], spec: MelSpec, levels: Sequence[float] = (1.0,)
) -> list[Pair]:
    """Pairs of all sounds, each at every level."""
    return [
        pair(sound, spec, level, reading.name)
        for reading in datasets
        for sound in reading.sounds
        for level in levels
    ]


def fit(pairs: Sequence[Pair], spec: MelSpec) -> MelBridge:
    """The map; bands above 7.6 kHz come from recordings that have sound there alone.

    Those below come from the others and the teacher: espeak-ng's formants, between pauses of
    nothing at all, made the map worse for people.
    """
    narrow = _upper_edges(spec) <= _NARROW_HZ
    prior = _nearest_bands(spec)
    weight, bias = _ridge([one for one in pairs if one.voiced_by != _FORMANTS], prior)
    if not bool(narrow.all()):
        wide_weight, wide_bias = _ridge([one for one in pairs if one.wide], prior)
        weight[~narrow], bias[~narrow] = wide_weight[~narrow], wide_bias[~narrow]
    # As they are shipped, so that what is measured is what is used.
    return MelBridge(spec, weight.half().float(), bias.float())


def unfitted(pairs: Sequence[Pair], spec: MelSpec) -> MelBridge:
    """For comparison: the nearest bands at the same time, and a constant for each."""
    prior = _nearest_bands(spec)
    kept = [one for one in pairs if one.voiced_by != _FORMANTS]
    off = torch.cat([one.mel - prior.float() @ one.features for one in kept], dim=1)
    return MelBridge(spec, prior.float(), off.mean(dim=1))


def _ridge(pairs: Sequence[Pair], prior: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares that are pulled towards ``prior``; loud frames count for more.

    With all frames alike, what is between quiet and loud is drawn to the mean, and loud frames
    came out 3 dB too quiet.
    """
    x = torch.cat([one.features for one in pairs], dim=1).double()
    y = torch.cat([one.mel for one in pairs], dim=1).double() - prior @ x
    share = (x[_HERE].mean(dim=0) / 2).exp()
    share /= share.sum()
    x_mean, y_mean = (x * share).sum(1, keepdim=True), (y * share).sum(1, keepdim=True)
    x, y = x - x_mean, y - y_mean
    gram = (x * share) @ x.mT
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weight = torch.linalg.solve(gram + ridge, (x * share) @ y.mT).mT
    return prior + weight, (y_mean - weight @ x_mean)[:, 0]


def _nearest_bands(spec: MelSpec) -> Tensor:
    """The map (bins, taps 80) float64 that takes the flow's band with the nearest centre."""
    ours, theirs = (_centres(one) for one in (FLOW_MEL, spec))
    weight = torch.zeros(spec.bins, len(TAPS) * FLOW_MEL.bins, dtype=torch.float64)
    band = (theirs[:, None] - ours[None]).abs().argmin(dim=1)
    weight[torch.arange(spec.bins), _HERE.start + band] = 1
    return weight


def _filters(spec: MelSpec) -> tuple[Tensor, Tensor]:
    filters = mel_filters(spec.rate, spec.n_fft, spec.bins, spec.low_hz, spec.high_hz)
    return filters, torch.arange(filters.shape[1]) * (spec.rate / spec.n_fft)


def _upper_edges(spec: MelSpec) -> Tensor:
    filters, hertz = _filters(spec)
    return (hertz * (filters > 0)).amax(dim=1)


def _centres(spec: MelSpec) -> Tensor:
    filters, hertz = _filters(spec)
    return (filters * hertz).sum(1) / filters.sum(1)


def error_db(bridge: MelBridge, pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Root mean square errors in dB: to 7.6 kHz, there where it is loud, and above 7.6 kHz.

    Loud: log mel above -7. Above 7.6 kHz wide recordings alone count.
    """
    narrow = _upper_edges(bridge.spec) <= _NARROW_HZ
    low, loud, high = (list[Tensor]() for _ in range(3))
    for one in pairs:
        off = bridge.weight @ one.features + bridge.bias[:, None] - one.mel
        low.append(off[narrow].flatten())
        loud.append(off[narrow][one.mel[narrow] > _LOUD])
        if one.wide:
            high.append(off[~narrow].flatten())
    return _rms(low), _rms(loud), _rms(high)


def _rms(values: list[Tensor]) -> float:
    return float(torch.cat(values).square().mean().sqrt() * _DB) if values else float("nan")


def main() -> None:
    """Fit all three maps, print their errors, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    out: Path = parser.parse_args().out
    datasets, tests = training(), held_out()
    print("fitted on", ", ".join(f"{one.name} {one.seconds:.0f} s" for one in datasets))
    tensors: dict[str, Tensor] = {}
    for spec in SPECS:
        given = pairs_of(datasets, spec, _LEVELS)
        bridge, plain = fit(given, spec), unfitted(given, spec)
        print(
            f"{mel_name(spec)}: RMS error in dB to 7.6 kHz, of what is loud there, above 7.6 kHz; "
            "the same three of nearest bands and a constant"
        )
        for reading in (*datasets, *tests):
            pairs = pairs_of([reading], spec)
            label = "held out" if any(reading is one for one in tests) else "fitted  "
            shown = (f"{value:5.2f}" for one in (bridge, plain) for value in error_db(one, pairs))
            print(f"  {label} {reading.name:28}", " ".join(shown))
        tensors[f"{mel_name(spec)}.weight"] = bridge.weight.half()
        tensors[f"{mel_name(spec)}.bias"] = bridge.bias
    save_file(tensors, out)
    out.chmod(0o644)


if __name__ == "__main__":
    main()
