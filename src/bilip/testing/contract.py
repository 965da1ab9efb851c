"""Every promise of a bijection, checked."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bilip import _linalg
from bilip.blocks import Bijection, Chain, FactorOut, Invert
from bilip.bounds import Box
from bilip.errors import ContractViolation, InputError, NoGlobalBound
from bilip.reversible import Reversible
from bilip.testing.gains import jacobian, search_gains

__all__ = ["check_contract"]


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
    _check_reversible(model, x, context)
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
    slope = jacobian(model(leaf, context), leaf)
    _close("log-determinant and slogdet of the Jacobian", log_det, _linalg.slogdet(slope)[1], 1e-7)


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


def _check_reversible(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    """Memory-saving gradients are the stored ones: of the block, inverted, and nested and factored out three levels deep; in both
    directions; in the first step and, with what the guard has learned from it, in the third.
    """
    z = model(x, context).detach()
    inner, shape = Chain(Chain(model), Chain()), tuple(x.shape[1:])
    for level in (1, 2, 3):
        inner = FactorOut(inner, (shape[0] + level, *shape[1:]), keep=shape[0] + level - 1)
    wider = torch.cat(
        (x, torch.linspace(-1, 1, 3 * x[:, :1].numel(), device=x.device).to(x).view(len(x), 3, *shape[1:])), 1
    )
    cases = [("of three factor-outs", inner, wider)]
    if model.closed_form:  # others cost an iteration for each evaluation
        cases += [("", model, x), ("of the inverted block", Invert(model), z)]
    for what, bijection, point in cases:
        latent = bijection(point, context).detach()
        for way, start in (("forward", point), ("inverse", latent)):
            stored = _gradients(bijection, start, context, way)
            saving = Reversible(bijection)
            for step in (1, 2, 3) if model.closed_form else (1, 2):  # the first call looks for tensors from outside
                found = _gradients(saving, start, context, way)
                scale = max((float(g.abs().max()) for g in stored if g.numel()), default=0.0)
                for a, b in zip(stored, found, strict=True):
                    error = float((a - b).abs().max()) if a.numel() else 0.0
                    if not error <= (1e-8 if model.closed_form else 1e-6) * (1 + scale):
                        raise ContractViolation(
                            f"Reversible {what}: the memory-saving gradient differs from the stored one by {error:.3g} "
                            f"(gradients up to {scale:.3g}; {way}, step {step})."
                        )


def _gradients(f: Bijection, point: Tensor, context: Tensor | None, way: str) -> list[Tensor]:
    """Of a loss that looks at every entry of value and log-determinant, with respect to input, context and parameters."""
    point = point.detach().clone().requires_grad_()
    given = None if context is None else context.detach().clone().requires_grad_(context.is_floating_point())
    value, log_det = (f.forward_and_log_det if way == "forward" else f.inverse_and_log_det)(point, given)
    weights = torch.linspace(-1, 1, value.numel(), device=value.device).to(value).view_as(value)
    loss = (weights * value.sin()).sum() + (
        log_det * torch.arange(1, len(log_det) + 1, device=log_det.device).to(log_det)
    ).sum()
    leaves = [point, *f.parameters()] if given is None else [point, given, *f.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def _check_state(model: Bijection, x: Tensor, context: Tensor | None) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        other.load_state_dict(state)
        _close("outputs after load_state_dict(state_dict())", model(x, context), other(x, context), 1e-12)


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
