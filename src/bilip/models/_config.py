"""Models that remember how they were built."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.overrides import TorchFunctionMode

from bilip.blocks.scale import Scale
from bilip.errors import BilipError, CheckpointError

__all__ = ["build", "config_of", "describe", "remembers"]

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def remembers(function: Callable[P, M]) -> Callable[P, M]:
    """Register a model function and note its arguments on what it returns, as JSON values."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> M:
        model = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model.config = {  # type: ignore[assignment]
            "model": function.__name__,
            "arguments": {name: _plain(value) for name, value in bound.arguments.items()},
        }
        return model

    _BUILDERS[function.__name__] = wrapper
    return wrapper


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return getattr(value, "config", None)
    if isinstance(value, Scale):
        return value.spec()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def config_of(model: nn.Module) -> dict[str, Any]:
    """The config noted on a model, or an error that says how to get one."""
    config = getattr(model, "config", None)
    if not _complete(config):
        raise CheckpointError(
            f"this {type(model).__name__} was not built by a function of bilip.models, so a file could not "
            "say how to build it again. "
            "Save its weights with safetensors and load them into a model that your own code builds."
        )
    return config  # type: ignore[return-value]


def _complete(config: object) -> bool:
    if not isinstance(config, dict):
        return False
    trunk = config["arguments"].get("trunk", {})
    return "trunk" not in config["arguments"] or _complete(trunk)


def build(config: dict[str, Any], *, tensors: int, numbers: int) -> nn.Module:
    """Build a model from its config; only the functions of `bilip.models` are called.

    Args:
        config: Name and arguments of the function.
        tensors: How many tensors the model has, as its file of weights says; building stops when it takes far more.
        numbers: Entries of these tensors together.

    Raises:
        CheckpointError: The config describes no model, or one that is larger than that.
    """
    try:
        with _AtMost(tensors, numbers):
            return _build(config)
    except CheckpointError:
        raise
    except BilipError as error:
        raise CheckpointError(f"the config's arguments do not fit {config.get('model')}: {error}") from error
    except Exception as error:  # arguments of any kind, so errors of any kind
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"the config's arguments do not fit {config.get('model')} ({text:.300}).") from error


def _build(config: Any) -> nn.Module:
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict):
        raise CheckpointError(f"the config {config!r:.60} does not describe a model.")
    name, arguments = config.get("model"), dict(config["arguments"])
    if not isinstance(name, str) or name not in _BUILDERS:
        raise CheckpointError(
            f"the config names the model {name!r:.60}; this version of bilip knows {', '.join(sorted(_BUILDERS))}."
        )
    if "trunk" in arguments:
        arguments["trunk"] = _build(arguments["trunk"])
    try:
        return _BUILDERS[name](**arguments)
    except TypeError as error:
        raise CheckpointError(f"the config's arguments do not fit {name} ({error!s:.300}).") from error


class _AtMost(TorchFunctionMode):
    """Inside, torch may be called about so often as a model of this size needs, and makes no tensor that is larger.

    A model takes up to twenty calls for each of its tensors; a config that asks for ten million blocks is stopped after some
    thousand calls, and one that asks for a matrix of terabytes before there is one.
    """

    MAKERS = frozenset(
        [
            "empty",
            "zeros",
            "ones",
            "full",
            "rand",
            "randn",
            "randint",
            "randperm",
            "normal",
            "arange",
            "linspace",
            "eye",
        ]
    )

    def __init__(self, tensors: int, numbers: int) -> None:
        super().__init__()
        self.calls, self.numbers = 10_000 + 200 * tensors, 2**20 + 4 * numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls -= 1
        made = _entries(args) if getattr(func, "__name__", "").removeprefix("new_") in self.MAKERS else 0
        if self.calls < 0 or made > self.numbers:
            raise CheckpointError(
                "the config asks for a model that is far larger than its weights: the two do not belong together, or one is damaged."
            )
        return func(*args, **(kwargs or {}))


def _entries(args: Any) -> int:
    """Entries of a tensor that is made with these arguments: `(2, 3)`, `((2, 3), ...)`, or `(3,)` for a square one too."""
    size = next((value for value in args if isinstance(value, (list, tuple))), [n for n in args if type(n) is int])
    return math.prod(n for n in size if isinstance(n, int))


def describe(model: nn.Module) -> str:
    """One line that says how a model was built."""
    config = getattr(model, "config", None)
    if not isinstance(config, dict):
        return type(model).__name__
    given = ", ".join(f"{k}={v!r}" for k, v in config["arguments"].items() if k != "trunk")
    return f"{config['model']}({given})"
