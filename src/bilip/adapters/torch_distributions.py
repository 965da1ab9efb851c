"""Transforms and transformed distributions of torch and Pyro; those of Pyro that take a context are conditioned on it at every call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, TransformedDistribution
from torch.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform

from bilip.adapters._inspect import comes_from, is_a, is_unchanged, no_inverse, require_own_map
from bilip.adapters.foreign import Base, Foreign, ForeignBase, compose, reference
from bilip.blocks import Bijection, Invert, Permutation
from bilip.bounds import Box, as_float64, log_of
from bilip.errors import InputError, UnknownLipschitz

__all__ = [
    "ConditionalBlock",
    "DistributionBase",
    "Holder",
    "ShiftedDiagonal",
    "TransformBlock",
    "event_log_det",
    "recognise",
    "require_inverse",
]

# Of these Pyro knows the inverse only from its cache.
_ONE_WAY = ("Planar", "Radial", "Sylvester", "BlockAutoregressive", "NeuralAutoregressive", "Polynomial")


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A transform as it is; of a transformed distribution, which goes from base to data, the inverse."""
    conditional = _recognise_conditional(model, shape)
    if conditional is not None:
        return conditional
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

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self.module.object(), x, inverse=self.reverse, log_det=log_det)

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return apply_fresh(self.module.object(), z, inverse=not self.reverse, log_det=log_det)

    def reshapes(self) -> bool:
        return type(self.module.object()).forward_shape is not Transform.forward_shape

    def native(self) -> Bijection:
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
        else:
            out = transform(x)
            value = transform.log_abs_det_jacobian(x, out) if log_det else None
        like, dims = out if inverse else x, transform.domain.event_dim
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


class ShiftedDiagonal(Bijection):
    r"""$F(x) = a \odot x + b$ with constants: $\mathrm{Lip}(F) = \max |a|$, $\mathrm{Lip}(F^{-1}) = 1 / \min |a|$.

    Args:
        shift: b, a number or a tensor without a batch.
        scale: a, likewise, without zeros.

    Example:
        >>> ShiftedDiagonal(1.0, torch.tensor([2.0, 0.5])).bounds()
        BiLipschitz(forward=2, inverse=2, domain=Box(-inf, inf))
    """

    a: Tensor
    b: Tensor

    def __init__(self, shift: float | Tensor, scale: float | Tensor) -> None:
        super().__init__()
        self.register_buffer("a", as_float64(scale).detach())
        self.register_buffer("b", as_float64(shift).detach())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self._fitting(tuple(x.shape[1:]))
        return self.b.to(x) + self.a.to(x) * x

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return (z - self.b.to(z)) / self.a.to(z)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self.a.abs().log().to(x).expand(x.shape).flatten(1).sum(1)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return log_of(float(self._fitting(box.shape).abs().max()))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return math.inf if bool((self._fitting(box.shape) == 0).any()) else log_of(float((1 / self.a).abs().max()))

    def _fitting(self, shape: tuple[int, ...]) -> Tensor:
        for value in (self.a, self.b):
            if shape and (value.ndim > len(shape) or torch.broadcast_shapes(value.shape, shape) != torch.Size(shape)):
                raise UnknownLipschitz(
                    f"an affine transform with tensors of shape {tuple(value.shape)} is not one map for all samples of "
                    f"shape {shape}, so it has no bound here."
                )
        return self.a

    def interval(self, box: Box, context: Box | None = None) -> Box:
        a = self._fitting(box.shape)
        ends = torch.stack(torch.broadcast_tensors(box.low * a, box.high * a)).nan_to_num(0.0, math.inf, -math.inf)
        low, high = ends.amin(0), ends.amax(0)
        return Box.outward(low + self.b, high + self.b, _rounding(low, high, self.b))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        a = self._fitting(box.shape)
        low, high = box.low - self.b, box.high - self.b
        ends = torch.stack(torch.broadcast_tensors(low / a, high / a))
        return Box.outward(ends.amin(0), ends.amax(0), _rounding(low, high, self.b) / a.abs())


def _rounding(*values: Tensor) -> Tensor:
    return sum((1e-15 * value.abs().nan_to_num(0.0, 0.0, 0.0) for value in values), torch.zeros((), device="cpu"))  # type: ignore[return-value]


class Holder(nn.Module):
    """Registers the tensors and modules that an object and its parts hold.

    Args:
        held: A transform or a distribution of torch, plain or a module itself.

    Example:
        >>> import torch
        >>> from torch.distributions.transforms import AffineTransform
        >>> holder = Holder(AffineTransform(torch.zeros(2), torch.ones(2))).double()
        >>> holder.object().scale.dtype
        torch.float64
    """

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.__dict__["held"] = held  # a module among the held is registered below, under a plain name
        self.places: list[tuple[Any, Any, str]] = []
        self._register()

    def object(self) -> Any:
        """The object, with the tensors as they are now."""
        for owner, key, name in self.places:
            value = getattr(self, name)
            if isinstance(owner, (list, dict)):
                owner[key] = value
            else:
                owner.__dict__[key] = value
        return self.__dict__["held"]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Holder:
        self._register()  # what an object computed meanwhile, such as an inverse permutation, moves too
        super()._apply(fn, recurse)
        self.object()
        return self

    def _register(self) -> None:
        known = {(id(owner), key) for owner, key, _ in self.places}
        _visit(self.__dict__["held"], self, known, set())


def _visit(value: Any, holder: Holder, known: set[tuple[int, Any]], seen: set[int]) -> None:
    """Walk through an object and what it is made of."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module) and not any(value is part for part in holder._modules.values()):
        holder.add_module(f"module{len(holder._modules)}", value)
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _visit(part, holder, known, seen)
    elif isinstance(value, MethodType):
        _visit(value.__self__, holder, known, seen)
    elif isinstance(value, (list, tuple)):
        _visit_items(value, enumerate(value), holder, known, seen)
    elif isinstance(value, dict):
        _visit_items(value, value.items(), holder, known, seen)
    elif isinstance(value, (Transform, Distribution)) or type(value).__module__.startswith("pyro.distributions"):
        items = [(k, v) for k, v in vars(value).items() if k not in ("_parameters", "_buffers", "_modules")]
        _visit_items(value, items, holder, known, seen)


def _visit_items(owner: Any, items: Any, holder: Holder, known: set[tuple[int, Any]], seen: set[int]) -> None:
    for key, part in list(items):
        if isinstance(key, str) and key.startswith("_cached"):
            continue
        if not isinstance(part, Tensor):
            _visit(part, holder, known, seen)
        elif not isinstance(owner, tuple) and (id(owner), key) not in known:
            name = f"tensor{len(holder.places)}"
            if isinstance(part, nn.Parameter):
                holder.register_parameter(name, part)
            else:
                holder.register_buffer(name, part)
            holder.places.append((owner, key, name))


def forget(value: Any) -> None:
    """Empty the caches of a transform and its parts: a cached inverse is the input again, not an inverse.

    Example:
        >>> import torch
        >>> from torch.distributions.transforms import ExpTransform
        >>> t, x = ExpTransform(cache_size=1), torch.ones(2)
        >>> y = t(x); forget(t); t.inv(y) is x
        False
    """
    if isinstance(value, (list, tuple)):
        for part in value:
            forget(part)
    if not isinstance(value, Transform):
        return
    for key, part in list(vars(value).items()):
        if key == "_cached_x_y":
            value.__dict__[key] = (None, None)
        elif key.startswith("_cached") and isinstance(part, (Tensor, tuple)):
            value.__dict__[key] = None
        elif key != "_inv" and isinstance(part, (Transform, list, tuple)):
            forget(part)
    for part in getattr(value, "_modules", {}).values():
        forget(part)


def _recognise_conditional(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A conditional transform, or a conditional transformed distribution, which goes from base to data."""
    if is_a(model, "ConditionalTransform", "pyro"):
        return compose(list(_conditional_blocks([model], reverse=False)), shape), None, "pyro"
    if not is_a(model, "ConditionalTransformedDistribution", "pyro"):
        return None
    require_own_map(model, ("condition",), "pyro")
    blocks = list(_conditional_blocks(list(model.transforms), reverse=True))
    base = model.base_dist
    constant = is_a(base, "ConstantConditionalDistribution", "pyro")
    if constant and shape is None:
        shape = tuple(base.base_dist.batch_shape + base.base_dist.event_shape) or None
    bijection = compose(blocks, shape)
    if constant:
        return bijection, DistributionBase(base.base_dist, bijection), "pyro"
    return bijection, ConditionalBase(base, bijection) if isinstance(base, nn.Module) else None, "pyro"


def _conditional_blocks(transforms: Sequence[Any], *, reverse: bool) -> Iterator[TransformBlock | ConditionalBlock]:
    for transform in reversed(transforms) if reverse else transforms:
        if is_a(transform, "ConditionalComposeTransformModule", "pyro"):
            yield from _conditional_blocks(list(transform.transforms), reverse=reverse)
        elif is_a(transform, "ConstantConditionalTransform", "pyro"):
            yield from transform_blocks([transform.transform], reverse=reverse)
        elif is_a(transform, "_ConditionalInverseTransformModule", "pyro"):
            yield from _conditional_blocks([transform.inv], reverse=not reverse)
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
    """A base distribution that is built anew for every context; here a conditional one of Pyro."""

    def distribution(self, module: Any, context: Tensor | None) -> Any:
        """The distribution for a context."""
        return module.condition(context)

    def draw(self, module: Any, count: int, context: Tensor | None) -> Tensor:
        base = self.distribution(module, context)
        return base.sample(() if base.batch_shape else (count,))

    def density(self, module: Any, z: Tensor, context: Tensor | None) -> Tensor:
        return self.distribution(module, context).log_prob(z)
