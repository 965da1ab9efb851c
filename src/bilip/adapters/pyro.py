"""Pyro's conditional transforms and distributions, conditioned on the context at every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from bilip.adapters._inspect import is_a, no_inverse, require_own_map
from bilip.adapters.foreign import Base, Foreign, ForeignBase, compose
from bilip.adapters.torch_distributions import (
    DistributionBase,
    TransformBlock,
    apply_fresh,
    require_inverse,
    transform_blocks,
)
from bilip.blocks import Bijection
from bilip.errors import InputError

__all__ = ["ConditionalBlock", "recognise"]


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A conditional transform, or a conditional transformed distribution, which goes from base to data."""
    if is_a(model, "ConditionalTransform", "pyro"):
        return compose(list(_blocks([model], reverse=False)), shape), None, "pyro"
    if not is_a(model, "ConditionalTransformedDistribution", "pyro"):
        return None
    require_own_map(model, ("condition",), "pyro")
    blocks = list(_blocks(list(model.transforms), reverse=True))
    base = model.base_dist
    if is_a(base, "ConstantConditionalDistribution", "pyro"):
        if shape is None:
            shape = tuple(base.base_dist.batch_shape + base.base_dist.event_shape) or None
        bijection = compose(blocks, shape)
        return bijection, DistributionBase(base.base_dist, bijection), "pyro"
    bijection = compose(blocks, shape)
    return bijection, ConditionalBase(base, bijection) if isinstance(base, nn.Module) else None, "pyro"


def _blocks(transforms: Sequence[Any], *, reverse: bool) -> Iterator[TransformBlock | ConditionalBlock]:
    for transform in reversed(transforms) if reverse else transforms:
        if is_a(transform, "ConditionalComposeTransformModule", "pyro"):
            yield from _blocks(list(transform.transforms), reverse=reverse)
        elif is_a(transform, "ConstantConditionalTransform", "pyro"):
            yield from transform_blocks([transform.transform], reverse=reverse)
        elif is_a(transform, "_ConditionalInverseTransformModule", "pyro"):
            yield from _blocks([transform.inv], reverse=not reverse)
        elif not is_a(transform, "ConditionalTransform", "pyro"):
            yield from transform_blocks([transform], reverse=reverse)
        else:
            yield ConditionalBlock(transform, reverse=reverse)


class ConditionalBlock(Foreign):
    """One conditional transform of Pyro.

    Args:
        module: The conditional transform.
        reverse: Whether F is the inverse of what it gives.
    """

    library = "pyro"

    def __init__(self, module: nn.Module, *, reverse: bool = False) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(
                f"{type(module).__name__} is a conditional transform that is no nn.Module: wrap it in one."
            )
        super().__init__(module)
        if any(name in self.kind for name in ("Planar", "Radial", "Sylvester", "NeuralAutoregressive")):
            raise no_inverse(module, "Pyro knows it only from the cache of a forward call")
        self.reverse = reverse

    def _condition(self, context: Tensor | None) -> Any:
        if context is None:
            raise InputError(f"{self.kind} of Pyro is conditional: pass context=.")
        transform = self.module.condition(context)  # type: ignore[operator]
        require_inverse(transform)
        return transform

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self._condition(context), x, inverse=self.reverse, log_det=log_det)

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self._condition(context), z, inverse=not self.reverse, log_det=log_det)


class ConditionalBase(ForeignBase):
    """A conditional base distribution of Pyro."""

    def draw(self, module: Any, count: int, context: Tensor | None) -> Tensor:
        base = module.condition(context)
        return base.sample(() if base.batch_shape else (count,))

    def density(self, module: Any, z: Tensor, context: Tensor | None) -> Tensor:
        return module.condition(context).log_prob(z)
