"""What a user names on the command line: a checkpoint folder or a function of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bilip.errors import BilipError, InputError, said_by

if TYPE_CHECKING:
    from bilip.adapters import Adapted
    from bilip.blocks import Bijection

__all__ = ["load_bijection", "load_model", "load_native"]


def load_bijection(target: str) -> Bijection:
    """Load `folder`, `package.module:function` or `package.module:object` as a bijection."""
    return load_model(target).bijection


def load_model(target: str, device: str | None = None) -> Adapted:
    """Load a model of any library that `as_bijection` takes; a function is called, a module is taken as it is."""
    return load_native(target, device)[1]


def load_native(target: str, device: str | None = None) -> tuple[object, Adapted]:
    """The same, with the object of the library itself in front."""
    import torch

    from bilip.adapters import adapt
    from bilip.models import load

    model = load(target) if Path(target).is_dir() else _import(target)
    if callable(model) and not isinstance(model, (torch.nn.Module, torch.distributions.Transform)):
        try:
            model = model()
        except (BilipError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InputError(f"{target} raised {_text(error)}.") from error
    try:
        adapted = adapt(model)
    except BilipError as error:
        raise InputError(f"{target} gave an object of type {type(model).__name__}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(
            f"{target} gave an object of type {type(model).__name__}, which raised {_text(error)}."
        ) from error
    if device is not None:
        try:
            adapted.bijection.to(device)
            if isinstance(model, torch.nn.Module):  # its base too
                model.to(device)
        except Exception as error:  # torch raises several kinds where a device is missing
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"--device {device}: {text:.300}") from error
    empty = [name for name, value in adapted.bijection.state_dict().items() if getattr(value, "is_meta", False)]
    if empty:
        raise InputError(
            f"{target} is on the device meta, where tensors have no numbers ({empty[0]}). Load its weights first, and use another --device."
        )
    return model, adapted


def _text(error: BaseException) -> str:
    return said_by(error).rstrip(".: ")


def _import(target: str) -> object:
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise InputError(f"{target!r} is neither a checkpoint folder nor of the form package.module:function.")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except (BilipError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise InputError(f"{target}: {error}. Run bilip in the folder that holds it, or install it.") from error
    except BaseException as error:
        raise InputError(f"importing the module {module!r} raised {_text(error)}.") from error
    finally:
        sys.path.remove("")
    if not hasattr(found, name):
        raise InputError(f"the module {module!r} has no {name!r}.")
    return getattr(found, name)
