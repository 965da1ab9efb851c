"""How the round-trip error grows while an attack searches for the worst input."""

from __future__ import annotations

from bilip.record import Measurement
from bilip.report.charts.marks import LEGEND, curve, safe_text
from bilip.report.charts.scale import LogScale
from bilip.report.format import clean, number
from bilip.report.parts import Figure

__all__ = ["attack_figure"]


def attack_figure(m: Measurement) -> Figure | None:
    """The error along the steps of each method; None if no method left a trajectory."""
    curves = {name: values for name, values in m.series.items() if values}
    if not curves:
        return None
    scale = LogScale(v for values in curves.values() for v in values)
    data = []
    for i, (name, values) in enumerate(curves.items()):
        texts = [f"{safe_text(name)}, step {k}: {number(v)}" for k, v in enumerate(values)]
        trace = curve(safe_text(name), values, scale, texts, style=i, dash=i)
        data.append(trace | {"marker": trace["marker"] | {"maxdisplayed": 12}})
    layout = {
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "step"}, "zeroline": False},
        "yaxis": scale.axis("round-trip error"),
        "shapes": scale.lane("y"),
    }
    ends = (f"{clean(name, 40)} from {number(v[0])} to {number(v[-1])}" for name, v in list(curves.items())[:6])
    return Figure("The error along the attack", f"Round-trip error under attack: {'; '.join(ends)}.", data, layout, 360)
