"""What users name on the command line: a model, data, files to write."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bilip.errors import BilipError, InputError, need, said_by

if TYPE_CHECKING:
    from bilip.adapters import Adapted


def load_model(target: str, device: str | None = None) -> Adapted:
    """Load `folder`, `package.module:function` or `package.module:object`, of any library that `as_bijection` takes.

    A function is called, a module is taken as it is.
    """
    return load_native(target, device)[1]


def load_native(target: str, device: str | None = None) -> tuple[object, Adapted]:
    """The object of the library itself, and the model that `as_bijection` makes of it."""
    import torch

    from bilip.adapters import adapt
    from bilip.models import load

    model = load(target) if Path(target).is_dir() else import_named(target)
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


def import_named(target: str) -> object:
    """What a module calls by a name: `package.module:name`. Modules of the folder in which bilip runs are found."""
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


def listed(text: str) -> list[str]:
    """The parts of a text between commas, as in `likelihood,sampling`."""
    return [part.strip() for part in text.split(",") if part.strip()]


def named_files(entries: list[str]) -> dict[str, str]:
    """Files of `--data` by name: `NAME=FILE`, or a file that is called by its stem."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not name or Path(entry).exists():
            name, path = Path(entry).stem or "data", entry
        if name in found:
            raise InputError(f"--data: two sources are called {name!r}. Give each a name, as in --data other={path}.")
        found[name] = path
    return found


def require_page(path: Path | None) -> None:
    """Say what a page needs before a long audit, not after it."""
    if path is not None:
        for module in ("jinja2", "markupsafe", "plotly.offline"):
            need(module, "the HTML page")


def require_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written: before a long audit, not after it."""
    if path is None:
        return
    folder = path.parent if str(path.parent) else Path()
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder.")
    if not folder.is_dir():
        why = f"{folder} is not a folder" if folder.exists() else f"the folder {folder} does not exist"
        raise InputError(f"cannot write {path}: {why}.")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"cannot write {path}: no permission.")
