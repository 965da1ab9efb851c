"""Names of version 0.1 that have moved keep working."""

import importlib
import sys

import bilip


def test_the_probes_under_their_old_names():
    from bilip.probes.distance import distances
    from bilip.probes.spectrum import Spectrum
    from bilip.probes.subject import Subject

    import bilip.probes
    from bilip.auditing import probes

    assert bilip.probes.Spectrum is Spectrum is probes.Spectrum
    assert bilip.probes.Subject is Subject
    assert distances is importlib.import_module("bilip.auditing.round_trip").distances
    assert sys.modules["bilip.probes.spectrum"] is sys.modules["bilip.auditing.probes.spectrum"]
    for name in probes.__all__:
        assert getattr(bilip.probes, name) is getattr(probes, name)


def test_the_names_on_the_root():
    from bilip.auditing import Budget, Thresholds, audit

    assert (bilip.audit, bilip.Budget, bilip.Thresholds) == (audit, Budget, Thresholds)
    assert bilip.Budget(512, 256, 512, 256, 32, 2, 64, 30, 4, 12, 32, 4, 32).gradients == 32  # as 0.1 wrote it
