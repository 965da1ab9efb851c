"""One claim of the paper a file, run through the public interface: `bilip reproduce`."""

from bilip.recipes.recipe import SIZES, Line, Measured, Recipe, Work, configured
from bilip.recipes.runner import Outcome, find, names, reproduce

__all__ = ["SIZES", "Line", "Measured", "Outcome", "Recipe", "Work", "configured", "find", "names", "reproduce"]
