"""Inside a composite of another library: the parts that it calls in both directions, and how the error grows from one to the next."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    """Inputs and outputs of each call of a module, in order."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def inner_parts(module: nn.Module, there: Callable[[], Any], back: Callable[[Any], Any], batch: int) -> list[InnerPart]:
    """The innermost parts of a module that are called both on the way there and on the way back, in the order of the way there.

    Parts are told by having two directions: a method `inverse` beside `forward`, or an argument `rev`. Their calls are watched, in both
    directions; nothing else about the module is changed, and the watching is undone.

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
    parts = {name: part for name, part in module.named_modules() if name and _two_way(part)}
    parts = {name: part for name, part in parts.items() if not any(n.startswith(f"{name}.") for n in parts)}
    with _watched(parts, batch) as first:
        z = there()
    with _watched(parts, batch) as second:
        back(z)
    found = []
    for name in first:
        ways = zip(first[name].seen, reversed(second.get(name, _Calls()).seen), strict=False)
        for (before, after), (arrived, carried) in ways:
            if before.shape == carried.shape and after.shape == arrived.shape:
                found.append(InnerPart(name, type(parts[name]).__name__, before, carried, after, arrived))
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


@contextlib.contextmanager
def _watched(parts: dict[str, nn.Module], batch: int) -> Iterator[dict[str, _Calls]]:
    """Within this context every call of a part is kept, by the name of the part in the order of the first calls."""
    calls: dict[str, _Calls] = {}
    undo: list[tuple[nn.Module, str]] = []

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            given = _flat(args[:1], batch)
            result = original(*args, **options)
            outcome = result[0] if isinstance(result, tuple) and result else result
            got = _flat(outcome, batch)
            if given is not None and got is not None:
                calls.setdefault(name, _Calls()).seen.append((given, got))
            return result

        return call

    try:
        for name, part in parts.items():
            for method in ("forward", "inverse"):
                original = getattr(part, method, None)
                if callable(original) and method not in vars(part):
                    setattr(part, method, watch(name, original))
                    undo.append((part, method))
        yield calls
    finally:
        for part, method in undo:
            delattr(part, method)


def _flat(value: Any, batch: int) -> Tensor | None:
    """All tensors of a value side by side, `(batch, entries)`, float64; `None` if there is none with so many rows."""
    if isinstance(value, Tensor):
        return value.detach().reshape(batch, -1).double() if value.ndim and len(value) == batch else None
    if isinstance(value, (list, tuple)):
        found = [f for f in (_flat(v, batch) for v in value) if f is not None]
        return torch.cat(found, 1) if found else None
    return None
