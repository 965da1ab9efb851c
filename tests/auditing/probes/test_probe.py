"""A probe written in one place is planned, measured, recorded, judged and shown; names of version 0.1 keep working."""

import importlib
import sys

import pytest
import torch

import bilip
from bilip.auditing import BUDGETS, Thresholds
from bilip.probes import PROBES, Probe
from bilip.record import Histogram, Measurement, Quantity
from bilip.report import compare, to_html, to_markdown


@pytest.fixture
def latent_reach():
    class LatentReach(Probe):
        """How far do latents lie from the origin?"""

        name = "latent_reach"
        scope = "source"
        section = ("How far do latents reach?", "Latents far from the origin are rare under the base")
        quantities = (
            Quantity("reach", "largest distance of a latent", "", "lower", judged_by="reach", uses=("editing",)),
            Quantity("share_far", "share of latents beyond 6", "share", "lower"),
            Quantity("distance", "distance from the origin"),
        )

        def __init__(self, samples):
            self.samples = samples

        @classmethod
        def cost(cls, budget, task):
            return {"samples": budget.walk}

        def _measure(self, subject, source):
            batch = source.first(self.samples, dtype=subject.dtype, device=subject.device)
            far = subject.forward(batch.x, batch.context).value.flatten(1).norm(dim=1)
            values = {"reach": float(far.max()), "share_far": float((far > 6).double().mean())}
            return Measurement(self.name, source.name, values=values, histograms={"distance": Histogram.of(far)})

    yield LatentReach
    del PROBES["latent_reach"]


def test_nothing_else_has_to_change(latent_reach, tmp_path):
    pytest.importorskip("plotly")  # for the page
    torch.manual_seed(0)
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, hidden=(8,)))
    sources = {"test": torch.randn(700, 2)}
    records = {
        limit: bilip.audit(
            flow,
            sources,
            ood=["scaled"],
            budget="quick",
            probes=["reconstruction", "latent_reach"],
            thresholds=Thresholds(more={"reach": limit}),
        )
        for limit in (1e3, 1e-3)
    }
    for limit, status in ((1e3, "safe"), (1e-3, "unsafe")):
        record = records[limit]
        assert [m.source for m in record.find("latent_reach")] == ["test", "scaled"]  # planned and measured
        assert record.verdicts["editing"].status == status  # judged
        assert record.verdicts["editing"].limit == limit
        record.save(tmp_path / "run.json")
        again = bilip.AuditRecord.load(tmp_path / "run.json")  # recorded
        assert again == record
        assert again.find("latent_reach")[0].quantity("reach").label == "largest distance of a latent"
        page = to_html(again)  # shown
        for text in (
            "How far do latents reach?",
            "largest distance of a latent",
            "share of latents beyond 6",
            "editing",
        ):
            assert text in page
        assert "largest distance of a latent" in to_markdown(again)
    assert "editing" in {v.use for v in compare(records[1e3], records[1e-3]).verdicts}
    changed = [c.name for c in compare(records[1e3], records[1e-3]).changes]
    assert "reach" in changed


def test_it_is_part_of_every_audit_from_then_on(latent_reach):
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=1, hidden=(4,)))
    from bilip.auditing.audit import _plan
    from bilip.data import as_source

    plan = list(_plan([as_source("x", torch.randn(8, 2))], BUDGETS["quick"], None, Thresholds(bad_share=0.01), None, 0))
    made = next(probe for probe, _ in plan if probe.name == "latent_reach")
    assert made.samples == BUDGETS["quick"].walk
    assert flow is not None


def test_a_probe_with_an_unknown_scope_is_refused():
    with pytest.raises(bilip.errors.InputError, match="'source', 'data', 'failing'"):

        class Odd(Probe):
            name = "odd"
            scope = "everywhere"

            def _measure(self, subject, source):
                return Measurement(self.name)

    assert "odd" not in PROBES


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
