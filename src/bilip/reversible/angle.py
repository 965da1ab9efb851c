"""The angle between two gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["angle"]


def angle(u: Sequence[Tensor], v: Sequence[Tensor]) -> float:
    r"""The angle between two gradients in radians, $2\,\mathrm{atan2}(|a - b|, |a + b|)$ of the unit vectors, in float64.

    Example:
        >>> round(angle([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]), 4)
        0.7854
    """
    a = torch.cat([t.detach().double().flatten() for t in u]) if u else torch.zeros(1)
    b = torch.cat([t.detach().double().flatten() for t in v]) if v else torch.zeros(1)
    if not a.any() and not b.any():
        return 0.0
    a, b = a / a.norm(), b / b.norm()
    return float(2 * torch.atan2((a - b).norm(), (a + b).norm()))
