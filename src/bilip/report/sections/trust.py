"""Which likelihoods can be trusted, by source."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, some

__all__ = ["PLACE", "sections"]

PLACE = 120


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Shares of samples whose likelihood can be believed."""
    columns = [
        ("count", "samples"),
        ("share_trusted", "trusted"),
        ("share_round_trip", "fail: round trip"),
        ("share_log_det", "fail: log-det"),
        ("share_condition", "fail: condition"),
        ("trusted_log_prob_median", "log p, trusted"),
        ("untrusted_log_prob_median", "log p, not trusted"),
    ]
    lead = (
        "The share of samples whose likelihood may be believed: the round trip works, the log-determinant agrees, "
        "and the condition number leaves digits."
    )
    return (
        Section(
            "trust",
            "Which likelihoods can be trusted?",
            lead,
            some(by_source(record, "trust", "Trust by source", columns)),
        ),
    )
