"""Codes while the sound arrives, checked and repaired at every block of one code.

A code reads no sample past its own 80 ms, so it is emitted as soon as it is heard. What may
still change it is the floor of the features, which follows the loudest frame of the whole
segment: when a louder one comes, what the new floor reaches is encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.features import WhisperBands
from mosstalk.codec.live_codes import Change, LiveCodes, Repair
from mosstalk.codec.live_encoder import Stretch, encode_rows
from mosstalk.codec.live_segment import LiveSegment, floor_below, hear
from mosstalk.codec.speech_tokenizer import CONV_STRIDE, SpeechTokenizer, squared_distances
from mosstalk.errors import AudioError
from mosstalk.units import INPUT_RATE

Sound = Tensor | npt.NDArray[np.float32]

TRUSTED_S = 1.0
"""Seconds of a turn for which the last turn's maximum is taken for this one's. Where this turn is
not as loud, that has to be repaired, so the end must not be the time to find out."""
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


class LiveTokenizer:
    """``SpeechTokenizer`` on sound as it arrives, for any number of streams.

    Holds no stream's state, only what all share. In float32 the codes at a turn's end are
    those of ``SpeechTokenizer.encode`` on the whole turn, however it was cut.
    """

    @torch.inference_mode()
    def __init__(self, tokenizer: SpeechTokenizer, trusted_s: float = TRUSTED_S) -> None:
        """``trusted_s`` is how long a turn trusts the maximum that it was opened with."""
        self.tokenizer = tokenizer
        weight = tokenizer.encoder.codebook.weight
        self._bands = WhisperBands.of(tokenizer.config.num_mel_bins, weight.device)
        self._centres = weight.float()
        self._centre_squares = self._centres.square().sum(1)
        self._trusted_samples = round(trusted_s * INPUT_RATE)
        # In lower precision rounding chooses often, and equality is not promised.
        self._tie = TIE if weight.dtype == torch.float32 else 0.0

    @torch.inference_mode()
    def open(self, last_maximum: float | None = None) -> LiveCodes:
        """A stream before its first sample.

        ``last_maximum`` is the ``maximum`` of the speaker's last turn: where this one becomes
        as loud, its first repairs are spared.
        """
        return LiveCodes(LiveSegment.of(self.tokenizer), last_maximum)

    def push(self, state: LiveCodes, pcm: Sound) -> Change:
        """Take samples (n,) float at 16 kHz, n of any size; see ``push_many``."""
        return self.push_many([state], [pcm])[0]

    def finish(self, state: LiveCodes) -> Change:
        """End the turn: the code that silence completes, and a last check of all others.

        Afterwards ``state.codes`` are final and the stream takes no more.
        """
        return self.push_many([state], [torch.empty(0)], [True])[0]

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
        """
        assert len({id(state) for state in states}) == len(states), "a stream given twice"
        assert not any(state.finished for state in states), "a stream that is finished"
        rest = [_checked(sound) for sound in sounds]
        turns = [_Turn.of(state) for state in states]
        ends = list(last or [False] * len(turns))
        while True:
            rest = [_write(state, sound) for state, sound in zip(states, rest, strict=True)]
            works = [
                self._work(turn, ended=end and not sound.shape[0])
                for turn, end, sound in zip(turns, ends, rest, strict=True)
            ]
            self._advance([work for work in works if work])
            if not any(sound.shape[0] for sound in rest):
                break
        for state, end in zip(states, ends, strict=True):
            state.finished = end
        return [turn.change() for turn in turns]

    def _work(self, turn: _Turn, *, ended: bool) -> _Work | None:
        """What is due for a stream; None where no code is whole that was not before."""
        state, segment = turn.state, turn.state.segment
        closing = segment.samples > 0 and (ended or segment.room == 0)
        per_code = self.tokenizer.samples_per_code
        frames = segment.close(per_code) if closing else segment.whole_frames()
        # A row is whole with the first of its frames.
        codes = -(-frames // CONV_STRIDE) // self.tokenizer.encoder.pool
        due = closing or codes > len(state.codes) - state.settled
        return _Work(turn, frames, codes, closing) if due else None

    def _advance(self, works: Sequence[_Work]) -> None:
        if not works:
            return
        hear([work.segment for work in works], [work.frames for work in works], self._bands)
        self._encode([(work, stretch) for work in works if (stretch := self._stretch(work))])
        for work in works:
            if work.closing:
                self._settle(work.turn)

    def _stretch(self, work: _Work) -> Stretch | None:
        """The rows to encode: those that are new, after those that another floor changed."""
        state, segment, pool = work.turn.state, work.segment, self.tokenizer.encoder.pool
        floor = floor_below(self._maximum(state, closing=work.closing))
        first = segment.first_row_changed_by(floor) // pool * pool
        if first < segment.rows:
            state.repairs.append(Repair(state.samples, segment.rows - first))
            segment.rows = first
        segment.floor = floor
        stretch = Stretch(segment, work.codes * pool)
        return stretch if stretch.rows else None

    def _maximum(self, state: LiveCodes, *, closing: bool) -> float:
        """The maximum by which the floor lies: the one heard, or one that is still trusted."""
        loudest = state.segment.loudest
        if closing or state.segment.samples >= self._trusted_samples:
            state.trusted = None
        return loudest if state.trusted is None else max(loudest, state.trusted)

    def _encode(self, due: Sequence[tuple[_Work, Stretch]]) -> None:
        if not due:
            return
        pool = self.tokenizer.encoder.pool
        starts = [stretch.segment.rows // pool for _, stretch in due]
        codes, gaps = self._nearest(encode_rows(self.tokenizer.encoder, [s for _, s in due]))
        at = 0
        for (work, _), start in zip(due, starts, strict=True):
            state, end = work.turn.state, at + work.codes - start
            work.turn.replace(state.settled + start, codes[at:end])
            state.gaps[start:] = gaps[at:end]
            state.blocks += 1
            state.rows += pool * (end - at)
            at = end

    def _nearest(self, pooled: Tensor) -> tuple[list[int], list[float]]:
        """The nearest entry of each point (n, C), and how much nearer it is than the next.

        In shares of the squared norms, by which rounding grows.
        """
        points = pooled.float()
        distances = squared_distances(points, self._centres, self._centre_squares)
        least, ids = distances.topk(2, largest=False)
        codes = ids[:, 0]
        norms = points.square().sum(1) + self._centre_squares[codes]
        return codes.tolist(), (least.diff(dim=1)[:, 0] / norms).tolist()

    def _settle(self, turn: _Turn) -> None:
        """Make the segment's codes final, and begin another in its place."""
        state, segment = turn.state, turn.state.segment
        if min(state.gaps) < self._tie:
            state.ties += 1
            whole = self.tokenizer.encode_segment(segment.pcm)
            turn.replace(state.settled, whole.codes.tolist())
        state.settled, state.gaps = len(state.codes), []
        state.trusted = state.maximum_before = segment.loudest
        segment.clear()


def _checked(sound: Sound) -> Tensor:
    # Copied, because torch takes no array that is read-only or runs backwards.
    samples = sound if isinstance(sound, Tensor) else torch.from_numpy(np.array(sound, order="C"))
    if samples.ndim != 1 or not samples.is_floating_point():
        kind = f"shape {tuple(samples.shape)} and type {samples.dtype}"
        raise AudioError(f"sound of {kind}: give float samples (n,)")
    if not bool(samples.isfinite().all()):
        raise AudioError("sound holds samples that are not finite")
    return samples


def _write(state: LiveCodes, sound: Tensor) -> Tensor:
    """Give a stream what its segment has room for; return the rest."""
    taken = min(sound.shape[0], state.segment.room)
    state.segment.write(sound[:taken])
    state.samples += taken
    return sound[taken:]
