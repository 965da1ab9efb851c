"""Kinks: where a piecewise activation has another slope on its two sides, rounding can choose the side.

A recovered activation differs from the one that was by a few roundings. Where a pre-activation is that close to a kink, its sign may
flip, and with it a term of the gradient: no drift, for either side is a gradient of the network at a point that float32 cannot tell from
the true one. `Signs` keeps the sides of the forward pass and puts the backward pass on them, so that the two are told apart.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Signs", "unseen"]

P = ParamSpec("P")
R = TypeVar("R")


class Signs:
    """On which side of its kinks every piecewise activation of every unit stood, in the order in which they were called.

    Example:
        >>> signs, x = Signs(), torch.tensor([1e-9, -1.0], requires_grad=True)
        >>> with signs.record(0):
        ...     _ = torch.relu(x)
        >>> with signs.replay(0):
        ...     torch.relu(x - 2e-9).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """

    def __init__(self) -> None:
        self.sides: dict[int, list[Tensor]] = {}

    def record(self, k: int) -> contextlib.AbstractContextManager[object]:
        """Keep the sides of what runs inside, as those of unit `k`."""
        self.sides[k] = []
        return _Recording(self.sides[k])

    def replay(self, k: int) -> contextlib.AbstractContextManager[object]:
        """What runs inside stands on the sides that unit `k` had; a call of another shape than then stands where it stands."""
        return _Replaying(list(self.sides.get(k, ())))


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose absolute values and clamps are no activations of the model: neither recorded nor replayed."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


class _Watching(TorchFunctionMode, ABC):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        find = _KINKS.get(func)
        if find is None:  # most calls, and every attribute of a tensor
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        value = args[0] if args else kwargs.get("input")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return func(*args, **kwargs)
        value = self.seen(value, find(*args[1:], **{name: v for name, v in kwargs.items() if name != "input"}))
        if args:
            args = (value, *args[1:])
        else:
            kwargs["input"] = value
        return func(*args, **kwargs)

    @abstractmethod
    def seen(self, value: Tensor, kinks: tuple[float, ...]) -> Tensor:
        """What the activation is given in place of `value`."""


class _Recording(_Watching):
    def __init__(self, into: list[Tensor]) -> None:
        super().__init__()
        self.into = into

    def seen(self, value, kinks):
        self.into.append(_side(value, kinks))
        return value


class _Replaying(_Watching):
    def __init__(self, sides: list[Tensor]) -> None:
        super().__init__()
        self.sides = sides

    def seen(self, value, kinks):
        side = self.sides.pop(0) if self.sides else None
        if side is None or side.shape != value.shape:
            return value
        return _Across.apply(value, side, kinks)


class _Across(torch.autograd.Function):
    """Where a value stands on another side than it should, it is put just beyond the kink; gradients pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, side: Tensor, kinks: tuple[float, ...]) -> Tensor:
        now, tiny = _side(value, kinks), torch.finfo(value.dtype).tiny
        result = value.clone()
        for k, kink in enumerate(kinks):
            at = torch.full_like(value, kink)
            above, below = (at + tiny, at - tiny) if kink == 0 else (at.nextafter(at + 1), at.nextafter(at - 1))
            result = torch.where((side == k + 1) & (now <= k), above, result)  # next to zero nothing subnormal
            result = torch.where((side == k) & (now > k), below, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None, None


def _side(value: Tensor, kinks: tuple[float, ...]) -> Tensor:
    """How many of the kinks lie below."""
    side = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for kink in kinks:
        side += value.detach() > kink
    return side


def _zero(*args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (0.0,)


def _between(low: float = -1.0, high: float = 1.0, *args: Any, min_val: float | None = None, **kwargs: Any):
    return (low if min_val is None else min_val, kwargs.get("max_val", high))


def _clamp(min: Any = None, max: Any = None, **kwargs: Any) -> tuple[float, ...]:
    return tuple(float(end) for end in (min, max) if isinstance(end, int | float))


def _beyond(lambd: float = 0.5, *args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (-float(lambd), float(lambd))


def _threshold(threshold: float, *args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (float(threshold),)


_KINKS: dict[Any, Callable[..., tuple[float, ...]]] = {
    **dict.fromkeys((functional.relu, functional.leaky_relu, functional.prelu, functional.selu, functional.elu), _zero),
    **dict.fromkeys((torch.relu, torch.relu_, torch.prelu, torch.selu, torch.abs), _zero),
    **dict.fromkeys((Tensor.relu, Tensor.relu_, Tensor.abs, Tensor.__abs__), _zero),
    functional.relu6: lambda *args, **kwargs: (0.0, 6.0),
    functional.hardtanh: _between,
    functional.hardsigmoid: lambda *args, **kwargs: (-3.0, 3.0),
    functional.hardswish: lambda *args, **kwargs: (-3.0, 3.0),
    functional.threshold: _threshold,
    functional.softshrink: _beyond,
    functional.hardshrink: _beyond,
    **dict.fromkeys((torch.clamp, Tensor.clamp, torch.clip, Tensor.clip), _clamp),
    **dict.fromkeys((torch.clamp_min, Tensor.clamp_min), _clamp),
    **dict.fromkeys((torch.clamp_max, Tensor.clamp_max), lambda max=None, **kwargs: _clamp(None, max)),
}
