"""Replies on a CPU: each keeps its rows side by side, layers run for several replies at once.

Products are computed reply by reply: of other sizes they would round otherwise, and a reply's
frames must not depend on its company. Norms, activations and windows are shared work.
Shapes: I replies, B = 2 I sequences (reply, guidance branch), T new frames, C channels.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.codec.flow_batch_base import BlockFlow, Hop, Start
from mosstalk.codec.flow_batch_host_layers import HostEncoder, HostEstimator, HostKept
from mosstalk.codec.flow_batch_voices import (
    FlowFigures,
    FlowOptions,
    alone_codes,
    seconds_per_page,
    speaker_of,
)
from mosstalk.codec.flow_items import Item
from mosstalk.codec.flow_kept import seen_mask
from mosstalk.models.flow import FlowDecoder, fixed_noise
from mosstalk.models.voices import Voice

_TOGETHER = 8
"""Replies whose layers run at once: the activations of more no longer fit into a core's cache."""


@dataclass(frozen=True)
class _Work:
    """Codes of one reply or voice, decoded in one go, and what it keeps."""

    item: Item
    kept: HostKept
    speaker: Tensor


class HostFlow(BlockFlow[HostKept]):
    """A flow whose memory grows with its replies; pages are counted, and refused past the limit.

    A reply's rows begin with a copy of its voice's.
    """

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        super().__init__(flow, options)
        self._flow = flow
        self._encoder = HostEncoder(flow.encoder)
        self._estimator = HostEstimator(flow.decoder)

    @property
    def hops_at_once(self) -> int:
        """As many as lie in a core's cache together."""
        return _TOGETHER

    def warm(self, items: Sequence[int] | None, pages: Sequence[int]) -> None:
        """Nothing is to be made ready."""

    def figures(self) -> FlowFigures:
        """What is held now."""
        return FlowFigures(
            pages=self.pool.size,
            pages_in_use=self.pool.in_use,
            page_bytes=self.layout.bytes,
            mb_per_s=self.layout.bytes / 1e6 / seconds_per_page(self.config),
            voices=len(self.shelf),
            weight_bytes=sum(w.numel() * w.element_size() for w in self._flow.parameters()),
            fixed_bytes=0,
            graphs=0,
        )

    def _compute(self, voice: Voice) -> Start[HostKept]:
        alone = alone_codes(voice, self.config)
        blocks = alone // self.config.chunk_size
        self._make_room(blocks)
        pages = self.pool.take(blocks)
        kept = HostKept(self._encoder.start(), *self._estimator.start())
        items = self._voice_items(voice, pages, 0)
        if items:
            whole = _joined(items)
            self._decode([_Work(whole, kept, speaker_of(self._flow, voice))])
        return Start(pages, voice.codes[alone:].tolist(), voice.mel.float(), 0, kept)

    def _drop(self, start: Start[HostKept]) -> None:
        self.pool.give(start.pages)

    def _run(self, hops: Sequence[Hop[HostKept]], fresh: list[int]) -> list[Tensor]:
        works = [list(self._works(hop, fresh)) for hop in hops]
        found: list[list[Tensor]] = [[] for _ in works]
        for turn in range(max(map(len, works), default=0)):
            alike: defaultdict[int, list[int]] = defaultdict(list)
            for place, each in enumerate(works):
                if turn < len(each):
                    alike[len(each[turn].item.codes)].append(place)
            for places in (p[n : n + _TOGETHER] for p in alike.values() for n in _steps(p)):
                mels = self._decode([works[place][turn] for place in places])
                for place, mel in zip(places, mels, strict=True):
                    found[place].append(mel)
        return [mels[0] if len(mels) == 1 else torch.cat(mels) for mels in found]

    def _works(self, hop: Hop[HostKept], fresh: list[int]) -> Iterator[_Work]:
        """A hop in one go, or block by block where the oldest is to be dropped."""
        state, start = hop.state, hop.state.start
        assert start is not None
        if state.kept is None:
            room = None if self.limit is None else self.limit * self.layout.frames
            state.kept = start.kept.fork(room)
        speaker = speaker_of(self._flow, state.voice)
        items = list(self._items(hop, fresh))
        for item in [_joined(items)] if self.limit is None else items:
            yield _Work(item, state.kept, speaker)

    def _decode(self, works: list[_Work]) -> list[Tensor]:
        """Mel (T, 80) of each of ``works``, which have equally many codes."""
        ratio, bins, block = self.config.token_mel_ratio, self.config.mel_bins, self.layout.frames
        frames = len(works[0].item.codes) * ratio
        given = works[0].speaker.new_zeros(len(works), 2, frames, 3 * bins)
        noise = []
        for work, row in zip(works, given[:, 0].unbind(), strict=True):
            item = work.item
            row[:, :bins] = self._mean(work)
            row[:, bins : 2 * bins] = work.speaker
            if item.condition is not None:
                row[: item.condition.shape[0], 2 * bins :] = item.condition
            noise.append(fixed_noise(frames, bins, start=item.start)[0].T)
        masks = [seen_mask(work.kept.keys.rows, frames, block, self.device) for work in works]
        keys = [work.kept.place(frames, block, self.limit) for work in works]
        kept = [work.kept for work in works]
        return list(self._estimator.integrate(torch.stack(noise), given, kept, keys, masks))

    def _mean(self, work: _Work) -> Tensor:
        """mu (T, 80) of one reply's new codes."""
        item, kept, block = work.item, work.kept, self.config.chunk_size
        kept.forget_codes(self.limit, block, self.layout.frames)
        ids = torch.tensor([*item.codes, *item.ahead])
        codes, ahead = self._flow.input_embedding(ids[None]).split(
            [len(item.codes), len(item.ahead)], dim=1
        )
        hidden = self._encoder.encode(codes, ahead, kept.encoder, block)
        return self._flow.encoder_proj(hidden)[0]


def _steps(places: list[int]) -> range:
    return range(0, len(places), _TOGETHER)


def _joined(items: list[Item]) -> Item:
    """Blocks one after the other as one item."""
    first, last = items[0], items[-1]
    codes = [code for item in items for code in item.codes]
    given = [item.condition for item in items if item.condition is not None]
    condition = torch.cat(given) if given else None
    return Item(codes, last.ahead, first.start, [], first.before, first.speaker, condition)
