"""One claim of the paper a file, run through the public interface: `bilip reproduce`."""

from bilip.recipes.config import configured
from bilip.recipes.frame import Outcome, find, names, reproduce
from bilip.recipes.recipe import SIZES, Line, Measured, Recipe, Work

__all__ = ["SIZES", "Line", "Measured", "Outcome", "Recipe", "Work", "configured", "find", "names", "reproduce"]
