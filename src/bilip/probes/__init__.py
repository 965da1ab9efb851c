"""Probes: one question each, answered with numbers."""

from bilip.probes.blame import Blame
from bilip.probes.bounds import Bounds
from bilip.probes.consistency import Consistency
from bilip.probes.error_map import ErrorMap
from bilip.probes.guarded import Outcome, run_guarded
from bilip.probes.log_det import LogDet, log_det_of_jacobian
from bilip.probes.probe import Probe
from bilip.probes.reconstruction import Reconstruction
from bilip.probes.sampling import Sampling
from bilip.probes.spectrum import Extremes, SingularValues, Spectrum, extremes, jacobian, singular_values
from bilip.probes.subject import Subject

__all__ = [
    "Blame",
    "Bounds",
    "Consistency",
    "ErrorMap",
    "Extremes",
    "LogDet",
    "Outcome",
    "Probe",
    "Reconstruction",
    "Sampling",
    "SingularValues",
    "Spectrum",
    "Subject",
    "extremes",
    "jacobian",
    "log_det_of_jacobian",
    "run_guarded",
    "singular_values",
]
