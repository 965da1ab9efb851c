"""Kernels for GPUs, in Triton: what a walk does to a state between its matrix products and its nets, in one pass each.

Every program works on one sample. A fingerprint (`bilip.reversible.fingerprint`) costs a few operations in registers on the way;
the scales of the coordinates, on the way there, one small launch. The numbers are those of torch's operations up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bilip.reversible.fingerprint import (
    FAR,
    FIRST,
    LOG_ODD,
    PART,
    PLACE,
    PLACES,
    ROW,
    ROWS,
    SECOND,
    SECOND_OF_A_ROW,
    STEP,
    WIDE,
    Fingerprint,
    Print,
    norm,
    span,
    wide,
)

__all__ = ["couple", "sensitivities", "scales", "sums", "uncouple"]

_STEP, _ROW, _PLACE = (tl.constexpr(n) for n in (STEP, ROW, PLACE))
_FIRST, _SECOND, _SECOND_OF_A_ROW = (tl.constexpr(n) for n in (FIRST, SECOND, SECOND_OF_A_ROW))
_FAR, _LOG_ODD, _WIDE = (tl.constexpr(n) for n in (FAR, LOG_ODD, WIDE))
_PART = tl.constexpr(PART)


def scales(flat: Tensor) -> Tensor:
    """The scale of each coordinate, as `bilip.reversible.fingerprint.scales` finds it."""
    flat = flat.contiguous()
    rows, size = flat.shape
    found = torch.empty(size, dtype=wide(flat.dtype), device=flat.device)
    apart, places = max(1, rows // ROWS), max(1, size // PLACES)
    kernel: Any = _scales
    with torch.cuda.device_of(flat):
        kernel[(triton.cdiv(size, 32),)](
            flat,
            found,
            min(ROWS, -(-rows // apart)),
            apart,
            min(PLACES, -(-size // places)),
            places,
            size,
            ROWS,
            32,
            PLACES,
            *span(found.dtype),
            num_warps=4,
        )
    return found


def sums(flat: Tensor, scale: Tensor, key: Fingerprint) -> Tensor:
    """The two sums of each part of each row."""
    flat = flat.contiguous()
    found = _sums_like(flat)
    if found.dtype == torch.float64:  # Triton takes numbers as float32, which would round the factor
        _launch(_sums, flat, flat, scale, key.counter, key.key, 1.0, found)
        return found.div_(norm(flat.shape[1]))
    _launch(_sums, flat, flat, *_key(key, scale, flat), found)
    return found


def sensitivities(flat: Tensor, grad: Tensor, scale: Tensor) -> Tensor:
    """The norm of the gradient of each row, as `bilip.reversible.fingerprint.Print.sensitivity` finds it."""
    flat, grad = flat.contiguous(), grad.contiguous()
    found = torch.empty(len(flat), dtype=torch.float64, device=flat.device)
    _launch(_sensitivities, flat, flat, grad, scale, found, most=4096)  # all loads at once: it does little else
    return found


def couple(
    x: Tensor,
    h: Tensor,
    scale: tuple[float, float, float] | None,
    place: int,
    mark: Fingerprint | None,
    *,
    inverse: bool,
) -> tuple[Print | None, Tensor | None]:
    """Transform a part of x in place, as a coupling whose net gave h does; the fingerprint of x before, and the sum of log-gains.

    Args:
        x: The state, contiguous, in float32.
        h: The shift, and below it the raw scale if there is a scale; likewise.
        scale: Low and high end of the sigmoid and what is added to its argument; `None` for additive coupling.
        place: Where in each sample the transformed part begins.
        mark: The fingerprint to be taken; `None` for none.
        inverse: Subtract and divide, instead of multiply and add.
    """
    taken = None if mark is None else Print(mark, scales(x.flatten(1)), _sums_like(x))
    logs = None if scale is None else x.new_empty(len(x))
    _launch(_couple, x, x, h, *_options(scale, h), place, *_key_of(taken, x), logs, inverse)
    return taken, logs


def uncouple(
    y: Tensor,
    h: Tensor,
    grad: Tensor,
    grad_log: Tensor | None,
    scale: tuple[float, float, float] | None,
    place: int,
    taken: Print | None,
    *,
    inverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Undo `couple` in place, and find the gradients of what went in from that of what came out.

    Returns:
        The gradient with respect to h; that with respect to the state, only its transformed part is filled in; the sums of the
        fingerprint of the state that was recovered, if one was taken.
    """
    g_h, g_x = torch.empty_like(h), torch.empty_like(grad)
    grad_log = None if grad_log is None else grad_log.contiguous()  # that of a sum is one number, expanded
    again = None if taken is None else Print(taken.fingerprint, taken.scale, _sums_like(y))
    _launch(_uncouple, y, y, h, grad, grad_log, g_h, g_x, *_options(scale, h), place, *_key_of(again, y), inverse)
    return g_h, g_x, None if again is None else again.sums


def _options(scale: tuple[float, float, float] | None, h: Tensor) -> tuple[Any, ...]:
    """Whether there is a scale, its numbers, and how many entries of a sample are transformed."""
    low, high, move = scale or (0.0, 1.0, 0.0)
    count = h[0].numel() // (1 if scale is None else 2)
    return scale is not None, low == 0, low, high - low, math.log(high - low), move, count


def _sums_like(x: Tensor) -> Tensor:
    return torch.empty(len(x), triton.cdiv(x[0].numel(), PART), 2, dtype=wide(x.dtype), device=x.device)


def _key_of(taken: Print | None, x: Tensor) -> tuple[Any, ...]:
    """What a kernel needs for a fingerprint: scales, counter, key, factor, and where its sums go."""
    if taken is None:
        return None, None, 0, 0.0, None
    return *_key(taken.fingerprint, taken.scale, x), taken.sums


def _key(key: Fingerprint, scale: Tensor, x: Tensor) -> tuple[Any, ...]:
    return scale, key.counter, key.key, 1 / norm(x[0].numel())


def _launch(kernel: Any, x: Tensor, *args: Any, most: int = 1024) -> None:
    """One program for each sample, which goes over it in blocks: of whole parts of a fingerprint, or all of a smaller sample."""
    size = x[0].numel()
    block = min(most, max(32, triton.next_power_of_2(size)))
    with torch.cuda.device_of(x):
        kernel[(len(x),)](*args, size, block, num_warps=max(1, min(8, block // 128)))


@triton.jit
def _scales(
    x,
    out,
    rows,
    apart,
    places,
    between,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    TINY: tl.constexpr,
    HUGE: tl.constexpr,
):
    row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (at < size)
    value = tl.load(x + row * apart * size + at, mask=inside, other=0.0).to(out.dtype.element_ty)
    both = inside & (row + 1 < rows)
    after = tl.load(x + (row + 1) * apart * size + at, mask=both, other=0.0).to(out.dtype.element_ty)
    mean = _geometric(value)
    spread = tl.minimum(_geometric(tl.where(both, after - value, 0.0)), _WIDE * mean)
    scale = tl.where(spread > 0, tl.maximum(spread, mean / _FAR), mean)
    # Some are zero throughout: rare, and these logarithms are half of the work.
    if tl.min(scale, axis=0) <= 0:  # type: ignore[operator]
        some = tl.arange(0, PLACES)[None, :]
        other = tl.load(x + row * apart * size + some * between, mask=(row < rows) & (some < places), other=0.0)
        other = other.to(out.dtype.element_ty)
        typical = tl.max(_geometric(tl.reshape(other, (ROWS * PLACES, 1))), axis=0)
        scale = tl.where(scale > 0, scale, tl.where(typical > 0, typical, 1.0))  # type: ignore[operator]
    scale = tl.minimum(tl.maximum(scale, TINY), HUGE)
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + place, scale, mask=place < size)


@triton.jit
def _geometric(value):
    """Over the rows: the geometric mean of the sizes of what is not zero, without what is more than a thousand times that of all;
    0 where all is.
    """
    some = tl.abs(value) > 0
    logs = tl.log(tl.where(some, tl.abs(value), 1.0))
    count = tl.sum(some.to(tl.int32), axis=0)
    usual = some & (logs <= (tl.sum(logs, axis=0) / tl.maximum(count, 1))[None, :] + _LOG_ODD)
    mean = tl.sum(tl.where(usual, logs, 0.0), axis=0) / tl.maximum(tl.sum(usual.to(tl.int32), axis=0), 1)
    return tl.where(count > 0, tl.exp(mean), 0.0)  # type: ignore[operator]


@triton.jit
def _seed(counter, key, row):
    """The hash of step, block and sample."""
    mixed = (row * _ROW + key + (tl.load(counter) & 0xFFFFFFFF) * _STEP) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * _FIRST) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * _SECOND_OF_A_ROW) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).to(tl.int32)


@triton.jit
def _store_sums(value, scale, begin, size, seed, factor, found, BLOCK: tl.constexpr):
    """The two sums of each part in the block of a sample that begins here, entries in their scales."""
    at = begin + tl.arange(0, BLOCK)
    u = value.to(scale.dtype.element_ty) / tl.load(scale + at, mask=at < size, other=1.0)
    large = tl.abs(u)
    far = _FAR + _FAR * tl.log(tl.maximum(large / _FAR, 1.0))
    u = tl.where(large > _FAR, tl.where(u > 0, far, -far), u)
    mixed = seed ^ (at * _PLACE)
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= _FIRST
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= _SECOND
    mixed ^= (mixed >> 16) & 0xFFFF
    LENGTH: tl.constexpr = _PART if BLOCK > _PART else BLOCK
    parts = tl.cdiv(size, LENGTH)
    part = begin // LENGTH + tl.arange(0, BLOCK // LENGTH)
    found += 2 * (tl.program_id(0).to(tl.int64) * parts + part)
    first = tl.reshape(u * _weight((mixed << 16) >> 16), (BLOCK // LENGTH, LENGTH))
    second = tl.reshape(u * _weight(mixed >> 16), (BLOCK // LENGTH, LENGTH))
    tl.store(found, tl.sum(first, axis=1) * factor, mask=part < parts)
    tl.store(found + 1, tl.sum(second, axis=1) * factor, mask=part < parts)


@triton.jit
def _weight(number):
    """From 16 bits with a sign to [0.5, 1.5] with a sign."""
    return number.to(tl.float32) * 0.000030517578125 + tl.where(number >= 0, 0.5, -0.5)


@triton.jit
def _sums(x, scale, counter, key, factor, found, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed = _seed(counter, key, row)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * size + at, mask=at < size, other=0.0)
        _store_sums(value, scale, begin, size, seed, factor, found, BLOCK)


@triton.jit
def _sensitivities(x, grad, scale, found, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(scale.dtype.element_ty)
        unit = tl.maximum(tl.load(scale + at, mask=at < size, other=1.0), tl.abs(value) / _FAR)
        part = tl.load(grad + row * size + at, mask=at < size, other=0.0).to(tl.float64) * unit.to(tl.float64)
        total += part * part
    tl.store(found + row, tl.sqrt(tl.sum(total, axis=0)))


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
    scale,
    counter,
    key,
    factor,
    found,
    logs,
    inverse: tl.constexpr,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * size
    h += row * count * (2 if affine else 1) - place
    seed = 0
    if scale is not None:
        seed = _seed(counter, key, row)
    log = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        moved = (at >= place) & (at < place + count)
        value = tl.load(x + at, mask=at < size, other=0.0)
        if scale is not None:
            _store_sums(value, scale, begin, size, seed, factor, found, BLOCK)
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
    scale,
    counter,
    key,
    factor,
    found,
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
    seed = 0
    if scale is not None:
        seed = _seed(counter, key, row)
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
        if scale is not None:
            value = tl.where(moved, x, value)
            _store_sums(value, scale, begin, size, seed, factor, found, BLOCK)


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
