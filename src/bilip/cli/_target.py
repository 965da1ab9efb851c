"""What a user names on the command line: a checkpoint folder or a function of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bilip.errors import BilipError, InputError

if TYPE_CHECKING:
    from bilip.blocks import Bijection

__all__ = ["load_bijection"]


def load_bijection(target: str) -> Bijection:
    """Load `folder`, `package.module:function` or `package.module:object`."""
    from bilip.blocks import Bijection, Flow
    from bilip.models import Classifier, load

    model = load(target) if Path(target).is_dir() else _import(target)
    if callable(model) and not isinstance(model, (Bijection, Flow, Classifier)):
        try:
            model = model()
        except BilipError:
            raise
        except Exception as error:
            raise InputError(f"{target} raised {type(error).__name__}: {error}") from error
    if isinstance(model, Flow):
        model = model.bijection
    if isinstance(model, Classifier):
        model = model.trunk
    if not isinstance(model, Bijection):
        raise InputError(f"{target} gave a {type(model).__name__}; expected a bilip Bijection, Flow or Classifier.")
    return model


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
