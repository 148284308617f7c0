"""One step on the device: the trunk over new rows, modality blocks where they are needed, draws.

With deferral a modality block reads only what the coming draw needs: in text mode the audio
block, its head and its draws wait; in audio mode the text block waits. The trunk's outputs
lie in the store until then.

A step is launched, then collected. The next one may be launched before: where a row is then
pending, the trunk reads what the slot drew last, and the draw after it is made only if that row
left the mode as it was.
"""

import time
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layers import NOT_SEEN, LayerOptions, Layers
from mosstalk.engine.request import Request, State
from mosstalk.engine.sampler import (
    Draw,
    DrawInputs,
    Drawn,
    Slots,
    draw_rows,
    few_tokens,
)
from mosstalk.engine.scheduler import Work
from mosstalk.engine.sequence import Part, Sequence, part_of
from mosstalk.engine.step_plan import QuerySpan, in_passes
from mosstalk.models.language_model import LanguageModel, Logits
from mosstalk.ops.sampling_parts import AUDIO, NOT_DRAWN, TEXT
from mosstalk.runtime.busy import BusyPart, on_card
from mosstalk.runtime.device_inputs import DeviceInputs, Field

_MODES = (Mode.TEXT, Mode.AUDIO)
_CHANNELS = ("text", "audio")
"""As TEXT and AUDIO number them."""
_KNOWN_TOKENS = 4096
"""Of a conversation's tokens so many at a time are marked as seen."""
_PARTS = ((TEXT, Part.TEXT), (AUDIO, Part.AUDIO))


@dataclass(frozen=True)
class Outcome:
    """What came of a draw: the row, None if it was missed; whether its logits were not finite."""

    draw: Draw
    row: Row | None
    bad: bool


@dataclass(frozen=True)
class InFlightStep:
    """A step that was launched: its draws, and where their tokens will be on the host.

    ``found`` (R, 3) int64: text and audio tokens, NOT_DRAWN where none was drawn, and whether the
    logits were not finite. It is there once ``done`` has come; on a CPU at once. ``launched_s``
    is of ``time.perf_counter``; ``part`` says whose rows the step reads, ``items`` how
    many, where a sequence without any counts as one.
    """

    draws: list[Draw]
    found: Tensor
    done: torch.cuda.Event | None
    launched_s: float
    part: BusyPart
    items: int

    @property
    def live(self) -> bool:
        """Whether anybody waits for a draw of it."""
        return any(draw.request.state is State.RUNNING for draw in self.draws)


@dataclass(frozen=True)
class _Due:
    """Rows ``begin`` .. ``end`` - 1 for a modality block; outputs are wanted from ``first`` on."""

    sequence: Sequence
    begin: int
    end: int
    first: int


class ModelRunner:
    """The network over a pool of blocks, for at most ``slots`` replies at once.

    ``deferral`` off computes both blocks and heads at every row. A modality block that has
    many rows to catch up with reads at most ``pass_rows`` at once, to bound what it takes.
    ``layers`` says how the network is computed.
    """

    def __init__(
        self,
        model: LanguageModel,
        ids: SpecialIds,
        pool: BlockPool,
        slots: int,
        *,
        pass_rows: int = 512,
        deferral: bool = True,
        layers: LayerOptions | None = None,
    ) -> None:
        config = model.config
        self.model, self.ids, self.pool = model, ids, pool
        self.deferral, self.pass_rows = deferral, pass_rows
        self.store = KVStore.allocate(config, pool, model.device, model.dtype)
        self.steps = 0
        self._slots = Slots.allocate(config, ids, slots, model.device)
        self._draws = DrawInputs(slots, ids, model.device)
        self._known = DeviceInputs(
            {name: Field((_KNOWN_TOKENS,), "int64", name) for name in _CHANNELS}, model.device
        )
        self._layer_options = layers
        self.layers = Layers(model, self.store, self._slots.latest, layers)

    @property
    def device(self) -> torch.device:
        """Where the weights and the store are."""
        return self.model.device

    def grow(self) -> None:
        """Have a store for a pool that has grown; graphs are captured anew when they are used."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph may still be at work in what goes
        self.store = self.store.grown(self.model.config, self.pool)
        self.layers = Layers(self.model, self.store, self._slots.latest, self._layer_options)

    def begin(self, request: Request) -> None:
        """Set a slot's penalty state from the request's rows; put-off draws are not in it.

        The rest of a slot's state is set by the first draw.
        """
        put_off = {due.place for due in request.deferred_draws}
        rows = request.sequence.rows
        audio = [row[AUDIO] for place, row in enumerate(rows) if place not in put_off]
        given = [np.array(tokens, np.int64) for tokens in ([row[TEXT] for row in rows], audio)]
        marked = [seen[request.slot].zero_() for seen in self._slots.seen]
        for first in range(0, len(rows), _KNOWN_TOKENS):
            parts = [tokens[first : first + _KNOWN_TOKENS] for tokens in given]
            values = dict(zip(_CHANNELS, parts, strict=True))
            self._known.fill(values, made_for=self.steps, step=self.steps)
            for name, part, seen in zip(_CHANNELS, parts, marked, strict=True):
                seen.index_fill_(0, self._known[name][: len(part)], True)

    @torch.inference_mode()
    def launch(self, works: list[Work], fresh: Several[Request] = ()) -> InFlightStep:
        """Begin to run ``works``, drawing a row for each request whose rows are all read then.

        Of ``fresh`` ones nothing was drawn since they got their slots (see ``begin``).

        Rows that a request has pending are read as its slot drew them. Nothing here waits for
        the device. What is launched counts as read, and what is drawn as pending.

        Raises:
            EngineInputError: what a launch was about to read is not what it must be.
        """
        part = _busy_part(works)
        with on_card(part, self.device):
            return self._launch(works, fresh, part)

    def _launch(self, works: list[Work], fresh: Several[Request], part: BusyPart) -> InFlightStep:
        """``launch`` of a step that counts as ``part``."""
        launched_s = time.perf_counter()
        self.steps += 1
        works = sorted(works, key=_draw_order)
        draws = [_draw_of(work.request, work) for work in works if work.draws and work.request]
        self._run_trunk([w for w in works if w.count])
        for request in fresh:  # now that the device has something to do
            self.begin(request)
        found = torch.full((len(draws), 3), NOT_DRAWN, device=self.device)
        found[:, 2] = 0
        for channel, block in _PARTS:
            hidden = self._run_part(block, [self._due(work, block) for work in works])
            for chosen in self._drawn_now(draws, channel):
                assert hidden is not None, "a draw without its block's output"
                # With deferral a block was asked for no other outputs than these.
                outputs = hidden if self.deferral else hidden[chosen]
                drawn = self._draw(draws[chosen], channel, outputs)
                found[chosen, channel] = drawn.tokens
                found[chosen, 2] |= drawn.bad
        for draw in draws:
            draw.request.sequence.pending += 1
        items = sum(max(work.count, 1) for work in works)
        return _sent(draws, found, launched_s, part, items)

    def collect(self, in_flight: InFlightStep) -> list[Outcome]:
        """Wait for a launched step; one outcome for each of its draws."""
        if in_flight.done:
            in_flight.done.synchronize()
        found = in_flight.found.tolist()
        return [
            self._outcome(draw, *each) for draw, each in zip(in_flight.draws, found, strict=True)
        ]

    def step(self, works: list[Work]) -> list[Outcome]:
        """``launch`` and ``collect``."""
        return self.collect(self.launch(works))

    @torch.inference_mode()
    def resolve_deferred(self, requests: list[Request]) -> list[tuple[Request, bool]]:
        """Make up the put-off audio draws of ``requests`` in order.

        Returns of each whether its logits were not finite.
        """
        self.steps += 1
        firsts = [request.deferred_draws[0].place - 1 for request in requests]
        ends = [request.deferred_draws[-1].place for request in requests]
        hidden = self._run_part(
            Part.AUDIO,
            [
                _Due(r.sequence, min(first, r.sequence.read[Part.AUDIO]), end, first)
                for r, first, end in zip(requests, firsts, ends, strict=True)
            ],
        )
        assert hidden is not None, "put-off draws without rows before them"
        lengths = (end - first for first, end in zip(firsts, ends, strict=True))
        cuts = pairwise(accumulate(lengths, initial=0))
        return [
            (request, self._resolve_one(request, hidden[begin:end]))
            for request, (begin, end) in zip(requests, cuts, strict=True)
        ]

    @torch.inference_mode()
    def logits(self, sequence: Sequence) -> Logits:
        """Read all unread rows (T) with both blocks; return the raw logits that follow each.

        Text (T, vocab_size), audio (T, audio_vocab_size), float32. For checks: nothing is
        drawn. The sequence must have room for its rows.
        """
        self.steps += 1
        start, end = sequence.read[Part.TRUNK], len(sequence.rows)
        self._run_trunk([Work(sequence, None, start, end - start, False)])
        found = []
        for channel, part in _PARTS:
            hidden = self._run_part(part, [_Due(sequence, sequence.read[part], end, start)])
            assert hidden is not None
            found.append(self.layers.logits(channel, hidden).float())
        return Logits(*found)

    def _resolve_one(self, request: Request, hidden: Tensor) -> bool:
        """Draw what is due after outputs (n, C); whether any logits were not finite."""
        dues = request.deferred_draws
        assert len(dues) == len(hidden), "put-off draws belong to rows that follow one another"
        found: list[Drawn] = []
        for number, due in enumerate(dues):
            draws = [Draw(request, due.step, due.rule, due.place, Mode.TEXT)]
            found.append(self._draw(draws, AUDIO, hidden[number : number + 1]))
        request.resolve_deferred(torch.cat([each.tokens for each in found]).tolist())
        return bool(torch.cat([each.bad for each in found]).any())

    def _due(self, work: Work, part: Part) -> _Due:
        """What a modality block reads in this step; its last output is wanted for a draw."""
        read, end = work.sequence.read[part], work.start + work.count
        if work.request and self.deferral and part is not part_of(work.request.mode):
            return _Due(work.sequence, read, read, read)
        first = end - 1 if work.draws else end
        return _Due(work.sequence, min(read, first), end, first)

    def _run_trunk(self, works: list[Work]) -> None:
        if not works:
            return
        spans = [QuerySpan(w.sequence, w.start, w.start + w.count) for w in works]
        rows = [row for work in works for row in _rows_of(work)]
        self.layers.trunk(self.steps, rows, spans)
        for span in spans:
            span.sequence.advance(Part.TRUNK, span.end)

    def _run_part(self, part: Part, dues: list[_Due]) -> Tensor | None:
        """Run a modality block over what is due, a bounded lot at a time.

        Returns the wanted outputs (N, C), normed, one after the other; None if it had no rows.
        """
        dues = [due for due in dues if due.begin < due.end]
        if not dues:
            return None
        firsts = {id(due.sequence): due.first for due in dues}
        spans = [QuerySpan(due.sequence, due.begin, due.end) for due in dues]
        wanted = []
        for lot in in_passes(spans, self.pass_rows):
            rows = [row >= firsts[id(s.sequence)] for s in lot for row in range(s.start, s.end)]
            places = [place for place, is_wanted in enumerate(rows) if is_wanted]
            wanted.append(self.layers.block(self.steps, part, lot, places))
            for span in lot:
                if span.end > span.sequence.read[part]:
                    span.sequence.advance(part, span.end)
        return torch.cat(wanted) if len(wanted) > 1 else wanted[0]

    def _drawn_now(self, draws: list[Draw], channel: int) -> list[slice]:
        """Which draws this channel makes, each with one mode; those of text come first."""
        texts = sum(draw.mode is Mode.TEXT for draw in draws)
        of_text, of_audio = slice(0, texts), slice(texts, len(draws))
        if channel == TEXT:
            chosen = [of_text]
        else:
            chosen = [of_audio] if self.deferral else [of_text, of_audio]
        return [each for each in chosen if each.start < each.stop]

    def _outcome(self, draw: Draw, text: int, audio: int, bad: int) -> Outcome:
        """A drawn row on the host, where a draw that was put off stands as audio_pad."""
        speaking = draw.mode is Mode.AUDIO
        if bad or (audio if speaking else text) == NOT_DRAWN:
            return Outcome(draw, None, bool(bad))
        if speaking:
            text = self.ids.modality_pad
        return Outcome(draw, (text, self.ids.audio_pad if audio == NOT_DRAWN else audio), False)

    def _draw(self, draws: list[Draw], channel: int, hidden: Tensor) -> Drawn:
        inputs = self._draws.fill(draws, channel, self.steps)
        return draw_rows(
            self.layers.logits(channel, hidden),
            self._slots,
            inputs,
            channel,
            self.ids,
            masked=any(draw.late for draw in draws),
            completes=draws[0].mode is _MODES[channel],
            greedy_only=all(each.request.options.temperature == 0 for each in draws),
            few_only=few_tokens(draws),
        )


def _busy_part(works: list[Work]) -> BusyPart:
    """Whether a step makes rows of replies, reads what was there before, or both."""
    making = [work.request is not None and work.count <= 1 for work in works]
    if all(making):
        return BusyPart.STEP
    return BusyPart.MIXED if any(making) else BusyPart.PREFILL


def _sent(
    draws: list[Draw], found: Tensor, launched_s: float, part: BusyPart, items: int
) -> InFlightStep:
    """What was drawn, on its way to the host."""
    if not found.is_cuda:
        return InFlightStep(draws, found, None, launched_s, part, items)
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return InFlightStep(draws, host, done, launched_s, part, items)


def _draw_order(work: Work) -> int:
    """Draws of text first, then those of audio: each channel's lie side by side."""
    if not (work.draws and work.request):
        return 2
    return int(work.request.mode is Mode.AUDIO)


def _draw_of(request: Request, work: Work) -> Draw:
    late = request.sequence.pending > 0
    place = work.start + work.count
    return Draw(request, request.step, request.rule, place, request.mode, late)


def _rows_of(work: Work) -> list[Row]:
    """The rows that the trunk reads, the last perhaps by the slot that drew it."""
    rows, end = work.sequence.rows, work.start + work.count
    unseen = end - len(rows)
    if unseen <= 0:
        return rows[work.start : end]
    assert work.request is not None
    assert work.request.slot is not None
    return [*rows[work.start :], (NOT_SEEN, work.request.slot)]
