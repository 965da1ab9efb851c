"""The error block by block on the way back from z to x, and how ill-conditioned each block is."""

from __future__ import annotations

import math
from typing import Any

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import LEGEND, LogScale, curve, note, safe_text
from bilip.report.format import as_float, clean, number
from bilip.report.parts import Figure, Fold, Line, Section, table
from bilip.report.summary import guilty_lines, worst_blame

__all__ = ["PLACE", "blame_figure", "sections"]

PLACE = 40

CURVES = {
    "carried_max": "inherited, worst sample",
    "carried_median": "inherited, median",
    "local_max": "made here, worst sample",
    "local_median": "made here, median",
}


def blame_figure(m: Measurement) -> Figure | None:
    """Carried error, error of each block alone and condition numbers along the depth; None without rows."""
    if not m.rows:
        return None
    names = [safe_text(row.get("block", i), 24) for i, row in enumerate(m.rows)]
    heads = [f"block {name} {safe_text(row.get('kind', ''), 30)}<br>" for name, row in zip(names, m.rows, strict=True)]

    def line(key: str, title: str, scale: LogScale, style: int, dash: int) -> dict[str, Any]:
        values = [row.get(key) for row in m.rows]
        texts = [f"{head}{title}: {number(v)}" for head, v in zip(heads, values, strict=True)]
        return curve(title, values, scale, texts, style=style, dash=dash)

    errors = LogScale(row.get(key) for row in m.rows for key in CURVES)
    conditions = LogScale(row.get("condition") for row in m.rows)
    data = [line(key, title, errors, i // 2, i % 2) for i, (key, title) in enumerate(CURVES.items())]
    data.append(line("condition", "condition number", conditions, 2, 0) | {"yaxis": "y2", "showlegend": False})
    step = max(1, math.ceil(len(names) / 16))
    guilty = _guilty(m)
    shapes, notes = _mark(guilty, names) if guilty is not None else ([], [])
    layout = {
        "legend": LEGEND,
        "xaxis": {
            "title": {"text": "block: x on the left, z on the right"},
            "anchor": "y2",
            "tickvals": list(range(0, len(names), step)),
            "ticktext": names[::step],
            "zeroline": False,
            "range": [-0.7, len(names) - 0.3],
        },
        "yaxis": errors.axis("relative error") | {"domain": [0.36, 1]},
        "yaxis2": conditions.axis("condition", 3) | {"domain": [0, 0.27]},
        "shapes": [*errors.lane("y"), *conditions.lane("y2"), *shapes],
        "annotations": notes,
    }
    where = f", on {clean(m.source, 60)}" if m.source else ""
    return Figure(f"Error along the depth{where}", _summary(m, guilty), data, layout, 470)


def _guilty(m: Measurement) -> int | None:
    wanted = m.get("guilty")
    if wanted in (None, ""):
        return None
    return next((i for i, row in enumerate(m.rows) if str(row.get("block")) == str(wanted)), None)


def _mark(guilty: int, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A band over the guilty block, and its label on the side with more room."""
    band = {"type": "rect", "xref": "x", "x0": guilty - 0.5, "x1": guilty + 0.5, "yref": "paper", "y0": 0, "y1": 1}
    band |= {"fillcolor": "@guilty", "line": {"color": "@bad", "width": 1, "dash": "dot"}, "layer": "below"}
    left = guilty <= len(names) / 2
    text, at = f"<b>guilty: {names[guilty]}</b>", guilty + (0.6 if left else -0.6)
    look = {"font": {"color": "@bad", "size": 12}, "xanchor": "left" if left else "right"}
    return [band], [note(text, at, 1.02, xref="x", yref="y2 domain", **look)]


def _summary(m: Measurement, guilty: int | None) -> str:
    last, first = number(m.rows[-1].get("carried_max")), number(m.rows[0].get("carried_max"))
    worst = max(m.rows, key=lambda row: -1.0 if math.isnan(c := as_float(row.get("condition"))) else c)
    text = f"Over {len(m.rows)} blocks, walking back, the worst inherited error goes from {last} to {first}; "
    text += (
        f"the largest condition number is {number(worst.get('condition'))}, at block {clean(worst.get('block'), 40)}. "
    )
    if guilty is None:
        return text + "No block stands out."
    return text + f"Guilty: block {clean(m.get('guilty'), 40)} ({clean(m.get('guilty_kind') or '?', 40)})."


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """The error block by block, the worst source first."""
    found = worst_blame(record)
    figures = [f for f in map(blame_figure, found) if f is not None]
    first = [Line(f"The guilty one: {line}") for line in guilty_lines(record)[:1]]
    columns = [
        ("block", "block"),
        ("kind", "kind"),
        ("carried_median", "carried median"),
        ("carried_max", "carried worst"),
        ("local_max", "made here"),
        ("gain", "gain"),
        ("share_non_finite", "Inf/NaN"),
        ("sigma_min", "σ min"),
        ("sigma_max", "σ max"),
        ("condition", "condition"),
        ("log_det_error", "log-det error"),
    ]
    tables = [
        Fold(
            f"Table, block by block, on {clean(m.source, 40) or 'all'}",
            (table("Blame by block", columns, m.rows, sortable=True),),
        )
        for m in found[:1]
        if m.rows
    ]
    lead = (
        "The error each block inherits on the way back from z to x (read from right to left), beside the error it makes on its own. "
        "The guilty block is where the inherited error jumps."
    )
    return (
        Section(
            "blame",
            "Which block breaks it?",
            lead,
            (*first, *figures[:1], *tables, *(Fold(f.title, (f,)) for f in figures[1:])),
        ),
    )
