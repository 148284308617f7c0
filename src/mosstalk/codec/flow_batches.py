"""Mel of many replies at once, each hop computed from what earlier ones left.

Replies in any voices, at any hops, joining and leaving.
"""

from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from mosstalk.codec.flow_batch_base import BlockFlow, Hop, ReplyState
from mosstalk.codec.flow_batch_paged import PagedFlow
from mosstalk.codec.flow_batch_rows import RowFlow
from mosstalk.codec.flow_batch_voices import FlowFigures, FlowOptions, with_steps
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.errors import CodecFullError, OptionError
from mosstalk.models.flow import FlowDecoder, FlowStream
from mosstalk.models.voices import Voice

LONGEST_USUAL_VOICE_S = 27.0
USUAL_REPLY_S = 20.0
"""For what length of voice and of reply passes are made ready; longer ones come as they may."""

__all__ = [
    "BatchedFlow",
    "FlowFigures",
    "FlowOptions",
    "FlowReply",
    "flow_curve",
    "whole_reply",
]


class FlowReply(FlowStream):
    """One reply of a ``BatchedFlow``; its own ``push`` and ``finish`` are batches of one."""

    def __init__(self, owner: "BatchedFlow", flow: FlowDecoder, voice: Voice) -> None:
        super().__init__(flow, voice)
        self.state: ReplyState[Any] = owner.blocks.open(voice)
        self.closed = False
        self._owner = owner

    def take(self, codes: Iterable[int], *, final: bool) -> Hop[Any] | None:
        """Add ``codes``; the hop that is possible now, at the end all that is left."""
        assert not self.closed, "a closed reply has no more hops"
        self.codes += codes
        done, ready = self.done_codes, len(self.codes)
        if final:
            return self._next(ready - done, final=True) if ready > done else None
        return self._next(self.hop_codes, final=False) if ready >= self.codes_needed else None

    def close(self) -> None:
        """Give the reply's pages back."""
        self._owner.close(self)

    def _next(self, hop: int, *, final: bool) -> Hop[Any]:
        assert not self.closed, "a closed reply has no more hops"
        end = self.done_codes + hop
        ahead = [] if final else self.codes[end : end + self.config.pre_lookahead_len]
        return Hop(self.state, self.codes[self.done_codes : end], ahead)

    def _hop(self, hop: int, *, final: bool) -> Tensor:
        return self._owner.decode([self._next(hop, final=final)])[0]


class BatchedFlow:
    """A flow decoder for many replies at once, with the weights that ``flow`` has now.

    Calls from several threads take turns; on a GPU all work is queued on the caller's stream.
    """

    @torch.inference_mode()
    def __init__(self, flow: FlowDecoder, options: FlowOptions | None = None) -> None:
        """Pack the weights and, on a GPU, allocate all pages.

        Raises:
            OptionError: an option means nothing for this flow.
            ConfigError: the flow's blocks are of one code.
        """
        self.options = options or FlowOptions()
        self._flow = with_steps(flow, self.options.steps)
        self.config = self._flow.config
        self.device = flow.encoder_proj.weight.device
        paged = self.device.type == "cuda" if self.options.paged is None else self.options.paged
        if not paged and self.options.dtype != torch.float32:
            raise OptionError("without pages a flow computes in float32")
        self.blocks: BlockFlow[Any] = (PagedFlow if paged else RowFlow)(self._flow, self.options)
        self._lock = RLock()

    @property
    def hops_at_once(self) -> int:
        """How many replies' hops one call computes at the same time; more wait for one another."""
        return self.blocks.hops_at_once

    def open(self, voice: Voice) -> FlowReply:
        """A new reply in ``voice``; it holds no memory before its first hop."""
        return FlowReply(self, self._flow, voice)

    @torch.inference_mode()
    def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        with self._lock:
            self.blocks.prepare(voice)

    def advance(self, hops: Sequence[tuple[FlowReply, Sequence[int], bool]]) -> list[Tensor]:
        """Give each reply (each at most once) more codes; return each one's next hop.

        Mels (80, frames) float32 on the device, without frames where a reply has not enough
        codes yet. A hop has ``hop_codes`` codes; with True, no code follows and the hop is all
        that is left.

        Raises:
            CodecFullError: there is no room; then no reply has moved nor taken its codes.
        """
        assert len({id(reply) for reply, _, _ in hops}) == len(hops), "a reply twice in a batch"
        before = [len(reply.codes) for reply, _, _ in hops]
        found = [torch.empty(self.config.mel_bins, 0, device=self.device) for _ in hops]
        with self._lock:
            due = [reply.take(codes, final=final) for reply, codes, final in hops]
            places = [place for place, hop in enumerate(due) if hop]
            try:
                mels = self.decode([hop for hop in due if hop])
            except CodecFullError:
                for (reply, _, _), count in zip(hops, before, strict=True):
                    del reply.codes[count:]
                raise
            for place, mel in zip(places, mels, strict=True):
                found[place] = mel
                hop = due[place]
                hops[place][0].done_codes += len(hop.codes) if hop else 0
        return found

    @torch.inference_mode()
    def decode(self, hops: Sequence[Hop[Any]]) -> list[Tensor]:
        """Mel (80, frames) of each hop; replies keep their count of codes themselves."""
        with self._lock:
            return self.blocks.advance(hops) if hops else []

    def close(self, reply: FlowReply) -> None:
        """Give a reply's pages back at once; its voice stays for others."""
        with self._lock:
            if not reply.closed:
                reply.closed = True
                self.blocks.close(reply.state)

    @torch.inference_mode()
    def warm(self, items: Sequence[int] | None = None, *, most_s: float | None = None) -> None:
        """Have passes of ``items`` blocks ready (None: of every bucket), captured with graphs on.

        For voice and reply of up to ``most_s`` seconds together; unless given, a voice of 27 s
        and the context, or 20 s where all is kept.
        """
        own_s = self.options.context_s or USUAL_REPLY_S
        codes = (most_s or LONGEST_USUAL_VOICE_S + own_s) * CODES_PER_SECOND
        with self._lock:
            self.blocks.warm(items, [1 + int(codes // self.config.chunk_size)])

    def figures(self) -> FlowFigures:
        """What is held now."""
        with self._lock:
            return self.blocks.figures()


@torch.inference_mode()
def flow_curve(
    flow: FlowDecoder,
    replies: Sequence[tuple[Voice, Sequence[int]]],
    ways: Mapping[float, FlowOptions],
    full: FlowOptions,
) -> dict[float, list[float]]:
    """What each of ``ways`` costs: each reply's relative error of the mel.

    ||mel - truth|| / ||truth - its mean||, truth being the mel by the options ``full``.
    """

    def mels(options: FlowOptions) -> list[Tensor]:
        batched = BatchedFlow(flow, options)
        return [whole_reply(batched, voice, codes) for voice, codes in replies]

    truths = mels(full)
    return {
        value: [
            float((mel - truth).norm() / (truth - truth.mean()).norm())
            for mel, truth in zip(mels(options), truths, strict=True)
        ]
        for value, options in ways.items()
    }


def whole_reply(batched: BatchedFlow, voice: Voice, codes: Sequence[int]) -> Tensor:
    """Mel (80, frames) of a whole reply, hop by hop."""
    reply = batched.open(voice)
    hops = reply.push(codes)
    last = reply.finish()
    reply.close()
    return torch.cat(hops if last is None else [*hops, last], dim=1)
