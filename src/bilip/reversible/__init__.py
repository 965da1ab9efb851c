"""Memory-saving gradients that cannot be silently wrong."""

from bilip.reversible.function import hold
from bilip.reversible.guard import DriftWarning, Guard, GuardReport, angle
from bilip.reversible.reversible import Reversible

__all__ = ["DriftWarning", "Guard", "GuardReport", "Reversible", "angle", "hold"]
