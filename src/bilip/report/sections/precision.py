"""Would more bits help: the same model in fewer and fewer of them."""

from __future__ import annotations

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import LEGEND, LogScale, curve, safe_text
from bilip.report.format import clean, number, share
from bilip.report.parts import Figure, Fold, Line, Part, Section, measured, some, table

__all__ = ["PLACE", "precision_figure", "sections"]

PLACE = 70

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


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """The precision ladder."""
    found = measured(record, "precision")
    parts: list[Part | None] = []
    columns = [
        ("rung", "precision"),
        ("eps", "eps"),
        ("error_median", "median"),
        ("error_max", "largest"),
        ("share_non_finite", "Inf/NaN"),
        ("predicted", "eps × condition"),
        ("delta", "|δ|"),
        ("lip_inverse", "gain along δ"),
        ("left_side", "error"),
        ("right_side", "bound on it"),
        ("holds", "holds"),
    ]
    for m in found:
        parts.append(Line(_said(m), clean(m.source, 60) or "all"))
        parts += [
            precision_figure(m),
            Fold("Numbers by precision", (table("Precision ladder", columns, m.rows),)) if m.rows else None,
        ]
    lead = (
        "The same model, the same inputs, in fewer and fewer bits: if more bits cure the error, "
        "it is a rounding error that the inverse magnifies."
    )
    return (Section("precision", "Would more bits help?", lead, some(*parts)),)


def _said(m: Measurement) -> str:
    """What the ladder says about the samples that were probed, and about no others."""
    cure, lowest, own = m.get("cure"), m.get("lowest"), clean(m.get("own") or "an unknown precision")
    count = number(m.get("samples"))
    if cure in (None, "none"):
        return f"Of the {count} samples probed some fail in every precision on the ladder."
    text = f"The {count} samples probed come back in {clean(cure)}; the model runs in {own}."
    return text + (
        f" The lowest precision in which they do is {clean(lowest)}." if lowest not in (None, "none", cure) else ""
    )
