"""The same model in fewer and fewer bits."""

from __future__ import annotations

from bilip.record import Measurement
from bilip.report.charts.marks import LEGEND, curve, safe_text
from bilip.report.charts.scale import LogScale
from bilip.report.format import clean, number, share
from bilip.report.parts import Figure

__all__ = ["precision_figure"]

CURVES = {
    "error_max": "measured, worst sample",
    "error_median": "measured, median",
    "predicted": "predicted: eps × condition",
}


def precision_figure(m: Measurement) -> Figure | None:
    """Errors over the rungs of the ladder; None without rows."""
    if not m.rows:
        return None
    own = m.get("own")
    rungs = [safe_text(row.get("rung", i), 16) for i, row in enumerate(m.rows)]
    ticks = [rung + ("<br>(own)" if row.get("rung") == own else "") for rung, row in zip(rungs, m.rows, strict=True)]
    broken = [share(row.get("share_non_finite")) for row in m.rows]
    scale = LogScale(row.get(name) for row in m.rows for name in CURVES)
    data = []
    for i, (name, title) in enumerate(CURVES.items()):
        values = [row.get(name) for row in m.rows]
        texts = [
            f"{rung}, {title}: {number(v)}<br>{part} Inf/NaN"
            for rung, v, part in zip(rungs, values, broken, strict=True)
        ]
        data.append(curve(title, values, scale, texts, style=i, dash=i))
    places = list(range(len(rungs)))
    layout = {
        "legend": LEGEND,
        "xaxis": {"tickvals": places, "ticktext": ticks, "zeroline": False, "range": [-0.5, len(rungs) - 0.5]},
        "yaxis": scale.axis("relative error"),
        "shapes": scale.lane("y"),
    }
    worst = ", ".join(f"{clean(row.get('rung'), 16)} {number(row.get('error_max'))}" for row in m.rows[:8])
    summary = f"Worst relative error by precision: {worst}. First rung in which all is well: {clean(m.get('cure') or 'unknown', 20)}."
    return Figure("Precision ladder", summary, data, layout, 360)
