"""bilip finds, explains and cures exploding inverses in invertible neural networks.

The root names load on first use, so that `import bilip` and `bilip --help` start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "Bijection": "bilip.blocks",
    "Chain": "bilip.blocks",
    "Invert": "bilip.blocks",
    "Flow": "bilip.blocks",
    "BiLipschitz": "bilip.bounds",
    "Box": "bilip.bounds",
    "BilipError": "bilip.errors",
}
_SUBMODULES = ("blocks", "bounds", "errors", "models", "nets", "testing")

__all__ = [
    "BiLipschitz",
    "Bijection",
    "BilipError",
    "Box",
    "Chain",
    "Flow",
    "Invert",
    "__version__",
    "blocks",
    "bounds",
    "errors",
    "models",
    "nets",
    "testing",
]

if TYPE_CHECKING:
    from bilip import blocks, bounds, errors, models, nets, testing
    from bilip.blocks import Bijection, Chain, Flow, Invert
    from bilip.bounds import BiLipschitz, Box
    from bilip.errors import BilipError


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"bilip.{name}")
    raise AttributeError(f"module 'bilip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
