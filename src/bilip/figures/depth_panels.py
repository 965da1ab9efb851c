"""Reconstruction error and singular values against the number of blocks (paper, figure toy-constructed)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bilip.errors import InputError
from bilip.figures import checks, style
from bilip.figures.lanes import Line, draw_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["depth_panels"]

LABELS = {
    "error": "reconstruction error",
    "sigma_min": r"singular value $\sigma_{\min}$",
    "sigma_max": r"singular value $\sigma_{\max}$",
    "condition": "condition number",
}


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
    x = checks.array(list(depths), "depths")
    if not len(x) or not np.isfinite(x).all():
        raise InputError(f"depths is {x.tolist()}; expected at least one number of blocks, all finite.")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, quantities in checks.named(curves, "curves").items():
        for quantity, values in checks.named(quantities, f"curves[{name!r}]").items():
            if quantity not in LABELS:
                raise InputError(
                    f"curves[{name!r}] has the quantity {quantity!r}; expected one of {', '.join(LABELS)}."
                )
            y = checks.array(values, f"curves[{name!r}][{quantity!r}]")
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
