"""What each slot draws next, from the row just drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, runs, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.sampling_parts import AUDIO, ENDED, TEXT, DrawState
from mosstalk.ops.tiles import Tile

_TEXT, _AUDIO, _ENDED = tl.constexpr(TEXT), tl.constexpr(AUDIO), tl.constexpr(ENDED)


@dataclass(frozen=True)
class ModeIds:
    """Ids that change a mode, and those that stand beside another channel's ids."""

    sosp: int
    eosp: int
    modality_pad: int
    audio_pad: int


def update_modes(
    text: DrawState, slots: Tensor, bad: Tensor, stop: Tensor, ids: ModeIds, *, put_off: bool
) -> None:
    """Complete the row that ``text.latest`` holds for each of ``slots``, and set the next mode.

    ``slots`` (R,) int64, each at most once, -1 for nobody; ``bad`` (R, 2) bool, by channel;
    ``stop`` (n,) int64, text ids that end a reply. In AUDIO mode the row's text becomes
    modality_pad, which ``text.seen`` then has. In TEXT mode sosp opens AUDIO, and eosp in an
    AUDIO row, or in the very row that opened it, leads to TEXT. A stop id drawn in TEXT mode,
    or a bad row, sets ENDED; ended slots stay as they are.

    ``put_off``: TEXT rows have drawn no audio id. They get audio_pad, and a row that opens
    AUDIO stays there until its draw is made up and says otherwise.
    """
    if not runs(slots):
        update_modes_reference(text, slots, bad, stop, ids, put_off=put_off)
        return
    plan_update_modes(text, slots, bad, stop, ids, put_off=put_off).run()


def update_modes_reference(
    text: DrawState, slots: Tensor, bad: Tensor, stop: Tensor, ids: ModeIds, *, put_off: bool
) -> None:
    """``update_modes`` in plain torch; nothing waits for the device."""
    assert text.latest is not None
    assert text.mode is not None
    owner = torch.zeros_like(text.mode, dtype=torch.int64)
    rows = torch.arange(1, len(slots) + 1, device=slots.device)
    # Slot -1 is written past the end, then cut off.
    wide = torch.cat([owner, owner.new_zeros(1)])
    owner = wide.scatter(0, torch.where(slots < 0, len(owner), slots), rows)[:-1]
    live = (owner > 0) & (text.mode != ENDED)
    damaged = live & bad.any(dim=1)[(owner - 1).clamp(min=0)]
    whole = live & ~damaged
    speaking = text.mode == AUDIO
    drawn_text, audio = text.latest[:, 0], text.latest[:, 1]
    if put_off:
        audio = torch.where(speaking, audio, ids.audio_pad)
    opens = ~speaking & (drawn_text == ids.sosp)
    after = torch.where((speaking | opens) & (audio != ids.eosp), AUDIO, TEXT)
    stopped = ~speaking & torch.isin(drawn_text, stop)
    after = torch.where(stopped | damaged, ENDED, after)
    said = torch.where(speaking, ids.modality_pad, drawn_text)
    row = torch.stack([said, audio], dim=1)
    text.latest.copy_(torch.where(whole[:, None], row, text.latest))
    text.seen[:, ids.modality_pad] |= whole & speaking
    text.mode.copy_(torch.where(live, after, text.mode))


def plan_update_modes(
    text: DrawState, slots: Tensor, bad: Tensor, stop: Tensor, ids: ModeIds, *, put_off: bool
) -> Launch:
    """The kernel that does what ``update_modes`` says."""
    assert text.latest is not None
    assert text.mode is not None
    assert text.latest.is_contiguous()
    assert bad.is_contiguous()
    assert bad.shape == (len(slots), 2)
    rows = len(slots)
    return Launch(
        _settle_modes,
        (1,),
        {
            "latest": text.latest,
            "mode": text.mode,
            "seen": text.seen.view(torch.uint8),
            "slots": slots,
            "bad": bad.view(torch.uint8),
            "stop": stop,
            "rows": rows,
            "stops": len(stop),
            "seen_stride": text.seen.stride(0),
        },
        {
            "SOSP": ids.sosp,
            "EOSP": ids.eosp,
            "MODALITY_PAD": ids.modality_pad,
            "AUDIO_PAD": ids.audio_pad,
            "PUT_OFF": put_off,
            "ROWS": 1 << (rows - 1).bit_length(),
        },
        Tile(rows, 0, 0, 1 if rows <= 64 else 4, 1),
    )


@triton.jit(do_not_specialize=["rows", "stops"])
def _settle_modes(
    latest,
    mode,
    seen,
    slots,
    bad,
    stop,
    rows,
    stops,
    seen_stride,
    SOSP: tl.constexpr,
    EOSP: tl.constexpr,
    MODALITY_PAD: tl.constexpr,
    AUDIO_PAD: tl.constexpr,
    PUT_OFF: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    gdc_wait(DEPENDENT)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    somebody = slot >= 0
    before = tl.load(mode + slot, mask=somebody, other=_ENDED).to(tl.int32)
    live = before != _ENDED
    drawn_text = tl.load(latest + slot * 2, mask=live, other=0)
    audio = tl.load(latest + slot * 2 + 1, mask=live, other=0)
    one = tl.load(bad + row * 2, mask=live, other=0)
    damaged = (one | tl.load(bad + row * 2 + 1, mask=live, other=0)) != 0
    speaking = before == _AUDIO
    if PUT_OFF:
        audio = tl.where(speaking, audio, AUDIO_PAD)
    opens = (before == _TEXT) & (drawn_text == SOSP)
    after = tl.where((speaking | opens) & (audio != EOSP), _AUDIO, _TEXT)
    for place in range(stops):
        stopped = (before == _TEXT) & (drawn_text == tl.load(stop + place))
        after = tl.where(stopped, _ENDED, after)
    after = tl.where(damaged, _ENDED, after)
    whole = live & (damaged == 0)
    said = tl.where(speaking, MODALITY_PAD, drawn_text)
    tl.store(latest + slot * 2, said, mask=whole)
    tl.store(latest + slot * 2 + 1, audio, mask=whole)
    known = tl.full((ROWS,), 1, tl.uint8)
    tl.store(seen + slot * seen_stride + MODALITY_PAD, known, mask=whole & speaking)
    tl.store(mode + slot, after.to(tl.int8), mask=live)
