"""Fingerprints of activations: a few numbers for each sample that tell how far a recovered activation is from the one that was."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["Fingerprint", "drifts_of", "kernels", "true_drift"]

_ODD, _OTHER = -0x61C8864680B583EB, 0x2545F4914F6CDD1D


class Fingerprint:
    """Two sums of an activation under random signs, one over each half of it, and its norm, for each sample in float64.

    The sum and the difference of the two are projections on mutually orthogonal sign vectors. The signs are a hash of the place and of
    a counter that lives on the device: no generator is disturbed, and a captured step draws anew each time it is replayed.

    Args:
        counter: A number that is another one in every step.
    """

    def __init__(self, counter: Tensor) -> None:
        self.counter = counter.clone()
        self.signs: dict[tuple[int, torch.dtype], Tensor] = {}
        self.halves: dict[int, Tensor] = {}

    def of(self, x: Tensor, *, norm: bool = True) -> Tensor:
        """The two sums and, if wanted, the norm: shape `(batch, 3)` or `(batch, 2)`."""
        flat, fused = x.flatten(1), kernels(x)
        if fused is None:
            return sums(flat, self.halves_of(x), norm=norm)
        return fused.sums(flat, self.signs_of(x))

    def signs_of(self, x: Tensor) -> Tensor:
        """The signs for activations of this size."""
        size = x[0].numel()
        if (size, x.dtype) not in self.signs:
            mixed = torch.arange(size, device=x.device) * _ODD + self.counter * _OTHER
            for shift in (30, 27):
                mixed = (mixed ^ (mixed >> shift)) * _ODD
            self.signs[size, x.dtype] = (((mixed >> 33) & 1) * 2 - 1).to(x.dtype)
        return self.signs[size, x.dtype]

    def halves_of(self, x: Tensor) -> Tensor:
        """The same as a matrix in float64, one column for each half."""
        size = x[0].numel()
        if size not in self.halves:
            first = torch.arange(size, device=x.device) < (size + 1) // 2
            self.halves[size] = self.signs_of(x).double()[:, None] * torch.stack((first, ~first), 1)
        return self.halves[size]


def sums(flat: Tensor, halves: Tensor, *, norm: bool = True) -> Tensor:
    """What a fingerprint consists of, by torch's own operations."""
    exact = flat.double()
    found = exact @ halves
    return torch.cat((found, _norms(exact)[:, None]), 1) if norm else found


def kernels(x: Tensor) -> Any:
    """`bilip.reversible.fused` where Triton works, else `None`: there the operations of torch take many passes for one."""
    return _kernels() if x.is_cuda else None


@functools.cache
def _kernels() -> Any:
    try:
        from bilip.reversible import fused

        fused.sums(torch.zeros(1, 2, device="cuda"), torch.ones(2, device="cuda"))
    except Exception:  # not installed, no compiler, a GPU it does not know: torch's operations are right everywhere
        return None
    return fused


def drifts_of(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """The largest drift over the samples, for each pair of fingerprints, relative to the norm of that sample there.

    What is not finite has drifted infinitely far.
    """
    known = torch.stack(before)
    return _relative(
        (torch.stack([one[:, :2] for one in after]) - known[..., :2]).square().sum(2).sqrt(), known[..., 2]
    )


def true_drift(x: Tensor, known: Tensor) -> Tensor:
    """The same against an activation that was kept."""
    return _relative(_norms((x - known).flatten(1)), _norms(known.flatten(1)))


def _norms(flat: Tensor) -> Tensor:
    """Of each sample, in float64: in float32 the squares of 1e20 overflow."""
    return torch.linalg.vector_norm(flat.double(), dim=1)


def _relative(apart: Tensor, size: Tensor) -> Tensor:
    """Samples next to zero count by the typical size of the batch, which no outlier moves."""
    ratio = (apart / (size + 1e-6 * size.median(-1, keepdim=True).values + 1e-30)).amax(-1)
    return torch.where(torch.isfinite(ratio), ratio, torch.inf)
