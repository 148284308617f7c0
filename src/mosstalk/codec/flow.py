"""A flow for many replies, by pages or by rows.

On a CPU each reply keeps its rows side by side, and layers run for several replies at once
(``RowFlow``); on a GPU replies lie in pages (``flow_paged``).
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mosstalk.codec.flow_networks import Estimator, EstimatorBuffers
from mosstalk.codec.flow_paged import PagedFlow
from mosstalk.codec.flow_pages import BRANCHES, FlowOptions, Item, speaker_of
from mosstalk.codec.flow_replies import BatchedFlow, ComputedVoice, Hop
from mosstalk.codec.flow_row_state import RowEncoder, RowFrames, RowState, seen_mask
from mosstalk.errors import OptionError
from mosstalk.models.flow import FlowDecoder, fixed_noise
from mosstalk.models.voices import Voice
from mosstalk.ops.launch import references_only

_TOGETHER = 8
"""Replies whose layers run at once: the activations of more no longer fit into a core's cache."""


@dataclass(frozen=True)
class _Work:
    """Codes of one reply or voice, decoded in one go, and what it keeps."""

    item: Item
    kept: RowState


class RowFlow(BatchedFlow):
    """A flow whose memory grows with its replies; pages are counted, and refused past the limit.

    A reply's rows begin with a copy of its voice's.
    """

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        super().__init__(flow, options)
        self._encoder = RowEncoder(flow)
        self._estimator = Estimator(flow.decoder, torch.float32)

    @property
    def hops_at_once(self) -> int:
        """As many as lie in a core's cache together."""
        return _TOGETHER

    @property
    def weight_bytes(self) -> int:
        """Memory of the flow's own weights."""
        return sum(weight.numel() * weight.element_size() for weight in self._flow.parameters())

    def _compute(self, voice: Voice) -> ComputedVoice:
        alone, pages = self._voice_pages(voice)
        speaker = speaker_of(self._flow, voice)
        kept = RowState.empty(self.config, self._estimator.weights, speaker)
        computed = ComputedVoice(pages, voice.codes[alone:].tolist(), voice.mel.float(), 0, kept)
        items = self._voice_items(voice, alone, computed)
        if items:
            self._decode([_Work(_joined(items), kept)])
        return computed

    def _warm(self, pages: int) -> None:
        """Nothing is to be made ready."""

    def _run(self, hops: Sequence[Hop], fresh: list[int]) -> list[Tensor]:
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

    def _works(self, hop: Hop, fresh: list[int]) -> Iterator[_Work]:
        """A hop in one go, or block by block where the oldest is to be dropped."""
        reply = hop.reply
        if reply.kept is None:
            assert reply.computed is not None
            assert reply.computed.kept is not None
            room = None if self.limit is None else self.limit * self.layout.frames
            reply.kept = reply.computed.kept.fork(room)
        items = list(self._items(hop, fresh))
        for item in [_joined(items)] if self.limit is None else items:
            yield _Work(item, reply.kept)

    @references_only()
    def _decode(self, works: list[_Work]) -> list[Tensor]:
        """Mel (T, 80) of each of ``works``, which have equally many codes."""
        bins, block = self.config.mel_bins, self.layout.frames
        frames = len(works[0].item.codes) * self.config.token_mel_ratio
        given = works[0].kept.speaker.new_zeros(len(works), BRANCHES * frames, 4 * bins)
        for work, rows in zip(works, given, strict=True):
            self._give(work, rows.unflatten(0, (BRANCHES, frames)))
        states = [work.kept for work in works]
        masks = [seen_mask(state.keys.rows, frames, block, self.device) for state in states]
        keys = [state.place(frames, block, self.limit) for state in states]
        # Without company (R, C), which makes one matmul of two branches.
        read = given[0] if len(works) == 1 else given
        self._estimator.integrate(EstimatorBuffers(read, read), RowFrames(states, keys, masks))
        return list(given[:, :frames, :bins].clone())

    def _give(self, work: _Work, rows: Tensor) -> None:
        """Noise, mu, speaker and condition of a reply's new frames into (2, T, 320)."""
        item, bins, frames = work.item, self.config.mel_bins, rows.shape[1]
        rows[:, :, :bins] = fixed_noise(frames, bins, start=item.start)[0].T
        work.kept.forget_codes(self.limit, self.config.chunk_size, self.layout.frames)
        rows[0, :, bins : 2 * bins] = self._encoder(item.codes, item.ahead, work.kept)
        rows[0, :, 2 * bins : 3 * bins] = work.kept.speaker
        if item.condition is not None:
            rows[0, : item.condition.shape[0], 3 * bins :] = item.condition


def _steps(places: list[int]) -> range:
    return range(0, len(places), _TOGETHER)


def _joined(items: list[Item]) -> Item:
    """Blocks one after the other as one item."""
    first, last = items[0], items[-1]
    codes = [code for item in items for code in item.codes]
    given = [item.condition for item in items if item.condition is not None]
    condition = torch.cat(given) if given else None
    return Item(codes, last.ahead, first.start, [], first.before, first.speaker, condition)


@torch.inference_mode()
def batched_flow(flow: FlowDecoder, options: FlowOptions | None = None) -> BatchedFlow:
    """Pack the weights of ``flow`` and, on a GPU, allocate all pages.

    Raises:
        OptionError: an option means nothing for this flow.
        ConfigError: the flow's blocks are of one code.
    """
    options = options or FlowOptions()
    on_gpu = flow.encoder_proj.weight.is_cuda
    paged = on_gpu if options.paged is None else options.paged
    if not paged and options.dtype != torch.float32:
        raise OptionError("without pages a flow computes in float32")
    return (PagedFlow if paged else RowFlow)(with_steps(flow, options.steps), options)


def with_steps(flow: FlowDecoder, steps: int | None) -> FlowDecoder:
    """The same flow with ``steps`` Euler steps, sharing its weights; None leaves it as it is."""
    if steps is None or steps == flow.config.n_timesteps:
        return flow
    other, decoder = copy.copy(flow), copy.copy(flow.decoder)
    other.config = decoder.config = replace(flow.config, n_timesteps=steps)
    other._modules = {**flow._modules, "decoder": decoder}
    return other
