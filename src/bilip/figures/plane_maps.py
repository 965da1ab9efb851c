"""Heat maps over the plane, one for each model (paper, figures checkerboardReconError and 2dtoyDensities)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.figures import checks, style
from bilip.figures.domain import domain_entry, draw_domain
from bilip.figures.ticks import Ticks, linear_ticks, log_ticks, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

__all__ = ["plane_maps"]

LOST = {"facecolor": "#F5B5D5", "edgecolor": "#6B0038", "hatch": "//////", "linewidth": 0.0}


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
    found = {t: checks.array(m, f"maps[{t!r}]", shape=(None, None)) for t, m in checks.named(maps, "maps").items()}
    for title, values in found.items():
        if not values.size:
            raise InputError(f"maps[{title!r}] has shape {values.shape}; expected at least one point.")
        if log and (negative := int(((values < 0) & np.isfinite(values)).sum())):
            raise InputError(
                f"maps[{title!r}] has {negative} negative numbers, which have no logarithm: pass log=False."
            )
    low, high = checks.interval((low, high), "(low, high)")
    box = None if box is None else checks.interval(box, "box")
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
        marks = log_ticks(*ends) if log else linear_ticks(*ends)
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


def _ticks(low: float, high: float, box: tuple[float, float] | None) -> Ticks:
    """The ends and the middle of the training domain where they show, else round numbers."""
    room = 0.03 * (high - low)  # at the very ends of an axis numbers run into the neighbour's
    if box is None or box[0] < low + room or box[1] > high - room or box[1] - box[0] < 0.3 * (high - low):
        return linear_ticks(low + room, high - room, count=4)
    places = np.array([box[0], (box[0] + box[1]) / 2, box[1]])
    return Ticks(places, [number(place) for place in places], np.empty(0))


def _range(maps: list[np.ndarray], vmin: float | None, vmax: float | None, *, log: bool) -> tuple[float, float]:
    values = np.concatenate([m[np.isfinite(m) & ((m > 0) | (not log))] for m in maps])
    low, high = (float(values.min()), float(values.max())) if values.size else (1.0, 1.0)
    low, high = (max(low, 1e-300), min(high, 1e300)) if log else (max(low, -1e300), min(high, 1e300))
    if high <= low or (vmin is not None and high <= vmin) or (vmax is not None and low >= vmax):
        base = vmin if vmin is not None else vmax if vmax is not None else low
        low, high = (base / 10, base * 10) if log else (base - max(1.0, abs(base)), base + max(1.0, abs(base)))
    low, high = checks.interval((low if vmin is None else vmin, high if vmax is None else vmax), "(vmin, vmax)")
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
