"""One step on the device: the trunk over new rows, modality blocks where they are needed, draws.

With deferral a modality block reads only what the coming draw needs: in text mode the audio
block, its head and its draws wait; in audio mode the text block waits. The trunk's outputs
lie in the store until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.blocks import BlockPool
from mosstalk.engine.inputs import Inputs, Spec
from mosstalk.engine.packed import Packed, Stretch, in_passes, run_block
from mosstalk.engine.request import DueDraw, Request
from mosstalk.engine.sampler import AUDIO, DRAW_SPECS, TEXT, Draw, Drawn, draw, draw_inputs
from mosstalk.engine.scheduler import Work
from mosstalk.engine.sequence import Part, Sequence, part_of
from mosstalk.engine.store import KVStore
from mosstalk.model.network import LanguageModel, Logits

_PLACE_SPECS = {"positions": Spec(("N",)), "places": Spec(("N",))}
_ROW_SPECS = {"rows": Spec(("N", 2))} | _PLACE_SPECS
_NOT_DRAWN = -2


@dataclass(frozen=True)
class Outcome:
    """What a step drew for a request: the row, or that its logits were not finite."""

    request: Request
    row: Row
    bad: bool


@dataclass(frozen=True)
class _Due:
    """Rows that a modality block reads: up to ``end``; outputs are wanted from row ``first`` on."""

    sequence: Sequence
    end: int
    first: int


@dataclass(frozen=True)
class _Read:
    """Wanted outputs (N, C) of a modality block, normed; where a sequence's row 0 would lie."""

    hidden: Tensor
    origins: dict[int, int]

    def after(self, rows: list[tuple[Sequence, int]]) -> Tensor:
        """Outputs (R, C) of single rows of sequences."""
        return self.hidden[[self.origins[id(sequence)] + row for sequence, row in rows]]


class Runner:
    """The network over a pool of blocks, for at most ``slots`` replies at once.

    ``deferral`` off computes both blocks and heads at every row. A modality block that has
    many rows to catch up with reads at most ``pass_rows`` at once, to bound what it takes.
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
    ) -> None:
        config = model.config
        self.model, self.ids, self.pool = model, ids, pool
        self.deferral, self.pass_rows = deferral, pass_rows
        self.store = KVStore.allocate(config, pool, model.device, model.dtype)
        self.steps = 0
        self._seen = [
            torch.zeros((slots, size), dtype=torch.bool, device=model.device)
            for size in (config.vocab_size, config.audio_vocab_size)
        ]

    @property
    def device(self) -> torch.device:
        """Where the weights and the store are."""
        return self.model.device

    def begin(self, request: Request) -> None:
        """Set a slot's penalty state from the request's rows; put-off draws are not in it."""
        put_off = {due.place for due in request.due_draws}
        rows = torch.tensor(request.sequence.rows, device=self.device)
        drawn = [place for place in range(len(rows)) if place not in put_off]
        for channel, seen in enumerate(self._seen):
            state = seen[request.slot]
            state.zero_()
            state[rows[:, channel] if channel == TEXT else rows[drawn, channel]] = True

    def penalised_ids(self, request: Request) -> tuple[set[int], set[int]]:
        """Text and audio ids that the repetition penalty of a running request counts as seen."""
        text, audio = (set(seen[request.slot].nonzero()[:, 0].tolist()) for seen in self._seen)
        return text, audio

    @torch.inference_mode()
    def step(self, works: list[Work]) -> list[Outcome]:
        """Run ``works`` and draw a row for each request whose rows are all read then.

        Raises:
            EngineInputError: what a launch was about to read is not what it must be.
        """
        self.steps += 1
        self._run_trunk([w for w in works if w.count])
        text, audio = (
            self._run_part(part, [self._due(work, part) for work in works])
            for part in (Part.TEXT, Part.AUDIO)
        )
        drawing = [w.request for w in works if w.draws and w.request]
        return self._draw_rows(drawing, text, audio) if drawing else []

    @torch.inference_mode()
    def make_up(self, requests: list[Request]) -> list[Outcome]:
        """Make up the put-off audio draws of ``requests`` in order; one outcome for each."""
        self.steps += 1
        found = self._run_part(
            Part.AUDIO,
            [
                _Due(r.sequence, r.sequence.read[Part.TRUNK], r.due_draws[0].place - 1)
                for r in requests
            ],
        )
        assert found is not None, "put-off draws without rows that the audio block has not read"
        return [self._make_up_one(request, found) for request in requests]

    @torch.inference_mode()
    def logits(self, sequence: Sequence) -> Logits:
        """Read all unread rows (T) with both blocks; return the raw logits that follow each.

        Text (T, vocab_size), audio (T, audio_vocab_size). For checks: nothing is drawn. The
        sequence must have room for its rows.
        """
        self.steps += 1
        start, end = sequence.read[Part.TRUNK], len(sequence.rows)
        self._run_trunk([Work(sequence, None, start, end - start, False)])
        hidden = [
            read.hidden
            for part in (Part.TEXT, Part.AUDIO)
            if (read := self._run_part(part, [_Due(sequence, end, start)]))
        ]
        return Logits(self._logits(TEXT, hidden[TEXT]), self._logits(AUDIO, hidden[AUDIO]))

    def _make_up_one(self, request: Request, read: _Read) -> Outcome:
        dues = request.due_draws
        hidden = read.after([(request.sequence, due.place - 1) for due in dues])
        logits = self._logits(AUDIO, hidden)
        found: list[Drawn] = []
        for number, due in enumerate(dues):
            draws = [Draw(request, due.step, due.rule)]
            found.append(self._draw(draws, AUDIO, logits[number : number + 1]))
            self._remember([request], AUDIO, found[-1].ids)
        request.make_up(torch.cat([each.ids for each in found]).tolist())
        bad = bool(torch.cat([each.bad for each in found]).any())
        return Outcome(request, request.sequence.rows[-1], bad)

    def _due(self, work: Work, part: Part) -> _Due:
        """How far a modality block reads in this step."""
        end = work.start + work.count
        put_off = work.request and self.deferral and part is not part_of(work.request.mode)
        return _Due(work.sequence, work.sequence.read[part] if put_off else end, end - 1)

    def _run_trunk(self, works: list[Work]) -> None:
        if not works:
            return
        stretches = [Stretch(w.sequence, w.start, w.start + w.count) for w in works]
        rows = [row for s in stretches for row in s.sequence.rows[s.start : s.end]]
        packed = Packed.of(stretches, self.device)
        inputs = Inputs(self.steps, {"rows": torch.tensor(rows, device=self.device)})
        self._check(inputs, packed, _ROW_SPECS)
        hidden = self.model.embed(inputs["rows"])
        theta = self.model.config.rope_theta
        hidden = run_block(self.model.model.shared_block, hidden, packed, self.store, theta)
        self.store.hidden[packed.places] = hidden
        for stretch in stretches:
            stretch.sequence.advance(Part.TRUNK, stretch.end)

    def _run_part(self, part: Part, dues: list[_Due]) -> _Read | None:
        """Run a modality block over what is due, a bounded lot at a time."""
        dues = [due for due in dues if due.end > due.sequence.read[part]]
        if not dues:
            return None
        begins = accumulate((due.end - due.first for due in dues), initial=0)
        origins = {id(d.sequence): n - d.first for d, n in zip(dues, begins, strict=False)}
        firsts = {id(due.sequence): due.first for due in dues}
        stretches = [Stretch(due.sequence, due.sequence.read[part], due.end) for due in dues]
        norm = self.model.model.text_norm if part is Part.TEXT else self.model.model.audio_norm
        wanted = []
        for lot in in_passes(stretches, self.pass_rows):
            rows = [row >= firsts[id(s.sequence)] for s in lot for row in range(s.start, s.end)]
            wanted.append(self._pass(part, lot)[torch.tensor(rows, device=self.device)])
        return _Read(norm(torch.cat(wanted)), origins)

    def _pass(self, part: Part, stretches: list[Stretch]) -> Tensor:
        """Outputs (N, C) of a modality block for rows whose trunk outputs are in the store."""
        packed = Packed.of(stretches, self.device)
        self._check(Inputs(self.steps), packed, _PLACE_SPECS)
        backbone, theta = self.model.model, self.model.config.rope_theta
        block = backbone.text_block if part is Part.TEXT else backbone.audio_block
        hidden = run_block(block, self.store.hidden[packed.places], packed, self.store, theta)
        for stretch in stretches:
            stretch.sequence.advance(part, stretch.end)
        return hidden

    def _check(self, inputs: Inputs, packed: Packed, specs: Mapping[str, Spec]) -> None:
        inputs.tensors |= {"positions": packed.positions, "places": packed.places}
        inputs.check(specs, self.steps, self.device)

    def _draw_rows(
        self, requests: list[Request], text: _Read | None, audio: _Read | None
    ) -> list[Outcome]:
        rows = torch.full((len(requests), 2), _NOT_DRAWN, device=self.device)
        bad = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        for channel, read in ((TEXT, text), (AUDIO, audio)):
            chosen = [n for n, r in enumerate(requests) if self._drawn_now(r, channel)]
            if not chosen:
                continue
            assert read is not None, "a draw without its block's output"
            drawing = [requests[n] for n in chosen]
            hidden = read.after([(r.sequence, len(r.sequence.rows) - 1) for r in drawing])
            draws = [Draw(r, r.step, r.rule) for r in drawing]
            drawn = self._draw(draws, channel, self._logits(channel, hidden))
            rows[chosen, channel] = drawn.ids
            bad[chosen] |= drawn.bad
            self._remember(drawing, channel, drawn.ids)
        return self._outcomes(requests, rows, bad)

    def _drawn_now(self, request: Request, channel: int) -> bool:
        if channel == AUDIO:
            return not self.deferral or request.mode is Mode.AUDIO
        return request.mode is Mode.TEXT

    def _outcomes(self, requests: list[Request], rows: Tensor, bad: Tensor) -> list[Outcome]:
        """Read the drawn rows back, and note which audio draws were put off."""
        outcomes = []
        found = torch.cat([rows, bad[:, None].long()], dim=1).tolist()
        for request, (text, audio, is_bad) in zip(requests, found, strict=True):
            if request.mode is Mode.AUDIO:
                text = self.ids.modality_pad
                self._seen[TEXT][request.slot, text] = True
            elif audio == _NOT_DRAWN:
                place = len(request.sequence.rows)
                request.due_draws.append(DueDraw(place, request.step, request.rule))
                audio = self.ids.audio_pad
            outcomes.append(Outcome(request, (text, audio), bool(is_bad)))
        return outcomes

    def _draw(self, draws: list[Draw], channel: int, logits: Tensor) -> Drawn:
        inputs = draw_inputs(draws, channel, self.ids, self.steps, self.device)
        inputs.check(DRAW_SPECS, self.steps, self.device)
        return draw(
            logits,
            self._seen[channel],
            inputs,
            channel,
            last_id=self.ids.eosp if channel == AUDIO else None,
            greedy_only=all(each.request.options.temperature == 0 for each in draws),
        )

    def _remember(self, requests: list[Request], channel: int, ids: Tensor) -> None:
        slots = torch.tensor([r.slot for r in requests], device=self.device)
        self._seen[channel][slots, ids] = True

    def _logits(self, channel: int, hidden: Tensor) -> Tensor:
        """Raw logits (R, V) of a head, rounded to the model's dtype, then float32."""
        head = self.model.audio_lm_head if channel == AUDIO else self.model.text_lm_head
        return head(hidden).float()
