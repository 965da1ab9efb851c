r"""THE relative error: how far a reconstruction is from its sample. Every probe, monitor, attack and assertion measures with it.

$$\frac{|x - \hat x|}{\max(|x|, r)}$$

with Euclidean norms over all entries of a sample, in float64 whatever the model's dtype, and $r$ the median of $|x|$ over the samples
at hand: the source where there is one, else the batch. A sample near zero is measured by its neighbours, data of size 1e-5 by their
own size, and no outlier moves $r$.

Where samples are lists of features, each feature of x and of its reconstruction is first divided by its own size, the median of $|x_j|$: a
column of size 1e-5 that is lost is not hidden by another of size 1. Pixels have one unit, and so have latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.data import Source

__all__ = ["Distances", "Typical", "distances", "distances_each", "median_of_known", "norms", "typical", "typical_norm"]

_ENOUGH = 16  # samples that tell the size of a feature


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


@dataclass(frozen=True)
class Typical:
    """What samples are measured by.

    Attributes:
        norm: Median norm of a sample, in units of `scale`; `None` for that of the batch.
        scale: Size of each feature, float64, where samples are lists of features; `None` for images.
    """

    norm: float | None
    scale: Tensor | None = None


def typical(x: Tensor | Source) -> Typical:
    """The sizes of some samples: of a source, from at most 1,024 samples spread over it, or of a batch.

    Fewer than 16 samples do not tell the sizes of their features; those count as equal.

    Example:
        >>> found = typical(torch.tensor([[1.0, 1e-5]]).repeat(20, 1))
        >>> found.scale, round(found.norm, 4)
        (tensor([1.0000e+00, 1.0000e-05], dtype=torch.float64), 1.4142)
    """
    if isinstance(x, Source):
        if len(x.shape) > 1:
            return Typical(x.statistics().norm)
        x = x.spread(1024).x
    if x.ndim != 2 or len(x) < _ENOUGH:
        return Typical(typical_norm(x))
    size = x.detach().double().abs()
    scale = torch.where(torch.isfinite(size) & (size > 0), size, torch.nan)
    scale = median_of_known(scale, 0)
    known = scale[torch.isfinite(scale)]
    scale = scale.nan_to_num(float(known.median()) if len(known) else 1.0)  # a feature that is 0 everywhere
    return Typical(typical_norm(x.detach().double() / scale), scale)


def median_of_known(values: Tensor, dim: int) -> Tensor:
    """The median of what is not NaN along a dimension, the lower one of two; `nanmedian` of a GPU raises where torch is told to be
    deterministic.

    Example:
        >>> median_of_known(torch.tensor([[3.0, torch.nan, 1.0, 2.0]]), 1)
        tensor([2.])
    """
    count = (~values.isnan()).sum(dim, keepdim=True)
    return values.sort(dim).values.gather(dim, ((count - 1) // 2).clamp_min(0)).squeeze(dim)


def distances(x: Tensor, other: Tensor, typical: Typical | float | None = None) -> Distances:
    """Errors of a batch of reconstructions.

    Args:
        x: The samples.
        other: Their reconstructions; of another size they count as not finite.
        typical: What they are measured by, as `typical(source)` gives it, or the median norm of a sample; by default that of the batch.

    Example:
        >>> distances(torch.tensor([[3e-5, 4e-5]]), torch.zeros(1, 2)).relative
        tensor([1.], dtype=torch.float64)
    """
    if other.shape != x.shape:
        other = other.reshape(x.shape) if other.numel() == x.numel() else torch.full_like(x, torch.nan)
    difference = other.detach().double() - x.detach().double()
    known = typical if isinstance(typical, Typical) else Typical(typical)
    scale = 1.0 if known.scale is None else known.scale.to(x.device)
    scaled = x.detach().double() / scale
    size = norms(scaled).clamp_min(max(typical_norm(scaled) if known.norm is None else known.norm, 1e-300))
    return Distances(norms(difference), norms(difference / scale) / size, difference.flatten(1).abs().amax(1))


def distances_each(x: Tensor, other: Tensor) -> Distances:
    """`distances` of many batches at once, each measured by itself: `(batches, batch, size)`, the errors `(batches, batch)`.

    On a device a few launches stand for those of all batches.

    Example:
        >>> distances_each(torch.ones(3, 2, 4), torch.zeros(3, 2, 4)).relative.shape
        torch.Size([3, 2])
    """
    shape = x.shape[:2]
    x, difference = x.flatten(0, 1), (other.double() - x.double()).flatten(0, 1)
    size, l2 = norms(x).view(shape), norms(difference).view(shape)
    known = median_of_known(torch.where(torch.isfinite(size) & (size > 0), size, torch.nan), 1).nan_to_num(1.0)
    size = torch.maximum(size, known.clamp_min(1e-300)[:, None])
    return Distances(l2, l2 / size, difference.abs().amax(1).view(shape))
