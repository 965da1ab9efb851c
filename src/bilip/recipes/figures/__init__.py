"""Figures for the recipes in one house style, ready for print. Needs matplotlib, but neither torch nor a display."""

from bilip.recipes.figures.curves import curves, depth_panels
from bilip.recipes.figures.images import image_rows, reconstructions
from bilip.recipes.figures.plane import plane_maps, scatters
from bilip.recipes.figures.style import save

__all__ = ["curves", "depth_panels", "image_rows", "plane_maps", "reconstructions", "save", "scatters"]
