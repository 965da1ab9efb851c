"""Transforms and transformed distributions of torch and Pyro."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform, TransformedDistribution
from torch.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform

from bilip.adapters._diagonal import ShiftedDiagonal
from bilip.adapters._holder import Holder, forget
from bilip.adapters._inspect import comes_from, is_unchanged, no_inverse, require_own_map
from bilip.adapters.base import Base, ForeignBase
from bilip.adapters.foreign import Foreign, compose, reference
from bilip.blocks import Bijection, Invert, Permutation

__all__ = ["DistributionBase", "TransformBlock", "event_log_det", "recognise", "require_inverse"]

# Of these Pyro knows the inverse only from its cache.
_ONE_WAY = ("Planar", "Radial", "Sylvester", "BlockAutoregressive", "NeuralAutoregressive", "Polynomial")


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A transform as it is; of a transformed distribution, which goes from base to data, the inverse."""
    library = "pyro" if comes_from(model, "pyro") else "zuko" if comes_from(model, "zuko") else "torch"
    if isinstance(model, TransformedDistribution):
        require_own_map(model, ("log_prob", "sample", "rsample"), library, "torch", "pyro", "zuko")
        blocks = list(transform_blocks(list(model.transforms), reverse=True))
        if shape is None:
            shape = tuple(model.batch_shape + model.event_shape) or None
        bijection = compose(blocks, shape)
        return bijection, DistributionBase(model.base_dist, bijection), library
    if isinstance(model, Transform):
        return compose(list(transform_blocks([model], reverse=False)), shape), None, library
    return None


def transform_blocks(transforms: Sequence[Any], *, reverse: bool) -> Iterator[TransformBlock]:
    """One block for each elementary transform, in the order in which data meets them."""
    for transform in reversed(transforms) if reverse else transforms:
        if not is_unchanged(transform, "torch", "pyro", "zuko"):
            require_inverse(transform)
            yield TransformBlock(transform, reverse=reverse)
        elif isinstance(transform, ComposeTransform) or type(transform).__name__ == "ComposedTransform":
            parts = transform.parts if isinstance(transform, ComposeTransform) else transform.transforms
            yield from transform_blocks(list(parts), reverse=reverse)
        elif isinstance(transform, IndependentTransform):
            yield from transform_blocks([transform.base_transform], reverse=reverse)
        elif type(transform).__name__ in ("_InverseTransform", "Inverse") and transform._inv is not None:
            yield from transform_blocks([transform._inv], reverse=not reverse)
        else:
            require_inverse(transform)
            yield TransformBlock(transform, reverse=reverse)


def require_inverse(transform: Any) -> None:
    """Raise where a transform is not bijective, or knows its inverse only from a cache."""
    if not transform.bijective:
        raise no_inverse(transform, "it is not bijective")
    names = [kind.__name__.removeprefix("Conditioned") for kind in type(transform).__mro__]
    if comes_from(transform, "pyro") and any(name in _ONE_WAY for name in names):
        raise no_inverse(transform, "Pyro knows it only from the cache of a forward call")
    if type(transform)._inverse is Transform._inverse and type(transform)._inv_call is Transform._inv_call:
        raise no_inverse(transform, "it defines only the forward direction")


def event_log_det(value: Any, x: Tensor, event_dim: int) -> Tensor:
    """The sum over all but the batch of a log-determinant that may be one number for each entry."""
    shape = x.shape[: x.ndim - event_dim]
    value = value.expand(shape) if isinstance(value, Tensor) else x.new_full(shape, float(value))
    return value.flatten(1).sum(1) if value.ndim > 1 else value


class TransformBlock(Foreign):
    """One transform of torch or Pyro, its caches emptied around every call.

    Args:
        transform: The transform; its tensors are registered.
        reverse: Whether F is its inverse.
    """

    module: Holder

    def __init__(self, transform: Any, *, reverse: bool = False) -> None:
        forget(transform)
        super().__init__(Holder(transform), kind=type(transform).__name__)
        self.library, self.reverse = "pyro" if comes_from(transform, "pyro") else "torch", reverse

    def push(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self.module.object(), x, inverse=self.reverse, log_det=log_det)

    def pull(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self.module.object(), z, inverse=not self.reverse, log_det=log_det)

    def reshapes(self) -> bool:
        return type(self.module.object()).forward_shape is not Transform.forward_shape

    def twin(self) -> Bijection:
        transform = self.module.object()
        if type(transform) is AffineTransform:
            block: Bijection = ShiftedDiagonal(transform.loc, transform.scale)
        elif self.kind == "Permute" and type(transform).__module__.startswith("pyro.distributions"):
            block = Permutation(transform.permutation, dim=transform.dim)
        else:
            raise self.unproved()
        return Invert(block) if self.reverse else block


def apply_fresh(transform: Any, x: Tensor, *, inverse: bool, log_det: bool) -> tuple[Tensor, Any]:
    """Apply a transform or its inverse without caches."""
    forget(transform)
    before = torch.get_default_dtype()
    try:
        if x.dtype != before and comes_from(transform, "pyro"):
            torch.set_default_dtype(x.dtype)  # autoregressive inverses of Pyro start from zeros of the default dtype
        if inverse:
            out = transform._inv_call(x)
            value = -transform.log_abs_det_jacobian(out, x) if log_det else None
            dims, like = transform.domain.event_dim, out
        else:
            out = transform(x)
            value = transform.log_abs_det_jacobian(x, out) if log_det else None
            dims, like = transform.domain.event_dim, x
        return out, None if value is None else event_log_det(value, like, dims)
    finally:
        torch.set_default_dtype(before)
        forget(transform)


class DistributionBase(ForeignBase):
    """A distribution of torch or Pyro."""

    def __init__(self, distribution: Distribution, bijection: Bijection) -> None:
        super().__init__(Holder(distribution), bijection)

    def sample(self, count: int, context: Tensor | None = None, generator: Any = None) -> Tensor:
        like = reference(self.bijection)
        if not any(t.is_floating_point() for t in (*self.bijection.parameters(), *self.bijection.buffers())):
            like = reference(self.module)  # a map without numbers has the dtype of its latents
        z = super().sample(count, context, generator)
        return z.to(like)

    def draw(self, module: Any, count: int, context: Tensor | None) -> Tensor:
        return module.object().sample((count,))

    def density(self, module: Any, z: Tensor, context: Tensor | None) -> Tensor:
        return module.object().log_prob(z)
