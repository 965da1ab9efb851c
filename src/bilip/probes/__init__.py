"""Probes: one question each, answered with numbers."""

from bilip.probes.attack import Attack, AttackResult, AttackRun
from bilip.probes.blame import Blame
from bilip.probes.bounds import Bounds
from bilip.probes.consistency import Consistency
from bilip.probes.error_map import ErrorMap
from bilip.probes.gradient_angle import GradientAngle
from bilip.probes.guarded import Outcome, run_guarded
from bilip.probes.log_det import LogDet, log_det_of_jacobian
from bilip.probes.monitor import StabilityMonitor, StabilityRow
from bilip.probes.precision import Precision
from bilip.probes.probe import Probe
from bilip.probes.reconstruction import Reconstruction
from bilip.probes.sampling import Sampling
from bilip.probes.spectrum import Extremes, SingularValues, Spectrum, extremes, jacobian, singular_values
from bilip.probes.subject import Subject
from bilip.probes.trust import Trust, TrustFlags, trust_flags

__all__ = [
    "Attack",
    "AttackResult",
    "AttackRun",
    "Blame",
    "Bounds",
    "Consistency",
    "ErrorMap",
    "Extremes",
    "GradientAngle",
    "LogDet",
    "Outcome",
    "Precision",
    "Probe",
    "Reconstruction",
    "Sampling",
    "SingularValues",
    "Spectrum",
    "StabilityMonitor",
    "StabilityRow",
    "Subject",
    "Trust",
    "TrustFlags",
    "extremes",
    "jacobian",
    "log_det_of_jacobian",
    "run_guarded",
    "singular_values",
    "trust_flags",
]
