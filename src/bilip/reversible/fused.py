"""Kernels for GPUs, in Triton: what a walk does to a state between its matrix products and its nets, in one pass each.

Every program works on one sample. A fingerprint (two signed sums and the norm, `bilip.reversible.fingerprint`) costs nothing on the
way. The numbers are those of torch's operations up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["couple", "shift", "sums", "uncouple"]


def sums(flat: Tensor, signs: Tensor) -> Tensor:
    """The fingerprint of each row."""
    flat = flat.contiguous()
    found = _prints(flat)
    _launch(_sums, flat, flat, signs, found, (flat.shape[1] + 1) // 2)
    return found


def shift(x: Tensor, bias: Tensor, sign: int, signs: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
    """`x + sign * bias` over the channels, and the fingerprint of x before or after."""
    out, found = torch.empty_like(x), _prints(x)
    size = x[0].numel()
    _launch(_shift, x, x, out, bias, sign, signs, found, (size + 1) // 2, size // len(bias), before)
    return out, found


def couple(
    x: Tensor, h: Tensor, scale: tuple[float, float, float] | None, place: int, signs: Tensor | None, *, inverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Transform a part of x in place, as a coupling whose net gave h does; the fingerprint of x before, and the sum of log-gains.

    Args:
        x: The state, contiguous, in float32.
        h: The shift, and below it the raw scale if there is a scale; likewise.
        scale: Low and high end of the sigmoid and what is added to its argument; `None` for additive coupling.
        place: Where in each sample the transformed part begins.
        signs: Of the fingerprint; `None` for none.
        inverse: Subtract and divide, instead of multiply and add.
    """
    found = None if signs is None else _prints(x)
    logs = None if scale is None else x.new_empty(len(x))
    _launch(_couple, x, x, h, *_options(scale, h), place, signs, found, logs, (x[0].numel() + 1) // 2, inverse)
    return found, logs


def uncouple(
    y: Tensor,
    h: Tensor,
    grad: Tensor,
    grad_log: Tensor | None,
    scale: tuple[float, float, float] | None,
    place: int,
    signs: Tensor | None,
    *,
    inverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Undo `couple` in place and pull a gradient through it.

    Returns:
        The gradient with respect to h; that with respect to the state, only its transformed part is filled in; the fingerprint of
        the state that was recovered.
    """
    g_h, g_x = torch.empty_like(h), torch.empty_like(grad)
    grad_log = None if grad_log is None else grad_log.contiguous()  # that of a sum is one number, expanded
    found = None if signs is None else _prints(y)
    half = (y[0].numel() + 1) // 2
    _launch(_uncouple, y, y, h, grad, grad_log, g_h, g_x, *_options(scale, h), place, signs, found, half, inverse)
    return g_h, g_x, found


def _options(scale: tuple[float, float, float] | None, h: Tensor) -> tuple[Any, ...]:
    """Whether there is a scale, its numbers, and how many entries of a sample are transformed."""
    low, high, move = scale or (0.0, 1.0, 0.0)
    count = h[0].numel() // (1 if scale is None else 2)
    return scale is not None, low == 0, low, high - low, math.log(high - low), move, count


def _prints(x: Tensor) -> Tensor:
    return torch.empty(len(x), 3, dtype=torch.float64, device=x.device)


def _launch(kernel: Any, x: Tensor, *args: Any) -> None:
    size = x[0].numel()
    block = min(1024, max(32, triton.next_power_of_2(size)))
    with torch.cuda.device_of(x):
        kernel[(len(x),)](*args, size, block, num_warps=max(1, min(8, block // 128)))


@triton.jit
def _signed(value, signs, at, size, half, first, second, square):
    exact = value.to(tl.float64)
    signed = exact * tl.load(signs + at, mask=at < size, other=0.0).to(tl.float64)
    return first + tl.where(at < half, signed, 0.0), second + tl.where(at < half, 0.0, signed), square + exact * exact


@triton.jit
def _store_print(found, row, first, second, square):
    tl.store(found + 3 * row, tl.sum(first, axis=0))
    tl.store(found + 3 * row + 1, tl.sum(second, axis=0))
    tl.store(found + 3 * row + 2, tl.sqrt(tl.sum(square, axis=0)))


@triton.jit
def _sums(x, signs, found, half, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * size + at, mask=at < size, other=0.0)
        first, second, square = _signed(value, signs, at, size, half, first, second, square)
    _store_print(found, row, first, second, square)


@triton.jit
def _shift(x, out, bias, sign, signs, found, half, pixels, before: tl.constexpr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < size
        value = tl.load(x + row * size + at, mask=inside, other=0.0)
        moved = value + sign * tl.load(bias + at // pixels, mask=inside, other=0.0)
        tl.store(out + row * size + at, moved, mask=inside)
        first, second, square = _signed(value if before else moved, signs, at, size, half, first, second, square)
    _store_print(found, row, first, second, square)


@triton.jit
def _couple(
    x,
    h,
    affine: tl.constexpr,
    from_zero: tl.constexpr,
    low,
    width,
    log_width,
    move,
    count,
    place,
    signs,
    found,
    logs,
    half,
    inverse: tl.constexpr,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * size
    h += row * count * (2 if affine else 1) - place
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    log = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        moved = (at >= place) & (at < place + count)
        value = tl.load(x + at, mask=at < size, other=0.0)
        if signs is not None:
            first, second, square = _signed(value, signs, at, size, half, first, second, square)
        add = tl.load(h + at, mask=moved, other=0.0)
        if affine:
            v = tl.load(h + count + at, mask=moved, other=0.0) + move
            gate = _sigmoid(v)
            gain = low + width * gate
            log += tl.where(moved, (_log_sigmoid(v) + log_width) if from_zero else tl.log(gain), 0.0)
            value = tl.div_rn(value - add, gain) if inverse else value * gain + add
        else:
            value = value - add if inverse else value + add
        tl.store(x + at, value, mask=moved)
    if signs is not None:
        _store_print(found, row, first, second, square)
    if affine:
        tl.store(logs + row, tl.sum(-log if inverse else log, axis=0))


@triton.jit
def _uncouple(
    y,
    h,
    grad,
    grad_log,
    g_h,
    g_x,
    affine: tl.constexpr,
    from_zero: tl.constexpr,
    low,
    width,
    log_width,
    move,
    count,
    place,
    signs,
    found,
    half,
    inverse: tl.constexpr,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    y += row * size
    grad += row * size
    g_x += row * size
    h += row * count * (2 if affine else 1) - place
    g_h += row * count * (2 if affine else 1) - place
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        moved = (at >= place) & (at < place + count)
        value = tl.load(y + at, mask=at < size, other=0.0)
        g = tl.load(grad + at, mask=moved, other=0.0)
        add = tl.load(h + at, mask=moved, other=0.0)
        if affine:
            v = tl.load(h + count + at, mask=moved, other=0.0) + move
            gate = _sigmoid(v)
            gain = low + width * gate
            slope = width * gate * _sigmoid(-v)
            if inverse:
                g = tl.div_rn(g, gain)
                g_raw = -g * value * slope
                x = value * gain + add
                g_add = -g
            else:
                x = tl.div_rn(value - add, gain)
                g_raw = g * x * slope
                g_add = g
                g = g * gain
            if grad_log is not None:  # the slope of log g: where g falls to zero it does not
                rate = _sigmoid(-v) if from_zero else slope / gain
                more = tl.load(grad_log + row) * rate
                g_raw += -more if inverse else more
            tl.store(g_h + count + at, g_raw, mask=moved)
        else:
            x = value + add if inverse else value - add
            g_add = -g if inverse else g
        tl.store(g_h + at, g_add, mask=moved)
        tl.store(g_x + at, g, mask=moved)
        tl.store(y + at, x, mask=moved)
        if signs is not None:
            value = tl.where(moved, x, value)
            first, second, square = _signed(value, signs, at, size, half, first, second, square)
    if signs is not None:
        _store_print(found, row, first, second, square)


@triton.jit
def _sigmoid(v):
    return tl.div_rn(1.0, 1.0 + _exp(-v))


@triton.jit
def _log_sigmoid(v):
    return tl.minimum(v, 0.0) - tl.log(1.0 + _exp(-tl.abs(v)))


@triton.jit
def _exp(v):
    """Triton's own loses digits with the size of its argument; here log2(e) has two parts. What is not a number stays so."""
    v = tl.where(v > 150.0, 150.0, v)
    v = tl.where(v < -150.0, -150.0, v)
    whole = tl.floor(v * 1.4426950408889634 + 0.5)
    part = tl.fma(v, 1.925963033500e-08, tl.fma(v, 1.44269502162933349609375, -whole))
    return tl.exp2(part) * tl.exp2(whole)
