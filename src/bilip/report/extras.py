"""Optional packages, imported where they are used, with a sentence when one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from bilip.errors import MissingExtra

__all__ = ["need"]


def need(module: str, purpose: str) -> Any:
    """Import a module of the extra `report`.

    Raises:
        MissingExtra: It is not installed.

    Example:
        >>> need("json", "the example").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtra(f"{purpose} needs {package}: pip install 'bilip[report]'.") from error
