"""Points in the plane, one panel for each model (paper, figures samplesCheckerboard and toyRegression)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.figures import checks, style
from bilip.figures.domain import domain_entry, draw_domain
from bilip.figures.ticks import linear_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["scatters"]

SAME_INK = {"s": 0.8, "^": 1.15, "D": 0.75, "v": 1.15}  # diameters, so that no set looks denser for its marker
FAR = 1e100  # beyond this a point does not decide how large a panel is


def scatters(
    panels: Mapping[str, Sequence[tuple[str, Any]]],
    *,
    box: tuple[float, float] | None = None,
    limit: tuple[float, float] | None = None,
    shared: bool = False,
    size: float = 1.2,
    xlabel: str = "$x_1$",
    ylabel: str = "$x_2$",
) -> Figure:
    """Draw sets of points side by side; those outside of the axes and those that are not finite are counted.

    Args:
        panels: By title, a list of `(label, points)` with points of shape (n, 2). A label looks the same in all panels.
        box: The training domain [a, b]^2, drawn dashed.
        limit: Ends of both axes in all panels; None to show all that is finite.
        shared: Without `limit`: whether all panels get the same axes, or each its own.
        size: Diameter of a point, in points of print.
        xlabel: Name of the first coordinate.
        ylabel: Name of the second coordinate.

    Raises:
        InputError: The points have another shape, or the ends are not ordered.

    Example:
        >>> figure = scatters({"samples": [("Glow", [[0, 1], [9, 9], [float("nan"), 0]])]}, limit=(-4, 4))
        >>> figure.axes[0].texts[0].get_text()
        '3 points, 1 beyond the axes, 1 Inf/NaN'
    """
    found = {title: _sets(sets, f"panels[{title!r}]") for title, sets in checks.named(panels, "panels").items()}
    box = None if box is None else checks.interval(box, "box")
    limit = None if limit is None else checks.interval(limit, "limit")
    looks = {
        label: style.look(i) for i, label in enumerate(dict.fromkeys(name for s in found.values() for name, _ in s))
    }
    every = np.concatenate([points for sets in found.values() for _, points in sets])
    with style.house():
        from matplotlib.lines import Line2D

        across = style.columns(len(found))
        figure, cells = style.square_sheet(len(found))
        panel = (figure.get_figwidth() - 0.3) / across - 0.25
        for number, (axes, (title, sets)) in enumerate(zip(cells, found.items(), strict=True)):
            points = every if shared else np.concatenate([points for _, points in sets])
            (left, right), (low, high) = (limit, limit) if limit else _ends(points, box, shared=shared)
            total = outside = lost = 0
            for place, (label, points) in enumerate(sets):
                finite = np.isfinite(points).all(axis=1)
                inside = finite & (np.clip(points, (left, low), (right, high)) == points).all(axis=1)
                total, lost = total + len(points), lost + int((~finite).sum())
                outside += int((finite & ~inside).sum())
                look = looks[label]
                larger = 1 + 0.6 * (len(sets) - 1 - place)  # what lies below looks out from under what covers it
                axes.plot(
                    *points[inside].T, linestyle="none", color=look.colour, marker=look.marker,
                    markersize=size * larger * SAME_INK.get(look.marker, 1.0), markeredgewidth=0, rasterized=True,
                )  # fmt: skip
            draw_domain(axes, box)
            axes.set(xlim=(left, right), ylim=(low, high), box_aspect=1, xlabel=xlabel)
            axes.set_ylabel(ylabel if number % across == 0 else "")
            style.heading(axes, title, _count(total, outside, lost), panel)
            for axis, ends in ((axes.xaxis, (left, right)), (axes.yaxis, (low, high))):
                ticks = linear_ticks(*ends, count=max(2, min(5, int(panel / 0.36))))
                axis.set_ticks(ticks.major, ticks.names)
        entries = {
            label: Line2D([], [], ls="none", color=k.colour, marker=k.marker) for label, k in looks.items() if label
        }
        if len(entries) == 1:
            entries = {}
        entries |= domain_entry(box)
        style.legend(figure, list(entries.values()), list(entries))
        return style.finish(figure, cells)


def _sets(sets: Any, what: str) -> list[tuple[str, np.ndarray]]:
    found = []
    for item in sets:
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
            raise InputError(f"{what} holds {item!r:.60}; expected pairs (label, points).")
        label, points = item
        points = np.empty((0, 2)) if np.size(points) == 0 else points
        found.append((label, checks.array(points, f"{label!r} in {what}", shape=(None, 2))))
    if not found:
        raise InputError(f"{what} is empty; expected at least one pair (label, points).")
    return found


def _ends(points: np.ndarray, box: tuple[float, float] | None, *, shared: bool) -> Any:
    """Ends of the two axes so that all points show, with a margin; equal ones for shared panels."""
    points = points[np.isfinite(points).all(axis=1) & (np.abs(points) <= FAR).all(axis=1)]
    if box is not None:
        points = np.concatenate([points, [(box[0],) * 2, (box[1],) * 2]])
    if not len(points):
        return (-1.0, 1.0), (-1.0, 1.0)
    low, high = points.min(axis=0), points.max(axis=0)
    if shared:
        low, high = np.full(2, low.min()), np.full(2, high.max())
    margin = 0.05 * (high - low)
    size = np.maximum(np.abs(low), np.abs(high))
    flat = high - low <= np.maximum(1e-9 * size, 1e-290)
    margin = np.where(flat, np.where(size < 1e-280, 1.0, 0.5 * size), margin)
    return tuple(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))


def _count(total: int, outside: int, lost: int) -> str:
    parts = [f"{total} point{'' if total == 1 else 's'}"]
    parts += [f"{outside} beyond the axes"] * bool(outside) + [f"{lost} Inf/NaN"] * bool(lost)
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
