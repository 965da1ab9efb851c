"""Small things that every room needs, once: names and halves of dtypes, rows of contexts, transforms, and flags of captured steps.

A step that is recorded as a CUDA graph may not stop to look at a number, so what goes on in it raises a `Flag`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["Flag", "capturing", "dtype_name", "half_digits", "is_transformed", "noting", "rows"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the module in front.

    Example:
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def half_digits(dtype: torch.dtype) -> float:
    """The root of machine epsilon: a relative error that leaves half of the digits of a dtype right, 3.5e-4 in float32.

    Example:
        >>> half_digits(torch.float64) == 2.0**-26
        True
    """
    return math.sqrt(torch.finfo(dtype).eps)


@overload
def rows(context: Tensor, count: int) -> Tensor: ...
@overload
def rows(context: Tensor | None, count: int) -> Tensor | None: ...
def rows(context: Tensor | None, count: int) -> Tensor | None:
    """A context for each of `count` samples; one context serves a sample that was repeated.

    Example:
        >>> rows(torch.ones(1, 3), 5).shape, rows(None, 5)
        (torch.Size([5, 3]), None)
    """
    return context if context is None or len(context) == count else context.expand(count, *context.shape[1:])


def is_transformed(x: Tensor | None = None) -> bool:
    """Whether a compiler, torch.func or forward mode is at work; with a tensor, forward mode counts only where that has a tangent.

    Example:
        >>> is_transformed()
        False
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    return forward_ad._current_level >= 0 and (x is None or forward_ad.unpack_dual(x).tangent is not None)


def capturing(x: Tensor) -> bool:
    """Whether what happens to a tensor now is recorded, to be replayed with other numbers.

    Example:
        >>> capturing(torch.zeros(2))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Flag:
    """A number on the device. Above 1, the step that raised it has to be run again without its graph.

    Args:
        owner: What raises it, and keeps counts on the host that a replay does not move.

    Example:
        >>> flag = Flag()
        >>> flag.raise_to(torch.tensor(3.0))
        >>> float(flag.on(torch.device("cpu")))
        3.0
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.value: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The number, 0 before it is raised."""
        if self.value is None or self.value.device != device:
            self.value = torch.zeros((), dtype=torch.float64, device=device)
        return self.value

    def raise_to(self, number: Tensor) -> None:
        """Raise it, unless it is higher already."""
        self.note()
        value = self.on(number.device)
        value.copy_(torch.maximum(value, number))

    def raise_unless(self, good: Tensor) -> None:
        """Raise it to infinity where something is not as it should be."""
        self.raise_to(torch.where(good, 0.0, torch.inf))

    def note(self) -> None:
        """Tell who listens that this flag has a part in the step."""
        for flags in _LISTENING:
            if all(flag is not self for flag in flags):
                flags.append(self)


_LISTENING: list[list[Flag]] = []  # for all threads: on a GPU backward passes run in one of their own


@contextlib.contextmanager
def noting(flags: list[Flag]) -> Iterator[None]:
    """Add to a list the flags that have a part in what happens inside."""
    _LISTENING.append(flags)
    try:
        yield
    finally:
        _LISTENING.remove(flags)
