"""Probes: one question each, answered with numbers."""

from importlib import import_module

from bilip.auditing.probes.attack import Attack, AttackResult, AttackRun
from bilip.auditing.probes.blame import Blame
from bilip.auditing.probes.bounds import Bounds
from bilip.auditing.probes.consistency import Consistency
from bilip.auditing.probes.gradient_angle import GradientAngle
from bilip.auditing.probes.likelihood import Likelihood
from bilip.auditing.probes.log_det import LogDet, log_det_of_jacobian
from bilip.auditing.probes.precision import Precision
from bilip.auditing.probes.probe import PROBES, Finding, Probe, Task
from bilip.auditing.probes.reconstruction import ErrorMap, Reconstruction
from bilip.auditing.probes.sampling import Sampling
from bilip.auditing.probes.spectrum import Extremes, SingularValues, Spectrum, extremes, jacobian, singular_values
from bilip.auditing.probes.trust import Trust, TrustFlags, trust_flags
from bilip.auditing.subject import Outcome, Subject, run_guarded

__all__ = [
    "PROBES",
    "Attack",
    "AttackResult",
    "AttackRun",
    "Blame",
    "Bounds",
    "Consistency",
    "ErrorMap",
    "Extremes",
    "Finding",
    "GradientAngle",
    "Likelihood",
    "LogDet",
    "Outcome",
    "Precision",
    "Probe",
    "Reconstruction",
    "Sampling",
    "SingularValues",
    "Spectrum",
    "Subject",
    "Task",
    "Trust",
    "TrustFlags",
    "extremes",
    "jacobian",
    "log_det_of_jacobian",
    "run_guarded",
    "singular_values",
    "trust_flags",
]


def __getattr__(name: str) -> object:
    if name in ("StabilityMonitor", "StabilityRow"):  # they stand in the room above, `bilip.training`
        return getattr(import_module("bilip.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
