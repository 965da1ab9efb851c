"""Is the log-determinant right: both directions, and against the Jacobian."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.charts import distribution_figure
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, measured, some

__all__ = ["PLACE", "sections"]

PLACE = 110


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Both log-determinants, against each other and the Jacobian."""
    found = measured(record, "log_det")
    columns = [
        ("count", "samples"),
        ("antisymmetry_median", "median"),
        ("antisymmetry_p999", "p99.9"),
        ("antisymmetry_max", "largest finite"),
        ("share_non_finite", "Inf/NaN"),
        ("slogdet_error_max", "against slogdet"),
        ("claimed", "claimed, worst"),
        ("measured", "measured, worst"),
    ]
    figure = distribution_figure(
        found, "antisymmetry", "Disagreement of the two log-determinants", "nats per dimension"
    )
    lead = (
        "The log-determinants of the two directions should cancel, and agree with the Jacobian. "
        "Where they do not, likelihoods are wrong."
    )
    return (
        Section(
            "log-det",
            "Is the log-determinant right?",
            lead,
            some(by_source(record, "log_det", "Log-determinants, nats per dimension", columns), figure),
        ),
    )
