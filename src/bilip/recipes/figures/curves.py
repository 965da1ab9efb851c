"""Curves: over training, one panel for each quantity (paper, figure toy-training-plots), and against the number of blocks (figure
toy-constructed).

An axis loses nothing: what it cannot place (NaN, Inf, zero on a logarithmic axis) gets a marked lane. A logarithmic axis is drawn as
log10(y) on a linear one: the lanes then are fractions of the panel, and no limit overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.recipes.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves", "depth_panels"]

HUGE = 1e300  # a linear axis cannot be stretched beyond this without overflow
_ROW, _LANE, _MOST = 0.06, 0.1, 0.5  # heights as fractions of the panel: one curve, one lane, all lanes together
LABELS = {
    "error": "reconstruction error",
    "sigma_min": r"singular value $\sigma_{\min}$",
    "sigma_max": r"singular value $\sigma_{\max}$",
    "condition": "condition number",
}


def curves(
    panels: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    xlabel: str = "step",
    linear: Collection[str] = (),
    width: float = style.DOUBLE,
) -> Figure:
    """Draw curves over training; several seeds become their median and a band from the smallest to the largest.

    A median is taken at each x over the seeds that were measured there, with NaN counted as Inf: where half of the seeds
    have failed the line ends, and the lanes show them. A single curve of more than a hundred points is drawn faintly, with its running
    median on top.

    Args:
        panels: By axis label, then by name of the curve: one pair `(x, y)`, or a list of such pairs, one for each seed.
        xlabel: What x counts.
        linear: The panels with a linear axis; the others have a logarithmic one.
        width: Width on paper in inches; one panel takes half of it.

    Raises:
        InputError: x and y differ in length, x is not finite or repeats in a seed, or `linear` names no panel.

    Example:
        >>> seeds = [([0, 100, 200], [1.0, 0.1, 0.02]), ([0, 100, 200], [1.0, 0.3, float("nan")])]
        >>> figure = curves({"MSE": {"plain": seeds, "regularized": ([0, 200], [1.0, 0.01])}})
        >>> figure.axes[0].get_ylabel()
        'MSE'
    """
    style.named(panels, "panels")
    unknown = [name for name in linear if name not in panels]
    if unknown or isinstance(linear, str):
        raise InputError(f"linear is {linear!r}; expected a list with some of {list(panels)}.")
    names = list(dict.fromkeys(name for panel in panels for name in style.named(panels[panel], f"panels[{panel!r}]")))
    looks = {name: style.look(number) for number, name in enumerate(names)}
    lines = {
        panel: {name: _line(looks[name], item, f"panels[{panel!r}][{name!r}]") for name, item in content.items()}
        for panel, content in panels.items()
    }
    everything = [(name, line) for content in lines.values() for name, line in content.items()]
    measured = {name for name, line in everything if len(line.x)}
    with style.house():
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        count = len(panels)
        figure, cells = style.sheet(count, width=width if count > 1 else width / 2, height=2.0 if count > 1 else 2.3)
        for axes, (panel, content) in zip(cells, lines.items(), strict=True):
            draw_lines(axes, list(content.values()), log=panel not in linear)
            axes.set_ylabel(style.wrap(panel, 1.8))
            axes.set_xlabel(xlabel)
            _shorten(axes)
        handles: list[Any] = [Line2D([], [], color=k.colour, marker=k.marker, ls=k.dashes) for k in looks.values()]
        entries = [name if name in measured else f"{name} (no points)" for name in names]
        if any(line.y.shape[1] > 1 for _, line in everything):
            handles.append(Patch(facecolor=style.GREY, alpha=0.25))
            entries.append("range of the seeds on the axis; lines: median")
        if (most := max((window(line) for _, line in everything), default=1)) > 1:
            handles.append(Line2D([], [], color=style.GREY, linewidth=0.4))
            entries.append(f"each point; bold: median of {most}")
        style.legend(figure, handles, entries)
        return style.finish(figure)


def _line(look: style.Look, item: Any, what: str) -> Line:
    """The seeds of one curve on their common x."""
    seeds = [_pair(pair, f"{what}[{i}]") for i, pair in enumerate(item)] if _is_list(item) else [_pair(item, what)]
    if len(seeds) == 1:
        x, y = seeds[0]
        return Line(look, x, y[:, None], np.ones((len(x), 1), dtype=bool))
    x = np.unique(np.concatenate([x for x, _ in seeds]))
    values, present = np.full((len(x), len(seeds)), np.nan), np.zeros((len(x), len(seeds)), dtype=bool)
    for number, (at, y) in enumerate(seeds):
        rows = np.searchsorted(x, at)
        if len(np.unique(rows)) < len(rows):
            raise InputError(f"{what}[{number}] has the same x twice; with several seeds expected each x once.")
        values[rows, number], present[rows, number] = y, True
    return Line(look, x, values, present)


def _is_list(item: Any) -> bool:
    """Whether it is a list of pairs; JSON keeps no tuples, so the content decides."""
    try:
        return len(item) > 0 and len(item[0]) > 0 and np.ndim(item[0][0]) > 0
    except (TypeError, KeyError, IndexError, ValueError):
        return False


def _pair(pair: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = pair
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} is not a pair; expected (x, y), two lists of the same length.") from error
    x, y = style.array(x, f"x of {what}"), style.array(y, f"y of {what}")
    if len(x) != len(y):
        raise InputError(f"{what} has {len(x)} numbers in x and {len(y)} in y; expected as many.")
    if not np.isfinite(x).all():
        raise InputError(f"x of {what} holds Inf or NaN; expected finite numbers.")
    return x, y


def _shorten(axes: Axes) -> None:
    """Thousands of steps as 10k."""
    from matplotlib.ticker import FuncFormatter

    if 10_000 <= max(abs(v) for v in axes.get_xlim()) < 1e7:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1000:g}k" if v else "0"))


# ---- against depth


def depth_panels(
    depths: Sequence[float],
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    labels: Mapping[str, str] | None = None,
    xlabel: str = "number of blocks",
    width: float = style.DOUBLE,
) -> Figure:
    """Draw one panel for each quantity, on a logarithmic axis, against depth.

    Args:
        depths: Numbers of blocks, shape (n,).
        curves: By name of the network, then by quantity (`error`, `sigma_min`, `sigma_max`, `condition`): n numbers,
            which may be zero, Inf or NaN. A quantity that no network has gets no panel.
        labels: Other axis labels, by quantity.
        xlabel: What `depths` counts.
        width: Width on paper in inches.

    Raises:
        InputError: A length differs from that of `depths`, or a quantity is unknown.

    Example:
        >>> depths = range(1, 51)
        >>> affine = {"error": [1e-8 * 10.0**n for n in depths], "sigma_min": [0.1**n for n in depths]}
        >>> len(depth_panels(depths, {"affine": affine}).axes)
        2
    """
    x = style.array(list(depths), "depths")
    if not len(x) or not np.isfinite(x).all():
        raise InputError(f"depths is {x.tolist()}; expected at least one number of blocks, all finite.")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, quantities in style.named(curves, "curves").items():
        for quantity, values in style.named(quantities, f"curves[{name!r}]").items():
            if quantity not in LABELS:
                raise InputError(
                    f"curves[{name!r}] has the quantity {quantity!r}; expected one of {', '.join(LABELS)}."
                )
            y = style.array(values, f"curves[{name!r}][{quantity!r}]")
            if len(y) != len(x):
                raise InputError(
                    f"curves[{name!r}][{quantity!r}] has {len(y)} numbers for {len(x)} depths; expected one for each."
                )
            found.setdefault(quantity, {})[name] = y
    looks = {name: style.look(number) for number, name in enumerate(curves)}
    quantities = [quantity for quantity in LABELS if quantity in found]
    with style.house():
        from matplotlib.lines import Line2D

        across = len(quantities)
        figure, panels = style.sheet(across, width=width * (across if across > 1 else 2) / 4, height=2.0)
        for axes, quantity in zip(panels, quantities, strict=True):
            lines = [
                Line(looks[name], x, y[:, None], np.ones((len(x), 1), dtype=bool))
                for name, y in found[quantity].items()
            ]
            draw_lines(axes, lines, log=True)
            axes.set_ylabel({**LABELS, **(labels or {})}[quantity])
            axes.set_xlabel(xlabel)
        style.legend(
            figure, [Line2D([], [], color=k.colour, marker=k.marker, ls=k.dashes) for k in looks.values()], list(looks)
        )
        return style.finish(figure)


# ---- lines and lanes


@dataclass(frozen=True)
class Line:
    """One curve, measured once or with several seeds.

    Attributes:
        look: Colour, marker and dashes.
        x: Where it was measured, shape (n,).
        y: The numbers, shape (n, seeds).
        present: Which of them exist, shape (n, seeds): a seed may have stopped early.
    """

    look: style.Look
    x: np.ndarray
    y: np.ndarray
    present: np.ndarray

    def median(self) -> np.ndarray:
        """The median over the seeds; NaN counts as Inf, so that failed seeds pull it up and are not left out."""
        if self.y.shape[1] == 1:
            return self.y[:, 0]
        sortable = np.where(self.present, np.where(np.isnan(self.y), np.inf, self.y), np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.nanmedian(sortable, axis=1) if len(self.x) else np.empty(0)


def window(line: Line) -> int:
    """How many points in a row are drawn as their median: one, but for a single curve of more than a hundred, whose spikes would
    hide the others.
    """
    count = len(line.x) if line.y.shape[1] == 1 else 0
    return 2 * (count // 40) + 1 if count > 100 else 1


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The running median, of what there is on both sides; NaN stays NaN."""
    half = width // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, half, constant_values=np.nan), width)
    found = np.full(values.shape, np.nan)
    there = np.isfinite(values)
    found[there] = np.nanmedian(around[there], axis=1)
    return found


@dataclass(frozen=True)
class Lane:
    """A strip for the numbers of one kind, at the top or at the bottom."""

    name: str
    top: bool
    holds: Callable[[np.ndarray], np.ndarray]


_LOG = (
    Lane("NaN", True, np.isnan),
    Lane("Inf", True, np.isposinf),
    Lane("\N{MINUS SIGN}Inf", False, np.isneginf),
    Lane("< 0", False, lambda y: (y < 0) & np.isfinite(y)),
    Lane("0", False, lambda y: y == 0),
)
_LINEAR = (
    Lane("NaN", True, np.isnan),
    Lane("Inf", True, np.isposinf),
    Lane("> 1e300", True, lambda y: (y > HUGE) & np.isfinite(y)),
    Lane("\N{MINUS SIGN}Inf", False, np.isneginf),
    Lane("< \N{MINUS SIGN}1e300", False, lambda y: (y < -HUGE) & np.isfinite(y)),
)


def draw_lines(axes: Axes, lines: Sequence[Line], *, log: bool) -> None:
    """Draw curves into a panel: medians, bands from the smallest to the largest seed, and the lanes that are needed."""
    from matplotlib.ticker import MaxNLocator

    shown = [_placed(np.where(line.present, line.y, np.nan), log) for line in lines]
    finite = np.concatenate([values[np.isfinite(values)] for values in shown] or [np.empty(0)])
    filled = {
        lane: rows
        for lane in (_LOG if log else _LINEAR)
        if (rows := [line for line in lines if (lane.holds(line.y) & line.present).any()])
    }
    low, high = _span(finite, log=log)
    centres, bottom, top = _draw_lanes(axes, filled)
    margin = 0.07 * (high - low)
    unit = (high - low + 2 * margin) / (1 - bottom - top)
    base = low - margin - bottom * unit
    axes.set_ylim(base, base + unit)
    ticks = style.log_ticks(low, high) if log else style.linear_ticks(low, high)
    if not finite.size:
        ticks = style.Ticks(np.empty(0), [], np.empty(0))
        axes.text(
            0.5, (bottom + 1 - top) / 2, "no finite value", transform=axes.transAxes, ha="center", fontsize=style.SMALL
        )
    lanes = [base + centre * unit for centre in centres]
    axes.set_yticks([*ticks.major, *lanes], [*ticks.names, *(lane.name for lane in filled)])
    axes.set_yticks(ticks.minor, minor=True)
    everywhere = np.concatenate([line.x for line in lines] or [np.empty(0)])
    if everywhere.size:
        left, right = float(everywhere.min()), float(everywhere.max())
        pad = 0.03 * (right - left) or 0.5
        axes.set_xlim(left - pad, right + pad)
        whole = bool((everywhere % 1 == 0).all())
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
    for place, (line, values) in enumerate(zip(lines, shown, strict=True)):
        _draw_line(axes, line, values, _placed(line.median(), log), stagger=place / len(lines))


def _placed(y: np.ndarray, log: bool) -> np.ndarray:
    """Heights on the axis; NaN for what belongs in a lane."""
    fits = (y > 0) & np.isfinite(y) if log else np.abs(y) <= HUGE
    return np.log10(y, where=fits, out=np.full(y.shape, np.nan)) if log else np.where(fits, y, np.nan)


def _alone(there: np.ndarray) -> np.ndarray:
    """Points without a neighbour on either side: a line through them has no length."""
    before, after = np.r_[False, there[:-1]], np.r_[there[1:], False]
    return there & ~before & ~after


def _draw_line(axes: Axes, line: Line, values: np.ndarray, middle: np.ndarray, *, stagger: float) -> None:
    if not len(line.x):
        return
    there, colour = np.isfinite(middle), line.look.colour
    if values.shape[1] > 1:
        some: np.ndarray = np.asarray(np.isfinite(values).any(axis=1))
        lowest = np.where(some, np.fmin.reduce(values, axis=1), np.nan)
        highest = np.where(some, np.fmax.reduce(values, axis=1), np.nan)
        axes.fill_between(line.x, lowest, highest, facecolor=(colour, 0.2), edgecolor=(colour, 0.6), linewidth=0.4)
        lone = _alone(some)
        axes.vlines(line.x[lone], lowest[lone], highest[lone], color=colour, alpha=0.4, linewidth=1)
    if (width := window(line)) > 1:
        axes.plot(line.x, middle, color=colour, linewidth=0.4, alpha=0.35, zorder=1.8)
        middle = _smooth(middle, width)
    step = max(1, math.ceil(len(line.x) / 6))
    marked = np.zeros(len(line.x), dtype=bool)
    marked[int(stagger * step) :: step] = True
    marks = np.flatnonzero((marked & there) | _alone(there)).tolist()
    axes.plot(
        line.x, middle, color=colour, linestyle=line.look.dashes, marker=line.look.marker, markevery=marks,
        markeredgecolor="white", markeredgewidth=0.3,
    )  # fmt: skip


def _span(finite: np.ndarray, *, log: bool) -> tuple[float, float]:
    """The ends of what is to be shown; a single number gets some room on both sides."""
    if not finite.size:
        return -1.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    size = max(abs(low), abs(high))
    if high - low > (1e-3 if log else max(1e-9 * size, 1e-290)):
        return low, high
    pad = 1.0 if log or size < 1e-280 else 0.5 * size
    return low - pad, high + pad


def _draw_lanes(axes: Axes, filled: dict[Lane, list[Line]]) -> tuple[list[float], float, float]:
    """Draw the strips with their points; where their centres are, and how much they take at the bottom and at the top."""
    from matplotlib.patches import Rectangle

    heights = {lane: max(_LANE, _ROW * len(rows)) for lane, rows in filled.items()}
    shrink = min(1.0, _MOST / sum(heights.values())) if heights else 1.0
    taken, centres = {False: 0.0, True: 0.0}, []
    for lane, rows in filled.items():
        height = heights[lane] * shrink
        base = 1 - taken[True] - height if lane.top else taken[False]
        taken[lane.top] += height
        centres.append(base + height / 2)
        strip = Rectangle((0, base), 1, height, transform=axes.transAxes, facecolor="#EDEDED", edgecolor="white")
        strip.set_zorder(1.5)
        axes.add_patch(strip)
        for place, line in enumerate(rows):
            inside = lane.holds(line.y) & line.present
            x = np.repeat(line.x, inside.sum(axis=1))
            level = base + height * (len(rows) - place - 0.5) / len(rows)
            points = axes.plot(
                x, np.full(x.shape, level), transform=axes.get_xaxis_transform(), linestyle="none",
                color=line.look.colour, marker=line.look.marker, markersize=2.4, markeredgewidth=0,
            )  # fmt: skip
            points[0].set_gid(f"lane {lane.name}")
    return centres, taken[False], taken[True]
