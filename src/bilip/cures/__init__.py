"""What repairs a trained model, each cure checked by an audit before it is offered; what broke one; which ranges to build with."""

from bilip.cures.cure import Attempt, Cure, cure, restore
from bilip.cures.rung import RUNGS, Rung

__all__ = ["RUNGS", "Attempt", "Cure", "Rung", "cure", "restore"]
