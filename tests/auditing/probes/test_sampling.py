"""Samples of the model itself."""

import math

import pytest
import torch

import bilip
from bilip import Chain, Flow, blocks, models
from bilip.auditing.probes import Sampling
from catalogue import Map, zeros

pytestmark = pytest.mark.numeric


def breaking(how):
    """The identity, whose inverse is not finite, or raises, for latents in a half space."""

    def inverse(z):
        if how == "raise" and bool((z[:, 0] > 1).any()):
            raise ValueError("too far")
        return z if how == "raise" else torch.where(z[:, :1] > 1, how, z)

    return Map(inverse=inverse, log_det=zeros)


def test_no_base_no_samples():
    m = Sampling().measure(models.real_nvp(2, blocks=1), torch.randn(8, 2))
    assert not m.measured
    assert "no base distribution" in m.reason


@pytest.mark.parametrize("how", [math.nan, math.inf, "raise"])
def test_samples_that_are_not_finite_are_counted(how):
    flow = Flow(Chain(breaking(how), shape=(2,)))
    m = Sampling(1000, batch=100).measure(flow, torch.randn(8, 2))
    assert m["count"] == 1000
    assert m["share_non_finite"] == pytest.approx(0.159, abs=0.05)  # P(z > 1), five standard errors
    assert m["share_failed"] == (m["share_non_finite"] if how == "raise" else 0)
    assert m["reencode_share_non_finite"] == m["share_non_finite"]
    assert math.isfinite(m["sample_bits_median"])


def test_samples_and_data_are_equally_likely_under_the_truth():
    flow = Flow(Chain(blocks.Permutation.reverse(8), shape=(8,)))
    m = Sampling(4000).measure(flow, torch.randn(256, 8))
    expected = (8 / 2 * math.log2(2 * math.pi) + 7.34 / 2 / math.log(2)) / 8  # 7.34: median of chi-squared with 8
    assert m["sample_bits_median"] == pytest.approx(expected, abs=0.02)
    assert m["data_bits_median"] == pytest.approx(expected, abs=0.1)
    far = Sampling(100).measure(flow, 10 * torch.randn(256, 8))
    assert far["data_bits_median"] > m["data_bits_median"] + 5


def test_seeds():
    flow = Flow(models.real_nvp(2, blocks=2))
    first, again, other = (Sampling(50, seed=s).measure(flow, torch.randn(4, 2)) for s in (1, 1, 2))
    assert first["sample_bits_median"] == again["sample_bits_median"] != other["sample_bits_median"]


def test_conditional_samples_take_each_context_once():
    seen = []

    class Notes(Map):
        def inverse(self, z, context=None):
            seen.append(context[:, 0])
            return z

    context = torch.arange(30.0)[:, None]
    m = Sampling(100, batch=8).measure(Flow(Chain(Notes(log_det=zeros), shape=(2,))), (torch.randn(30, 2), context))
    assert m["count"] == 30
    drawn = [c for c in seen if c.dtype == torch.float32]  # the float64 copy decodes the same latents again
    assert torch.equal(torch.cat(drawn), context[:, 0])


def test_a_base_that_gives_nothing_is_not_measured():
    flow = Flow(Chain(breaking(math.nan)))  # no shape: what should be drawn?
    m = Sampling().measure(flow, torch.randn(8, 2))
    assert not m.measured
    assert "shape of a latent is not known" in m.reason
    record = bilip.audit(flow, torch.randn(8, 2), budget="quick", probes=["sampling"])
    assert record.verdicts["sampling"].status == "not-measured"
