import math

import pytest
import torch
from torch.distributions import Independent, Normal

from bilip import Bijection, Chain, Flow
from bilip.blocks import DiagonalScaling
from bilip.errors import InputError, NotMeasured
from bilip.models import real_nvp, residual_flow
from bilip.probes.trust import Trust, trust_flags

pytestmark = pytest.mark.numeric


class Planted(Bijection):
    """The identity, but for what is planted in it where the first entry is positive."""

    def __init__(self, *, back=lambda z: z, log_det=0.0, log_det_back=0.0):
        super().__init__()
        self.back, self.values = back, (log_det, log_det_back)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def _log_det(self, x, value):
        return torch.where(x[:, 0] > 0, torch.full_like(x[:, 0], value), torch.zeros_like(x[:, 0]))

    def forward(self, x, context=None):
        return x.clone()

    def forward_and_log_det(self, x, context=None):
        return x.clone(), self._log_det(x, self.values[0])

    def inverse(self, z, context=None):
        return torch.where(z[:, :1] > 0, self.back(z), z)

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), self._log_det(z, self.values[1])


class WrongSign(DiagonalScaling):
    """A real bug: the inverse states the log-determinant of the forward map."""

    def inverse_and_log_det(self, z, context=None):
        x, log_det = super().inverse_and_log_det(z, context)
        return x, -log_det


X = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [-2.0, 0.0], [3.0, 0.0]])
FINE = [True, False, True, False]


def test_good_models_are_trusted():
    for model in (real_nvp(2, blocks=4), residual_flow(2, blocks=2, hidden=(16,)), real_nvp(2, coupling="additive")):
        flags = trust_flags(Flow(model), torch.randn(32, 2), condition=True)
        assert bool(flags.trusted.all())
        assert flags.condition_ok is not None
        assert flags.log_prob is not None
        assert flags.trusted.shape == flags.log_prob.shape == (32,)


@pytest.mark.parametrize("back", [lambda z: z * 1.01, lambda z: z * math.nan, lambda z: z * math.inf])
def test_only_samples_that_do_not_come_back_are_flagged(back):
    flags = trust_flags(Planted(back=back), X)
    assert flags.trusted.tolist() == flags.round_trip_ok.tolist() == FINE
    assert bool(flags.log_det_ok.all())
    assert flags.log_prob is None


@pytest.mark.parametrize(
    ("log_det", "log_det_back", "ok"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (1.0, -1.001, True), (1.0, -1.004, False), (math.inf, -math.inf, False)],
)
def test_log_determinants_have_to_cancel(log_det, log_det_back, ok):
    """Two dimensions and 1e-3 for each: a difference of 0.002 is the limit."""
    flags = trust_flags(Planted(log_det=log_det, log_det_back=log_det_back), X)
    assert flags.log_det_ok.tolist() == [True, ok, True, ok]
    assert flags.trusted.equal(flags.log_det_ok)
    assert bool(flags.round_trip_ok.all())


def test_a_wrong_sign_inside_a_chain_is_seen_by_every_sample():
    good, wrong = (
        Chain(real_nvp(2, blocks=2), kind(torch.tensor([2.0, 3.0]))) for kind in (DiagonalScaling, WrongSign)
    )
    x = torch.randn(8, 2)
    assert bool(trust_flags(good, x).trusted.all())
    flags = trust_flags(wrong, x)
    assert not bool(flags.log_det_ok.any())
    # per dimension: |log 6 + log 6| / 2
    assert flags.antisymmetry.tolist() == pytest.approx([math.log(6)] * 8, rel=1e-5)


def test_condition_numbers_have_a_limit_of_half_of_the_digits():
    x = torch.randn(3, 2)
    for ratio, ok in ((1e3, True), (1e4, False)):  # 1 / sqrt(eps) of float32 is 2896
        model = DiagonalScaling(torch.tensor([ratio, 1.0]))
        flags = trust_flags(model, x, condition=True)
        assert flags.condition_ok.tolist() == flags.trusted.tolist() == [ok] * 3
        assert trust_flags(model, x, condition=2e4).trusted.tolist() == [True] * 3
        assert trust_flags(model, x).condition_ok is None
        assert bool(trust_flags(model.double(), x, condition=True).condition_ok.all())


def test_samples_for_which_the_model_raises_are_flagged_and_no_others():
    def raises(z):
        if bool((z[:, 0] > 2).any()):
            raise ValueError("too large")
        return z

    flags = trust_flags(Flow(Planted(back=raises), shape=(2,)), X)
    assert flags.trusted.tolist() == [True, True, True, False]
    assert math.isnan(float(flags.relative_error[3]))


def test_a_base_that_refuses_nan_costs_only_those_samples():
    base = Independent(Normal(torch.zeros(2), torch.ones(2), validate_args=True), 1)

    class NanForward(Planted):
        def forward_and_log_det(self, x, context=None):
            z, log_det = super().forward_and_log_det(x)
            return torch.where(x[:, :1] > 0, math.nan, z), log_det

    flags = trust_flags(Flow(NanForward(), base), X)
    assert flags.trusted.tolist() == FINE
    assert torch.isfinite(flags.log_prob).tolist() == FINE
    assert float(flags.log_prob[0]) == pytest.approx(-1 - math.log(2 * math.pi))


def test_the_probe_streams_what_the_function_says():
    model, x = Flow(Planted(back=lambda z: z + 1), shape=(2,)), torch.randn(1000, 2)
    flags = trust_flags(model, x)
    m = Trust(batch=64).measure(model, x)
    assert m["count"] == 1000
    assert m["share_trusted"] == float(flags.trusted.double().mean())
    assert m["share_trusted"] + m["share_round_trip"] == 1
    assert m["share_log_det"] == 0
    assert m["share_condition"] is None
    assert m["trusted_log_prob_median"] == pytest.approx(float(flags.log_prob[flags.trusted].median()))
    assert m["untrusted_log_prob_median"] == pytest.approx(float(flags.log_prob[~flags.trusted].median()))
    assert Trust(limit=10, condition=True).measure(model, x)["count"] == 10


def test_without_a_log_determinant_there_is_no_likelihood():
    class Mute(Planted):
        has_log_det = False

    with pytest.raises(NotMeasured, match="log-determinant"):
        trust_flags(Mute(), X)
    assert "log-determinant" in Trust().measure(Mute(), X).reason


def test_contexts_modes_and_input():
    model = real_nvp(2, blocks=2, context=1).train()
    flags = trust_flags(model, torch.randn(4, 2, dtype=torch.float64), context=torch.randn(4, 1), condition=True)
    assert bool(flags.trusted.all())
    assert model.training
    for bad in (torch.zeros(2), torch.zeros(0, 2), [[1.0, 2.0]]):
        with pytest.raises(InputError, match="expected a batch"):
            trust_flags(model, bad)
