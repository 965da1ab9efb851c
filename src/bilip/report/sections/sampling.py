"""Can it sample? Draws of the model, decoded, held against a reference and encoded again."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.charts import distribution_figure
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, gallery, measured, some

__all__ = ["PLACE", "sections"]

PLACE = 90


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Samples, encoded again."""
    found = measured(record, "sampling")
    columns = [
        ("count", "samples"),
        ("share_non_finite", "Inf/NaN"),
        ("share_failed", "raised"),
        ("reencode_share_non_finite", "Inf/NaN encoded again"),
        ("reencode_relative_median", "error, median"),
        ("reencode_relative_p999", "p99.9"),
        ("sample_bits_median", "bits/dim, samples"),
        ("data_bits_median", "bits/dim, data"),
    ]
    figure = distribution_figure(found, "reencode_relative", "Error of samples encoded again", "relative error of z")
    lead = "Samples are drawn from the base distribution, decoded, and encoded again: they should lead back to where they came from."
    return (
        Section(
            "sampling",
            "Can it sample?",
            lead,
            some(by_source(record, "sampling", "Samples of the model", columns), figure, gallery("Samples", found)),
        ),
    )
