"""MemCNN: wrappers that save memory by throwing their input away, and the couplings inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from bilip.adapters._inspect import comes_from, is_a, no_inverse
from bilip.adapters.foreign import Base, Foreign, compose
from bilip.blocks import AdditiveCoupling, Bijection, Chain, Split

__all__ = ["MemcnnBlock", "recognise"]


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A wrapper or a coupling of MemCNN."""
    if not comes_from(model, "memcnn") or not isinstance(model, nn.Module):
        return None
    if not hasattr(model, "inverse"):
        raise no_inverse(model, "this module of MemCNN defines only a forward")
    return compose([MemcnnBlock(model)], shape), None, "memcnn"


class MemcnnBlock(Foreign):
    """A module of MemCNN, called with its memory saving off: with it on, a call frees the storage of its input."""

    library = "memcnn"
    has_log_det = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, kind=type(_inner(module)).__name__)

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        with _stored(self.module):
            return self.module(x), None

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        with _stored(self.module):
            return self.module.inverse(z), None  # type: ignore[operator]

    def native(self) -> Bijection:
        inner: Any = self.module
        while type(inner).__name__ == "InvertibleModuleWrapper" and type(inner).__module__.startswith("memcnn."):
            inner = inner._fn
        if type(inner).__name__ == "AdditiveCoupling" and type(inner).__module__ == "memcnn.models.additive":
            first = AdditiveCoupling(inner.Fm, Split(dim=inner.split_dim, swap=True))
            return Chain(first, AdditiveCoupling(inner.Gm, Split(dim=inner.split_dim)))
        raise self.unproved()


def _inner(module: Any) -> nn.Module:
    return _inner(module._fn) if is_a(module, "InvertibleModuleWrapper", "memcnn") else module


@contextlib.contextmanager
def _stored(module: nn.Module) -> Iterator[None]:
    """Within this context the wrappers compute with stored activations."""
    wrappers = [part for part in module.modules() if is_a(part, "InvertibleModuleWrapper", "memcnn")]
    before = [part.disable for part in wrappers]
    try:
        for part in wrappers:
            part.disable = True  # type: ignore[assignment]
        yield
    finally:
        for part, value in zip(wrappers, before, strict=True):
            part.disable = value
