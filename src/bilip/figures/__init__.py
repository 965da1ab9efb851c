"""Figures for the recipes in one house style, ready for print. Needs matplotlib, but neither torch nor a display."""

from bilip.figures.curves import curves
from bilip.figures.depth_panels import depth_panels
from bilip.figures.image_rows import image_rows
from bilip.figures.plane_maps import plane_maps
from bilip.figures.reconstructions import reconstructions
from bilip.figures.save import save
from bilip.figures.scatters import scatters

__all__ = ["curves", "depth_panels", "image_rows", "plane_maps", "reconstructions", "save", "scatters"]
