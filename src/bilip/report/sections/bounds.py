"""What is proven, beside measured gains."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.format import clean
from bilip.report.parts import Fold, Part, Section, table
from bilip.report.sections.common import by_source, measured, some

__all__ = ["PLACE", "sections"]

PLACE = 60


def sections(record: AuditRecord) -> tuple[Section, ...]:
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
    return (Section("bounds", "What is proven?", lead, some(*parts)),)
