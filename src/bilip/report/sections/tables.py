"""Sections that are tables: one row for each source, with a histogram, pictures or a table of the blocks below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bilip.record import AuditRecord
from bilip.report.charts import distribution_figure
from bilip.report.format import clean
from bilip.report.parts import Fold, Part, Section, by_source, gallery, measured, row_columns, some, table

__all__ = ["SECTIONS"]


@dataclass(frozen=True)
class BySource:
    """The section of a probe whose values say it all."""

    probe: str  # name of the probe
    title: str  # the question that it answers
    lead: str  # what was done, and how to read it
    caption: str  # heading of the table
    columns: tuple[tuple[str, str], ...]  # names of values, and what stands above them
    histogram: tuple[str, str, str] | None = None  # name, heading and unit of a distribution to draw; empty for none
    threshold: str = ""  # the field of `Thresholds` beyond which the distribution is drawn as wrong
    pictures: str = ""  # heading of the pictures, where the probe leaves some

    def __call__(self, record: AuditRecord) -> tuple[Section, ...]:
        """The table, the distribution and the pictures of a record."""
        found, limits = measured(record, self.probe), record.settings.get("thresholds")
        limit = limits.get(self.threshold) if self.threshold and isinstance(limits, dict) else None
        parts = some(
            by_source(record, self.probe, self.caption, self.columns),
            distribution_figure(found, *self.histogram, limit) if self.histogram else None,
            gallery(self.pictures, found) if self.pictures else None,
        )
        return (Section(self.probe.replace("_", "-"), self.title, self.lead, parts),)


def bounds(record: AuditRecord) -> tuple[Section, ...]:
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


def gradient_angle(record: AuditRecord) -> tuple[Section, ...]:
    """The largest angle, and each block's."""
    found = measured(record, "gradient_angle")
    names = dict.fromkeys((name, clean(m.quantity(name).label, 80)) for m in found for name in m.values)
    parts: list[Part | None] = [by_source(record, "gradient_angle", "Angles in radians", list(names))]
    for m in found:
        if m.rows:
            blocks = table("Block by block", row_columns(m), m.rows[:400], sortable=True, quantity=m.quantity)
            parts.append(Fold(f"Block by block ({len(m.rows)} blocks)", (blocks,)))
    lead = (
        "Gradients from recomputed activations beside those from stored ones. An angle near 0 means that training in constant memory "
        "follows the same direction."
    )
    return (Section("gradient-angle", "Are memory-saving gradients right?", lead, some(*parts)),)


SAMPLING = BySource(
    "sampling",
    "Can it sample?",
    "Samples are drawn from the base distribution, decoded, and encoded again: they should lead back to where they came from.",
    "Samples of the model",
    (
        ("count", "samples"),
        ("share_non_finite", "Inf/NaN"),
        ("share_failed", "raised"),
        ("reencode_share_non_finite", "Inf/NaN encoded again"),
        ("reencode_relative_median", "error, median"),
        ("reencode_relative_p999", "p99.9"),
        ("sample_bits_median", "bits/dim, samples"),
        ("data_bits_median", "bits/dim, data"),
    ),
    ("reencode_relative", "Error of samples encoded again", "relative error of z"),
    pictures="Samples",
)
LIKELIHOOD = BySource(
    "likelihood",
    "Is log p right?",
    "The log-likelihood as the model computes it, in its own precision, beside that of a float64 copy of it. A sample is wrong "
    "where the two differ by more than a thousandth of d + |log p|.",
    "Log-likelihoods, in nats",
    (
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
    ),
    ("excess", "Error of log p", "error of log p, divided by d + |log p|"),
    threshold="log_prob",
)
LOG_DET = BySource(
    "log_det",
    "Is the log-determinant right?",
    "The log-determinants of the two directions should cancel, and agree with the Jacobian. "
    "Where they do not, likelihoods are wrong.",
    "Log-determinants, nats per dimension",
    (
        ("count", "samples"),
        ("antisymmetry_median", "median"),
        ("antisymmetry_p999", "p99.9"),
        ("antisymmetry_max", "largest finite"),
        ("share_non_finite", "Inf/NaN"),
        ("slogdet_error_max", "against slogdet"),
        ("claimed", "claimed, worst"),
        ("measured", "measured, worst"),
    ),
    ("antisymmetry", "Disagreement of the two log-determinants", "nats per dimension"),
)
TRUST = BySource(
    "trust",
    "Which likelihoods can be trusted?",
    "The share of samples whose likelihood may be believed: the round trip works, the log-determinant agrees, "
    "and the condition number leaves digits.",
    "Trust by source",
    (
        ("count", "samples"),
        ("share_trusted", "trusted"),
        ("share_round_trip", "fail: round trip"),
        ("share_log_det", "fail: log-det"),
        ("share_condition", "fail: condition"),
        ("trusted_log_prob_median", "log p, trusted"),
        ("untrusted_log_prob_median", "log p, not trusted"),
    ),
)
CONSISTENCY = BySource(
    "consistency",
    "Is it a function at all?",
    "The same input twice, alone and in a batch, should give the same answer; and the inverse should compute, not remember.",
    "Calls that should agree",
    (
        ("stochastic", "another answer each time"),
        ("batch_dependent", "depends on the batch"),
        ("inverse_batch_dependent", "inverse depends on the batch"),
        ("log_det_batch_dependent", "log-det depends on the batch"),
        ("base_wrong", "wrong density of the base"),
        ("cached", "answers from a cache"),
        ("repeat_difference", "two calls differ by"),
        ("batch_difference", "a batch and its half"),
        ("straight_error", "latents back at once"),
        ("around_error", "latents back later"),
        ("log_det_spread", "log-dets, nats/dim"),
    ),
)
SECTIONS: dict[str, tuple[int, Callable[[AuditRecord], tuple[Section, ...]]]] = {
    "bounds": (60, bounds),
    "sampling": (90, SAMPLING),
    "likelihood": (100, LIKELIHOOD),
    "log_det": (110, LOG_DET),
    "trust": (120, TRUST),
    "gradient_angle": (125, gradient_angle),
    "consistency": (130, CONSISTENCY),
}
"""Place on the page and builder, by the name of the probe."""
