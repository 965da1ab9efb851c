"""What a user names on the command line: a checkpoint folder or a function of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilip.errors import BilipError, InputError

if TYPE_CHECKING:
    from bilip.blocks import Bijection

__all__ = ["load_bijection", "load_model"]


def load_bijection(target: str) -> Bijection:
    """Load `folder`, `package.module:function` or `package.module:object` as a bijection."""
    from bilip.adapters import as_bijection

    return as_bijection(load_model(target))


def load_model(target: str, device: str | None = None) -> Any:
    """Load a model of any library that `as_bijection` takes; a function is called, a module is taken as it is."""
    import torch

    from bilip.adapters import adapt
    from bilip.models import load

    model = load(target) if Path(target).is_dir() else _import(target)
    if callable(model) and not isinstance(model, (torch.nn.Module, torch.distributions.Transform)):
        try:
            model = model()
        except BilipError:
            raise
        except Exception as error:
            raise InputError(f"{target} raised {type(error).__name__}: {error}") from error
    try:
        adapted = adapt(model)
        if device is not None:
            adapted.bijection.to(device)
    except BilipError as error:
        raise InputError(f"{target} gave a {type(model).__name__}: {error}") from error
    except RuntimeError as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    return adapted


def _import(target: str) -> object:
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise InputError(f"{target!r} is neither a folder nor of the form package.module:function.")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except BilipError:
        raise
    except Exception as error:
        raise InputError(
            f"the module {module!r} cannot be imported ({error}). Run bilip where python finds it."
        ) from error
    finally:
        sys.path.remove("")
    if not hasattr(found, name):
        raise InputError(f"the module {module!r} has no {name!r}.")
    return getattr(found, name)
