"""Is it a function at all: the same answer twice, in any company, without a memory."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report.parts import Section
from bilip.report.sections.common import by_source, some

__all__ = ["PLACE", "sections"]

PLACE = 130


def sections(record: AuditRecord) -> tuple[Section, ...]:
    """Findings and the differences behind them."""
    columns = [
        ("stochastic", "another answer each time"),
        ("batch_dependent", "depends on the batch"),
        ("cached", "answers from a cache"),
        ("repeat_difference", "two calls differ by"),
        ("batch_difference", "a batch and its half"),
        ("straight_error", "latents back at once"),
        ("around_error", "latents back later"),
        ("log_det_spread", "log-dets, nats/dim"),
    ]
    lead = "The same input twice, alone and in a batch, should give the same answer; and the inverse should compute, not remember."
    table = by_source(record, "consistency", "Calls that should agree", columns)
    return (Section("consistency", "Is it a function at all?", lead, some(table)),)
