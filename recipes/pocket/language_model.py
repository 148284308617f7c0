"""The language-model stage: both heads learn replies, the mode of each row known.

Rows of a spoken reply train the audio head, rows of a written one the text head; what the
model reads of its own reply is sometimes wrong on purpose, so that it can go on after a slip.
Two more heads, which do not ship, tell phones: of what is heard, from the trunk's middle, so that
the model does not make up for what was said with what is likely; and of what is to be said next,
from the trunk's end, so that it learns how words are spoken before it learns codes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mosstalk.config import LanguageModelConfig
from mosstalk.constants import MEL_FRAMES_PER_CODE
from mosstalk.models.language_model import KVCache, LanguageModel
from mosstalk.numerics.rope import rotary_tables
from recipes.pocket.data import PHONES, UNLABELLED, side_by_side
from recipes.pocket.examples import Examples
from recipes.pocket.recorded import Recorded
from recipes.pocket.training import Averaged, Run, adamw, fresh, load_weights, save_weights

PEAK_RATE = 2e-3
_ROWS_PER_BATCH, _ROWS_ON_A_CPU = 48_000, 3_000
_WIDTHS = (48, 64, 80, 104, 128, 160, 208, 256, 336, 416, 512, 704, 1024, 2048)
"""Rows that an example is padded to, so that a card records few shapes; the model has places for no
more than the last."""
_VALIDATE_EVERY, _VALIDATED = 1000, 12
"""Steps between two validations, and the groups of held-out examples in each."""
_WEIGHT_DECAY = 0.05
_SMOOTHING = 0.05
_LISTENING_DEPTH = 0.6
"""Share of the trunk's layers before the phones are told."""


class Slips(NamedTuple):
    """Share of ids that the model reads wrong: of its replies, and of what is heard."""

    written: float = 0.0
    spoken: float = 0.0
    heard: float = 0.0


NO_SLIPS = Slips()
SLIPS = Slips(written=0.15, spoken=0.04, heard=0.08)
"""Written replies have more: a sentence's beginning often tells its end, and a model that may
trust what it has written goes on from there instead of listening. Codes tell each other less,
and a spoken reply has its whole text before it. What is heard has some because codes of people
are further from those of synthetic voices than one room's are from another's."""


class Passing(KVCache):
    """Keeps nothing: in training all rows are new, and gradients must flow through K and V."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return what came."""
        del layer
        return key, value


@dataclass(frozen=True)
class Batch:
    """Examples side by side: rows (B, T, 2), learned (B, T) False past each one's end.

    ``phones`` (B, T, 4) are -100 where nothing is heard or no phone is known.
    """

    rows: Tensor
    learned: Tensor
    phones: Tensor


def gather(examples: Examples, chosen: NDArray[np.int64], width: int) -> Batch:
    """Examples ``chosen`` in ``width`` rows each, padded by the first row of the whole tensor.

    In the place of a number below 0 nothing is learned.
    """
    lengths = np.where(chosen < 0, 0, examples.lengths[chosen])
    places, inside = side_by_side(examples.starts[chosen], lengths, examples.rows.device, width)
    phones = examples.phones[places].long()
    told = inside[..., None] & (phones != UNLABELLED)
    return Batch(
        examples.rows[places].long(),
        examples.learned[places] & inside,
        torch.where(told, phones, -100),
    )


class Group(NamedTuple):
    """Numbers of examples, -1 in empty places, and the rows that each gets."""

    chosen: NDArray[np.int64]
    width: int


def groups(lengths: NDArray[np.int64], rows: int, draw: np.random.Generator) -> list[Group]:
    """All examples in shuffled groups of like length, of at most ``rows`` rows.

    There are few shapes of groups: ``_WIDTHS``, each with as many examples as fit. Examples that
    are longer than all of them are left out.
    """
    widths = np.array(_WIDTHS)
    places = np.searchsorted(widths, lengths)
    out: list[Group] = []
    for place in np.unique(places[places < len(widths)]):
        width = int(widths[place])
        count = max(1, rows // width)
        members = draw.permutation(np.flatnonzero(places == place))
        members = np.pad(members, (0, -len(members) % count), constant_values=-1)
        out += [Group(some, width) for some in members.reshape(-1, count)]
    return [out[number] for number in draw.permutation(len(out))]


def with_slips(config: LanguageModelConfig, batch: Batch, slips: Slips) -> Tensor:
    """The rows as the model reads them: a share of the ids replaced by random ones.

    Nothing is replaced in a written turn of the user's.
    """
    text, audio = batch.rows.unbind(-1)
    spoken = text == config.modality_pad_token_id
    share = torch.where(spoken, slips.spoken, slips.written)
    share = torch.where(batch.learned, share, spoken * slips.heard)
    slipped = torch.rand(text.shape, device=text.device) < share
    ordinary = text < config.sosp_token_id - 3
    codes = torch.randint_like(audio, config.eosp_token_id)
    words = torch.randint_like(text, config.sosp_token_id - 3)
    audio = torch.where(slipped & spoken & (audio < config.eosp_token_id), codes, audio)
    text = torch.where(slipped & ordinary, words, text)
    return torch.stack([text, audio], dim=-1)


class Listener(nn.Module):
    """Phones of a code's four frames, heard: from the trunk's middle, one row after the code; to be
    said: from its end, one row before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        told = MEL_FRAMES_PER_CODE * len(PHONES)
        self.phones = nn.ModuleList(nn.Linear(width, told) for _ in range(2))

    def forward(self, middle: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """(..., width) each to logits (..., 4, phones) of what is heard, and of what is said."""
        told = [
            phones(norm(x)).unflatten(-1, (MEL_FRAMES_PER_CODE, -1))
            for x, norm, phones in zip((middle, end), self.norms, self.phones, strict=True)
        ]
        return told[0], told[1]


def _trunk(
    model: LanguageModel, rows: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The trunk's output and what it holds at ``_LISTENING_DEPTH``, each (B, T, C)."""
    block, cache = model.model.shared_block, Passing(0)
    x = middle = model.embed(rows)
    for index, layer in enumerate(block.layers):
        x = layer(x, tables, None, cache, index)
        if index + 1 <= _LISTENING_DEPTH * len(block.layers):
            middle = x
    return x, middle


def losses(
    model: LanguageModel, listener: Listener, batch: Batch, slips: Slips = NO_SLIPS
) -> dict[str, Tensor]:
    """Cross-entropy of spoken and of written reply rows, each predicted from the row before,
    and of the phones heard and said.

    The audio head tells the first code already where the text head is to open speech. Of written
    rows it learns nothing else, and whatever it draws there is ignored, but for one thing: drawn
    beside the row that opens speech, the id that ends speech ends it before its first code.
    """
    rows = with_slips(model.config, batch, slips)
    blocks, cache = model.model, Passing(0)
    positions = torch.arange(rows.shape[1] - 1, device=rows.device)
    tables = rotary_tables(positions, model.config.head_dim, model.config.rope_theta)
    hidden, middle = _trunk(model, rows[:, :-1], tables)
    text_target, audio_target = batch.rows[:, 1:].unbind(-1)
    learned = batch.learned[:, 1:]
    spoken = learned & (text_target == model.config.modality_pad_token_id)
    opening = (text_target == model.config.sosp_token_id) & F.pad(spoken[:, 1:], (0, 1))
    audio_target = torch.where(opening, audio_target.roll(-1, 1), audio_target)
    # Of every row both heads tell something: which rows count is known to the card alone.
    text = blocks.text_norm(blocks.text_block(hidden, tables, None, cache))
    audio = blocks.audio_norm(blocks.audio_block(hidden, tables, None, cache))
    smoothing = _SMOOTHING if model.training else 0.0
    of_text, right_text = _entropy(
        model.text_lm_head(text), text_target.masked_fill(~learned | spoken, -100), smoothing
    )
    of_audio, right_audio = _entropy(
        model.audio_lm_head(audio), audio_target.masked_fill(~(spoken | opening), -100), smoothing
    )
    own = batch.learned[..., None]
    heard, said = listener(middle[:, 1:], hidden)
    of_heard = batch.phones.masked_fill(own, -100)[:, :-2]
    of_phones, right_phones = _entropy(heard, of_heard)
    of_said, right_said = _entropy(said, batch.phones.masked_fill(~own, -100)[:, 1:])
    return {
        "loss": of_text + of_audio,
        "text": of_text,
        "audio": of_audio,
        "phones": of_phones,
        "said": of_said,
        "right_text": right_text,
        "right_audio": right_audio,
        "right_phones": right_phones,
        "right_said": right_said,
    }


def _entropy(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and share of right guesses where ``target`` is not -100; else zero.

    ``logits`` (..., classes), ``target`` (...).
    """
    logits, target = logits.flatten(0, -2), target.flatten()
    count = (target >= 0).sum().clamp_min(1)
    entropy = F.cross_entropy(logits.float(), target, reduction="sum", label_smoothing=smoothing)
    return entropy / count, (logits.argmax(-1) == target).sum() / count


def new_model(config: LanguageModelConfig, device: torch.device) -> LanguageModel:
    """A model with small normal weights; those that write to the residual smaller by depth."""
    model = fresh(LanguageModel(config)).to(device)
    depth = (2 * (config.num_shared_layers + config.num_modality_layers)) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            closing = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 0.5 if "embed" in name else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=scale * (depth if closing else 1))
    return model


def _compile(model: LanguageModel) -> None:
    """Fuse each layer's small operations, once for all lengths."""
    blocks = model.model
    for block in (blocks.shared_block, blocks.text_block, blocks.audio_block):
        for layer in block.layers:
            layer.compile(dynamic=True)


def _optimizer(model: LanguageModel, listener: Listener) -> torch.optim.AdamW:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    unchecked = {"params": [*others, *listener.parameters()], "weight_decay": 0.0}
    return adamw([{"params": matrices, "weight_decay": _WEIGHT_DECAY}, unchecked], PEAK_RATE)


class Best:
    """The averaged weights that guessed most of ``held_out``'s ids right, in a file.

    ``held_out`` are several kinds of examples by name, and each counts as much, written and spoken.
    The cross-entropy would choose an earlier model: one that learns its clips by heart is too sure
    of itself where it is wrong, though it is wrong no more often.
    """

    def __init__(
        self,
        mean: Averaged[LanguageModel],
        listener: Listener,
        held_out: Mapping[str, Examples],
        rows: int,
    ) -> None:
        self._mean, self._listener = mean, listener
        self._held_out, self._rows = held_out, rows
        self._right = -math.inf

    def consider(self, run: Run) -> None:
        """Validate, and keep these weights if none did better; the log's ``kept`` says whether."""
        found, right = dict[str, float](), 0.0
        for kind, examples in self._held_out.items():
            some = validate(self._mean.module, self._listener, examples, self._rows)
            found |= {f"{kind}_{name}": value for name, value in some.items()}
            right += some["right_text"] + some["right_audio"]
        better = right > self._right
        run.log(**found, kept=float(better))
        if better:
            self._right = right
            info = {"step": run.step} | found
            save_weights(self._mean.module, weights_file(run.folder), info, torch.float16)


def weights_file(folder: Path) -> Path:
    """Where the stage writes in ``folder``."""
    return folder / "language_model.safetensors"


def train(
    examples: Examples,
    held_out: Mapping[str, Examples],
    config: LanguageModelConfig,
    run: Run,
    peak_rate: float,
    listening: float,
    *,
    speaking_alone: bool = False,
) -> LanguageModel:
    """Train, writing ``language_model.safetensors`` in float16; return what it holds.

    That is the average which did best on ``held_out``, as Best has it, and need not be the last.
    With ``speaking_alone`` only the audio block and its head learn: what is written of the same
    rows stays what it was, to the bit.
    """
    torch.manual_seed(run.seed)
    device = examples.rows.device
    small = run.smoke or device.type == "cpu"
    rows_per_batch = _ROWS_ON_A_CPU if small else _ROWS_PER_BATCH
    model = new_model(config, device)
    if run.resume:
        load_weights(model, run.resume)
    if speaking_alone:
        model.requires_grad_(False)
        for part in (model.model.audio_block, model.model.audio_norm, model.audio_lm_head):
            part.requires_grad_(True)
    listener = Listener(config.hidden_size).to(device)
    optimizer, mean = _optimizer(model, listener), Averaged(model)
    if device.type == "cuda":
        _compile(model)  # after it was copied for its average, which is not trained
    best = Best(mean, listener, held_out, rows_per_batch)
    if run.resume:
        best.consider(run)

    def gradients(rows: Tensor, learned: Tensor, phones: Tensor) -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts = losses(model, listener, Batch(rows, learned, phones), SLIPS)
        (parts["loss"] + listening * (parts["phones"] + parts["said"])).backward()
        return parts

    recorded = Recorded(gradients, [*model.parameters(), *listener.parameters()], plain=run.plain)
    draw, waiting = np.random.default_rng(run.seed), list[Group]()
    for step in run.steps():
        waiting = waiting or groups(examples.lengths, rows_per_batch, draw)
        batch = gather(examples, *waiting.pop())
        parts = recorded(batch.rows, batch.learned, batch.phones)
        run.follow(parts, optimizer, peak_rate, mean, model)
        if step % _VALIDATE_EVERY == _VALIDATE_EVERY - 1:
            best.consider(run)
    best.consider(run)
    load_weights(mean.module, weights_file(run.folder))
    return mean.module.eval()


@torch.no_grad()
def validate(
    model: LanguageModel, listener: Listener, examples: Examples, rows_per_batch: int
) -> dict[str, float]:
    """Losses on held-out ``examples``, without slips."""
    model.eval()
    order = groups(examples.lengths, rows_per_batch, np.random.default_rng(0))
    found = [losses(model, listener, gather(examples, *group)) for group in order[:_VALIDATED]]
    model.train()
    return {name: float(sum(f[name] for f in found)) / len(found) for name in found[0]}
