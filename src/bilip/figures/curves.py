"""Training curves, one panel for each quantity (paper, figure toy-training-plots)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.figures import checks, style
from bilip.figures.lanes import Line, draw_lines, window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves"]


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
    checks.named(panels, "panels")
    unknown = [name for name in linear if name not in panels]
    if unknown or isinstance(linear, str):
        raise InputError(f"linear is {linear!r}; expected a list with some of {list(panels)}.")
    names = list(dict.fromkeys(name for panel in panels for name in checks.named(panels[panel], f"panels[{panel!r}]")))
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
    x, y = checks.array(x, f"x of {what}"), checks.array(y, f"y of {what}")
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
