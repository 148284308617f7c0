"""The tokenizer stage: an encoder whose codes tell phones and the mel, whoever speaks.

And the stage that encodes: each shard of sound gets a file of codes, so that parts can be encoded
one by one, as they are made, and read together.

Two teachers at once: a classifier of the phone at every 20 ms and a regression of the
speaker's clean mel, both from the codes alone, while the encoder hears rooms and noise. The
two heads are thrown away.

A tokenizer that is held goes on with its codebook as it is, and of Kokoro's clean sound says what
it said before: language model and flow need not follow. What it learns is to say the same of other
throats and microphones, and to place other programs' voices among its codes where Whisper's
features, which know thousands of people, would place them.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE, MEL_FRAMES_PER_CODE
from mosstalk.models.features import MelSpec, vocoder_mel, whisper_log_mel
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from recipes.pocket.augment import augment
from recipes.pocket.data import (
    PHONES,
    UNLABELLED,
    Recordings,
    frames_later,
    length_batches,
    padded_sound,
)
from recipes.pocket.quantizer import Quantizer, nearest, perplexity
from recipes.pocket.sizes import CODEC, SMOKE_CODEC
from recipes.pocket.training import Averaged, Run, adamw, load_weights, save_weights
from recipes.pocket.voices import KOKORO, LISTENED, TEACHER

HEARD_MEL = MelSpec(INPUT_RATE, 1280, 320, 80, 0.0, 8000.0)
"""The flow's mel, taken from what the listener hears: the same bands, 20 ms a frame."""
_PEAK_RATE = 1.5e-3
_CONTINUOUS = 0.06
"""Share of the budget before anything is quantised."""
_COMMITMENT = 0.15
_LENGTHS = ((100, 96), (300, 32))
"""Window in codes and rows of a batch: 8 s mostly, 24 s now and then."""
_LONG_SHARE = 0.25
_WIDTH = 256
_CODES_PER_BATCH = 12_000
_READERS_ALONE = 0.05
"""Share of the budget in which new readers learn the codes of an encoder that is resumed."""
_HELD_RATE_SHARE, _HELD_WEIGHT = 0.1, 5.0
"""Of a tokenizer that is held: its rate as a share of the readers', and the weight of how far it is
from what it said, as a share of the codebook's variance."""


SEGMENT = 30 * INPUT_RATE
"""Samples that Whisper hears at once."""
_CODES_BEFORE = 2
"""Of a code's features the codes before it have a part, since it is heard late."""
Features = Callable[[Tensor], Tensor]


class Mixer(nn.Module):
    """A ConvNeXt block (Liu et al. 2022) over time, seeing both ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        y = self.norm(self.spread(x.transpose(1, 2)).transpose(1, 2))
        return x + self.narrow(F.gelu(self.wide(y)))


class Readers(nn.Module):
    """Codes' values to phones and mel at 50 frames a second; used in training alone."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, inner)
        self.slow = nn.Sequential(Mixer(inner), Mixer(inner))
        self.place = nn.Parameter(torch.randn(MEL_FRAMES_PER_CODE, inner) * 0.1)
        self.fast = nn.Sequential(*[Mixer(inner) for _ in range(4)])
        self.phones = nn.Linear(inner, len(PHONES))
        self.speaker = nn.Embedding(len(LISTENED), inner)
        self.mel_mixer = Mixer(inner)
        self.mel = nn.Linear(inner, HEARD_MEL.bins)

    def forward(self, values: Tensor, voices: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) and voices (B, T) to phone logits and mel, each (B, 4T, ...)."""
        x = self.slow(self.enter(values))
        x = (x[:, :, None] + self.place).flatten(1, 2)
        x = self.fast(x)
        who = self.speaker(voices).repeat_interleave(MEL_FRAMES_PER_CODE, dim=1)
        return self.phones(x), self.mel(self.mel_mixer(x + who))


@dataclass
class Batch:
    """Windows of sound: clean (B, n), labels (B, 4T), voices (B, T)."""

    clean: Tensor
    labels: Tensor
    voices: Tensor


def windows(
    data: Recordings, codes: int, rows: int, first: int, last: int, draw: torch.Generator
) -> Batch:
    """``rows`` random windows of ``codes`` codes between codes ``first`` and ``last``."""
    device = data.heard.device
    start = torch.randint(first, last - codes, (rows, 1), generator=draw, device=device)

    def take(values: Tensor, per_code: int) -> Tensor:
        return values[start * per_code + torch.arange(codes * per_code, device=device)]

    sound = take(data.heard, INPUT_SAMPLES_PER_CODE).float() / 32768
    voices = take(data.voices, 1).long()
    return Batch(sound, take(data.labels, MEL_FRAMES_PER_CODE).long(), voices)


class Trainee(nn.Module):
    """Encoder, quantiser and readers as one module."""

    def __init__(self, config: SpeechTokenizerConfig, inner: int) -> None:
        super().__init__()
        self.tokenizer = SpeechTokenizer(config)
        encoder = self.tokenizer.encoder
        encoder.embed_positions.weight.requires_grad_(False)
        encoder.embed_positions.weight.copy_(sinusoids(config.max_source_positions, config.d_model))
        encoder.codebook.weight.requires_grad_(False)
        self.quantizer = Quantizer(config.quantize_vocab_size, config.d_model)
        self.readers = Readers(config.d_model, inner)

    def pooled(self, heard: Tensor) -> Tensor:
        """Sound (B, n) to hidden states (B, T, C)."""
        log_mel = whisper_log_mel(heard, self.tokenizer.config.num_mel_bins)
        return self.tokenizer.encoder(log_mel)


def sinusoids(length: int, width: int) -> Tensor:
    """Whisper's fixed positions (Radford et al. 2022): sines, then cosines, scaled down."""
    rates = torch.exp(-torch.arange(width // 2) * (torch.log(torch.tensor(1e4)) / (width // 2 - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def resumed(trainee: Trainee, path: Path) -> bool:
    """Fill ``trainee`` from what an earlier run wrote; False if its readers are not in the file."""
    weights = load_file(path)
    if any(name.startswith("readers.") for name in weights):
        trainee.load_state_dict(weights)
        return True
    trainee.tokenizer.load_state_dict(weights)
    quantizer = trainee.quantizer
    quantizer.codebook.copy_(trainee.tokenizer.encoder.codebook.weight)
    quantizer.sums.copy_(quantizer.codebook * quantizer.counts[:, None])
    return False


class Earlier(nn.Module):
    """What a tokenizer said before it is trained further on, and what it should say of any voice.

    It said what it should of Kokoro's clean sound. Of that ``told`` learns to say the same of
    Whisper's ``features`` (B, 1500, C) of sound (B, 480000), and tells it of other voices' too.
    """

    def __init__(self, trainee: Trainee, features: Features | None = None) -> None:
        super().__init__()
        self._tokenizer = copy.deepcopy(trainee.tokenizer).eval().requires_grad_(False)
        self._scale = trainee.quantizer.codebook.var(0).mean()
        self._features = features
        width = trainee.tokenizer.config.d_model
        near = MEL_FRAMES_PER_CODE * (_CODES_BEFORE + 1) * width
        self.tell = nn.Sequential(
            nn.LayerNorm(near), nn.Linear(near, 2 * width), nn.GELU(), nn.LayerNorm(2 * width),
            nn.Dropout(0.1), nn.Linear(2 * width, 2 * width), nn.GELU(),
            nn.Linear(2 * width, width),
        )  # fmt: skip

    @torch.no_grad()
    def said(self, sound: Tensor) -> Tensor:
        """Hidden states (B, T, C) of sound (B, n)."""
        log_mel = whisper_log_mel(sound, self._tokenizer.config.num_mel_bins)
        with torch.autocast(sound.device.type, torch.bfloat16, enabled=sound.is_cuda):
            return self._tokenizer.encoder(log_mel)

    def told(self, features: Tensor, codes: int) -> Tensor:
        """Hidden states (B, ``codes``, C) of features (B, 1500, C): of each code's rows and those
        of the codes before it.
        """
        rows = features[:, : codes * MEL_FRAMES_PER_CODE].unflatten(1, (codes, -1)).flatten(2)
        before = [F.pad(rows, (0, 0, n, 0))[:, :codes] for n in range(_CODES_BEFORE + 1)]
        return self.tell(torch.cat(before, dim=-1)) * self._scale.sqrt()

    def apart(self, pooled: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Mean squared distances over the codebook's variance: ``apart`` of ``pooled`` (B, T, C)
        from what was said of Kokoro's voices, and, with Whisper's features, ``followed`` from what
        is told of the others; ``told`` is how far that is from what was said.
        """
        kokoros = [LISTENED.index(voice) for voice in (TEACHER, KOKORO)]
        known = torch.isin(batch.voices, torch.tensor(kokoros, device=pooled.device))
        said, pooled = self.said(batch.clean).float(), pooled.float()
        parts = {"apart": self._mean(pooled, said, known)}
        if self._features is None:
            return parts
        with (
            torch.no_grad(),
            torch.autocast(said.device.type, torch.bfloat16, enabled=said.is_cuda),
        ):
            features = self._features(F.pad(batch.clean, (0, SEGMENT - batch.clean.shape[1])))
        told = self.told(features.float(), pooled.shape[1])
        followed = self._mean(pooled, told.detach(), ~known)
        return parts | {"told": self._mean(told, said, known), "followed": followed}

    def _mean(self, made: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
        error = (made - wanted).square().mean(-1) * counted
        return error.sum() / counted.sum().clamp_min(1) / self._scale


def losses(
    trainee: Trainee,
    batch: Batch,
    heard: Tensor,
    *,
    quantise: bool,
    readers_alone: bool = False,
    earlier: Earlier | None = None,
) -> dict[str, Tensor]:
    """Loss and its parts; ``heard`` (B, n) is what the encoder hears of ``batch``.

    With ``readers_alone`` no gradient reaches the encoder. With ``earlier`` it is held.
    """
    target = vocoder_mel(batch.clean, HEARD_MEL)
    with torch.autocast(heard.device.type, torch.bfloat16, enabled=heard.is_cuda):
        pooled = trainee.pooled(heard)
    pooled = pooled.detach() if readers_alone else pooled
    if quantise:
        values, _, commitment = trainee.quantizer(pooled)
    else:
        values, commitment = pooled, pooled.float().square().mean() * 0.01
    with torch.autocast(heard.device.type, torch.bfloat16, enabled=heard.is_cuda):
        phones, mel = trainee.readers(values, batch.voices)
    phones, mel = phones.float(), mel.float()
    labels = torch.where(batch.labels == UNLABELLED, -100, batch.labels)
    phone = F.cross_entropy(phones.transpose(1, 2), labels, ignore_index=-100)
    of_teacher = (batch.voices == LISTENED.index(TEACHER)).repeat_interleave(4, dim=1)
    weight = torch.where(of_teacher, 1.0, 0.5)[..., None]
    mel_loss = (weight * (mel - target).abs()).mean()
    right = (phones.argmax(-1) == labels)[labels != -100].float().mean()
    held = {} if earlier is None else earlier.apart(pooled, batch)
    of_held = _HELD_WEIGHT * sum(held.values())
    return held | {
        "loss": phone + 0.7 * mel_loss + _COMMITMENT * commitment + of_held,
        "phone": phone,
        "right": right,
        "mel": mel_loss,
        "commitment": commitment,
    }


@torch.no_grad()
def begin_codebook(trainee: Trainee, batches: Iterator[Tensor], draw: torch.Generator) -> None:
    """Place the codebook on the hidden states of some batches of sound."""
    points = torch.cat([trainee.pooled(heard).float().flatten(0, 1) for heard in batches])
    trainee.quantizer.begin(points, draw)


def train(
    data: Recordings, run: Run, *, hold: bool = False, features: Features | None = None
) -> SpeechTokenizer:
    """Train, writing ``tokenizer.safetensors``; return the averaged tokenizer.

    With ``hold`` the codes of the tokenizer that is resumed keep what they mean; ``features`` are
    Whisper's then, as Earlier has them.
    """
    device, smoke = data.heard.device, run.smoke
    torch.manual_seed(run.seed)
    draw = torch.Generator(device).manual_seed(run.seed)
    config = SpeechTokenizerConfig.from_dict(SMOKE_CODEC if smoke else CODEC)
    with torch.no_grad():
        trainee = Trainee(config, 32 if smoke else _WIDTH).to(device)
        readers_new = run.resume is not None and not resumed(trainee, run.resume)
    lengths = ((20, 4), (40, 2)) if smoke else _LENGTHS
    earlier = Earlier(trainee, features).to(device) if hold else None
    trainee.quantizer.moving = not hold
    share = _HELD_RATE_SHARE if hold else 1.0
    encoder = [p for p in trainee.tokenizer.parameters() if p.requires_grad]
    others = [*trainee.readers.parameters(), *(earlier.tell.parameters() if earlier else ())]
    groups = [{"params": encoder, "share": share}, {"params": others}]
    optimizer = adamw(groups, _PEAK_RATE)
    mean = Averaged(trainee)
    first_kept = _held_out_codes(data)
    quantise = run.resume is not None
    for step in run.steps():
        if not quantise and run.progress >= _CONTINUOUS:
            quantise = True
            batches = (
                augment(windows(data, *lengths[0], first_kept, len(data.voices), draw).clean, draw)
                for _ in range(2 if smoke else 12)
            )
            begin_codebook(trainee, batches, draw)
        codes, rows = lengths[torch.rand(()) < _LONG_SHARE]
        batch = windows(data, codes, rows, first_kept, len(data.voices), draw)
        alone = readers_new and run.progress < _READERS_ALONE
        heard = augment(batch.clean, draw, throats=hold)
        parts = losses(
            trainee, batch, heard, quantise=quantise, readers_alone=alone, earlier=earlier
        )
        run.learn(parts, optimizer, _PEAK_RATE, mean, trainee)
        if step % 500 == 499:
            run.log(
                **validate(trainee, data, first_kept, lengths[0], quantise=quantise),
                **_as_before(earlier, trainee, data, first_kept, lengths[0]),
            )
    run.log(**_as_before(earlier, mean.module, data, first_kept, lengths[0]))
    return _finish(mean.module, trainee, data, run, first_kept, lengths[0])


def _held_out_codes(data: Recordings) -> int:
    """The first 1% of the teacher's codes are kept for validation."""
    return max(200, data.teacher_codes // 100)


@torch.no_grad()
def validate(
    trainee: Trainee, data: Recordings, last: int, shape: tuple[int, int], *, quantise: bool
) -> dict[str, float]:
    """Losses on the teacher's held-out codes, clean, and the codebook's perplexity.

    ``right_of_others`` are the phones told right of the other voices, which are not held out.
    """
    trainee.eval()
    draw = torch.Generator(data.heard.device).manual_seed(1)
    codes, rows = shape
    batch = windows(data, codes, rows, 0, last, draw)
    parts = losses(trainee, batch, batch.clean, quantise=quantise)
    used = trainee.quantizer(trainee.pooled(batch.clean)).codes
    values = {f"held_out_{name}": float(value) for name, value in parts.items()}
    values["perplexity"] = perplexity(used, trainee.quantizer.codebook.shape[0])
    if len(data.voices) - data.teacher_codes > codes:
        others = windows(data, codes, rows, data.teacher_codes, len(data.voices), draw)
        parts = losses(trainee, others, others.clean, quantise=quantise)
        values["right_of_others"] = float(parts["right"])
    trainee.train()
    return values


@torch.no_grad()
def _as_before(
    earlier: Earlier | None, trainee: Trainee, data: Recordings, last: int, shape: tuple[int, int]
) -> dict[str, float]:
    """How many of the teacher's held-out codes are what they were, clean and from other throats;
    nothing where no tokenizer is held.
    """
    if earlier is None:
        return {}
    draw = torch.Generator(data.heard.device).manual_seed(1)
    sound = windows(data, *shape, 0, last, draw).clean
    entries = trainee.quantizer.codebook
    before = nearest(earlier.said(sound).float(), entries)
    heard = {"same_clean": sound, "same_heard": augment(sound, draw, throats=True)}
    return {
        name: float((nearest(trainee.pooled(each).float(), entries) == before).float().mean())
        for name, each in heard.items()
    }


def _finish(
    mean: Trainee, trainee: Trainee, data: Recordings, run: Run, last: int, shape: tuple[int, int]
) -> SpeechTokenizer:
    """Settle the codebook on the averaged encoder, validate, and write both forms."""
    for name in ("codebook", "counts", "sums"):
        getattr(mean.quantizer, name).copy_(getattr(trainee.quantizer, name))
    mean.tokenizer.encoder.codebook.weight.copy_(mean.quantizer.codebook)
    run.log(**validate(mean, data, last, shape, quantise=True))
    save_weights(mean, run.folder / "tokenizer-training.safetensors", {"step": run.step})
    save_weights(mean.tokenizer, run.folder / "tokenizer.safetensors", {"step": run.step})
    return mean.tokenizer.eval()


def load_tokenizer(path: Path, device: torch.device, *, smoke: bool = False) -> SpeechTokenizer:
    """The tokenizer that the tokenizer stage wrote."""
    tokenizer = SpeechTokenizer(SpeechTokenizerConfig.from_dict(SMOKE_CODEC if smoke else CODEC))
    load_weights(tokenizer, path)
    return tokenizer.to(device).eval()


def clip_sound(data: Recordings, clips: NDArray[np.int64]) -> Tensor:
    """Sound (B, n) float of clips, with zeros after each one's end."""
    per_code = INPUT_SAMPLES_PER_CODE
    return padded_sound(data.heard, data.starts[clips] * per_code, data.codes[clips] * per_code)


@torch.inference_mode()
def encode_all(
    tokenizer: SpeechTokenizer, data: Recordings, *, hearing: int, seed: int = 0
) -> NDArray[np.int16]:
    """Codes of all clips in the order of ``data.starts``; those of ``hearing`` 0 are heard clean.

    In others the teacher begins ``frames_later(hearing)`` of 20 ms later, and is clean too: replies
    are of such codes. All other voices have other throats, in rooms and noise.
    """
    device = data.heard.device
    later = frames_later(hearing) * INPUT_SAMPLES_PER_CODE // MEL_FRAMES_PER_CODE
    draw = torch.Generator(device).manual_seed(seed)
    out = np.zeros(int(data.codes.sum()), dtype=np.int16)
    centres = tokenizer.encoder.codebook.weight
    for clips in length_batches(data.codes, _CODES_PER_BATCH):
        sound = clip_sound(data, clips)
        if hearing:
            moved = F.pad(sound, (later, 0))[:, : sound.shape[1]]
            teachers = torch.as_tensor(clips < data.teacher_clips, device=device)[:, None]
            sound = torch.where(teachers, moved, augment(sound, draw, 0.9, throats=True))
        log_mel = whisper_log_mel(sound, tokenizer.config.num_mel_bins)
        pooled = tokenizer.encoder(log_mel)
        found = nearest(pooled, centres).to(torch.int16).cpu().numpy()
        for row, clip in enumerate(clips):
            start, count = data.starts[clip], data.codes[clip]
            out[start : start + count] = found[row, :count]
    return out


def write_codes(folder: Path, data: Recordings, hearings: list[NDArray[np.int16]]) -> None:
    """Write ``folder``/SHARD.npy (hearings, codes) for each shard of ``data``."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(list(data.shards.values()))[:-1]
    for name, codes in zip(data.shards, np.split(np.stack(hearings), ends, axis=1), strict=True):
        np.save(folder / f"{name}.npy", codes)


def read_codes(folder: Path, data: Recordings) -> list[NDArray[np.int16]]:
    """All hearings of ``data``'s codes, in its order; FileNotFoundError where one is missing."""
    return list(np.concatenate([np.load(folder / f"{name}.npy") for name in data.shards], axis=1))
