"""Where in the plane a two-dimensional model loses its inverse."""

from __future__ import annotations

import math
from typing import Any

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import LogScale, note
from bilip.report.format import as_float, number, share
from bilip.report.parts import Figure, Section, measured, some

__all__ = ["PLACE", "glance", "map_figure", "sections"]

PLACE = 30

CYAN = "#00ffff"
CEILING = 3


def map_figure(m: Measurement) -> Figure | None:
    """Relative errors on the grid; broken cells in cyan, the region of the data in a box. None if the grid is not whole."""
    errors, side = m.series.get("error", ()), math.isqrt(len(m.series.get("error", ())))
    low, high = as_float(m.get("low")), as_float(m.get("high"))
    if side < 2 or side * side != len(errors) or not -math.inf < low < high < math.inf:
        return None
    scale = LogScale((v for v in errors if math.isfinite(v)), CEILING)
    logs = [scale.place(v) if math.isfinite(v) else None for v in errors]
    rows = [[v if v is None else round(v, 2) for v in logs[i * side : (i + 1) * side]] for i in range(side)]
    step = (high - low) / (side - 1)
    place = {"type": "heatmap", "x0": low, "dx": step, "y0": low, "dy": step}
    say = "x₁ %{x:.3g}, x₂ %{y:.3g}<br>"
    colours = {"colorscale": "Cividis", "colorbar": _bar(scale), "hovertemplate": say + "10^%{z:.1f}<extra></extra>"}
    data: list[dict[str, Any]] = [place | {"z": rows} | colours]
    lost = logs.count(None)
    if lost:
        cells = [[1 if v is None else None for v in row] for row in rows]
        colours = {
            "colorscale": [[0, CYAN], [1, CYAN]],
            "showscale": False,
            "hovertemplate": say + "Inf or NaN<extra></extra>",
        }
        data.append(place | {"z": cells} | colours)
    part = share(lost / len(errors))
    edge = {"range": [low - step / 2, high + step / 2], "zeroline": False, "showgrid": False, "constrain": "domain"}
    shapes, notes = _box(m)
    layout = {
        "xaxis": edge | {"title": {"text": "x₁"}},
        "yaxis": edge | {"title": {"text": "x₂"}, "scaleanchor": "x"},
        "margin_top": 34,
        "shapes": shapes,
        "annotations": [*notes, note(f"<b>cyan</b>: Inf or NaN, {part} of the grid", 0, 1.01)],
    }
    finite = [v for v in errors if math.isfinite(v)]
    spread = f"from {number(min(finite))} to {number(max(finite))}" if finite else "nowhere finite"
    grid = f"a {side} by {side} grid over {number(low)} to {number(high)}"
    summary = f"Relative error on {grid}: {spread}; {part} of the points are Inf or NaN."
    return Figure("Relative error over the plane", summary, data, layout, 560, square=True)


def glance(record: AuditRecord) -> Figure | None:
    """The map in small, with the same colours for every model, to stand beside others; None if there is no map."""
    figure = next((f for m in measured(record, "map") if (f := map_figure(m)) is not None), None)
    if figure is None:
        return None
    data = [
        trace | {"showscale": False} | ({"zmin": -8, "zmax": 0} if "colorbar" in trace else {}) for trace in figure.data
    ]
    bare = {"title": {"text": ""}, "nticks": 5, "constraintoward": "top"}
    layout = figure.layout | {
        "xaxis": figure.layout["xaxis"] | bare,
        "yaxis": figure.layout["yaxis"] | bare,
        "margin_top": 8,
    }
    layout["annotations"] = []
    return Figure(
        "", figure.summary, [{k: v for k, v in t.items() if k != "colorbar"} for t in data], layout, 250, square=True
    )


def _bar(scale: LogScale) -> dict[str, Any]:
    ticks = scale.axis("", 6)
    title = {"text": "relative error", "side": "right", "font": {"size": 12}}
    return {"title": title, "thickness": 14, "tickvals": ticks["tickvals"], "ticktext": ticks["ticktext"]}


def _box(m: Measurement) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A box around the training data, and its label."""
    a, b = as_float(m.get("data_low")), as_float(m.get("data_high"))
    if not (math.isfinite(a) and math.isfinite(b)):
        return [], []
    box = {"type": "rect", "x0": a, "x1": b, "y0": a, "y1": b}
    shapes = [
        box | {"line": {"color": "#000", "width": 4}},
        box | {"line": {"color": "#fff", "width": 2, "dash": "dash"}},
    ]
    look = {"font": {"color": "#fff", "size": 12}, "bgcolor": "rgba(0,0,0,0.65)", "borderpad": 3}
    return shapes, [note("training data", a, b, xref="x", yref="y", **look)]


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """The error over the plane, for models of two dimensions."""
    figures = [map_figure(m) for m in measured(record, "map")]
    lead = (
        "Every point of the plane is sent through the model and back. Dark is exact, bright is wrong, cyan is lost; "
        "the box holds the training data."
    )
    return (Section("map", "Where in the plane?", lead, some(*figures)),)
