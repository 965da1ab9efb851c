"""bilip finds, explains and cures exploding inverses in invertible neural networks.

The root names load on first use, so that `import bilip` and `bilip --help` start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_ROOMS = {
    "adapters": ("as_bijection",),
    "auditing": ("Budget", "Thresholds", "audit"),
    "blocks": ("Bijection", "Chain", "Flow", "Invert"),
    "bounds": ("BiLipschitz", "Box"),
    "cures": ("advise", "cure", "diagnose"),
    "errors": ("BilipError",),
    "record": ("AuditRecord",),
    "reversible": ("Guard", "Reversible"),
}
_NAMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AuditRecord",
    "BiLipschitz",
    "Bijection",
    "BilipError",
    "Box",
    "Budget",
    "Chain",
    "Flow",
    "Guard",
    "Invert",
    "Reversible",
    "Thresholds",
    "__version__",
    "adapters",
    "advise",
    "as_bijection",
    "audit",
    "auditing",
    "blocks",
    "bounds",
    "cure",
    "cures",
    "data",
    "diagnose",
    "errors",
    "figures",
    "models",
    "nets",
    "objectives",
    "probes",
    "recipes",
    "record",
    "regularizers",
    "report",
    "reversible",
    "testing",
    "training",
]

if TYPE_CHECKING:
    from bilip import (
        adapters,
        auditing,
        blocks,
        bounds,
        cures,
        data,
        errors,
        figures,
        models,
        nets,
        objectives,
        probes,
        recipes,
        record,
        regularizers,
        report,
        reversible,
        testing,
        training,
    )
    from bilip.adapters import as_bijection
    from bilip.auditing import Budget, Thresholds, audit
    from bilip.blocks import Bijection, Chain, Flow, Invert
    from bilip.bounds import BiLipschitz, Box
    from bilip.cures import advise, cure, diagnose
    from bilip.errors import BilipError
    from bilip.record import AuditRecord
    from bilip.reversible import Guard, Reversible


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(importlib.import_module(f"bilip.{_NAMES[name]}"), name)
    if name in __all__:  # the others are rooms
        return importlib.import_module(f"bilip.{name}")
    raise AttributeError(f"module 'bilip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
