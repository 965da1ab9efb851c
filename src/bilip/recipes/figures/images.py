"""Images with broken pixels in cyan: above what a model makes of them (paper, figures ood-reconstructions and flow-recons), and rows that
belong together column by column (figures samplingIssues and attacksResflow).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bilip.errors import InputError
from bilip.recipes.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["image_rows", "reconstructions"]

CYAN = np.array([0, 255, 255], np.uint8)
ACROSS = 4  # groups side by side
LABEL, GAP, LEGEND = 1.0, 0.06, 0.24  # inches: left of the rows, between them, and above where there is a legend


def reconstructions(
    groups: Mapping[str, tuple[Any, Any]], *, notes: Mapping[str, str] | None = None, rows: str = "input\nreconstr."
) -> Figure:
    """Draw groups of images, input above and reconstruction below; pixels that are not finite are cyan.

    Args:
        groups: By title: bytes of shape (count, 2, height, width, 3), input and reconstruction of each image, and of shape (count, 2,
            height, width), not 0 where a pixel is not finite.
        notes: By title, small print under it.
        rows: Names of the two rows, one on each line.

    Raises:
        InputError: An array has another shape.

    Example:
        >>> images = np.zeros((3, 2, 8, 8, 3), np.uint8)
        >>> broken = np.zeros((3, 2, 8, 8), np.uint8)
        >>> figure = reconstructions({"uniform": (images, broken)}, notes={"uniform": "100 % not finite"})
        >>> figure.axes[0].get_title()
        'uniform'
    """
    style.named(groups, "groups")
    mosaics = {title: _mosaic(images, broken, title) for title, (images, broken) in groups.items()}
    with style.house():
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        across = min(ACROSS, len(mosaics))
        down = -(-len(mosaics) // across)
        width = style.DOUBLE * across / ACROSS
        shape = next(iter(mosaics.values())).shape
        height = (width / across - 0.2) * shape[0] / shape[1] + (0.42 if notes else 0.28)
        more = [style.wrap(title, width / across).count("\n") for title in mosaics]  # lines of titles beyond the first
        more = sum(max(more[k : k + across]) for k in range(0, len(more), across)) * 1.2 * style.TEXT / 72
        figure = Figure(figsize=(width + 0.4, down * height + more + 0.15), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr]
        cells = figure.subplots(down, across, squeeze=False).ravel().tolist()
        for cell in cells[len(mosaics) :]:
            cell.remove()
        for k, (axes, (title, mosaic)) in enumerate(zip(cells, mosaics.items(), strict=False)):
            _show(axes, mosaic)
            names = [line.strip() for line in rows.split("\n")] if k % across == 0 else []
            axes.set_yticks([mosaic.shape[0] * (2 * i + 1) / 4 for i in range(len(names))], names)
            axes.tick_params(length=0)
            if notes:
                style.heading(axes, title, notes.get(title, ""), width / across)
            else:
                axes.set_title(title)
        if any(np.asarray(broken).any() for _, broken in groups.values()):
            style.legend(figure, [Patch(facecolor="cyan")], ["Inf or NaN"])
        return style.finish(figure)


def _mosaic(images: Any, broken: Any, title: str) -> np.ndarray:
    """Inputs in one row, reconstructions in the next, on white."""
    images, broken = np.asarray(images), np.asarray(broken)
    if images.ndim != 5 or images.shape[1] != 2 or images.shape[4] != 3 or broken.shape != images.shape[:4]:
        raise InputError(
            f"groups[{title!r}] has shapes {images.shape} and {broken.shape}; expected (count, 2, height, width, 3) and the same without "
            "the colours."
        )
    above, below = (_side_by_side(images[:, k], broken[:, k]) for k in (0, 1))
    between = np.full((max(1, len(above) // 16), *above.shape[1:]), 255, np.uint8)
    return np.concatenate((above, between, below))


# ---- rows


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
    style.named(rows, "rows")
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
            _show(axes, strip, aspect="auto")
            axes.set_yticks([])
            axes.set_ylabel(style.wrap(name, LABEL - 0.1), rotation=0, ha="right", va="center")
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
    return _side_by_side(images, broken)


# ---- what both draw


def _side_by_side(images: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Images in one row on white, in cyan where a pixel is broken."""
    shown = np.where(broken[..., None] != 0, CYAN, images.astype(np.uint8))
    count, height, width, _ = shown.shape
    gap = max(1, height // 16)
    out = np.full((height, count * (width + gap) - gap, 3), 255, np.uint8)
    for k in range(count):
        out[:, k * (width + gap) : k * (width + gap) + width] = shown[k]
    return out


def _show(axes: Axes, picture: np.ndarray, aspect: Literal["auto", "equal"] = "equal") -> None:
    """Draw a picture without a grid, ticks across and a frame."""
    axes.imshow(picture, interpolation="nearest", aspect=aspect)
    axes.grid(visible=False)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
