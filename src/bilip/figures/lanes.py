"""Curves on an axis that loses nothing: what it cannot place (NaN, Inf, zero on a logarithmic axis) gets a marked lane.

A logarithmic axis is drawn as log10(y) on a linear one: the lanes then are fractions of the panel, and no limit overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bilip.figures.style import SMALL, Look
from bilip.figures.ticks import Ticks, linear_ticks, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Line", "draw_lines", "window"]

HUGE = 1e300  # a linear axis cannot be stretched beyond this without overflow
_ROW, _LANE, _MOST = 0.06, 0.1, 0.5  # heights as fractions of the panel: one curve, one lane, all lanes together


@dataclass(frozen=True)
class Line:
    """One curve, measured once or with several seeds.

    Attributes:
        look: Colour, marker and dashes.
        x: Where it was measured, shape (n,).
        y: The numbers, shape (n, seeds).
        present: Which of them exist, shape (n, seeds): a seed may have stopped early.
    """

    look: Look
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
    ticks = log_ticks(low, high) if log else linear_ticks(low, high)
    if not finite.size:
        ticks = Ticks(np.empty(0), [], np.empty(0))
        axes.text(0.5, (bottom + 1 - top) / 2, "no finite value", transform=axes.transAxes, ha="center", fontsize=SMALL)
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
