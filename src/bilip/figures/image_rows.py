"""Rows of images that belong together column by column, with broken pixels in cyan (paper, figures samplingIssues and attacksResflow)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.figures import checks, style
from bilip.figures.reconstructions import CYAN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["image_rows"]

LABEL, GAP, LEGEND = 1.0, 0.06, 0.24  # inches: left of the rows, between them, and above where there is a legend


def image_rows(rows: Mapping[str, tuple[Any, Any]], *, inches: float = 0.62) -> Figure:
    """Draw rows of images under each other, each with its name at the left; pixels that are not finite are cyan.

    Args:
        rows: By name: bytes of shape (count, height, width, 3), and of shape (count, height, width), not 0 where a pixel is not finite.
            Rows may differ in their count.
        inches: Width of an image on paper, less where the rows would be wider than a page.

    Raises:
        InputError: An array has another shape.

    Example:
        >>> images, broken = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((4, 8, 8), np.uint8)
        >>> figure = image_rows({"data": (images, broken), "samples": (images, broken)})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['data', 'samples']
    """
    checks.named(rows, "rows")
    strips = {name: _strip(images, broken, name) for name, (images, broken) in rows.items()}
    most = max(len(images) for images, _ in rows.values())
    width = min(inches, (style.DOUBLE - LABEL) / most)
    with style.house():
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        lost = any(np.asarray(broken).any() for _, broken in rows.values())
        whole = max(strip.shape[1] for strip in strips.values())
        tall = [len(strip) * most * width / whole + GAP for strip in strips.values()]
        height = sum(tall) + (LEGEND if lost else GAP)
        figure = Figure(figsize=(LABEL + most * width, height))
        top = LEGEND if lost else GAP
        for (name, strip), inches in zip(strips.items(), tall, strict=True):
            top += inches
            page, bottom = figure.get_figwidth(), height - top + GAP
            wide = most * width * strip.shape[1] / whole
            axes = figure.add_axes((LABEL / page, bottom / height, wide / page, (inches - GAP) / height))
            axes.imshow(strip, interpolation="nearest", aspect="auto")
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_ylabel(style.wrap(name, LABEL - 0.1), rotation=0, ha="right", va="center")
            for side in axes.spines.values():
                side.set_visible(False)
        if lost:
            figure.legend([Patch(facecolor="cyan")], ["Inf or NaN"], loc="upper center", borderaxespad=0.1)
        return style.finish(figure)


def _strip(images: Any, broken: Any, name: str) -> np.ndarray:
    """The images of a row side by side, on white."""
    images, broken = np.asarray(images), np.asarray(broken)
    if images.ndim != 4 or images.shape[3] != 3 or not len(images) or broken.shape != images.shape[:3]:
        raise InputError(
            f"rows[{name!r}] has shapes {images.shape} and {broken.shape}; expected (count, height, width, 3) and the same without the "
            "colours."
        )
    shown = np.where(broken[..., None] != 0, CYAN, images.astype(np.uint8))
    count, height, width, _ = shown.shape
    gap = max(1, height // 16)
    out = np.full((height, count * (width + gap) - gap, 3), 255, np.uint8)
    for k in range(count):
        out[:, k * (width + gap) : k * (width + gap) + width] = shown[k]
    return out
