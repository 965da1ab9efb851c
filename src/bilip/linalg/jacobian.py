"""Products with Jacobians, by whichever road a model allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bilip.errors import NotMeasured

__all__ = ["jvp", "jvp_many", "vjp", "vjp_many"]

Map = Callable[[Tensor], Tensor]
_CHUNK_ENTRIES = 2**24
_ROWS = 512
_SMALL_ENTRIES = 2**17  # below, calls cost more than work, and vmap makes calls dearer


def jvp(function: Map, x: Tensor, v: Tensor) -> Tensor:
    r"""$J v$ for a batch: sample by sample its own point and its own direction.

    Forward mode where every operation has it, else two backward passes.

    Example:
        >>> jvp(torch.sin, torch.zeros(2, 1), torch.ones(2, 1)).flatten()
        tensor([1., 1.])
    """
    try:
        with torch.no_grad(), forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent
            if tangent is not None:
                return tangent.clone()
    except (RuntimeError, AttributeError):
        pass  # an operation without forward mode, or one that cannot hold duals
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        z = _differentiable(function(point))
        probe = torch.zeros_like(z, requires_grad=True)
        (vjp_of_probe,) = torch.autograd.grad(
            z, point, probe, create_graph=True, allow_unused=True, materialize_grads=True
        )
        found = None
        if vjp_of_probe.requires_grad:
            found = torch.autograd.grad(vjp_of_probe, probe, v, allow_unused=True, materialize_grads=True)[0].detach()
    # A backward pass that cannot be differentiated loses the tangent without a word: hold it against the adjoint.
    u = torch.linspace(-1, 1, z[0].numel(), dtype=z.dtype, device=z.device).view_as(z[0]).expand_as(z)
    if found is not None:
        left, right = (found * u).flatten(1).sum(1), (vjp(function, x, u) * v).flatten(1).sum(1)
        scale = found.flatten(1).norm(dim=1) * u.flatten(1).norm(dim=1)
        if bool(((left - right).abs() <= 1e-6 * scale + 1e-30).all()):
            return found
    return _by_rows(function, x, v, z)


def _by_rows(function: Map, x: Tensor, v: Tensor, z: Tensor) -> Tensor:
    """J v from the rows of J, one backward pass for all of them."""
    outputs = z[0].numel()
    if outputs > _ROWS:
        raise NotMeasured(
            "an operation of the model has no forward mode and no second derivative, and the model is large"
        )
    eye = torch.eye(outputs, dtype=z.dtype, device=z.device).reshape(outputs, *z.shape[1:])
    rows = [vjp(function, x[k : k + 1].expand(outputs, *x.shape[1:]).clone(), eye).flatten(1) for k in range(len(x))]
    return torch.stack([row @ v[k].flatten() for k, row in enumerate(rows)]).reshape(z.shape)


def vjp(function: Map, x: Tensor, u: Tensor) -> Tensor:
    r"""$J^\top u$ for a batch, one backward pass.

    Example:
        >>> vjp(torch.exp, torch.zeros(2, 1), torch.ones(2, 1)).flatten()
        tensor([1., 1.])
    """
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        z = _differentiable(function(point))
        return torch.autograd.grad(z, point, u.reshape(z.shape), allow_unused=True, materialize_grads=True)[0].detach()


def jvp_many(function: Map, x: Tensor, v: Tensor) -> Tensor:
    r"""$J v_k$ for many directions at one point.

    For large problems the point is evaluated once and only the tangents are many (`torch.func.vmap`). Small ones, and models
    that do not allow it, get the point repeated in a batch, which asks no more than that the model treats samples apart.

    Args:
        function: A map of batches.
        x: One point, a batch of one.
        v: Directions, shape `(many, *shape)`.

    Example:
        >>> jvp_many(torch.sin, torch.zeros(1, 2), torch.eye(2)).shape
        torch.Size([2, 2])
    """

    def one(direction: Tensor) -> Tensor:
        return torch.func.jvp(function, (x,), (direction[None],))[1][0]

    return _many(one, lambda points, part: jvp(function, points, part), x, v)


def vjp_many(function: Map, x: Tensor, u: Tensor) -> Tensor:
    r"""$J^\top u_k$ for many directions at one point, likewise.

    Example:
        >>> vjp_many(torch.sin, torch.zeros(1, 2), torch.eye(2)).shape
        torch.Size([2, 2])
    """

    def one(direction: Tensor) -> Tensor:
        z, back, *_ = torch.func.vjp(function, x)
        return back(direction.reshape(z.shape))[0][0]

    return _many(one, lambda points, part: vjp(function, points, part), x, u)


def _many(one: Map, batch: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    chunk = max(1, _CHUNK_ENTRIES // max(1, v[0].numel()))
    if v.numel() > _SMALL_ENTRIES:
        try:
            with torch.no_grad():
                return torch.cat([torch.func.vmap(one)(part) for part in v.split(chunk)])
        except Exception:  # vmap and jvp refuse models in many ways
            chunk = min(chunk, 1024)
    return torch.cat([batch(x.expand(len(part), *x.shape[1:]).clone(), part) for part in v.split(chunk)])


def _differentiable(z: Tensor) -> Tensor:
    if not z.requires_grad:
        raise NotMeasured("the model does not let gradients through, so its Jacobian cannot be taken")
    return z
