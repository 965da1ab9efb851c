"""The plane, one panel for each model: heat maps (paper, figures checkerboardReconError and 2dtoyDensities) and points (figures
samplesCheckerboard and toyRegression). The training domain [a, b]^2 is a dashed box, as in the figures of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.recipes.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

__all__ = ["plane_maps", "scatters"]

LOST = {"facecolor": "#F5B5D5", "edgecolor": "#6B0038", "hatch": "//////", "linewidth": 0.0}
SAME_INK = {"s": 0.8, "^": 1.15, "D": 0.75, "v": 1.15}  # diameters, so that no set looks denser for its marker
FAR = 1e100  # beyond this a point does not decide how large a panel is
_DASHES = (0, (3, 2))


def plane_maps(
    maps: Mapping[str, Any],
    *,
    low: float,
    high: float,
    label: str,
    box: tuple[float, float] | None = (-4, 4),
    log: bool = True,
    vmin: float | None = None,
    vmax: float | None = None,
    cmap: str = "viridis",
    xlabel: str = "$x_1$",
    ylabel: str = "$x_2$",
) -> Figure:
    """Draw one heat map for each model on the square [low, high]^2, with one colour bar for all.

    Args:
        maps: By title, an array indexed [row = second coordinate, column = first coordinate], both ascending. What is
            not finite is hatched, and its share stands under the title.
        low: Left and lower end of the plane.
        high: Right and upper end of the plane.
        label: What the colour means, with its unit.
        box: The training domain [a, b]^2, drawn dashed; None for no box.
        log: Whether the colour is logarithmic; zeros then lie below `vmin`.
        vmin: Lower end of the colours; None for the smallest finite (on a logarithmic scale positive) number.
        vmax: Upper end of the colours; None for the largest finite number.
        cmap: Name of a matplotlib colour map.
        xlabel: Name of the first coordinate.
        ylabel: Name of the second coordinate.

    Raises:
        InputError: A map is not a matrix or, on a logarithmic scale, has negative numbers; or the ranges are not ordered.

    Example:
        >>> import numpy as np
        >>> errors = np.full((20, 20), 1e-6)
        >>> errors[0, :5] = np.inf
        >>> figure = plane_maps({"Glow": errors}, low=-8, high=8, label="reconstruction error", vmin=1e-8, vmax=1)
        >>> figure.axes[0].texts[0].get_text()
        'Inf/NaN: 1.2 % (5 points)'
    """
    found = {t: style.array(m, f"maps[{t!r}]", shape=(None, None)) for t, m in style.named(maps, "maps").items()}
    for title, values in found.items():
        if not values.size:
            raise InputError(f"maps[{title!r}] has shape {values.shape}; expected at least one point.")
        if log and (negative := int(((values < 0) & np.isfinite(values)).sum())):
            raise InputError(
                f"maps[{title!r}] has {negative} negative numbers, which have no logarithm: pass log=False."
            )
    low, high = style.interval((low, high), "(low, high)")
    box = None if box is None else style.interval(box, "box")
    bottom, top = _range(list(found.values()), vmin, vmax, log=log)
    ends = (math.log10(bottom), math.log10(top)) if log else (bottom, top)
    with style.house():
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.patches import Patch

        if cmap not in colormaps:
            raise InputError(f"cmap is {cmap!r}; expected the name of a matplotlib colour map, such as 'viridis'.")
        colours = colormaps[cmap].resampled(_shades(ends, log=log)).with_extremes(bad=(0, 0, 0, 0))
        scale = ScalarMappable(Normalize(*ends), colours)
        figure, cells = style.square_sheet(len(found))
        across = style.columns(len(found))
        ticks = _ticks(low, high, box)
        for place, (axes, (title, values)) in enumerate(zip(cells, found.items(), strict=True)):
            kept = np.clip(np.nan_to_num(values), bottom, top)
            kept = np.ma.masked_array(np.log10(kept) if log else kept, ~np.isfinite(values))
            _draw_map(axes, kept, scale, low, high)
            draw_domain(axes, box, on_picture=True)
            style.heading(axes, title, _share(~np.isfinite(values)), (figure.get_figwidth() - 1.0) / across)
            axes.set_xticks(ticks.major, ticks.names)
            axes.set_yticks(ticks.major, ticks.names)
            axes.set(xlim=(low, high), ylim=(low, high), xlabel=xlabel, ylabel=ylabel if place % across == 0 else "")
            axes.tick_params(labelleft=place % across == 0)
            axes.grid(visible=False)
        every = np.concatenate([values[np.isfinite(values)] for values in found.values()])
        below, above = bool((every < bottom).any()), bool((every > top).any())
        extend = "both" if below and above else "min" if below else "max" if above else "neither"
        bar = figure.colorbar(scale, ax=cells, extend=extend, label=label, aspect=18, pad=0.02)
        marks = style.log_ticks(*ends) if log else style.linear_ticks(*ends)
        bar.set_ticks(marks.major.tolist(), labels=marks.names)
        bar.minorticks_off()
        bar.ax.grid(visible=False)
        lost = {} if every.size == sum(values.size for values in found.values()) else {"Inf/NaN": Patch(**LOST)}
        entries = lost | domain_entry(box)
        style.legend(figure, list(entries.values()), list(entries))
        return style.finish(figure, cells)


def _draw_map(axes: Axes, values: np.ma.MaskedArray, scale: ScalarMappable, low: float, high: float) -> None:
    """The picture, transparent where it is masked, over a hatched ground."""
    from matplotlib.patches import Rectangle

    norm: Any = scale.norm
    axes.add_patch(Rectangle((low, low), high - low, high - low, zorder=0.5, **LOST))
    place: Any = {"origin": "lower", "extent": (low, high, low, high), "interpolation": "nearest", "zorder": 1}
    axes.imshow(values, norm=norm, cmap=scale.cmap, **place)


def _ticks(low: float, high: float, box: tuple[float, float] | None) -> style.Ticks:
    """The ends and the middle of the training domain where they show, else round numbers."""
    room = 0.03 * (high - low)  # at the very ends of an axis numbers run into the neighbour's
    if box is None or box[0] < low + room or box[1] > high - room or box[1] - box[0] < 0.3 * (high - low):
        return style.linear_ticks(low + room, high - room, count=4)
    places = np.array([box[0], (box[0] + box[1]) / 2, box[1]])
    return style.Ticks(places, [style.number(place) for place in places], np.empty(0))


def _range(maps: list[np.ndarray], vmin: float | None, vmax: float | None, *, log: bool) -> tuple[float, float]:
    values = np.concatenate([m[np.isfinite(m) & ((m > 0) | (not log))] for m in maps])
    low, high = (float(values.min()), float(values.max())) if values.size else (1.0, 1.0)
    low, high = (max(low, 1e-300), min(high, 1e300)) if log else (max(low, -1e300), min(high, 1e300))
    if high <= low or (vmin is not None and high <= vmin) or (vmax is not None and low >= vmax):
        base = vmin if vmin is not None else vmax if vmax is not None else low
        low, high = (base / 10, base * 10) if log else (base - max(1.0, abs(base)), base + max(1.0, abs(base)))
    low, high = style.interval((low if vmin is None else vmin, high if vmax is None else vmax), "(vmin, vmax)")
    if log and low <= 0:
        raise InputError(f"vmin is {low:g}; a logarithmic colour begins above zero: pass vmin > 0 or log=False.")
    return low, high


def _shades(ends: tuple[float, float], *, log: bool) -> int:
    """Whole shades: a reader can count them along the bar, and noise in the last digits does not fill the file."""
    return int(np.clip(round(4 * (ends[1] - ends[0])), 8, 64)) if log else 32


def _share(lost: np.ndarray) -> str:
    count, share = int(lost.sum()), 100 * float(lost.mean())
    if not count:
        return "Inf/NaN: none"
    text = f"Inf/NaN:_{'<0.1' if share < 0.1 else f'{share:.1f}'}_% ({count}_point{'s' if count > 1 else ''})"
    return text.replace("_", "\N{NO-BREAK SPACE}")


# ---- points


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
    found = {title: _sets(sets, f"panels[{title!r}]") for title, sets in style.named(panels, "panels").items()}
    box = None if box is None else style.interval(box, "box")
    limit = None if limit is None else style.interval(limit, "limit")
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
                ticks = style.linear_ticks(*ends, count=max(2, min(5, int(panel / 0.36))))
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
        found.append((label, style.array(points, f"{label!r} in {what}", shape=(None, 2))))
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


# ---- the training domain


def draw_domain(axes: Axes, box: tuple[float, float] | None, *, on_picture: bool = False) -> None:
    """Draw the box; on a picture in white over black, which shows on any colour."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import Normal, Stroke

    if box is None:
        return
    side = box[1] - box[0]
    frame = Rectangle((box[0], box[0]), side, side, fill=False, linestyle=_DASHES, linewidth=0.9, zorder=3)
    if on_picture:
        frame.set(edgecolor="white", path_effects=[Stroke(linewidth=2.0, foreground="black"), Normal()])
    axes.add_patch(frame)


def domain_entry(box: tuple[float, float] | None) -> dict[str, Any]:
    """Its entry in a legend; none without a box."""
    from matplotlib.lines import Line2D

    if box is None:
        return {}
    text = f"training domain [{style.number(box[0])}, {style.number(box[1])}]\N{SUPERSCRIPT TWO}"
    return {text: Line2D([], [], color="black", linestyle=_DASHES, linewidth=0.9)}
