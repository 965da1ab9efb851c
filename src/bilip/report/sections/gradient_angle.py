"""Are memory-saving gradients the gradients: angles, whole network and block by block."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.format import clean
from bilip.report.parts import Fold, Part, Section, table
from bilip.report.sections.common import by_source, measured, some

__all__ = ["PLACE", "sections"]

PLACE = 125


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """The largest angle, and each block's."""
    found = measured(record, "gradient_angle")
    names = dict.fromkeys((name, clean(m.quantity(name).label, 80)) for m in found for name in m.values)
    parts: list[Part | None] = [by_source(record, "gradient_angle", "Angles in radians", list(names))]
    for m in found:
        columns = dict.fromkeys((str(name), clean(m.quantity(str(name)).label, 40)) for row in m.rows for name in row)
        if m.rows:
            blocks = table("Block by block", list(columns), m.rows[:400], sortable=True, quantity=m.quantity)
            parts.append(Fold(f"Block by block ({len(m.rows)} blocks)", (blocks,)))
    lead = (
        "Gradients from recomputed activations beside those from stored ones. An angle near 0 means that training in constant memory "
        "follows the same direction."
    )
    return (Section("gradient-angle", "Are memory-saving gradients right?", lead, some(*parts)),)
