"""Rows by their places: gathered, scattered, and looked up from ids."""

from typing import NamedTuple

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, op, power_of_two, strided, tl, triton
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

_TILE = Tile(1, 1024, 0, 4, 1)
_SHORT_ROWS = 2048


class Latest(NamedTuple):
    """Rows that are on the device alone: ``rows`` (slots, 2) int64 of ids, ``slot`` (N,) int32."""

    rows: Tensor
    slot: Tensor


def gather_rows_reference(source: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """``gather_rows`` in plain torch."""
    out.copy_(source.index_select(0, places.clamp(min=0)))
    return out.masked_fill_(places[:, None] < 0, 0)


@op(gather_rows_reference)
def gather_rows(source: Tensor, places: Tensor, out: Tensor) -> tuple[Tensor, Launch]:
    """Copy rows ``places`` (N,) of ``source`` (P, C) into ``out`` (N, C); -1 gives zeros."""
    return _move(source, out, places, scatter=False)


def scatter_rows_reference(x: Tensor, places: Tensor, target: Tensor) -> Tensor:
    """``scatter_rows`` in plain torch; which rows are written is read on the host."""
    written = places >= 0
    if not written.all():
        x, places = x[written], places[written]
    return target.index_copy_(0, places.long(), x.to(target.dtype))


@op(scatter_rows_reference)
def scatter_rows(x: Tensor, places: Tensor, target: Tensor) -> tuple[Tensor, Launch]:
    """Copy ``x`` (N, C) to rows ``places`` (N,) of ``target`` (P, C); -1 writes nothing.

    No two rows may have one place.
    """
    return _move(x, target, places, scatter=True)


def embed_rows_reference(
    rows: Tensor,
    text_table: Tensor,
    audio_table: Tensor,
    modality_pad: int,
    out: Tensor,
    latest: Latest,
) -> Tensor:
    """``embed_rows`` in plain torch."""
    elsewhere = (rows[:, 0] < 0) & (latest.slot >= 0)
    there = latest.rows.index_select(0, latest.slot.clamp(min=0))
    rows = torch.where(elsewhere[:, None], there, rows)
    text, audio = rows.unbind(-1)
    is_audio = text == modality_pad
    # An id that is not looked up may be any number.
    from_text = text_table.index_select(0, text.clamp(0, len(text_table) - 1))
    from_audio = audio_table.index_select(0, audio.clamp(0, len(audio_table) - 1))
    out.copy_(torch.where(is_audio[:, None], from_audio, from_text))
    unknown = (text < 0) | (is_audio & (audio < 0))
    return out.masked_fill_(unknown[:, None], 0)


@op(embed_rows_reference)
def embed_rows(
    rows: Tensor,
    text_table: Tensor,
    audio_table: Tensor,
    modality_pad: int,
    out: Tensor,
    latest: Latest,
) -> tuple[Tensor, Launch]:
    """Embed ``rows`` (N, 2) int64 of ids as ``LanguageModel.embed``, into ``out`` (N, C).

    The text's row of ``text_table`` (V, C), or the audio's of ``audio_table`` (A, C) where the
    text is ``modality_pad``. A negative text stands for row ``slot`` of ``latest`` where the
    slot is not negative; what stays negative gives zeros.
    """
    count, width = out.shape
    assert rows.shape == (count, 2)
    assert text_table.shape[1] == audio_table.shape[1] == width
    assert latest.slot.shape == (count,)
    assert all(one.is_contiguous() for one in (rows, text_table, audio_table, *latest))
    assert out.stride(1) == 1
    channels = min(_TILE.columns, power_of_two(width))
    return out, Launch(
        _embed_rows,
        (count, ceil_div(width, channels)),
        {
            **strided(out=out),
            "rows": rows,
            "text_table": text_table,
            "audio_table": audio_table,
            "latest": latest.rows,
            "slot": latest.slot,
        },
        {"PAD": modality_pad, "C": width, "CHANNELS": channels},
        _TILE,
        short=count <= _SHORT_ROWS,
    )


def _move(
    source: Tensor, target: Tensor, places: Tensor, *, scatter: bool
) -> tuple[Tensor, Launch]:
    """Both ways of moving rows by their places, and what is written."""
    width, count = source.shape[1], places.shape[0]
    assert target.shape[1] == width
    assert (source if scatter else target).shape[0] == count
    assert source.stride(1) == target.stride(1) == 1
    channels = min(_TILE.columns, power_of_two(width))
    return target, Launch(
        _move_rows,
        (count, ceil_div(width, channels)),
        {**strided(source=source, target=target), "places": places},
        {"SCATTER": scatter, "C": width, "CHANNELS": channels},
        _TILE,
        short=count <= _SHORT_ROWS,
    )


@triton.jit
def _move_rows(
    source,
    target,
    places,
    source_stride,
    target_stride,
    SCATTER: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < C
    gdc_wait(DEPENDENT)
    place = tl.load(places + row).to(tl.int64)
    if SCATTER:
        here = here & (place >= 0)
        moved = tl.load(source + row * source_stride + channel, mask=here)
        there = target + place * target_stride + channel
    else:
        known = here & (place >= 0)
        moved = tl.load(source + place * source_stride + channel, mask=known, other=0.0)
        there = target + row * target_stride + channel
    tl.store(there, moved.to(target.dtype.element_ty), mask=here)


@triton.jit
def _embed_rows(
    rows,
    text_table,
    audio_table,
    latest,
    slot,
    out,
    out_stride,
    PAD: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < C
    gdc_wait(DEPENDENT)
    text = tl.load(rows + row * 2)
    audio = tl.load(rows + row * 2 + 1)
    there = tl.load(slot + row).to(tl.int64)
    elsewhere = (text < 0) & (there >= 0)
    newer_text = tl.load(latest + there * 2, mask=elsewhere, other=-1)
    newer_audio = tl.load(latest + there * 2 + 1, mask=elsewhere, other=-1)
    text = tl.where(elsewhere, newer_text, text)
    audio = tl.where(elsewhere, newer_audio, audio)
    from_text = here & (text >= 0) & (text != PAD)
    from_audio = here & (text == PAD) & (audio >= 0)
    text_row = tl.load(text_table + text * C + channel, mask=from_text, other=0.0)
    audio_row = tl.load(audio_table + audio * C + channel, mask=from_audio, other=0.0)
    found = tl.where(from_audio, audio_row, text_row)
    tl.store(out + row * out_stride + channel, found.to(out.dtype.element_ty), mask=here)
