r"""The contract of a bijection, for your own blocks and your own test suite.

`check_contract` checks every promise of the interface: round trips, log-determinants against the Jacobian, bounds
that no measured gain exceeds, enclosures that hold, gradients, and a state dict that carries everything.
`assert_invertible` is the one line for a trained model. `search_gains` looks for the largest gains of a map and its
inverse, the adversary of every bound.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilip.adapters import as_bijection
from bilip.blocks import Bijection
from bilip.bounds import EPS, Box, as_float64
from bilip.errors import ContractViolation, InputError, NoGlobalBound

__all__ = ["Gains", "assert_invertible", "check_contract", "search_gains"]


def assert_invertible(model: Any, x: Tensor, *, tolerance: float | None = None, context: Tensor | None = None) -> None:
    r"""Fail unless $|x - F^{-1}(F(x))| \le \text{tolerance} \cdot (1 + |x|)$ for every sample, measured in float64.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes; it is called as it is, in its own dtype and mode,
            without gradients.
        x: A batch of inputs.
        tolerance: By default the square root of the dtype's epsilon: half of the digits survive.
        context: Context of the batch.

    Raises:
        ContractViolation: With the number of bad samples, the worst one and its error. It is an `AssertionError`.

    Example:
        >>> from bilip.models import real_nvp
        >>> assert_invertible(real_nvp(4, coupling="additive"), torch.randn(16, 4))
    """
    bijection = as_bijection(model)
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        raise InputError("assert_invertible: expected a batch of at least one sample, shape (batch, ...).")
    if not torch.isfinite(x).all():
        raise InputError("assert_invertible: the inputs hold NaN or Inf; no reconstruction could equal them.")
    tolerance = math.sqrt(torch.finfo(x.dtype).eps) if tolerance is None else tolerance
    with torch.no_grad():
        back = bijection.inverse(bijection(x, context), context)
    error = (as_float64(back) - as_float64(x)).flatten(1).norm(dim=1)
    limit = tolerance * (1 + as_float64(x).flatten(1).norm(dim=1))
    bad = ~(error <= limit)
    if bad.any():
        broken = int((~torch.isfinite(error)).sum())
        worst = int(torch.where(torch.isfinite(error), error / limit, math.inf).argmax())
        raise ContractViolation(
            f"{int(bad.sum())} of {len(x)} samples do not come back ({broken} of them not finite). Worst: "
            f"sample {worst}, "
            f"error {float(error[worst]):.3g}, allowed {float(limit[worst]):.3g} ({x.dtype}, tolerance "
            f"{tolerance:.1g})."
        )


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
            left, values, right = torch.linalg.svd(_jacobian(z, x))
            forward = max(forward, float(values[:, 0].max()))
            # A singular value errs by the rounding of the largest: count only the gain that is certain.
            certain = values[:, -1] + 8 * values.shape[-1] * EPS * values[:, 0]
            inverse = max(inverse, float((1 / certain).nan_to_num(0.0).max()))
            k = 0 if sign > 0 else -1
            # The derivative of a singular value u^T J v is u^T dJ v: u and v stay fixed.
            (pulled,) = torch.autograd.grad(z, x, left[:, :, k].view_as(z), create_graph=True)
            gain = (pulled.flatten(1) * right[:, k]).sum()
            slope = (
                torch.autograd.grad(gain, x)[0].nan_to_num(0.0, 0.0, 0.0) if gain.requires_grad else torch.zeros_like(x)
            )
            x = torch.clamp(x.detach() + sign * rate * side * slope.sign(), domain.low, domain.high)
            rate *= 0.85
    return Gains(forward, inverse)


def _jacobian(z: Tensor, x: Tensor) -> Tensor:
    """The Jacobians of a batch, one backward pass for each output: of use for any map that treats samples apart."""
    flat = z.flatten(1)
    rows = [torch.autograd.grad(flat[:, k].sum(), x, retain_graph=True)[0].flatten(1) for k in range(flat.shape[1])]
    return torch.stack(rows, 1)


def _pair_gains(
    model: Bijection, domain: Box, x: Tensor, context: Tensor | None, generator: torch.Generator
) -> tuple[float, float]:
    forward = inverse = 0.0
    for scale in (1.0, 1e-2, 1e-4):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
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


def check_contract(
    bijection: Bijection,
    x: Tensor,
    *,
    context: Tensor | None = None,
    domain: Box | None = None,
    bounds: bool = True,
) -> None:
    """Check every promise of a bijection on a small float64 batch.

    Args:
        bijection: The block or network; it is not changed.
        x: A batch of float64 inputs, few and small: full Jacobians are computed.
        context: One context for each sample.
        domain: Box on which the bounds are checked; the hull of the batch by default.
        bounds: Whether the block takes part in proofs.

    Raises:
        ContractViolation: Names the promise that was broken and the numbers.

    Example:
        >>> from bilip.blocks import AdditiveCoupling
        >>> from bilip.nets import MLP
        >>> check_contract(AdditiveCoupling(MLP(2, 2)), torch.randn(3, 4, dtype=torch.float64))
    """
    if x.dtype != torch.float64:
        raise InputError(
            f"check_contract: expected float64 inputs, got {x.dtype}; the reference is computed in float64."
        )
    model = copy.deepcopy(bijection).double().eval()
    _check_maps(model, x, context)
    _check_log_det(model, x, context)
    _check_gradients(model, x[:1], None if context is None else context[:1])
    _check_state(model, x, context)
    if not repr(model).startswith(type(model).__name__):
        raise ContractViolation(f"repr: {repr(model)!r} does not begin with the name of the class.")
    if bounds:
        low, high = x.amin(0), x.amax(0)
        _check_bounds(model, Box(low, high) if domain is None else domain.expand(tuple(x.shape[1:])), x, context)


def _check_maps(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    with torch.no_grad():
        z, z2 = model(x, context), model.forward_and_log_det(x, context)[0]
        back, back2 = model.inverse(z, context), model.inverse_and_log_det(z, context)[0]
        again = model(back, context)
    _close("F(x) and forward_and_log_det(x)", z, z2, 1e-12)
    _close("F^-1(z) and inverse_and_log_det(z)", back, back2, 1e-12)
    _close("round trip x -> z -> x", x, back, 1e-7)
    _close("round trip z -> x -> z", z, again, 1e-7)
    if z.shape[0] != x.shape[0] or tuple(z.shape[1:]) != model.out_shape(x.shape[1:]):
        raise ContractViolation(
            f"out_shape: {model.out_shape(x.shape[1:])} was announced, {tuple(z.shape[1:])} came out."
        )
    if model.in_shape(z.shape[1:]) != tuple(x.shape[1:]):
        raise ContractViolation(
            f"in_shape: {model.in_shape(z.shape[1:])} was announced for inputs of shape {tuple(x.shape[1:])}."
        )


def _check_log_det(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    with torch.no_grad():
        z, log_det = model.forward_and_log_det(x, context)
        _, back = model.inverse_and_log_det(z, context)
    for name, value in (("forward_and_log_det", log_det), ("inverse_and_log_det", back)):
        if tuple(value.shape) != (len(x),):
            raise ContractViolation(
                f"{name}: the log-determinant has shape {tuple(value.shape)}, expected ({len(x)},)."
            )
    _close("log-determinants of F and F^-1 (up to sign)", log_det, -back, 1e-7)
    leaf = x.detach().clone().requires_grad_()
    jacobian = _jacobian(model(leaf, context), leaf)
    _close("log-determinant and slogdet of the Jacobian", log_det, torch.linalg.slogdet(jacobian)[1], 1e-7)


def _check_gradients(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    z = model(x, context).detach().requires_grad_()
    x = x.detach().clone().requires_grad_()
    for name, method, point in (("forward", model.forward_and_log_det, x), ("inverse", model.inverse_and_log_det, z)):

        def both(*inputs: Tensor, method=method) -> tuple[Tensor, ...]:
            return method(inputs[0], context)

        inputs = (point, *parameters)
        if not torch.autograd.gradcheck(
            both, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, raise_exception=False, fast_mode=True, nondet_tol=1e-9
        ):
            raise ContractViolation(f"gradients of {name}_and_log_det differ from finite differences.")


def _check_state(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        twin.load_state_dict(state)
        _close("outputs after load_state_dict(state_dict())", model(x, context), twin(x, context), 1e-12)


def _check_bounds(model: Bijection, box: Box, like: Tensor, context: Tensor | None) -> None:
    given = None if context is None else Box.point(context[0])
    one = None if context is None else context[0]
    gains = search_gains(model, box, context=one, points=8, steps=6)
    for formula in ("sharp", "paper"):
        for where, domain in (("on the box", box), ("everywhere", None)):
            try:
                bound = model.bounds(domain, context=given, formula=formula)
            except NoGlobalBound:
                if domain is None:
                    continue
                raise
            for direction in ("forward", "inverse"):
                gain, limit = getattr(gains, direction), getattr(bound, direction)
                if gain > limit * (1 + 1e-9):
                    raise ContractViolation(
                        f"bounds: a gain of {gain:.9g} was found for the {direction} map, but {limit:.9g} is "
                        f"claimed {where} ({formula})."
                    )
    points = box.sample(64).to(like)
    rows = None if one is None else one.expand(64, *one.shape)
    with torch.no_grad():
        images = model(points, rows)
        _inside("enclose", model.enclose(box, given), images)
        low, high = images.amin(0), images.amax(0)
        latent = Box(low, high)
        latents = latent.sample(64).to(like)
        _inside("enclose_inverse", model.enclose_inverse(latent, given), model.inverse(latents, rows))


def _inside(name: str, box: Box, values: Tensor) -> None:
    held = box.contains(values.nan_to_num(0.0))
    if not held.all():
        raise ContractViolation(
            f"{name}: {int((~held).sum())} of {len(values)} images lie outside the box that should hold them."
        )


def _close(what: str, a: Tensor, b: Tensor, tolerance: float) -> None:
    a, b = a.detach(), b.detach()
    error = float((a - b).abs().max()) if a.numel() else 0.0
    scale = 1 + float(a.abs().max()) if a.numel() else 1.0
    if not error <= tolerance * scale:
        raise ContractViolation(
            f"{what} differ by {error:.3g} (values up to {scale - 1:.3g}, allowed {tolerance:.0e} relative)."
        )
