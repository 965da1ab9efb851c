"""Round trips and condition numbers in the plane."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from bilip import Bijection, _linalg
from bilip.errors import NotConverged
from bilip.testing.gains import jacobian

__all__ = ["MOST", "condition", "grid", "round_trip_errors", "summary"]

MOST = 16384  # points at a time


def grid(edge: float, spacing: float, device: str | torch.device = "cpu") -> Tensor:
    """The points of a square grid on [-edge, edge]^2, shape `(side * side, 2)`, the first coordinate running fastest.

    Example:
        >>> grid(1.0, 1.0)[:3].tolist()
        [[-1.0, -1.0], [0.0, -1.0], [1.0, -1.0]]
    """
    axis = torch.linspace(-edge, edge, round(2 * edge / spacing) + 1)
    second, first = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack((first, second), -1).reshape(-1, 2).to(device)


@torch.no_grad()
def round_trip_errors(model: Bijection, x: Tensor) -> Tensor:
    """|x - F^-1(F(x))| in the model's own dtype, its length in float64; NaN where an iterative inverse missed its tolerance."""
    if len(x) > MOST:
        return torch.cat([round_trip_errors(model, part) for part in x.split(MOST)])
    try:
        return (model.inverse(model(x)).double() - x.double()).norm(dim=1)
    except NotConverged:
        if len(x) == 1:
            return torch.full((1,), torch.nan, dtype=torch.float64, device=x.device)
        return torch.cat([round_trip_errors(model, part) for part in x.chunk(2)])  # down to the samples that missed it


def summary(error: Tensor) -> dict[str, float]:
    """Median and worst of the errors, and the shares that are lost; what is not finite counts as infinite.

    Example:
        >>> summary(torch.tensor([0.0, 2.0, torch.inf]))["share_non_finite"] > 0.3
        True
    """
    finite = error[torch.isfinite(error)]
    return {
        "points": len(error),
        "median": float(torch.where(torch.isfinite(error), error, torch.inf).median()),
        "worst_finite": float(finite.max()) if len(finite) else math.nan,
        "share_above_1": float((~(error <= 1)).double().mean()),
        "share_non_finite": 1 - len(finite) / len(error),
    }


@torch.no_grad()
def condition(model: Bijection, x: Tensor) -> Tensor:
    r"""$\sigma_\text{max}(J) \, \sigma_\text{max}(J^{-1})$ at a batch of points, in float64, shape `(batch,)`.

    Both Jacobians are products over the blocks, so that the small end of the spectrum is not lost to rounding where a decomposition of
    $J$ alone ends, near 1e15. NaN where an activation is not finite.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> [f"{value:.0e}" for value in condition(DiagonalScaling(torch.tensor([1.0, 1e-20])), torch.ones(1, 2))]
        ['1e+20']
    """
    z = x.detach().double()
    there = back = torch.eye(2, dtype=torch.float64, device=x.device).expand(len(x), 2, 2)
    for _, block in copy.deepcopy(model).double().parts():
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            out = block(z)
            slope = jacobian(out, z)
        there, back, z = slope @ there, back @ _linalg.inv_ex(slope)[0], out.detach()
    finite = torch.isfinite(there).flatten(1).all(1) & torch.isfinite(back).flatten(1).all(1)
    found = torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
    both = [torch.linalg.matrix_norm(value[finite], 2) for value in (there, back)]
    found[finite] = both[0] * both[1]
    return found
