r"""THE relative error: how far a reconstruction is from its sample. Every probe, monitor, attack and assertion measures with it.

$$\frac{|x - \hat x|}{\max(|x|, r)}$$

with Euclidean norms over all entries of a sample, in float64 whatever the model's dtype, and $r$ the median of $|x|$ over the samples
at hand: the source where there is one, else the batch. A sample near zero is measured by its neighbours, data of size 1e-5 by their
own size, and no outlier moves $r$.
"""

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
        relative: The relative error, |x - other| / max(|x|, typical |x|).
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
    """The median norm of the samples of a batch that are finite and not zero; 1 if there is none.

    Example:
        >>> typical_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [1e30, 0.0]]))
        5.0
    """
    size = norms(x)
    known = size[torch.isfinite(size) & (size > 0)]
    return float(known.median()) if len(known) else 1.0


def distances(x: Tensor, other: Tensor, typical: float | None = None) -> Distances:
    """Errors of a batch of reconstructions.

    Args:
        x: The samples.
        other: Their reconstructions; of another size they count as not finite.
        typical: Median norm of a sample, as `Source.statistics().norm` gives it; by default that of the batch.

    Example:
        >>> distances(torch.tensor([[3e-5, 4e-5]]), torch.zeros(1, 2)).relative
        tensor([1.], dtype=torch.float64)
    """
    if other.shape != x.shape:
        other = other.reshape(x.shape) if other.numel() == x.numel() else torch.full_like(x, torch.nan)
    difference = other.detach().double() - x.detach().double()
    l2, size = norms(difference), norms(x)
    floor = typical_norm(x) if typical is None else typical
    return Distances(l2, l2 / size.clamp_min(max(floor, 1e-300)), difference.flatten(1).abs().amax(1))
