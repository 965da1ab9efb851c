"""Condition numbers in the plane, block by block."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bilip import Bijection

__all__ = ["condition"]


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
            rows = [torch.autograd.grad(out[:, k].sum(), z, retain_graph=k == 0)[0] for k in (0, 1)]
        slope = torch.stack(rows, 1)
        there, back, z = slope @ there, back @ torch.linalg.inv_ex(slope)[0], out.detach()
    finite = torch.isfinite(there).flatten(1).all(1) & torch.isfinite(back).flatten(1).all(1)
    found = torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
    both = [torch.linalg.matrix_norm(value[finite], 2) for value in (there, back)]
    found[finite] = both[0] * both[1]
    return found
