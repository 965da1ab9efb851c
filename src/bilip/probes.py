"""Probes: one question each, answered with numbers. The public name of `bilip.auditing.probes`."""

import sys
from importlib import import_module
from pkgutil import iter_modules

from bilip.auditing import probes as _room
from bilip.auditing.probes import *  # noqa: F403
from bilip.auditing.probes import __all__ as __all__

# The modules that 0.1 had under this name, such as bilip.probes.spectrum.
_MOVED = {"subject": "subject", "guarded": "guarded", "float32": "float32", "distance": "round_trip"}
for _name in (module.name for module in iter_modules(_room.__path__)):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = import_module(f"{_room.__name__}.{_name}")
for _name, _now in _MOVED.items():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = import_module(f"bilip.auditing.{_now}")
