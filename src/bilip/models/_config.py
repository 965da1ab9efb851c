"""Models that remember how they were built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from bilip.blocks.scale import Scale
from bilip.errors import CheckpointError

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


def build(config: dict[str, Any]) -> nn.Module:
    """Build a model from its config; only the functions of `bilip.models` are called."""
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict):
        raise CheckpointError(f"the config {config!r} does not describe a model.")
    name, arguments = config.get("model"), dict(config["arguments"])
    if name not in _BUILDERS:
        raise CheckpointError(
            f"the config names the model {name!r}; this version of bilip knows {', '.join(sorted(_BUILDERS))}."
        )
    if "trunk" in arguments:
        arguments["trunk"] = build(arguments["trunk"])
    try:
        return _BUILDERS[name](**arguments)
    except TypeError as error:
        raise CheckpointError(f"the config's arguments do not fit {name} ({error}).") from error


def describe(model: nn.Module) -> str:
    """One line that says how a model was built."""
    config = getattr(model, "config", None)
    if not isinstance(config, dict):
        return type(model).__name__
    given = ", ".join(f"{k}={v!r}" for k, v in config["arguments"].items() if k != "trunk")
    return f"{config['model']}({given})"
