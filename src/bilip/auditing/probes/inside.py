"""Inside a composite of another library: the parts that it calls in both directions, and how the error grows from one to the next."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from bilip.auditing.round_trip import norms

__all__ = ["InnerPart", "inner_parts"]


@dataclass(frozen=True)
class InnerPart:
    """One part of a composite, seen on the way there and back.

    Attributes:
        name: Its path inside the composite.
        kind: Its class.
        stored: What it was given on the way there, flat, `(batch, entries)`.
        carried: What it gave back on the way back, likewise.
        after: What it gave on the way there.
        arrived: What reached it on the way back.
    """

    name: str
    kind: str
    stored: Tensor
    carried: Tensor
    after: Tensor
    arrived: Tensor

    @property
    def gain(self) -> Tensor:
        """How much the error grew from its output to its input, for each sample."""
        return norms(self.carried - self.stored) / norms(self.arrived - self.after)


@dataclass
class _Calls:
    """Inputs and outputs of each call of a part, in order, and its class."""

    kind: str = ""
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def inner_parts(module: nn.Module, there: Callable[[], Any], back: Callable[[Any], Any], batch: int) -> list[InnerPart]:
    """The innermost parts of a module that are called both on the way there and on the way back, in the order of the way there.

    Parts are told by having two directions: a method `inverse` beside `forward`, or an argument `rev`; or they are the innermost ones of a
    `torch.distributions` transform that the module holds, or that it builds when it is called, as modules of zuko and Pyro do. Their
    calls are watched, in both directions; nothing else about the module is changed, and the watching is undone.

    Args:
        module: The composite.
        there: Runs it from data to latents.
        back: Runs it back from what `there` returned.
        batch: Number of samples.

    Example:
        >>> class Twice(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        ...     def inverse(self, z):
        ...         return z / 2
        >>> class Both(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = Twice(), Twice()
        >>> both, x = Both(), torch.ones(3, 2)
        >>> found = inner_parts(both, lambda: both.second(both.first(x)), lambda z: both.first.inverse(both.second.inverse(z)), 3)
        >>> [(part.name, part.kind) for part in found]
        [('first', 'Twice'), ('second', 'Twice')]
    """
    with _watched(module, batch) as first:
        z = there()
    with _watched(module, batch) as second:
        back(z)
    found = []
    for name in first:
        ways = zip(first[name].seen, reversed(second.get(name, _Calls()).seen), strict=False)
        for (before, after), (arrived, carried) in ways:
            if before.shape == carried.shape and after.shape == arrived.shape:
                found.append(InnerPart(name, first[name].kind, before, carried, after, arrived))
    return found


def _two_way(part: nn.Module) -> bool:
    if type(part).__module__.startswith("torch."):
        return False
    if callable(getattr(part, "inverse", None)):
        return True
    try:
        return "rev" in inspect.signature(part.forward).parameters
    except (TypeError, ValueError):
        return False


def _transforms(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Transform]]:
    """The innermost transforms that a transform or a list is made of, with their paths."""
    if isinstance(value, Transform) and id(value) not in seen:
        seen.add(id(value))
        # the attribute _inv of a transform is its inverse, which holds the transform; that of the inverse is what it inverts
        held = {k: v for k, v in vars(value).items() if k != "_inv" or type(value).__name__ == "_InverseTransform"}
        held |= getattr(value, "_modules", {})
        inner = [found for name, part in held.items() for found in _transforms(part, f"{path}.{name}", seen)]
        yield from inner or [(path.strip("."), value)]
    elif isinstance(value, (list, tuple, nn.ModuleList)):
        for k, part in enumerate(value):
            yield from _transforms(part, f"{path}.{k}", seen)


@contextlib.contextmanager
def _watched(module: nn.Module, batch: int) -> Iterator[dict[str, _Calls]]:
    """Within this context every call of a part is kept, by the name of the part in the order of the first calls."""
    calls: dict[str, _Calls] = {}
    undo: list[tuple[Any, str]] = []

    def replaced(part: Any, method: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(part, method, None)
        if callable(original) and method not in vars(part):
            setattr(part, method, by(original))
            undo.append((part, method))

    def kept(name: str, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def by(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                given = _flat(args[:1], batch)
                result = original(*args, **options)
                outcome = result[0] if isinstance(result, tuple) and result else result
                got = _flat(outcome, batch)
                if given is not None and got is not None:
                    calls.setdefault(name, _Calls(kind)).seen.append((given, got))
                return result

            return call

        return by

    def entered(held: Any, path: str) -> None:
        for name, part in _transforms(held, path, set()):
            for method in ("_call", "_inverse"):
                replaced(part, method, kept(name, type(part).__name__))

    def built(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def by(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                result = original(*args, **options)
                if isinstance(result, Transform):
                    entered(result, path)
                return result

            return call

        return by

    parts = {name: part for name, part in module.named_modules() if name and _two_way(part)}
    parts = {name: part for name, part in parts.items() if not any(n.startswith(f"{name}.") for n in parts)}
    try:
        for name, part in parts.items():
            for method in ("forward", "inverse"):
                replaced(part, method, kept(name, type(part).__name__))
        entered(vars(module).get("held"), "")
        replaced(module, "forward", built(""))
        replaced(module, "condition", built(""))
        yield calls
    finally:
        for part, method in reversed(undo):
            delattr(part, method)


def _flat(value: Any, batch: int) -> Tensor | None:
    """All tensors of a value side by side, `(batch, entries)`, float64; `None` if there is none with so many rows."""
    if isinstance(value, Tensor):
        return value.detach().reshape(batch, -1).double() if value.ndim and len(value) == batch else None
    if isinstance(value, (list, tuple)):
        found = [f for f in (_flat(v, batch) for v in value) if f is not None]
        return torch.cat(found, 1) if found else None
    return None
