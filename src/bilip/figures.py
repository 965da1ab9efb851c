"""Figures of recipes. The public name of `bilip.recipes.figures`."""

from bilip.recipes.figures import *  # noqa: F403
from bilip.recipes.figures import __all__ as __all__
