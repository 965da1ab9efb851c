"""A function that uses modules, as a module: a lambda over a model is moved, converted and copied with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["Function"]


class Function(nn.Module):
    """Registers the modules that a callable uses: it may be one, a method or partial of one, or a function that names some.

    Args:
        function: The callable.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> double = copy.deepcopy(Function(lambda x: layer(x) + 1)).double()
        >>> double(torch.zeros(1, 2, dtype=torch.float64)).dtype, layer.weight.dtype
        (torch.float64, torch.float32)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, module in _modules(function).items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["function"](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        parts = {name: copy.deepcopy(module, memo) for name, module in _modules(self.__dict__["function"]).items()}
        new = Function(_rebuilt(self.__dict__["function"], parts, memo))
        new.train(self.training)
        memo[id(self)] = new
        return new

    def _get_name(self) -> str:
        return f"Function[{getattr(self.__dict__['function'], '__qualname__', type(self.function).__name__)}]"


def _modules(function: Any) -> dict[str, nn.Module]:
    """The modules that a callable uses, by name."""
    if isinstance(function, nn.Module):
        return {"module": function}
    if isinstance(function, MethodType):
        return {"module": function.__self__} if isinstance(function.__self__, nn.Module) else {}
    if isinstance(function, functools.partial):
        parts = enumerate((function.func, *function.args, *function.keywords.values()))
        return {f"{name}_{k}": module for k, part in parts for name, module in _modules(part).items()}
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    named = {name: _contents(cell) for name, cell in cells}
    named |= {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    return {name: value for name, value in named.items() if isinstance(value, nn.Module)}


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _rebuilt(function: Any, parts: dict[str, nn.Module], memo: dict[int, Any]) -> Any:
    """The same callable on other modules."""
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)
    if not parts:
        return function
    cells = tuple(
        CellType(parts[name]) if name in parts else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    names = {**function.__globals__, **parts} if any(name in function.__globals__ for name in parts) else None
    new = FunctionType(
        function.__code__, names or function.__globals__, function.__name__, function.__defaults__, cells
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new
