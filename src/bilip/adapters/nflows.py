"""nflows and its relatives (glasflow, enflows, flowcon), which share its interface; sbi estimators built on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.adapters._inspect import comes_from, is_a, is_unchanged, no_inverse, require_own_map
from bilip.adapters.foreign import Base, Foreign, ForeignBase, compose, embedded
from bilip.blocks import AdditiveCoupling, AffineCoupling, Bijection, Indices, Permutation, SigmoidScale
from bilip.bounds import log_of, log_product, log_sum
from bilip.errors import UnknownLipschitz
from bilip.nets import Declared, log_lipschitz
from bilip.nets.readable import tampered

__all__ = ["FAMILY", "NflowsBase", "NflowsBlock", "recognise"]

FAMILY = ("nflows", "glasflow", "enflows", "flowcon")
# What a flow is to its users.
_MAPS = ("log_prob", "_log_prob", "sample", "_sample", "sample_and_log_prob", "transform_to_noise")
_RESHAPING = ("SqueezeTransform", "MultiscaleCompositeTransform", "ReshapeTransform")


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A flow (map, base and embedding net) or a transform; forward goes from data to latents."""
    if not comes_from(model, *FAMILY):
        return None
    library = next(root for root in FAMILY if comes_from(model, root))
    if hasattr(model, "_transform") and hasattr(model, "_distribution"):
        require_own_map(model, _MAPS, *FAMILY)
        embedding = getattr(model, "_embedding_net", None)
        embedding = None if isinstance(embedding, nn.Identity) else embedding
        blocks = list(_blocks(model._transform, embedding, library))
        if shape is None and not any(block.reshapes() for block in blocks):
            shape = getattr(model._distribution, "_shape", None)
        bijection = compose(blocks, shape)
        return bijection, NflowsBase(model._distribution, bijection, embedding), library
    if is_a(model, "Transform", *FAMILY):
        return compose(list(_blocks(model, None, library)), shape), None, library
    return None


def _blocks(transform: nn.Module, embedding: nn.Module | None, library: str) -> Iterator[NflowsBlock]:
    if type(transform).forward.__qualname__ == "CompositeTransform.forward" and is_unchanged(transform, *FAMILY):
        for part in transform._transforms:  # type: ignore[union-attr]
            yield from _blocks(part, embedding, library)  # type: ignore[arg-type]
    else:
        method: Any = getattr(type(transform), "inverse", None)
        if method is None or method.__qualname__ == "Transform.inverse":
            raise no_inverse(transform, f"the transform of {library} defines only the forward direction")
        yield NflowsBlock(transform, embedding, library)


class NflowsBlock(Foreign):
    """One transform of nflows: `forward(x, context)` and `inverse(z, context)`, each with its log-determinant.

    Args:
        module: The transform.
        embedding: The net that the flow applies to contexts, shared by its blocks.
        library: The member of the family.
    """

    def __init__(self, module: nn.Module, embedding: nn.Module | None = None, library: str = "nflows") -> None:
        super().__init__(module)
        self.embedding, self.library = embedding, library

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return self.module(x, context=embedded(self.embedding, context))

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        return self.module.inverse(z, context=embedded(self.embedding, context))  # type: ignore[operator]

    def reshapes(self) -> bool:
        return any(kind.__name__ in _RESHAPING for kind in type(self.module).__mro__)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NflowsBlock:
        super()._apply(fn, recurse)
        for part in self.module.modules():  # linear transforms may keep a weight of the old dtype
            if hasattr(getattr(part, "cache", None), "invalidate"):
                part.cache.invalidate()  # type: ignore[union-attr, operator]
        return self

    def context_shape(self) -> tuple[int, ...] | None:
        width = int(getattr(getattr(self.module, "transform_net", None), "context", 0) or 0)
        return (width,) if width else None

    def native(self) -> Bijection:
        module: Any = self.module
        if type(module).__module__.endswith("nflows.transforms.permutations"):
            return Permutation(module._permutation, dim=module._dim)
        if self.embedding is None and type(module).__module__.endswith("nflows.transforms.coupling"):
            if module.unconditional_transform is not None:
                raise self.unproved("the passive half has a transform of its own")
            kept, moved = module.identity_features.tolist(), module.transform_features.tolist()
            partition = Indices(kept, moved, total=module.features)
            if self.kind == "AdditiveCouplingTransform":
                return AdditiveCoupling(certified(module.transform_net), partition)
            if self.kind == "AffineCouplingTransform" and _default_scale(module):
                scale = SigmoidScale(0.001, 1.001, 2.0)
                return AffineCoupling(certified(module.transform_net), scale=scale, partition=partition)
        raise self.unproved()


def _default_scale(module: Any) -> bool:
    """Whether the scale is sigmoid(u + 2) + 0.001; relatives let the user choose it."""
    chosen = getattr(module, "scale_activation", None)
    return chosen is None or chosen is getattr(type(module), "DEFAULT_SCALE_ACTIVATION", None)


class NflowsBase(ForeignBase):
    """A distribution of nflows, which may look at the embedded context."""

    def _given(self, context: Tensor | None) -> dict[str, Any]:
        # Distributions without a context of their own would only repeat the draw.
        if context is None or is_a(self.module, "StandardNormal", *FAMILY):
            return {}
        return {"context": embedded(self.embedding, context)}

    def draw(self, module: Any, count: int, context: Tensor | None) -> Tensor:
        given = self._given(context)
        return module.sample(1, **given)[:, 0] if given else module.sample(count)

    def density(self, module: Any, z: Tensor, context: Tensor | None) -> Tensor:
        return module.log_prob(z, **self._given(context))


_ONE = (F.relu, torch.relu, F.elu, F.leaky_relu, F.softplus, torch.tanh, F.tanh, torch.sin)


def certified(net: nn.Module) -> nn.Module:
    r"""The net with a Lipschitz constant that is proved from its layers.

    For `ResidualNet` of nflows the constant is $\|W_{in}\| \prod_k (1 + \|W_{k,2}\| \, \|W_{k,1}\|) \, \|W_{out}\|$;
    other nets come back as they are.

    Args:
        net: The net of a coupling.

    Raises:
        UnknownLipschitz: A residual net with batch normalisation, active dropout, a context or an unknown activation.
    """
    if not (type(net).__name__ == "ResidualNet" and type(net).__module__.endswith("nflows.nn.nets.resnet")):
        return net
    known: Any = net
    log = log_product(log_lipschitz(known.initial_layer), log_lipschitz(known.final_layer))
    for block in known.blocks:
        log = log_product(log, _block(block))
    if log > 700:
        raise UnknownLipschitz(f"{type(net).__name__}: its constant is too large for a number (e^{log:.0f}).")
    # In a container, which hands on no context: there is none, though the net has an argument for it.
    return nn.Sequential(Declared(net, lipschitz=math.exp(log) * (1 + 1e-12)))


def _block(block: Any) -> float:
    """Log of the Lipschitz constant of x + W2 act(W1 act(x))."""
    why = None
    kind = type(block)
    if kind.__name__ != "ResidualBlock" or not kind.__module__.endswith("nflows.nn.nets.resnet"):
        why = f"a block of the class {kind.__module__}.{kind.__qualname__}"
    elif block.use_batch_norm:
        why = "batch normalisation"
    elif block.dropout.p and block.dropout.training:
        why = "dropout in training mode: call .eval()"
    elif hasattr(block, "context_layer"):
        why = "a context that gates its layers"
    elif not any(block.activation is known for known in _ONE):
        why = f"the activation {getattr(block.activation, '__name__', block.activation)}"
    elif any(tampered(part) is not None for part in block.modules()):
        why = "hooks or replaced methods"
    if why is not None:
        raise UnknownLipschitz(
            f"the ResidualNet of a coupling holds {why}, so its Lipschitz constant cannot be proved."
        )
    first, second = block.linear_layers
    return log_sum(log_of(1.0), log_product(log_lipschitz(first), log_lipschitz(second)))
