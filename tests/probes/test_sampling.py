"""Samples of the model itself."""

import math

import pytest
import torch

import bilip
from bilip import Bijection, Chain, Flow, blocks, models
from bilip.probes import Sampling

pytestmark = pytest.mark.numeric


class Breaks(Bijection):
    """The identity, whose inverse is not finite, or raises, for latents in a half space."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, context=None):
        return x

    def inverse(self, z, context=None):
        if self.how == "raise":
            if bool((z[:, 0] > 1).any()):
                raise ValueError("too far")
            return z
        return torch.where(z[:, :1] > 1, self.how, z)

    def forward_and_log_det(self, x, context=None):
        return x, x.new_zeros(len(x))


def test_no_base_no_samples():
    m = Sampling().measure(models.real_nvp(2, blocks=1), torch.randn(8, 2))
    assert not m.measured
    assert "no base distribution" in m.reason


@pytest.mark.parametrize("how", [math.nan, math.inf, "raise"])
def test_samples_that_are_not_finite_are_counted(how):
    flow = Flow(Chain(Breaks(how), shape=(2,)))
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

    class Notes(Breaks):
        def inverse(self, z, context=None):
            seen.append(context[:, 0])
            return z

    context = torch.arange(30.0)[:, None]
    m = Sampling(100, batch=8).measure(Flow(Chain(Notes(0.0), shape=(2,))), (torch.randn(30, 2), context))
    assert m["count"] == 30
    assert torch.equal(torch.cat(seen), context[:, 0])


def test_a_base_that_gives_nothing_is_not_measured():
    flow = Flow(Chain(Breaks(math.nan)))  # no shape: what should be drawn?
    m = Sampling().measure(flow, torch.randn(8, 2))
    assert not m.measured
    assert "shape of a latent is not known" in m.reason
    record = bilip.audit(flow, torch.randn(8, 2), budget="quick", probes=["sampling"])
    assert record.verdicts["sampling"].status == "not-measured"
