"""Does it come back: errors by source, and the worst inputs."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.charts import distribution_figure
from bilip.report.format import clean
from bilip.report.parts import Cell, Fold, Line, Part, Section, gallery, measured, some, table
from bilip.report.summary import non_finite, source_about, worst_condition

__all__ = ["PLACE", "sections"]

PLACE = 20


WORST = [
    ("source", "source"),
    ("sample", "sample"),
    ("relative", "relative error"),
    ("l2", "L2 error"),
    ("finite", "finite"),
]


def _errors(record: AuditRecord) -> Section:
    """The distribution of the reconstruction error on every source."""
    found = measured(record, "reconstruction")
    limit = next((m.get("wrong_limit") for m in found if m.get("wrong_limit") is not None), None)
    rows = [
        {
            **m.values,
            "source": Cell(clean(m.source), m.source, note=source_about(record, m.source)),
            "share_non_finite": non_finite(m),
            "condition": Cell.of(*worst_condition(record, m.source)),
        }
        for m in found
    ]
    columns = [
        ("source", "source"),
        ("count", "samples"),
        ("share_non_finite", "Inf/NaN"),
        ("share_failed", "raised"),
        ("share_wrong", "wrong"),
        ("relative_median", "median"),
        ("relative_p99", "p99"),
        ("relative_p999", "p99.9"),
        ("relative_max", "largest finite"),
        ("condition", "condition"),
    ]
    more = [
        ("source", "source"),
        ("latent_relative_median", "z → x → z median"),
        ("latent_relative_p999", "p99.9"),
        ("latent_share_non_finite", "Inf/NaN"),
        ("rounds", "round trips"),
        ("after_relative_median", "median after them"),
        ("after_relative_max", "largest finite"),
        ("after_share_non_finite", "Inf/NaN"),
    ]
    parts: list[Part | None] = [
        distribution_figure(found, "relative", "Relative reconstruction error", "relative error", limit)
    ]
    if found:
        parts.append(table("Relative error of F⁻¹(F(x)) by source", columns, rows))
        parts.append(
            Fold("From the latent side, and after several round trips", (table("Other round trips", more, rows),))
        )
    worst = [{"source": m.source, **row} for m in found if not m.pictures for row in m.rows[:5]]
    parts.append(Fold("Worst samples", (table("Worst samples", WORST, worst, sortable=True),)) if worst else None)
    parts += [Line(f"{clean(m.source)}: {clean(m['failure'])}") for m in found if m.get("failure")]
    lead = (
        "Each sample goes through the model and back; what comes back should be what went in. Bars to the right of the dashed "
        "line, hatched, are wrong; the last column counts samples that came back as Inf or NaN."
    )
    return Section("errors", "Does it come back?", lead, some(*parts))


def _worst(record: AuditRecord) -> Section:
    """Pictures of the inputs that come back worst."""
    found = [m for m in measured(record, "reconstruction") if m.pictures]
    rows = [{"source": m.source, **row} for m in found for row in m.rows[:5]]
    lead = "The inputs that come back worst, beside what came back. Broken pixels are cyan."
    numbers = Fold("Worst samples", (table("Worst samples", WORST, rows, sortable=True),)) if rows else None
    return Section(
        "worst",
        "Worst inputs",
        lead,
        some(*(gallery(f"On {clean(m.source, 60) or 'all'}", [m]) for m in found), numbers),
    )


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """The errors, then pictures of the worst inputs."""
    return _errors(record), _worst(record)
