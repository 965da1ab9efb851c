"""Probes: one question each, answered with numbers. The public name of `bilip.auditing.probes`."""

import sys
from importlib import import_module
from pkgutil import iter_modules

from bilip.auditing import probes as _room
from bilip.auditing.probes import *  # noqa: F403
from bilip.auditing.probes import __all__ as _names
from bilip.training.monitor import StabilityMonitor, StabilityRow

__all__ = [*_names, "StabilityMonitor", "StabilityRow"]  # pyright: ignore[reportUnsupportedDunderAll]

# The modules that 0.1 had under this name, such as bilip.probes.spectrum; a function of the same name comes first.
_ROOM = {module.name: f"{_room.__name__}.{module.name}" for module in iter_modules(_room.__path__)}
_MOVED = {
    "subject": "auditing.subject",
    "guarded": "auditing.subject",
    "float32": "auditing.float32",
    "distance": "auditing.round_trip",
    "jacobian": "linalg.jacobian",
    "lanczos": "linalg.lanczos",
    "linear": "linalg.linearized",
    "linear_part": "linalg.linearized",
    "structured": "linalg.structured",
    "monitor": "training.monitor",
    "error_map": "auditing.probes.reconstruction",
    "rungs": "auditing.probes.precision",
    "inside": "auditing.probes.blame",
    "attack_result": "auditing.probes.attack",
    "route": "auditing.probes.attack_methods",
}
for _name, _place in {**_ROOM, **{old: f"bilip.{new}" for old, new in _MOVED.items()}}.items():
    _module = sys.modules[f"{__name__}.{_name}"] = import_module(_place)
    globals().setdefault(_name, _module)
