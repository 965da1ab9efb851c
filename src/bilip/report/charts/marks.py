"""Curves, rules and labels, drawn the same way in every figure: a curve differs by colour, dash and symbol."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from bilip.report.charts.scale import LogScale
from bilip.report.format import clean

__all__ = ["LEGEND", "SYMBOLS", "curve", "note", "rule", "safe_text"]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def safe_text(text: Any, limit: int = 40) -> str:
    """Text for a figure, where tags would be read.

    Example:
        >>> safe_text("<b>flow</b>")
        '&lt;b&gt;flow&lt;/b&gt;'
    """
    return html.escape(clean(text, limit), quote=False)


def curve(
    name: str, values: Sequence[Any], scale: LogScale, texts: Sequence[str], *, style: int, dash: int, start: int = 0
) -> dict[str, Any]:
    """A line with marks over 0, 1, 2, ...

    Args:
        name: Its name in the legend.
        values: The values; missing ones leave a gap.
        scale: The vertical axis.
        texts: What to say when the pointer is over a value.
        style: Number of the colour and of the symbol.
        dash: Number of the dash.
        start: First position.
    """
    tone = f"@c{style % 6 + 1}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(range(start, start + len(values))),
        "y": [scale.place(v) for v in values],
        "text": list(texts),
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": tone, "dash": DASHES[dash % 6], "width": 2},
        "marker": {
            "color": tone,
            "symbol": SYMBOLS[style % 6],
            "size": 7,
            "maxdisplayed": 60 if len(values) > 120 else 0,
        },
    }


def note(text: str, x: float, y: float, *, xref: str = "paper", yref: str = "paper", **more: Any) -> dict[str, Any]:
    """A label that stands to the right of and above its point."""
    place = {"x": x, "xref": xref, "xanchor": "left", "y": y, "yref": yref, "yanchor": "bottom"}
    return {"text": text, "showarrow": False, **place, **more}


def rule(at: float, text: str, axis: str = "y", tone: str = "@muted") -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed line across the figure, and its label."""
    line = {"type": "line", "line": {"color": tone, "width": 1.5, "dash": "dash"}}
    look = {"font": {"size": 11, "color": tone}, "bgcolor": "@card"}
    if axis.startswith("y"):
        line |= {"yref": axis, "y0": at, "y1": at, "xref": "paper", "x0": 0, "x1": 1}
        return line, note(text, 1, at, yref=axis, **look) | {"xanchor": "right"}
    line |= {"xref": axis, "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1}
    return line, note(text, at, 1, xref=axis, **look) | {"xanchor": "center"}
