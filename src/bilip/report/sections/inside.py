"""Inside the model: which block breaks it, how ill-conditioned it is, what is proven."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report import charts
from bilip.report.format import clean
from bilip.report.parts import Cell, Fold, Line, Part, Section, table
from bilip.report.sections.common import by_source, measured, some
from bilip.report.summary import guilty_lines, worst_blame, worst_condition

__all__ = ["blame_section", "bounds_section", "spectrum_section"]


def blame_section(record: AuditRecord) -> Section:
    """The error block by block, the worst source first."""
    found = worst_blame(record)
    figures = [f for f in map(charts.blame_figure, found) if f is not None]
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
    return Section(
        "blame",
        "Which block breaks it?",
        lead,
        (*first, *figures[:1], *tables, *(Fold(f.title, (f,)) for f in figures[1:])),
    )


def spectrum_section(record: AuditRecord) -> Section:
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
    return Section(
        "spectrum",
        "How ill-conditioned is it?",
        lead,
        some(
            charts.spectrum_figure(found),
            table("Extreme singular values over the samples", columns, rows) if rows else None,
        ),
    )


def bounds_section(record: AuditRecord) -> Section:
    """Proven bounds beside measured gains."""
    found = measured(record, "bounds")
    columns = [
        ("block", "block"),
        ("kind", "kind"),
        ("log10_forward", "Lip(F)"),
        ("log10_inverse", "Lip(F⁻¹)"),
        ("log10_total_forward", "Lip(F) so far"),
        ("log10_total_inverse", "Lip(F⁻¹) so far"),
        ("magnitude", "|activation| up to"),
    ]
    whole = [
        ("log10_forward", "Lip(F), proven"),
        ("measured_log10_forward", "measured"),
        ("log10_inverse", "Lip(F⁻¹), proven"),
        ("measured_log10_inverse", "measured"),
        ("first_beyond_precision", "beyond precision from block"),
        ("domain", "range of inputs"),
    ]
    parts: list[Part | None] = [by_source(record, "bounds", "Proven and measured, by source", whole)]
    for m in found:
        rows = [
            {**r, "log10_total_forward": r.get("total_forward"), "log10_total_inverse": r.get("total_inverse")}
            for r in m.rows
        ]
        if rows:
            proven = table(f"Bounds of each block, on {clean(m.source, 60) or 'all'}", columns, rows, sortable=True)
            short = len(found) == 1 and len(rows) <= 12
            parts.append(proven if short else Fold(f"{proven.caption} ({len(rows)} blocks)", (proven,)))
    lead = (
        "How much each block, and its inverse, can magnify a difference at most: proven for every input in the range of the "
        "data, not estimated. Once Lip(F⁻¹) passes 1/eps, nothing rules out that a reconstruction is all error."
    )
    return Section("bounds", "What is proven?", lead, some(*parts))
