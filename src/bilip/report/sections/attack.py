"""Can it be broken on purpose: a search near real samples."""

from __future__ import annotations

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import LEGEND, LogScale, curve, safe_text
from bilip.report.format import clean, number
from bilip.report.parts import Figure, Line, Part, Section, gallery, measured, some, table

__all__ = ["PLACE", "attack_figure", "sections"]

PLACE = 80


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


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Attacks on the round trip."""
    found = measured(record, "attack")
    columns = [
        ("method", "method"),
        ("success", "broke it"),
        ("steps", "steps"),
        ("start_error", "error before"),
        ("end_error", "error after"),
        ("worst_relative", "worst relative"),
        ("samples", "samples"),
    ]
    parts: list[Part | None] = []
    for m in found:
        parts += [attack_figure(m), table("Attacks", columns, m.rows) if m.rows else None]
        if m.get("box") is not None:
            size = f"radius {number(m.get('radius'))}, step {number(m.get('step'))}"
            parts.append(Line(f"The search stays inside: {clean(m['box'])} ({size})."))
    parts.append(gallery("The point found and its reconstruction", found))
    lead = (
        "A search near real samples, inside the range of the data, for an input whose round trip fails: "
        "that the data at hand comes back proves little."
    )
    return (Section("attack", "Can it be broken on purpose?", lead, some(*parts)),)
