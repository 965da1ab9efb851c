"""zuko's lazy flows and transforms, built anew from their parameters at every call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from bilip.adapters._inspect import is_a, is_unchanged, require_own_map
from bilip.adapters._proofs import Joint, SoftclipExpScale, rearranged
from bilip.adapters.foreign import Base, Foreign, compose, embedded
from bilip.adapters.torch_distributions import ConditionalBase, event_log_det, require_inverse
from bilip.blocks import AffineCoupling, Bijection, Indices, Invert, Permutation
from bilip.errors import InputError
from bilip.nets.certify import flatten

__all__ = ["ZukoBase", "ZukoBlock", "recognise"]


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A lazy flow with its base, or a lazy transform; both go from data to latents."""
    return recognise_embedded(model, shape, None)


def recognise_embedded(
    model: Any, shape: Sequence[int] | None, embedding: nn.Module | None
) -> tuple[Bijection, Base | None, str] | None:
    """A lazy flow or transform, as in `recognise`, with a net that is applied to contexts first."""
    if is_a(model, "LazyTransform", "zuko"):
        return compose(list(_blocks(model, embedding)), shape), None, "zuko"
    if is_a(model, "NormalizingFlow", "zuko"):
        raise InputError(
            "a NormalizingFlow of zuko is a flow already built for one context, so parameters and copies do not reach it. "
            "Pass the lazy flow that built it, as_bijection(flow), and c as the context."
        )
    if not is_a(model, "LazyDistribution", "zuko"):
        return None
    if not hasattr(model, "transform") or not hasattr(model, "base"):
        raise InputError(
            f"{type(model).__name__} of zuko is a distribution without a transform, so there is no inverse."
        )
    require_own_map(model, ("forward",), "zuko")
    blocks = list(_blocks(model.transform, embedding))
    bijection = compose(blocks, _features(model) if shape is None else shape)
    return bijection, ZukoBase(model.base, bijection, embedding), "zuko"


def _features(flow: Any) -> tuple[int, ...] | None:
    """Shape of one sample, where the base has a fixed one."""
    if not is_a(flow.base, "UnconditionalDistribution", "zuko"):
        return None
    base = flow.base()
    return tuple(base.batch_shape + base.event_shape) or None


def _blocks(transform: Any, embedding: nn.Module | None, *, reverse: bool = False) -> Iterator[ZukoBlock]:
    whole = is_unchanged(transform, "zuko")
    if whole and is_a(transform, "LazyComposedTransform", "zuko"):
        for part in reversed(transform.transforms) if reverse else transform.transforms:
            yield from _blocks(part, embedding, reverse=reverse)
    elif whole and is_a(transform, "LazyInverse", "zuko"):
        yield from _blocks(transform.transform, embedding, reverse=not reverse)
    else:
        yield ZukoBlock(transform, embedding, reverse=reverse)


class ZukoBlock(Foreign):
    """One lazy transform of zuko.

    Args:
        module: The lazy transform.
        embedding: A net applied to contexts first, shared by the blocks.
        reverse: Whether F is its inverse.
    """

    library = "zuko"

    def __init__(self, module: nn.Module, embedding: nn.Module | None = None, *, reverse: bool = False) -> None:
        kind = type(module).__name__
        if kind == "UnconditionalTransform":
            kind = getattr(getattr(module, "f", None), "__name__", kind)
        super().__init__(module, kind=kind)
        self.embedding, self.reverse = embedding, reverse
        self.stochastic_log_det = getattr(module, "exact", True) is False

    def _build(self, context: Tensor | None) -> Any:
        transform = self.module(embedded(self.embedding, context))
        require_inverse(transform)
        return transform

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        transform = self._build(context)
        return _apply(transform.inv if self.reverse else transform, x, log_det)

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        transform = self._build(context)
        return _apply(transform if self.reverse else transform.inv, z, log_det)

    def context_shape(self) -> tuple[int, ...] | None:
        module: Any = self.module
        width = module.hyper[0].weight.shape[-1] - int(module.mask.sum()) if _is_affine_coupling(module) else 0
        return (width,) if width else None

    def helpers(self) -> tuple[object, ...]:
        univariate = getattr(self.module, "univariate", None)
        return (univariate,) if isinstance(univariate, type) else ()

    def native(self) -> Bijection:
        module: Any = self.module
        if self.kind == "PermutationTransform" and type(module()).__module__ == "zuko.transforms":
            block: Bijection = Permutation(module().order.detach(), dim=-1)
        elif self.embedding is None and _is_affine_coupling(module):
            kept, moved = module.mask.nonzero()[:, 0], (~module.mask).nonzero()[:, 0]
            partition = Indices(kept.tolist(), moved.tolist(), total=len(module.mask), dim=-1)
            net, width = rearranged(_plain(module.hyper), interleaved=True), self.context_shape()
            net = net if width is None else Joint(net, width[0])
            block = AffineCoupling(net, scale=SoftclipExpScale(-math.log(1e-3)), partition=partition)
        else:
            raise self.unproved()
        return Invert(block) if self.reverse else block


def _plain(net: nn.Module) -> nn.Module:
    """Zuko's MLP with its linear layers as those of torch, on the same parameters."""
    layers = []
    for layer in flatten(net):
        if type(layer).__name__ == "Linear" and type(layer).__module__ == "zuko.nn" and layer.weight.ndim == 2:  # type: ignore[union-attr]
            plain = nn.Linear(1, 1, device="meta")
            plain.weight, plain.bias = layer.weight, layer.bias  # type: ignore[assignment]
            layer = plain
        layers.append(layer)
    return nn.Sequential(*layers)


def _is_affine_coupling(module: Any) -> bool:
    return (
        type(module).__name__ == "GeneralCouplingTransform"
        and type(module).__module__ == "zuko.flows.coupling"
        and getattr(module.univariate, "__name__", "") == "MonotonicAffineTransform"
        and getattr(module.univariate, "__module__", "") == "zuko.transforms"
    )


def _apply(transform: Any, x: Tensor, log_det: bool) -> tuple[Tensor, Any]:
    if not log_det:
        return transform(x), None
    z, value = transform.call_and_ladj(x)
    return z, event_log_det(value, x, transform.domain.event_dim)


class ZukoBase(ConditionalBase):
    """The lazy base distribution of a zuko flow."""

    def distribution(self, module: Any, context: Tensor | None) -> Any:
        return module(embedded(self.embedding, context))
