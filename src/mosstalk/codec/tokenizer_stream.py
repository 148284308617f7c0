"""Codes while the sound arrives, checked and repaired at every block of one code.

A code reads no sample past its own 80 ms, so it is emitted as soon as it is heard. What may
still change it is the floor of the features, which follows the loudest frame of the whole
segment: when a louder one comes, what the new floor reaches is encoded again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.tokenizer_block import BLOCK_CODES, BUCKETS, Blocks, BlockSpan, EncodedSpan
from mosstalk.codec.tokenizer_encoder import (
    LiveEncoder,
    SegmentSpan,
    StreamByStream,
    compute_features,
    encode_rows,
)
from mosstalk.codec.tokenizer_state import (
    ROW_S,
    Change,
    Floats,
    LiveCodes,
    LiveSegment,
    Pages,
    Repair,
    floor_below,
)
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import AudioError
from mosstalk.models.speech_tokenizer import CONV_STRIDE, SpeechTokenizer
from mosstalk.ops.launch import compiled_together
from mosstalk.ops.linear_tf32x3 import Precision, takes

Sound = Tensor | npt.NDArray[np.float32]

TRUSTED_S = 1.0
"""Seconds of a turn for which the last turn's maximum is taken for this one's. Where this turn is
not as loud, that has to be repaired, so the end must not be the time to find out."""
_PAGE_S = 1.28
"""Seconds of a page on a GPU: short turns hold little, and a kernel finds its rows quickly."""
TIE = 1e-5
"""Least lead of the nearest entry of the codebook, in shares of the squared norms, that rounding
cannot turn round. Sums in another order moved leads by 1e-6 at most."""


@dataclass
class _Turn:
    """A stream during one call: how many of its codes have stayed so far."""

    state: LiveCodes
    kept: int
    repairs: int

    @classmethod
    def of(cls, state: LiveCodes) -> "_Turn":
        return cls(state, len(state.codes), len(state.repairs))

    def replace(self, start: int, codes: list[int]) -> None:
        """Put ``codes`` in the place of those from ``start`` on."""
        old = self.state.codes[start:]
        self.state.codes[start:] = codes
        pairs = zip(old, codes, strict=False)
        same = next((at for at, (was, now) in enumerate(pairs) if was != now), len(old))
        self.kept = min(self.kept, start + same)

    def change(self) -> Change:
        """What became of the stream's codes since the call began."""
        return Change(
            self.kept, self.state.codes[self.kept :], len(self.state.repairs) > self.repairs
        )


class _Work(NamedTuple):
    """What a stream's segment has come to: ``frames`` that are whole, ``codes`` that they make.

    ``closing``: nothing follows in this segment.
    """

    turn: _Turn
    frames: int
    codes: int
    closing: bool

    @property
    def segment(self) -> LiveSegment:
        return self.turn.state.segment


@dataclass(frozen=True)
class LiveOptions:
    """How streams are computed; None leaves it to the device.

    ``together``: all streams in one run, in blocks of 400 ms from samples to codes without the
    host, rather than stream by stream with nothing padded; the former in float32 on a GPU.
    ``graphs``: such runs are captured as CUDA graphs; there alone. ``page_s``: seconds
    of sound in a page; 1.28 on a GPU, else a whole segment. ``limit_s``: sound that all streams
    together may hold, in whole pages; None: as much as the device has memory for. ``precision``:
    how a GPU multiplies float32; see ``linear_tf32x3``.
    """

    together: bool | None = None
    graphs: bool | None = None
    page_s: float | None = None
    limit_s: float | None = None
    precision: Precision = "tf32x3"


class LiveTokenizer:
    """``SpeechTokenizer`` on sound as it arrives, for any number of streams.

    Holds pages that streams take and give back, else no stream's state. In float32 the codes
    at a turn's end are those of ``SpeechTokenizer.encode`` on the whole turn, however it was
    cut. One thread at a time may push; streams may be opened and dropped by any.
    """

    @torch.inference_mode()
    def __init__(
        self,
        tokenizer: SpeechTokenizer,
        trusted_s: float = TRUSTED_S,
        options: LiveOptions | None = None,
    ) -> None:
        """``trusted_s`` is how long a turn trusts the maximum that it was opened with."""
        options = options or LiveOptions()
        self.tokenizer = tokenizer
        weight = tokenizer.encoder.codebook.weight
        self.device = weight.device
        self.on_gpu = on_gpu = weight.device.type == "cuda"
        # In other precisions references stand in for kernels; they look at items on the host.
        kernels = on_gpu and takes(weight)
        self._together = kernels if options.together is None else options.together
        graphs = kernels and options.graphs is not False
        rows = self._page_rows(options, on_gpu=on_gpu)
        zeroed = on_gpu or self._together
        self.pages = Pages(tokenizer, rows, options.limit_s, zeroed=zeroed)
        self._encoder = LiveEncoder(tokenizer, self.pages, options.precision)
        self._blocks = Blocks(self._encoder, graphs=graphs and self._together)
        self._pool = tokenizer.encoder.pool
        self._samples_per_code = tokenizer.samples_per_code
        self._longest = tokenizer.config.max_source_positions
        self._trusted_samples = round(trusted_s * INPUT_RATE)
        # In lower precision rounding chooses often, and equality is not promised.
        self._tie = TIE if weight.dtype == torch.float32 else 0.0

    def _page_rows(self, options: LiveOptions, *, on_gpu: bool) -> int:
        longest = self.tokenizer.config.max_source_positions
        seconds = options.page_s or (_PAGE_S if on_gpu else longest * ROW_S)
        return min(max(round(seconds / ROW_S), 1), longest)

    @torch.inference_mode()
    def warm(self, streams: int = BUCKETS[-1]) -> None:
        """Make ready for up to so many streams.

        On a GPU, where graphs do not outlive a pool that has to grow, there is memory afterwards
        for all that ``limit_s`` allows.

        Raises:
            CodecFullError: that much sound is not to be had.
        """
        if self.on_gpu:
            self.pages.reserve_all()
            if self._together:
                with compiled_together():  # no kernel runs in here
                    self._blocks.try_out(streams)
            # What looks twice at ties; before graphs, which leave less room.
            self.tokenizer.encode_segment(torch.zeros(self._samples_per_code))
        if self._together:
            self._blocks.warm(streams)

    @torch.inference_mode()
    def open(self, last_maximum: float | None = None) -> LiveCodes:
        """A stream before its first sample.

        ``last_maximum`` is the ``maximum`` of the speaker's last turn: where this one becomes
        as loud, its first repairs are spared.
        """
        return LiveCodes(LiveSegment.of(self.tokenizer, self.pages), last_maximum)

    def close(self, state: LiveCodes) -> None:
        """Drop a stream before its end: its pages are free at once. It takes no more."""
        state.finished = True
        state.segment.held.give()

    def push(self, state: LiveCodes, pcm: Sound) -> Change:
        """Take samples (n,) float at 16 kHz, n of any size; see ``push_many``."""
        return self.push_many([state], [pcm])[0]

    def finish(self, state: LiveCodes) -> Change:
        """End the turn: the code that silence completes, and a last check of all others.

        Afterwards ``state.codes`` are final and the stream takes no more.
        """
        return self.push_many([state], [np.zeros(0, np.float32)], [True])[0]

    @torch.inference_mode()
    def foresee(
        self, states: Sequence[LiveCodes], sounds: Sequence[Sound]
    ) -> list[LiveCodes | None]:
        """What each stream would be if it took samples (n,) more and were finished.

        The streams go on as if nobody had asked; one whose turn does end there may be closed, and
        what is returned put in its place. None where the samples would begin another segment.

        Raises:
            AudioError, CodecFullError: see ``push_many``.
        """
        taken = list(map(_checked, sounds))
        asked = [
            (state, sound)
            for state, sound in zip(states, taken, strict=True)
            if len(sound) < state.segment.room and state.segment.samples + len(sound) > 0
        ]
        self._cover([state.segment for state, _ in asked], [sound for _, sound in asked])
        found = {id(state): state.as_if() for state, _ in asked}
        works = []
        for state, sound in asked:
            _write(found[id(state)], sound)
            work = self._work(_Turn.of(found[id(state)]), ended=True)
            assert work is not None, "a turn that has sound"
            works.append(work)
        self._encode_new(works)
        for (state, _), work in zip(asked, works, strict=True):
            # Another floor has changed what is kept of rows that are to be read on from.
            first = work.segment.first_row_changed_by(state.segment.floor)
            state.segment.rows = min(state.segment.rows, first // self._pool * self._pool)
            self._settle(work.turn)
            work.turn.state.finished = True
        return [found.get(id(state)) for state in states]

    @torch.inference_mode()
    def finish_anew(self, state: LiveCodes, sound: Sound) -> Change:
        """``finish`` after samples (n,) more for which there are no pages.

        All that was not final is encoded offline, up to 30 s of it at once.

        Raises:
            AudioError: see ``push_many``.
        """
        turn, samples = _Turn.of(state), _checked(sound)
        rest = torch.cat([state.segment.pcm, torch.from_numpy(samples)])
        turn.replace(state.settled, self.tokenizer.encode(rest))
        state.samples += len(samples)
        self.close(state)
        return turn.change()

    @torch.inference_mode()
    def push_many(
        self,
        states: Sequence[LiveCodes],
        sounds: Sequence[Sound],
        last: Sequence[bool] | None = None,
    ) -> list[Change]:
        """Take each stream's samples (n,) float at 16 kHz; what is due is encoded in one batch.

        Streams may have heard, and be given, different amounts. Nothing is computed for one
        before its next code is whole. Where ``last`` is True the turn is over and is finished
        in the same run, rather than in a second one by ``finish``.

        Raises:
            AudioError: samples are not (n,), not float or not finite. No stream took any.
            CodecFullError: the pages for so much sound are not to be had. No stream took any.
        """
        assert len({id(state) for state in states}) == len(states), "a stream given twice"
        assert not any(state.finished for state in states), "a stream that is finished"
        rest = [_checked(sound) for sound in sounds]
        self._cover([state.segment for state in states], rest)
        turns = [_Turn.of(state) for state in states]
        ends = list(last or [False] * len(turns))
        while True:
            rest = [_write(state, sound) for state, sound in zip(states, rest, strict=True)]
            works = [
                self._work(turn, ended=end and not len(sound))
                for turn, end, sound in zip(turns, ends, rest, strict=True)
            ]
            self._advance([work for work in works if work])
            if not any(len(sound) for sound in rest):
                break
        for state, end in zip(states, ends, strict=True):
            if end:
                self.close(state)
        return [turn.change() for turn in turns]

    def _cover(self, segments: Sequence[LiveSegment], sounds: Sequence[Floats]) -> None:
        """Give each segment pages for the sound that it is about to take."""
        needed = [
            min(
                -(-(segment.samples + len(sound)) // self._samples_per_code) * self._pool,
                self._longest,
            )
            for segment, sound in zip(segments, sounds, strict=True)
        ]
        each = list(zip(segments, needed, strict=True))
        self.pages.reserve(sum(segment.held.missing(rows) for segment, rows in each))
        for segment, rows in each:
            segment.held.cover(rows)

    def _work(self, turn: _Turn, *, ended: bool) -> _Work | None:
        """What is due for a stream; None where no code is whole that was not before."""
        state, segment = turn.state, turn.state.segment
        if segment.samples > 0 and (ended or segment.room == 0):
            frames = segment.close(self._samples_per_code)
            return _Work(turn, frames, frames // (CONV_STRIDE * self._pool), closing=True)
        # A row is whole with the first of its frames.
        codes = -(-segment.whole_frames() // CONV_STRIDE) // self._pool
        if codes <= len(state.codes) - state.settled:
            return None
        return _Work(turn, CONV_STRIDE * self._pool * codes - 1, codes, closing=False)

    def _advance(self, works: Sequence[_Work]) -> None:
        self._encode_new(works)
        for work in works:
            if work.closing:
                self._settle(work.turn)

    def _encode_new(self, works: Sequence[_Work]) -> None:
        if works and self._together:
            self._run_together(works)
        elif works:
            compute_features(self._encoder, [w.segment for w in works], [w.frames for w in works])
            due = [(work, span) for work in works if (span := self._span(work)).rows]
            if due:
                self._encode(due)

    def _run_together(self, works: Sequence[_Work]) -> None:
        """Encode what is new of each; of one that has more than a run takes, run after run."""
        left = works
        while left:
            self._run_blocks([self._beginning(work) for work in left])
            left = [work for work in left if work.segment.rows < work.codes * self._pool]

    def _beginning(self, work: _Work) -> _Work:
        """As much of it as a run takes."""
        most = work.segment.rows // self._pool + self._blocks.most * BLOCK_CODES
        if work.codes <= most:
            return work
        return work._replace(codes=most, frames=CONV_STRIDE * self._pool * most - 1)

    def _run_blocks(self, works: Sequence[_Work]) -> None:
        """Encode what is new of each, and again in one run what another floor reaches by it."""
        again = []
        for work, span, found in self._encoded(works):
            segment, known = work.segment, work.segment.rows
            segment.put(found.quietest, found.loudest)
            if self._span(work, span.end - known).start < known:
                work.turn.state.rows += span.end - known
                again.append(work)
            elif span.end > known:
                self._take(work, known, found.codes, found.leads)
                segment.rows = span.end
        for work, span, found in self._encoded(again):
            self._take(work, span.start, found.codes, found.leads)
            work.segment.rows = span.end

    def _encoded(self, works: Sequence[_Work]) -> Iterator[tuple[_Work, BlockSpan, EncodedSpan]]:
        """What is due of each in blocks; where no row is new, its last code once more."""
        spans = []
        for work in works:
            end = work.codes * self._pool
            start = min(work.segment.rows, end - self._pool)
            maximum = self._maximum(work)
            spans.append(BlockSpan(work.segment, start, end, work.frames, maximum))
        return zip(works, spans, self._blocks.run(spans) if spans else [], strict=True)

    def _span(self, work: _Work, encoded: int = 0) -> SegmentSpan:
        """The rows to encode: those that are new, after those that another floor changed.

        ``encoded`` of the new ones have been already, which a repair makes again.
        """
        segment, pool = work.segment, self._pool
        floor = floor_below(self._maximum(work))
        first = segment.first_row_changed_by(floor) // pool * pool
        if first < segment.rows:
            again = segment.rows - first + encoded
            work.turn.state.repairs.append(Repair(work.turn.state.samples, again))
            segment.rows = first
        segment.floor = floor
        return SegmentSpan(segment, work.codes * pool)

    def _maximum(self, work: _Work) -> float:
        """The maximum by which the floor lies: the one heard, or one that is still trusted."""
        state = work.turn.state
        if work.closing or state.segment.samples >= self._trusted_samples:
            state.trusted = None
        loudest = state.segment.loudest
        return loudest if state.trusted is None else max(loudest, state.trusted)

    def _encode(self, due: Sequence[tuple[_Work, SegmentSpan]]) -> None:
        spans = [span for _, span in due]
        starts = [span.start for span in spans]
        attention = StreamByStream(self._encoder, spans)
        codes, leads = self._encoder.nearest(encode_rows(self._encoder, spans, attention))
        found = torch.stack([codes, leads.view(torch.int32)]).cpu().numpy()
        at = 0
        for (work, span), start in zip(due, starts, strict=True):
            end = at + (span.end - start) // self._pool
            new = found[:, at:end]
            self._take(work, start, new[0].tolist(), new[1].view(np.float32).tolist())
            at = end

    def _take(self, work: _Work, row: int, codes: list[int], leads: list[float]) -> None:
        """Note the codes that a stream's rows from ``row`` on became."""
        state, start = work.turn.state, row // self._pool
        work.turn.replace(state.settled + start, codes)
        state.leads[start:] = leads
        state.blocks += 1
        state.rows += self._pool * len(codes)

    def _settle(self, turn: _Turn) -> None:
        """Make the segment's codes final, and begin another in its place."""
        state, segment = turn.state, turn.state.segment
        if min(state.leads) < self._tie:
            state.ties += 1
            whole = self.tokenizer.encode_segment(segment.pcm)
            turn.replace(state.settled, whole.codes.tolist())
        state.settled, state.leads = len(state.codes), []
        state.trusted = state.maximum_before = segment.loudest
        segment.clear()


def _checked(sound: Sound) -> Floats:
    if isinstance(sound, Tensor):
        sound = (sound.float() if sound.is_floating_point() else sound).numpy(force=True)
    if sound.ndim != 1 or sound.dtype.kind != "f":
        kind = f"shape {sound.shape} and type {sound.dtype}"
        raise AudioError(f"sound of {kind}: give float samples (n,)")
    with np.errstate(over="ignore"):
        floats = sound.astype(np.float32, copy=False)
    if not np.isfinite(floats).all():
        raise AudioError("sound holds samples that are not finite")
    return floats


def _write(state: LiveCodes, sound: Floats) -> Floats:
    """Give a stream what its segment has room for; return the rest."""
    taken = min(len(sound), state.segment.room)
    state.segment.write(sound[:taken])
    state.samples += taken
    return sound[taken:]
