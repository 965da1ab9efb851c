"""As a density: samples, log-determinants and which likelihoods to believe."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report import charts
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, gallery, measured, some

__all__ = ["log_det_section", "sampling_section", "trust_section"]


def sampling_section(record: AuditRecord) -> Section:
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
    figure = charts.distribution_figure(
        found, "reencode_relative", "Error of samples encoded again", "relative error of z"
    )
    lead = "Samples are drawn from the base distribution, decoded, and encoded again: they should lead back to where they came from."
    return Section(
        "sampling",
        "Can it sample?",
        lead,
        some(by_source(record, "sampling", "Samples of the model", columns), figure, gallery("Samples", found)),
    )


def log_det_section(record: AuditRecord) -> Section:
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
    figure = charts.distribution_figure(
        found, "antisymmetry", "Disagreement of the two log-determinants", "nats per dimension"
    )
    lead = (
        "The log-determinants of the two directions should cancel, and agree with the Jacobian. "
        "Where they do not, likelihoods are wrong."
    )
    return Section(
        "log-det",
        "Is the log-determinant right?",
        lead,
        some(by_source(record, "log_det", "Log-determinants, nats per dimension", columns), figure),
    )


def trust_section(record: AuditRecord) -> Section:
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
    return Section(
        "trust", "Which likelihoods can be trusted?", lead, some(by_source(record, "trust", "Trust by source", columns))
    )
