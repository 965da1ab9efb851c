"""A kernel for GPUs, in Triton: a fingerprint in one pass over an activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sums"]


def sums(flat: Tensor, signs: Tensor) -> Tensor:
    """The two signed sums and the norm of each row, as `bilip.reversible.fingerprint.sums` gives them."""
    rows, size = flat.shape
    flat = flat.contiguous()
    out = torch.empty(rows, 3, dtype=torch.float64, device=flat.device)
    block = min(2048, max(32, triton.next_power_of_2(size)))
    with torch.cuda.device_of(flat):
        _sums[(rows,)](flat, signs, out, size, (size + 1) // 2, block, num_warps=max(1, min(8, block // 128)))
    return out


@triton.jit
def _sums(x, signs, out, size, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * size
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float64)
        signed = value * tl.load(signs + at, mask=at < size, other=0.0).to(tl.float64)
        first += tl.where(at < half, signed, 0.0)
        second += tl.where(at < half, 0.0, signed)
        square += value * value
    tl.store(out + 3 * row, tl.sum(first, axis=0))
    tl.store(out + 3 * row + 1, tl.sum(second, axis=0))
    tl.store(out + 3 * row + 2, tl.sqrt(tl.sum(square, axis=0)))
