"""A flow for many replies, by pages or by rows, and what bounded memory and fewer steps cost it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mosstalk.codec.flow_options import FlowOptions, with_steps
from mosstalk.codec.flow_paged import PagedFlow
from mosstalk.codec.flow_replies import BatchedFlow
from mosstalk.codec.flow_rows import RowFlow
from mosstalk.errors import OptionError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice


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
        batched = batched_flow(flow, options)
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
