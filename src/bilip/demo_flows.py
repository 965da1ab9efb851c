"""The name that `bilip.demo` had before; it still works, and says so."""

import warnings

from bilip.demo import NAMES, how_trained, load_demo_flow

__all__ = ["NAMES", "how_trained", "load_demo_flow"]

warnings.warn("bilip.demo_flows is now bilip.demo: import from there.", DeprecationWarning, stacklevel=2)
