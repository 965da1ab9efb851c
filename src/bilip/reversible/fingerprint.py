"""Fingerprints of activations: two numbers for each sample and each 128 coordinates, and a scale for each coordinate, that tell how
far a recovered activation is from the one that was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilip.reversible.kinks import unseen

__all__ = ["Fingerprint", "Print", "drifts_of", "kernels"]

ROWS, PLACES = 32, 64  # samples that tell the scale of a coordinate; coordinates that tell that of those all zero
STEP, BLOCK, ROW, PLACE = 0x1E3779B1, 0x05EBCA6B, 0x1B873593, -0x61C88647  # factors of the hash, odd
FIRST, SECOND, SECOND_OF_A_ROW = 0x7FEB352D, -0x7B935975, 0x046CA68B
PART = 128  # coordinates of one part of a state: each has sums of its own, so that what drifts alone is not lost in a wide state
FAR = 32.0  # from so many scales on an entry counts by its own size, of which a scale is at least this part
LOG_ODD = math.log(1000)  # a size so far above the mean of the logarithms is not typical of a coordinate
WIDE = 8.0  # sizes of a coordinate that its spread counts up to


@dataclass(frozen=True)
class Fingerprint:
    r"""Random weights for one state of one step: other ones for every step, block, sample and place.

    A fingerprint is two sums $\sum_j w_j\, \varphi(x_j / s_j)$ for each sample and each part of 128 coordinates, over the root of twice
    their number: what drifts in a few coordinates is not lost among many others. The scale $s_j$ of a coordinate is its typical spread
    over the batch, so that no large coordinate hides a small one; $\varphi(u) = u$ up to 32 and $32 + 32 \log(u / 32)$ beyond, so that
    what is far larger than is typical counts by its own size. The weights have random signs and magnitudes in [0.5, 1.5], so that equal
    drifts do not cancel; they are a hash of a counter that lives on the device, of block, sample and place: no generator is disturbed,
    and a captured step draws anew each time it is replayed.

    Args:
        counter: A number that is another one in every step.
        block: Which state of the step this is.
    """

    counter: Tensor
    block: int = 0

    @property
    def key(self) -> int:
        """What the block adds to the hash."""
        return self.block * BLOCK & 0x7FFFFFFF

    @unseen
    def of(self, x: Tensor) -> Print:
        """The fingerprint of a state on the way there."""
        fused = kernels(x)
        scale = (scales if fused is None else fused.scales)(x.flatten(1))
        return Print(self, scale, self.sums(x, scale))

    @unseen
    def sums(self, x: Tensor, scale: Tensor) -> Tensor:
        """The two sums of each part of each sample, given the scales of the coordinates: shape `(batch, parts, 2)`."""
        flat, fused = x.flatten(1), kernels(x)
        if fused is not None:
            return fused.sums(flat, scale, self)
        # No product of matrices: autocast would round it.
        return by_parts(squeezed(flat, scale)[:, :, None] * self.weights(flat)) / norm(flat.shape[1])

    def weights(self, flat: Tensor) -> Tensor:
        """Two for each entry, shape `(batch, size, 2)`."""
        row = torch.arange(len(flat), device=flat.device) * ROW + self.key
        row = (row + (self.counter & 0xFFFFFFFF) * STEP) & 0xFFFFFFFF
        row = ((row ^ (row >> 16)) * FIRST) & 0xFFFFFFFF
        row = ((row ^ (row >> 15)) * SECOND_OF_A_ROW) & 0xFFFFFFFF
        place = torch.arange(flat.shape[1], dtype=torch.int32, device=flat.device) * PLACE
        mixed = (row ^ (row >> 16)).to(torch.int32)[:, None] ^ place
        mixed ^= (mixed >> 16) & 0xFFFF
        mixed *= FIRST
        mixed ^= (mixed >> 15) & 0x1FFFF
        mixed *= SECOND
        mixed ^= (mixed >> 16) & 0xFFFF
        weights = mixed.view(torch.int16).to(wide(flat.dtype)).div_(32768)
        return weights.add_(torch.copysign(torch.full_like(weights, 0.5), weights)).unflatten(1, (-1, 2))


@dataclass(frozen=True)
class Print:
    """A fingerprint that was taken: with which weights, in which scales of the coordinates, and its sums."""

    fingerprint: Fingerprint
    scale: Tensor
    sums: Tensor

    def again(self, x: Tensor) -> Tensor:
        """The same sums of the state that was recovered."""
        return self.fingerprint.sums(x, self.scale)

    def apart(self, x: Tensor) -> Tensor:
        """How far a state is from the one that this was taken of: the largest of a sample. What was not finite does not count."""
        most = _worst_part(torch.where(torch.isfinite(self.sums), self.again(x) - self.sums, 0.0)).amax()
        return torch.where(torch.isfinite(most), most, torch.inf)

    @unseen
    def sensitivity(self, x: Tensor, grad: Tensor) -> Tensor:
        """How much the loss of each sample moves with a state: the norm of its gradient, each entry in the unit that drift has there."""
        fused = kernels(x)
        if fused is not None:
            return fused.sensitivities(x.flatten(1), grad.flatten(1), self.scale)
        unit = torch.maximum(self.scale, x.flatten(1).to(self.scale.dtype).abs() / FAR).double()
        return torch.linalg.vector_norm(grad.flatten(1) * unit, dim=1)


def scales(flat: Tensor) -> Tensor:
    """The scale of each coordinate: the geometric mean of how far neighbours in the batch are apart, or 1/32 of their size.

    Zeros do not count, nor do samples far larger than the others: a loss may leave them out, and what is typical of the others would
    look like nothing beside them. In a batch of a few samples one of these is in most of the differences, so that a spread counts up
    to `WIDE` sizes. A coordinate that is constant has its size for a scale, one that is zero throughout that of some others.
    """
    rows = flat[:: max(1, len(flat) // ROWS)][:ROWS].to(wide(flat.dtype))
    size, spread = geometric(rows), geometric(rows[1:] - rows[:-1])
    spread = torch.minimum(spread, WIDE * size)
    scale = torch.where(spread > 0, torch.maximum(spread, size / FAR), size)
    others = geometric(rows[:, :: max(1, flat.shape[1] // PLACES)][:, :PLACES].reshape(-1, 1))
    others = torch.where(others > 0, others, 1.0)
    return torch.where(scale > 0, scale, others).clamp(*span(scale.dtype))


def span(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest scale: what is divided by it stays a number."""
    return (1e-270, 1e270) if dtype == torch.float64 else (1e-30, 1e30)


def geometric(values: Tensor) -> Tensor:
    """The geometric mean of the sizes of what is not zero, over the first dimension; 0 where all is. What is more than a
    thousand times the geometric mean of all is left out.
    """
    size = values.abs()
    some = size > 0
    logs = torch.where(some, size, 1.0).log()
    usual = some & (logs <= _mean(logs, some) + LOG_ODD)
    return torch.where(some.any(0), _mean(logs, usual).exp(), 0.0)


def _mean(values: Tensor, which: Tensor) -> Tensor:
    return torch.where(which, values, 0.0).sum(0) / which.sum(0).clamp_min(1)


def squeezed(flat: Tensor, scale: Tensor) -> Tensor:
    """Entries in the scales of their coordinates; what is far beyond, by its logarithm."""
    u = flat.to(wide(flat.dtype)) / scale
    size = u.abs()
    return torch.where(size > FAR, (FAR + FAR * (size / FAR).clamp_min(1).log()).copysign(u), u)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of fingerprints: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def by_parts(terms: Tensor) -> Tensor:
    """The sums over each part, the last of which may be shorter: from shape `(batch, size, 2)` to `(batch, parts, 2)`."""
    size = terms.shape[1]
    if size <= PART:
        return terms.sum(1, keepdim=True)
    return torch.nn.functional.pad(terms, (0, 0, 0, -size % PART)).unflatten(1, (-1, PART)).sum(2)


def norm(size: int) -> float:
    """What a sum is divided by, so that the root of the sum of two squares is, on average, the root mean square of a part's drift."""
    return math.sqrt(2 * min(size, PART) * 13 / 12)  # 13/12: the mean square of a weight


def kernels(x: Tensor) -> Any:
    """`bilip.reversible.fused` where Triton works, else `None`: there the operations of torch take many passes for one."""
    return _kernels() if x.is_cuda else None


@functools.cache
def _kernels() -> Any:
    try:
        from bilip.reversible import fused

        zero = torch.zeros(1, 2, device="cuda")
        fused.sensitivities(zero, zero, zero[0])  # the one that compiles fastest
    except Exception:  # not installed, no compiler, a GPU it does not know: torch's operations are right everywhere
        return None
    return fused


def drifts_of(before: Sequence[Print], after: Sequence[Tensor], sensitivities: Sequence[Tensor] = ()) -> Tensor:
    """The largest drift over the samples and their parts, for each pair of fingerprints; what is not finite has drifted infinitely far.

    Args:
        before: Of the forward pass.
        after: Of the walk.
        sensitivities: Of the walk, in its order. Where that of a sample grows from one state to the next, a net is steep there, and
            turns as fast: the drift of the sample counts as many times more.
    """
    taken = [one.sums for one in before]
    if len({sums.shape for sums in taken}) == 1:  # in few launches
        drift = _worst_part(torch.stack(list(after)) - torch.stack(taken))
    else:  # states of several sizes
        drift = torch.stack([_worst_part(a - b) for a, b in zip(after, taken, strict=True)])
    if len(sensitivities) > 1:
        sensitivity = torch.stack(list(sensitivities))
        grown = sensitivity[1:] / sensitivity[:-1]  # from nothing to something is no growth: other paths begin there
        drift[1:] *= torch.where(torch.isfinite(grown), grown, 1.0).clamp_min(1.0)
    most = drift.amax(-1)
    return torch.where(torch.isfinite(most), most, torch.inf)


def _worst_part(apart: Tensor) -> Tensor:
    """The drift of each sample: that of its worst part, from differences of sums."""
    return torch.linalg.vector_norm(apart.double(), dim=-1).amax(-1)
