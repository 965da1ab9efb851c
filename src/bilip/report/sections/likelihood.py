"""Is log p right: as the model computes it, against a float64 reference."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.charts import distribution_figure
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, measured, some

__all__ = ["PLACE", "sections"]

PLACE = 100


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Errors of log p, and both values of the worst sample."""
    found = measured(record, "likelihood")
    columns = [
        ("count", "samples"),
        ("bad", "wrong"),
        ("unknown", "no stable reference"),
        ("referenced", "held against float64"),
        ("error_median", "error, median"),
        ("error_max", "largest finite"),
        ("worst_log_prob", "log p as run, worst"),
        ("worst_reference", "log p of the reference"),
        ("log_prob_median", "log p, median"),
        ("spread", "spread over draws"),
    ]
    figure = distribution_figure(
        found, "excess", "Error of log p", "error of log p, divided by d + |log p|", _limit(record)
    )
    lead = (
        "The log-likelihood as the model computes it, in its own precision, beside that of a float64 copy of it. A sample is wrong "
        "where the two differ by more than a thousandth of d + |log p|."
    )
    table = by_source(record, "likelihood", "Log-likelihoods, in nats", columns)
    return (Section("likelihood", "Is log p right?", lead, some(table, figure)),)


def _limit(record: AuditRecord) -> object:
    thresholds = record.settings.get("thresholds")
    return thresholds.get("log_prob") if isinstance(thresholds, dict) else None
