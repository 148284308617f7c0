"""Both trainings: ``convert`` makes Whisper's encoder causal, ``quantise`` adds the codebook.

The teacher hears the clean sound with all that is to come, the student the same sound in a room,
in noise or over a telephone, and nothing that is to come. Whisper's frozen decoder reads both: it
must expect the same text of both (Hinton et al. 2015), and some of the loss is the text itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from evals.words import error_rate
from mosstalk.models.features import vocoder_mel, whisper_log_mel
from mosstalk.models.weights import from_int8, to_int8
from recipes.listener.segments import Clips, Maker, Segments, alone
from recipes.listener.student import Encoding, Student
from recipes.listener.whisper import Decoder, Teacher
from recipes.pocket.augment import augment
from recipes.pocket.quantizer import perplexity
from recipes.pocket.tokenizer import HEARD_MEL
from recipes.pocket.training import Run, adamw, descend

_ENCODER_RATE, _READER_RATE = 4e-4, 1.2e-3
_TEXT_WEIGHT, _FEATURE_WEIGHT, _MEL_WEIGHT, _COMMITMENT = 0.25, 1.0, 0.3, 0.25
_SILENT_WEIGHT = 0.15
"""Of frames without speech in the features' loss."""
_NOISE_SEED = 5
Features = Callable[[Tensor], Tensor]


@dataclass
class Judge:
    """Whisper's decoder and its text."""

    decoder: Decoder
    pieces: Tokenizer

    @torch.no_grad()
    def written(self, features: Features, sounds: Tensor, at_once: int = 10) -> list[str]:
        """What it writes down of sounds (B, 480000), ``at_once`` at a time."""
        return [
            self.pieces.decode(tokens).strip()
            for rows in sounds.split(at_once)
            for tokens in self.decoder.transcribe(features(rows))
        ]


@dataclass
class Bench:
    """Held-out clips to write down: sound (B, 480000) clean and noisy, and what was said."""

    clean: Tensor
    noisy: Tensor
    texts: list[str]
    judge: Judge

    @classmethod
    def of(cls, clips: Clips, chosen: list[int], texts: list[str], judge: Judge) -> "Bench":
        """The ``chosen`` clips; rooms and noise are the same in every run."""
        clean = alone(clips, chosen)
        draw = torch.Generator(clean.device).manual_seed(_NOISE_SEED)
        return cls(clean, augment(clean, draw, 1.0), texts, judge)

    def rates(self, features: Features) -> dict[str, float]:
        """Word error rates of what the judge reads of ``features`` of the sound."""
        return {
            name: error_rate(self.texts, self.judge.written(features, sound, 50))
            for name, sound in (("clean", self.clean), ("noisy", self.noisy))
        }


class Training:
    """Teacher, student, decoder and what they learn from."""

    def __init__(
        self, teacher: Teacher, decoder: Decoder, student: Student, maker: Maker, clips: Clips,
        *, rows: int, seed: int,
    ) -> None:  # fmt: skip
        self.teacher, self.decoder, self.student = teacher, decoder, student
        self.maker, self.clips, self.rows = maker, clips, rows
        self.device = clips.sound.device
        self.draw = torch.Generator(self.device).manual_seed(seed)

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    @torch.no_grad()
    def measure_features(self) -> None:
        """Mean and spread of each of the teacher's features, over speech."""
        batch = self.maker.batch(self.rows)
        features = self.taught(batch)[batch.speech.repeat_interleave(4, 1)]
        self.student.mean.copy_(features.mean(0))
        self.student.spread.copy_(features.std(0))

    @torch.no_grad()
    def taught(self, batch: Segments) -> Tensor:
        """The teacher's features (B, 1500, C), float32."""
        with self.autocast():
            return self.teacher(whisper_log_mel(batch.clean, 80)).float()

    def features_loss(self, made: Tensor, taught: Tensor, batch: Segments) -> Tensor:
        """Smooth L1 in the teacher's own spreads; speech counts most."""
        spoken = batch.speech.repeat_interleave(4, 1)
        weight = torch.where(spoken, 1.0, _SILENT_WEIGHT)[..., None]
        error = F.smooth_l1_loss(
            made / self.student.spread, taught / self.student.spread, reduction="none"
        )
        return (weight * error).mean() / weight.mean()

    def _expected(self, batch: Segments, features: Tensor) -> Tensor:
        """Logits (n, vocabulary) of each token that is asked for, with these features."""
        hidden = self.decoder(batch.tokens, self.decoder.read(features))
        return self.decoder.logits(hidden[batch.targets >= 0])

    def text_losses(self, made: Tensor, taught: Tensor, batch: Segments) -> dict[str, Tensor]:
        """How far the decoder's expectations of both are apart, and the text's cross-entropy."""
        asked = batch.targets >= 0
        with self.autocast():
            with torch.no_grad():
                wanted = self._expected(batch, taught)
            found = self._expected(batch, made)
        found = found.float().log_softmax(-1)
        wanted = wanted.float().log_softmax(-1)
        apart = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        text = F.nll_loss(found, batch.targets[asked])
        return {"apart": apart, "text": text, "text_of_teacher": F.nll_loss(
            wanted, batch.targets[asked]
        )}  # fmt: skip

    def mel_loss(self, heard: Encoding, batch: Segments) -> Tensor:
        """L1 of the clean mel where a clip speaks at its own pitch."""
        known = batch.clip >= 0
        styles = self.clips.styles[batch.clip.clamp_min(0)]
        with self.autocast():
            mel = self.student.reader.mel_of(heard.inner, styles)
        target = vocoder_mel(batch.clean, HEARD_MEL)
        error = (mel.float() - target).abs().mean(-1)
        weight = known.repeat_interleave(4, 1).float()
        return (error * weight).sum() / weight.sum().clamp_min(1)

    def converting(self, batch: Segments) -> dict[str, Tensor]:
        """The first way's losses; the reader begins beside it."""
        taught = self.taught(batch)
        with self.autocast():
            rows = self.student.rows(augment(batch.clean, self.draw))
            early = self.student.early(rows).float()
            heard = self.student.heard(rows)
        parts = self.text_losses(early, taught, batch)
        parts["features"] = self.features_loss(early, taught, batch)
        parts["read"] = self.features_loss(heard.features, taught, batch)
        loss = parts["apart"] + _TEXT_WEIGHT * parts["text"]
        loss = loss + _FEATURE_WEIGHT * parts["features"] + 0.3 * parts["read"]
        return {"loss": loss} | parts

    def quantising(self, batch: Segments) -> dict[str, Tensor]:
        """The second way's losses."""
        taught = self.taught(batch)
        with self.autocast():
            rows = self.student.rows(augment(batch.clean, self.draw))
            heard = self.student.heard(rows, batch.speech)
        parts = self.text_losses(heard.features, taught, batch)
        parts["features"] = self.features_loss(heard.features, taught, batch)
        parts["mel"] = self.mel_loss(heard, batch)
        parts["commitment"] = heard.commitment
        loss = parts["apart"] + _TEXT_WEIGHT * parts["text"] + _FEATURE_WEIGHT * parts["features"]
        loss = loss + _MEL_WEIGHT * parts["mel"] + _COMMITMENT * parts["commitment"]
        return {"loss": loss} | parts

    @torch.no_grad()
    def begin_codebook(self, batches: int) -> None:
        """Place the codebook on pooled rows of speech."""
        points = []
        for _ in range(batches):
            batch = self.maker.batch(self.rows)
            with self.autocast():
                rows = self.student.rows(augment(batch.clean, self.draw))
            points.append(self.student.encoder.pooled(rows).float()[batch.speech])
        self.student.begin_codebook(torch.cat(points), self.draw)

    def run(
        self, run: Run, losses: Callable[[Segments], dict[str, Tensor]],
        judged: Callable[[], dict[str, float]], judge_every_s: float,
    ) -> dict[str, float]:  # fmt: skip
        """Train until the budget is used up, judging now and then; what is found at the end."""
        student = self.student
        own = {id(p) for p in (*student.encoder.parameters(), *student.layer_norm.parameters())}
        trained = [p for p in student.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) in own], "peak": _ENCODER_RATE},
            {"params": [p for p in trained if id(p) not in own], "peak": _READER_RATE},
        ]
        optimizer = adamw(groups, _ENCODER_RATE)
        last = 0.0
        student.train()
        for _ in run.steps():
            for group in optimizer.param_groups:
                group["lr"] = run.learning_rate(group["peak"])
            parts = losses(self.maker.batch(self.rows))
            descend(parts["loss"], optimizer, trained)
            run.record(**parts)
            if run.elapsed_s - last > judge_every_s:
                last = run.elapsed_s
                run.log(**judged())
        found = judged()
        run.log(**found)
        student.settle()
        return found

    @torch.no_grad()
    def judged(self, bench: Bench, *, early: bool) -> dict[str, float]:
        """Word error rates of one way."""
        self.student.eval()
        codes = []

        def features(sound: Tensor) -> Tensor:
            with self.autocast():
                rows = self.student.rows(sound)
                if early:
                    return self.student.early(rows)
                heard = self.student.heard(rows)
            codes.append(heard.codes.flatten())
            return heard.features

        with self.autocast():
            found = bench.rates(features)
        values = {f"wer_{name}": rate for name, rate in found.items()}
        if self.student.quantizer is not None and codes:
            entries = self.student.quantizer.codebook.shape[0]
            values["perplexity"] = perplexity(torch.cat(codes), entries)
        self.student.train()
        return values

    @torch.no_grad()
    def teacher_rates(self, bench: Bench) -> dict[str, float]:
        """Word error rates of the teacher's own features."""
        with self.autocast():
            return bench.rates(lambda sound: self.teacher(whisper_log_mel(sound, 80)))


def save_student(student: Student, path: Path, info: dict[str, float]) -> None:
    """Write all weights in float16; the fixed positions are left out, the codebook is kept once."""
    kept = {
        name: value.detach().half().contiguous().cpu()
        for name, value in student.state_dict().items()
        if not name.endswith(("embed_positions.weight", "encoder.codebook.weight"))
        and name not in ("quantizer.sums", "quantizer.counts")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(kept, path, metadata={"info": json.dumps(info)})


def keep_tokenizer(path: Path, kept: Path, look_ahead: int) -> None:
    """Write what ``save_student`` wrote to ``kept``: without the reader, its matrices in int8."""
    weights = {n: v for n, v in load_file(path).items() if not n.startswith("reader.")}
    info = {
        "codes": weights["quantizer.codebook"].shape[0],
        "look_ahead": look_ahead,
        "from": "Whisper tiny.en (MIT), trained on speech of Kokoro's voices (Apache-2.0)",
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    save_file(to_int8(weights), kept, metadata={"info": json.dumps(info)})


@torch.no_grad()
def resume_student(student: Student, path: Path) -> bool:
    """Take what ``save_student`` or ``keep_tokenizer`` wrote; False if that has no reader.

    A reader that is not in the file stays as it is, and so does a codebook of another size.
    """
    own, weights = student.state_dict(), from_int8(load_file(path))
    for name, value in weights.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
    if student.quantizer is not None:
        student.quantizer.sums.copy_(student.quantizer.codebook * student.quantizer.counts[:, None])
        student.settle()
    return any(name.startswith("reader.") for name in weights)
