"""float32 numbers as two that a card's TF32 units take, which multiply them at float32's accuracy.

The units keep 11 significant bits of an operand. With x = high + low, three products of halves,
high high + high low + low high, leave out 2^-21 of x y at most, which is less than what summing
in float32 rounds away; each short run of products is added to the float32 sum outside the units,
whose own additions round toward zero (Ootomo and Yokota 2022).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mosstalk.ops.launch import runs, tl, triton

Precision = Literal["tf32x3", "ieee"]
"""How float32 products are taken: of halves in TF32 units, or by float32's own multiply-adds."""


class Tf32x3(NamedTuple):
    """A float32 tensor: ``high`` alone, or the sum of ``high`` in TF32 and the rest ``low``."""

    high: Tensor
    low: Tensor | None = None

    @classmethod
    def empty(cls, like: Tensor, columns: int, *, split: bool) -> "Tf32x3":
        """Room for (R, columns) of float32 beside ``like`` (R, ...); ``split``: for both."""
        return cls(*torch.empty(2 if split else 1, len(like), columns, device=like.device))

    @classmethod
    def of(cls, x: Tensor, *, split: bool) -> "Tf32x3":
        """``x`` in any precision, float32 where it is to be ``split``."""
        if not split:
            return cls(x)
        bits = x.contiguous().view(torch.int32) + (1 << 12)
        high = (bits & -(1 << 13)).view(torch.float32)
        return cls(high, x - high)

    def whole(self) -> Tensor:
        """The tensor itself."""
        return self.high if self.low is None else self.high + self.low

    def check(self, rows: int, columns: int) -> None:
        """Assert the size and that rows follow one another without gaps."""
        for half in self:
            assert half is None or half.shape == (rows, columns)
            assert half is None or half.is_contiguous()


def takes(x: Tensor) -> bool:
    """Whether the kernels for float32, rather than their references, take ``x``."""
    return x.dtype == torch.float32 and runs(x)


@triton.jit
def upper(x):
    """The nearest number of 11 significant bits to each of ``x``, float32."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return (bits & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def store_tf32x3(high, low, place, x, mask, SPLIT: tl.constexpr):
    """Write ``x`` where its halves are kept, or the whole where ``high`` alone is."""
    if SPLIT:
        top = upper(x)
        tl.store(high + place, top, mask=mask)
        tl.store(low + place, x - top, mask=mask)
    else:
        tl.store(high + place, x.to(high.dtype.element_ty), mask=mask)


@triton.jit
def tf32x3_dot(a, b, b_low, HALVES: tl.constexpr, IEEE: tl.constexpr):
    """a b of float32 tiles (m, k) and (k, n); ``b_low`` is read where b comes in HALVES."""
    if IEEE:
        if HALVES:
            b += b_low
        product = tl.dot(a, b, input_precision="ieee")
    else:
        a_high = upper(a)
        a_low = a - a_high
        b_high = b
        if not HALVES:
            b_high = upper(b)
            b_low = b - b_high
        product = tl.dot(a_low, b_high, input_precision="tf32")
        product = tl.dot(a_high, b_low, product, input_precision="tf32")
        product = tl.dot(a_high, b_high, product, input_precision="tf32")
    return product
