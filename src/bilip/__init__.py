"""bilip finds, explains and cures exploding inverses in invertible neural networks.

The root names load on first use, so that `import bilip` and `bilip --help` start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "AuditRecord": "bilip.record",
    "Bijection": "bilip.blocks",
    "Chain": "bilip.blocks",
    "Invert": "bilip.blocks",
    "Flow": "bilip.blocks",
    "BiLipschitz": "bilip.bounds",
    "Box": "bilip.bounds",
    "BilipError": "bilip.errors",
    "Budget": "bilip.auditing",
    "Guard": "bilip.reversible",
    "Reversible": "bilip.reversible",
    "Thresholds": "bilip.auditing",
    "advise": "bilip.cures",
    "as_bijection": "bilip.adapters",
    "audit": "bilip.auditing",
    "cure": "bilip.cures",
    "diagnose": "bilip.cures",
}
_SUBMODULES = (
    "adapters",
    "auditing",
    "blocks",
    "bounds",
    "cures",
    "data",
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
)

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
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"bilip.{name}")
    raise AttributeError(f"module 'bilip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
