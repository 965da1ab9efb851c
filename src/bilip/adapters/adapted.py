"""Whatever model a user has, as a bijection from data to latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from bilip.adapters import freia, generic, memcnn, nflows, normflows, torch_distributions, zuko
from bilip.adapters._inspect import comes_from, is_unchanged, require_own_map
from bilip.adapters.foreign import Base, FlowBase, compose
from bilip.blocks import Bijection, Chain, Flow
from bilip.errors import InputError

__all__ = ["Adapted", "adapt", "as_bijection"]


@dataclass(frozen=True)
class Adapted:
    """A model as bilip sees it.

    Attributes:
        bijection: The map from data to latents; a `Chain` of `Foreign` blocks where the blocks are visible.
        base: The distribution of the latents, where the model has one.
        library: Where the model comes from, for example `"bilip"`, `"nflows"`, `"FrEIA"` or `"generic"`.

    Example:
        >>> from bilip import Flow
        >>> from bilip.models import real_nvp
        >>> model = adapt(Flow(real_nvp(2)))
        >>> model.library, model.base.sample(3).shape
        ('bilip', torch.Size([3, 2]))
    """

    bijection: Bijection
    base: Base | None
    library: str


def as_bijection(
    model: Any,
    *,
    shape: Sequence[int] | None = None,
    inverse: Callable[..., Any] | None = None,
    log_det: Callable[..., Any] | None = None,
    inverse_log_det: Callable[..., Any] | None = None,
) -> Bijection:
    """The map from data to latents of any model; see `adapt`.

    Example:
        >>> import torch
        >>> from torch.distributions import Normal, TransformedDistribution
        >>> from torch.distributions.transforms import AffineTransform, ExpTransform
        >>> base = Normal(torch.zeros(2), torch.ones(2))
        >>> model = TransformedDistribution(base, [AffineTransform(1.0, 2.0), ExpTransform()])
        >>> [block.kind for block in as_bijection(model)]
        ['ExpTransform', 'AffineTransform']
    """
    return adapt(model, shape=shape, inverse=inverse, log_det=log_det, inverse_log_det=inverse_log_det).bijection


def adapt(
    model: Any,
    *,
    shape: Sequence[int] | None = None,
    inverse: Callable[..., Any] | None = None,
    log_det: Callable[..., Any] | None = None,
    inverse_log_det: Callable[..., Any] | None = None,
) -> Adapted:
    """A model of any supported library as a bijection from data to latents, with its base.

    Args:
        model: A model of bilip, FrEIA, nflows, glasflow, sbi, normflows, zuko, torch.distributions, Pyro or MemCNN; a module
            with an `inverse` method, or whose forward takes `reverse=True` (or `rev`, `inverse`); a `Sequential` of such; a pair
            `(forward, inverse)` of callables; or, with `inverse=`, any callable.
        shape: Shape of one sample, where the model does not know it.
        inverse: The inverse of a model that has none of its own.
        log_det: log |det J_F| as a function of x, for a model that does not return it.
        inverse_log_det: log |det J_F^-1| as a function of z, likewise.

    Raises:
        InputError: The model is not recognised, or has no inverse.

    Example:
        >>> import torch
        >>> model = adapt(lambda x: 2 * x, inverse=lambda z: z / 2)
        >>> model.bijection.inverse(torch.ones(1, 2)), model.base, model.library
        (tensor([[0.5000, 0.5000]]), None, 'generic')
    """
    if inverse is not None or log_det is not None or inverse_log_det is not None:
        return Adapted(_with_callables(model, inverse, log_det, inverse_log_det, shape), None, "generic")
    model = _unwrapped(model)
    if comes_from(model, "sbi"):
        return _sbi(model, shape)
    for recognise in _RECOGNISERS:
        found = recognise(model, shape)
        if found is not None:
            return Adapted(*found)
    if isinstance(model, nn.Sequential) and len(model):
        if not is_unchanged(model, "torch"):
            raise InputError(
                f"as_bijection: {type(model).__name__} is a Sequential with hooks or overridden methods, so it is more than its "
                "parts and they do not give its inverse. Pass one with as_bijection(model, inverse=...)."
            )
        parts = [adapt(part) for part in model]
        libraries = {part.library for part in parts}
        library = libraries.pop() if len(libraries) == 1 else "generic"
        return Adapted(compose([part.bijection for part in parts], shape), None, library)
    raise _not_recognised(model)


def _unwrapped(model: Any) -> Any:
    """The model inside torch.compile and the wrappers of data-parallel training."""
    if isinstance(model, nn.DataParallel) or type(model).__name__ == "DistributedDataParallel":
        return _unwrapped(model.module)
    return _unwrapped(model._orig_mod) if type(model).__name__ == "OptimizedModule" else model


def _with_callables(
    model: Any,
    inverse: Callable[..., Any] | None,
    log_det: Callable[..., Any] | None,
    inverse_log_det: Callable[..., Any] | None,
    shape: Sequence[int] | None,
) -> Bijection:
    if inverse is None:
        inverse = getattr(model, "inverse", None)
    if isinstance(model, tuple) and len(model) == 2:
        model, inverse = model
    if not callable(model) or not callable(inverse):
        raise InputError(f"as_bijection: {type(model).__name__} has no inverse to go with log_det=; pass inverse= too.")
    kind = type(model).__name__ if isinstance(model, nn.Module) else None
    return generic.from_callables(
        model, inverse, log_det=log_det, inverse_log_det=inverse_log_det, shape=shape, kind=kind
    )


def _sbi(model: Any, shape: Sequence[int] | None) -> Adapted:
    """An estimator of sbi holds a flow of nflows or zuko as `.net`; of zuko's the embedding net lies beside it."""
    net = getattr(model, "net", None)
    if net is None and hasattr(model, "posterior_estimator"):
        return _sbi(model.posterior_estimator, shape)
    embedding = getattr(model, "embedding_net", None)
    if isinstance(embedding, nn.Module) and not isinstance(embedding, nn.Identity):
        found = zuko.recognise_embedded(net, shape, embedding)
        if found is not None:
            return Adapted(found[0], found[1], "sbi")
    if net is None:
        raise _not_recognised(model)
    inner = adapt(net, shape=shape)
    return Adapted(inner.bijection, inner.base, "sbi")


def _not_recognised(model: Any) -> InputError:
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if isinstance(model, nn.Module) or callable(model):
        return InputError(
            f"{type(model).__name__} has no inverse that bilip knows of ({kind}). Pass one with as_bijection(model, "
            "inverse=...), or give the module a method inverse(z), or its forward an argument reverse=False."
        )
    return InputError(
        f"as_bijection: {kind} is not a model. Expected a bilip.Bijection or Flow, a model of FrEIA, nflows, normflows, "
        "zuko, torch.distributions, Pyro or MemCNN, a module with an inverse method, or two callables: "
        "as_bijection(forward, inverse=...)."
    )


def _own(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A bijection as it is, the map and base of a flow, the trunk of a classifier."""
    base = None
    if isinstance(model, Flow):
        require_own_map(model, ("log_prob", "sample"), "bilip")
        model, base = model.bijection, getattr(model, "adapted_base", None) or FlowBase(model)
    elif not isinstance(model, Bijection):
        model = getattr(model, "trunk", None)
    if not isinstance(model, Bijection):
        return None
    if shape is not None and model.shape is None:  # told apart, so that the model itself is not changed
        model = Chain(*model if isinstance(model, Chain) else (model,), shape=shape)
    return model, base, "bilip"


_RECOGNISERS: tuple[Callable[[Any, Sequence[int] | None], tuple[Bijection, Base | None, str] | None], ...] = (
    _own,
    nflows.recognise,
    freia.recognise,
    normflows.recognise,
    zuko.recognise,
    torch_distributions.recognise,
    memcnn.recognise,
    generic.recognise,
)
