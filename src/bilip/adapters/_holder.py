"""Plain objects that hold tensors, as modules: so that `.double()`, `.to()`, `state_dict` and copies reach them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, Transform

__all__ = ["Holder", "forget"]


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
