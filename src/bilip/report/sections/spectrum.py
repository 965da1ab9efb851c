"""How ill-conditioned is it: singular values of the Jacobian at the worst sample of each source."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import LEGEND, SYMBOLS, LogScale, curve, rule, safe_text
from bilip.report.format import clean, number
from bilip.report.parts import Cell, Figure, Section, measured, some, table
from bilip.report.summary import worst_condition

__all__ = ["PLACE", "spectrum_figure", "sections"]

PLACE = 50

PRECISIONS = {"float32": 2.0**-23, "float64": 2.0**-52}


def spectrum_figure(measurements: Sequence[Measurement]) -> Figure | None:
    """Spectra with filled marks where a value is resolved and open ones where it is not; None if no source has one."""
    shown = [(m, m.series["singular_values"]) for m in measurements if m.series.get("singular_values")]
    if not shown:
        return None
    values = [v for _, sigma in shown for v in sigma]
    limits, longest = _limits(values), max(len(sigma) for _, sigma in shown)
    scale = LogScale([*values, *limits.values()])
    data = []
    for i, (m, sigma) in enumerate(shown):
        source = safe_text(m.source) or "all"
        resolved = ([bool(r) for r in m.series.get("resolved", ())] + [True] * len(sigma))[: len(sigma)]
        texts = [
            f"{source}: σ<sub>{k}</sub> = {number(v)}{'' if seen else ', not resolved'}"
            for k, (v, seen) in enumerate(zip(sigma, resolved, strict=True), 1)
        ]
        trace = curve(source, sigma, scale, texts, style=i, dash=0, start=1)
        symbols = [SYMBOLS[i % 6] + ("" if seen else "-open") for seen in resolved]
        look = {
            "marker": trace["marker"] | {"symbol": symbols, "maxdisplayed": 0},
            "line": trace["line"] | {"width": 1},
        }
        data.append(trace | look)
    rules = [
        rule(scale.place(limit) or 0.0, f"{name} loses what is below eps · σ<sub>max</sub>")
        for name, limit in limits.items()
    ]
    layout = {
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "index"}, "zeroline": False} | ({"dtick": 1} if longest <= 12 else {}),
        "yaxis": scale.axis("singular value", 7),
        "shapes": [*scale.lane("y"), *(line for line, _ in rules)],
        "annotations": [label for _, label in rules],
    }
    ends = (f"{clean(m.source, 40) or 'all'} from {number(sigma[0])} to {number(sigma[-1])}" for m, sigma in shown[:6])
    summary = f"Singular values of the Jacobian at the worst sample: {'; '.join(ends)}."
    return Figure("Singular values at the worst sample", summary, data, layout, 400)


def _limits(values: Sequence[float]) -> dict[str, float]:
    """Where float32 ends, and where float64 does if the spectrum comes within a factor of a thousand of that."""
    finite = [v for v in values if math.isfinite(v) and v > 0]
    if not finite:
        return {}
    limits = {name: eps * max(finite) for name, eps in PRECISIONS.items()}
    return {
        name: limit for name, limit in limits.items() if limit > 0 and (name == "float32" or limit * 1e3 > min(finite))
    }


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Singular values of the Jacobian."""
    found = measured(record, "spectrum")
    rows = [{**m.values, "source": m.source, "condition": Cell.of(*worst_condition(record, m.source))} for m in found]
    columns = [
        ("source", "source"),
        ("method", "method"),
        ("samples", "samples"),
        ("sigma_max", "σ max"),
        ("sigma_max_status", "known"),
        ("sigma_min", "σ min"),
        ("sigma_min_status", "known"),
        ("condition", "condition"),
    ]
    lead = (
        "A singular value says how much the model stretches one direction; the inverse magnifies errors by one over the smallest. "
        "Below the dashed lines a precision cannot see a direction any more. Open marks are values that could not be resolved."
    )
    return (
        Section(
            "spectrum",
            "How ill-conditioned is it?",
            lead,
            some(
                spectrum_figure(found),
                table("Extreme singular values over the samples", columns, rows) if rows else None,
            ),
        ),
    )
