"""Inverses, solutions and determinants of stacks of matrices that are right on every device.

On a CPU, torch factors the matrices of a stack in several threads at once, and after `torch.set_num_threads(n)` with n > 1 the
factors of matrices with more than about 150 rows are wrong, or never come (pytorch#142815, pytorch#141358). One matrix at a time is right,
so larger matrices on a CPU are taken one by one. On other devices a stack is one call. All else is as in `torch.linalg`:
gradients, forward mode and what is raised. `tests/test_floors.py` refuses direct calls elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["det", "inv", "inv_ex", "lu", "slogdet", "solve", "solve_ex"]

_SMALL = 32  # rows up to which a stack is one call on a CPU too: far below those that are factored in several threads

T = TypeVar("T")


def inv(a: Tensor) -> Tensor:
    """The inverse of a matrix, or of each of a stack, shape `(..., n, n)`.

    Example:
        >>> inv(torch.tensor([[2.0, 0.0], [0.0, 4.0]]).expand(3, 2, 2))[0].tolist()
        [[0.5, 0.0], [0.0, 0.25]]
    """
    return _each(torch.linalg.inv, a)


def inv_ex(a: Tensor) -> Any:
    """The `inverse` like `inv`, and `info`, which is not 0 where a matrix is singular: nothing is raised or waited for.

    Example:
        >>> inv_ex(torch.zeros(2, 2)).info.item()
        1
    """
    return _each(torch.linalg.inv_ex, a)


def solve(a: Tensor, b: Tensor) -> Tensor:
    """X with `a x = b`: matrices `(..., n, n)` and right-hand sides `(..., n, k)`, whose leading dimensions are broadcast.

    Example:
        >>> solve(torch.tensor([[2.0]]), torch.tensor([[6.0]])).item()
        3.0
    """
    return _each(torch.linalg.solve, a, b)


def solve_ex(a: Tensor, b: Tensor) -> Any:
    """The `result` like `solve`, and `info`, which is not 0 where a matrix is singular: nothing is raised or waited for.

    Example:
        >>> solve_ex(torch.tensor([[2.0]]), torch.tensor([[6.0]])).result.item()
        3.0
    """
    return _each(torch.linalg.solve_ex, a, b)


def lu(a: Tensor) -> Any:
    """`P`, `L` and `U` with `a = P L U`, of a matrix or of each of a stack.

    Example:
        >>> lu(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).U.tolist()
        [[1.0, 0.0], [0.0, 2.0]]
    """
    return _each(torch.linalg.lu, a)


def slogdet(a: Tensor) -> Any:
    """The `sign` of the determinant of a matrix, or of each of a stack, and `logabsdet`, the log of its size.

    Example:
        >>> slogdet(-torch.eye(3)).sign.item()
        -1.0
    """
    return _each(torch.linalg.slogdet, a)


def det(a: Tensor) -> Tensor:
    """The determinant of a matrix, or of each of a stack.

    Example:
        >>> det(2 * torch.eye(3)).item()
        8.0
    """
    return _each(torch.linalg.det, a)


def _each(function: Callable[..., T], a: Tensor, *others: Tensor) -> T:
    """A function of a stack of matrices, one by one where one call would be wrong."""
    if a.device.type != "cpu" or a.shape[-1] <= _SMALL or math.prod(a.shape[:-2]) <= 1:
        return function(a, *others)
    batch = torch.broadcast_shapes(a.shape[:-2], *(other.shape[:-2] for other in others))
    stacks = [stack.expand(*batch, *stack.shape[-2:]).flatten(0, -3) for stack in (a, *others)]
    found: list[Any] = [function(*matrices) for matrices in zip(*stacks, strict=True)]

    def joined(values: Any) -> Tensor:
        return torch.stack(list(values)).unflatten(0, batch)

    if isinstance(found[0], Tensor):
        return joined(found)  # type: ignore[return-value]
    return type(found[0])(joined(values) for values in zip(*found, strict=True))
