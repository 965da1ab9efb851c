"""The audit: probes measure a model on its sources, verdicts judge each use by what was measured, remedies say what to do."""

from bilip.auditing.audit import audit
from bilip.auditing.budget import BUDGETS, Budget
from bilip.auditing.verdicts import Thresholds, judge

__all__ = ["BUDGETS", "Budget", "Thresholds", "audit", "judge"]
