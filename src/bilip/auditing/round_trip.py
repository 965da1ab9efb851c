"""Distances between a sample and its reconstruction, in float64 whatever the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Distances", "distances", "norms", "typical_norm"]


@dataclass(frozen=True)
class Distances:
    """Per-sample errors, float64, shape `(batch,)`.

    Attributes:
        l2: Euclidean norm of the difference.
        relative: The same divided by |x|, or by the typical |x| where that is larger.
        largest: Largest absolute difference of one entry.
    """

    l2: Tensor
    relative: Tensor
    largest: Tensor

    @property
    def finite(self) -> Tensor:
        """Which samples came back without NaN and Inf."""
        return torch.isfinite(self.l2)


def norms(x: Tensor) -> Tensor:
    """Euclidean norm of each sample in float64, scaled so that it does not overflow by itself.

    Example:
        >>> norms(torch.tensor([[3e200, 4e200]], dtype=torch.float64))
        tensor([5.0000e+200], dtype=torch.float64)
    """
    flat = x.detach().double().flatten(1)
    scale = flat.abs().amax(1).clamp_min(torch.finfo(torch.float64).tiny)
    scale = torch.where(torch.isfinite(scale), scale, torch.ones_like(scale))
    return (flat / scale[:, None]).norm(dim=1) * scale


def typical_norm(x: Tensor) -> float:
    """The mean norm of the samples of a batch that are finite; 1 if there is none.

    Example:
        >>> typical_norm(torch.tensor([[3.0, 4.0]]))
        5.0
    """
    size = norms(x)
    known = size[torch.isfinite(size)]
    return float(known.mean()) if len(known) else 1.0


def distances(x: Tensor, other: Tensor, typical: float = 1.0) -> Distances:
    """Errors of a batch of reconstructions.

    Args:
        x: The samples.
        other: Their reconstructions; of another size they count as not finite.
        typical: A typical norm of a sample, by which those near zero are measured.

    Example:
        >>> distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])).l2
        tensor([5.], dtype=torch.float64)
    """
    if other.shape != x.shape:
        other = other.reshape(x.shape) if other.numel() == x.numel() else torch.full_like(x, torch.nan)
    difference = other.detach().double() - x.detach().double()
    l2, size = norms(difference), norms(x)
    return Distances(l2, l2 / size.clamp_min(max(typical, 1e-300)), difference.flatten(1).abs().amax(1))
