"""The largest gains of a map and of its inverse that a search finds."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.blocks import Bijection
from bilip.bounds import EPS, Box, as_float64
from bilip.errors import InputError

__all__ = ["Gains", "jacobian", "search_gains"]


@dataclass(frozen=True)
class Gains:
    """The largest gains found, each at an actual pair of points or tangent, so lower bounds on the true constants.

    Attributes:
        forward: The largest |F(x) - F(x')| / |x - x'| or |J v| / |v| found.
        inverse: The largest gain of F^-1 found on F(domain).
    """

    forward: float
    inverse: float


def search_gains(
    bijection: Bijection,
    domain: Box,
    *,
    context: Tensor | None = None,
    points: int = 16,
    steps: int = 20,
    seed: int = 0,
) -> Gains:
    r"""Look for large gains of F on a box and of F^-1 on its image, in float64: random pairs, then ascent on $|J_F(x) v|$.

    The Jacobian at the present points gives the best directions; the points then climb along the gradient of the gain
    in these directions and are projected back onto the box. The gain of the inverse at $F(x)$ along $J v$ is $|v| /
    |J v|$.

    Args:
        bijection: The map; a float64 copy is searched.
        domain: A bounded box with the shape of one sample.
        context: One context, repeated for all points.
        points: Number of points that climb at once.
        steps: Number of climbing steps.
        seed: Seed of the starting points.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> gains = search_gains(DiagonalScaling(torch.tensor([2.0, 0.5])), Box(-1, 1, shape=(2,)))
        >>> round(gains.forward, 6), round(gains.inverse, 6)
        (2.0, 2.0)
    """
    if not (isinstance(domain, Box) and domain.shape and domain.is_bounded):
        raise InputError(
            "search_gains: expected a bounded box with the shape of one sample, as in Box(-1, 1, "
            f"shape=(2,)), got {domain!r}."
        )
    model = copy.deepcopy(bijection).double().cpu().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    given = None if context is None else as_float64(context).expand(points, *context.shape)
    start = domain.sample(points, generator=generator)
    forward, inverse = _pair_gains(model, domain, start, given, generator)
    side = (domain.high - domain.low).clamp_min(1e-12)
    for sign in (1, -1):
        x, rate = start, 0.1
        for _ in range(steps):
            x = x.detach().requires_grad_()
            z = model(x, given)
            left, values, right = torch.linalg.svd(jacobian(z, x))
            forward = max(forward, float(values[:, 0].max()))
            # A singular value errs by the rounding of the largest: count only the gain that is certain.
            certain = values[:, -1] + 8 * values.shape[-1] * EPS * values[:, 0]
            inverse = max(inverse, float((1 / certain).nan_to_num(0.0).max()))
            k = 0 if sign > 0 else -1
            # The derivative of a singular value u^T J v is u^T dJ v: u and v stay fixed.
            (vjp,) = torch.autograd.grad(z, x, left[:, :, k].view_as(z), create_graph=True)
            gain = (vjp.flatten(1) * right[:, k]).sum()
            slope = (
                torch.autograd.grad(gain, x)[0].nan_to_num(0.0, 0.0, 0.0) if gain.requires_grad else torch.zeros_like(x)
            )
            x = torch.clamp(x.detach() + sign * rate * side * slope.sign(), domain.low, domain.high)
            rate *= 0.85
    return Gains(forward, inverse)


def jacobian(z: Tensor, x: Tensor) -> Tensor:
    """The Jacobians of a batch, one backward pass for each output: of use for any map that treats samples apart."""
    flat = z.flatten(1)
    rows = [torch.autograd.grad(flat[:, k].sum(), x, retain_graph=True)[0].flatten(1) for k in range(flat.shape[1])]
    return torch.stack(rows, 1)


def _pair_gains(
    model: Bijection, domain: Box, x: Tensor, context: Tensor | None, generator: torch.Generator
) -> tuple[float, float]:
    forward = inverse = 0.0
    for scale in (1.0, 1e-2, 1e-4):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        other = torch.clamp(x + scale * (domain.high - domain.low) * noise, domain.low, domain.high)
        step = (x - other).flatten(1).norm(dim=1)
        with torch.no_grad():
            move = (model(x, context) - model(other, context)).flatten(1).norm(dim=1)
        # A difference of nearby values carries rounding noise: leave out pairs where that could pass for a gain.
        sure = (step > 1e-6) & torch.isfinite(move) & (move > 1e-6)
        if sure.any():
            forward = max(forward, float((move / step)[sure].max()))
            inverse = max(inverse, float((step / move)[sure].max()))
    return forward, inverse
