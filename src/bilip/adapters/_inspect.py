"""Reading foreign objects without importing their library: where a class comes from, what a callable takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from bilip.errors import InputError
from bilip.nets.readable import HARMLESS, changed, tampered

__all__ = [
    "CONTEXT_NAMES",
    "call",
    "comes_from",
    "context_name",
    "is_a",
    "is_unchanged",
    "join_parts",
    "no_inverse",
    "patched_class",
    "require_own_map",
    "split_parts",
]

CONTEXT_NAMES = ("context", "conditional", "conditions", "condition", "cond", "c", "ctx", "y", "label", "labels")


def comes_from(model: object, *roots: str) -> bool:
    """Whether a class among the ancestors of `model` is defined in one of these packages."""
    return any(kind.__module__.split(".")[0] in roots for kind in type(model).__mro__)


def is_a(model: object, name: str, *roots: str) -> bool:
    """Whether `model` is an instance of a class of this name from one of these packages."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] in roots for kind in type(model).__mro__)


def is_unchanged(model: object, *roots: str) -> bool:
    """Whether `model` computes what its class from one of these packages does, so that it may be taken apart."""
    order = type(model).__mro__
    own = next((k for k, kind in enumerate(order) if kind.__module__.split(".")[0] in roots), len(order))
    return tampered(model) is None and changed(type(model), own) is None


def patched_class(made: type, *roots: str) -> str | None:
    """A method of a class, or an ancestor, from these packages that was not written there, as the rest of a sentence; `None` if
    there is none.
    """
    for kind in made.__mro__:
        if kind.__module__.split(".")[0] not in roots or kind is nn.Module:  # which `tampered` looks at
            continue
        for name, value in vars(kind).items():
            # of a method of the class, of a property
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and name not in HARMLESS:
                home = str(function.__globals__.get("__name__")).split(".")[0]
                if home not in (*roots, *_DECORATORS):  # libraries add to the classes of torch
                    return f"has the method {name} of its class {kind.__name__} replaced"
    return None


def require_own_map(model: object, names: Sequence[str], *roots: str) -> None:
    """Raise where a flow overrides what its library's class computes: its layers alone are then another model.

    Args:
        model: The flow.
        names: The methods that are the flow, as its users call it.
        roots: The library.
    """
    changes = [name for name in names if name in getattr(model, "__dict__", ())]
    for kind in type(model).__mro__:
        if kind.__module__.split(".")[0] in roots:
            break
        changes += [name for name in names if name in vars(kind)]
    if changes:
        raise InputError(
            f"{type(model).__name__} defines its own {changes[0]}, which the layers of {roots[0]} alone do not give, so bilip would "
            "judge another model. Make what it adds a layer of the flow, or pass the whole map with "
            "as_bijection(forward, inverse=..., log_det=...)."
        )


_DECORATORS = ("torch", "functools", "contextlib", "abc", "dataclasses", "typing")


def context_name(function: Callable[..., Any]) -> str | None:
    """The argument through which a callable takes a context, `None` where it takes none.

    That is an argument after the first with a usual name, or a second one that has no default.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    first = next((p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    for name in CONTEXT_NAMES:
        if any(p.name == name and p is not first for p in named):
            return name
    rest = [p for p in named if p is not first and p.kind is p.POSITIONAL_OR_KEYWORD]
    return rest[0].name if rest and rest[0].default is rest[0].empty else None


def call(function: Callable[..., Any], x: Any, context: Tensor | None, name: str | None) -> Any:
    """Call with the context under its name, where there is one and the callable takes it."""
    return function(x) if name is None or context is None else function(x, **{name: context})


def no_inverse(model: object, why: str) -> InputError:
    """The one line about a class without a usable inverse."""
    return InputError(
        f"{type(model).__name__} has no inverse: {why}. bilip measures inverses; give one with "
        "as_bijection(model, inverse=...)."
    )


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Several tensors as one of shape `(batch, size)`."""
    return torch.cat([part.flatten(1) for part in parts], 1)


def split_parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Undo `join_parts`."""
    sizes = [math.prod(shape) for shape in shapes]
    if flat.ndim != 2 or flat.shape[1] != sum(sizes):
        raise InputError(
            f"expected one flat tensor of shape (batch, {sum(sizes)}) for the parts {[tuple(s) for s in shapes]}, "
            f"got {tuple(flat.shape)}."
        )
    return [part.reshape(len(flat), *shape) for part, shape in zip(flat.split(sizes, 1), shapes, strict=True)]
