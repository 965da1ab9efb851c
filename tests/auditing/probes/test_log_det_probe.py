"""Claimed log-determinants against the Jacobian."""

import math

import pytest
import torch

from bilip.auditing import BUDGETS
from bilip.auditing.probes import LogDet
from bilip.auditing.probes.probe import Task
from catalogue import CATALOGUE, Map

pytestmark = pytest.mark.numeric

CHOSEN = [e for e in CATALOGUE if e.shape and math.prod(e.shape) <= 16 and "ode" not in e.name]


@pytest.mark.parametrize("entry", CHOSEN, ids=[e.name for e in CHOSEN])
def test_own_blocks_tell_the_truth(entry):
    x, context = entry.batch(3), entry.contexts(3)
    m = LogDet(samples=2).measure(entry.make().double(), x if context is None else (x, context))
    assert m.measured, m.reason
    if entry.name == "factor out":
        assert m["slogdet_samples"] in (0, 2)
    else:
        assert m["slogdet_samples"] == 2, m.notes
        assert m["slogdet_error_max"] < 1e-6
    assert m["antisymmetry_max"] < 1e-6


def doubling(there=1.0, back=-1.0):
    """2 x, with so much of its log-determinant claimed in each direction."""

    def claim(share):
        return lambda x: x.new_full((len(x),), share * x.shape[1] * math.log(2))

    return Map(lambda x: 2 * x, lambda z: z / 2, claim(there), claim(back))


@pytest.mark.parametrize(
    ("claims", "cancel", "jacobian"),
    [((1, -1), 0, 0), ((-1, 1), 0, 2), ((1.5, -1.5), 0, 0.5), ((1, 1), 2, 0), ((0, -1), 1, 1)],
)
def test_false_claims_are_measured_per_dimension(claims, cancel, jacobian):
    m = LogDet().measure(doubling(*claims), torch.randn(6, 5))
    assert m["antisymmetry_max"] == pytest.approx(cancel * math.log(2), abs=1e-5)
    assert m["slogdet_error_max"] == pytest.approx(jacobian * math.log(2), abs=1e-5)
    assert any("wrong sign" in note for note in m.notes) == (claims[0] == -1)
    assert m["measured"] == pytest.approx(5 * math.log(2))
    assert m["claimed"] == pytest.approx(claims[0] * 5 * math.log(2), abs=1e-5)


def test_a_claim_that_is_not_finite_is_not_lost():
    m = LogDet().measure(doubling(math.nan), torch.randn(6, 5))
    assert m["share_non_finite"] == 1.0
    assert not m["slogdet_error_max"] <= 1e9


def test_no_claim_is_not_measured():
    def silent(x):
        raise NotImplementedError("no log-determinant")

    m = LogDet().measure(Map(lambda x: 2 * x, lambda z: z / 2, silent), torch.randn(6, 5))
    assert not m.measured
    assert "no log-determinant" in m.reason


def test_a_log_determinant_that_is_wrong_at_some_points_is_found_where_jacobians_are_cheap():
    """exp(1) x; half of the space has no log-determinant of its own."""
    lies = Map(
        lambda x: x * math.e,
        lambda z: z / math.e,
        lambda x: torch.where(x[:, 0] < 0, float(x.shape[1]), 0.0).to(x),
    )
    torch.manual_seed(0)
    x = torch.randn(200, 8)
    x[:, 0] = x[:, 0].abs()
    x[:8, 0] *= -1  # the first points are right
    probe = LogDet(**LogDet.cost(BUDGETS["quick"], Task(shape=(8,))))
    m = probe.measure(lies, x)
    assert m["slogdet_samples"] == 200
    assert m["slogdet_off"] == 192
    assert m["slogdet_error_max"] == pytest.approx(1.0)
    assert (m["claimed"], m["measured"]) == (pytest.approx(0.0), pytest.approx(8.0))


@pytest.mark.parametrize("many", [0, 16])
def test_a_point_whose_determinant_float64_cannot_hold_says_nothing(many):
    """e^-1000 x where the first entry is positive: the log-determinant is right, and the Jacobian is 0 in float64."""

    def log_scale(x):
        return torch.where(x[:, :1] > 0, -1000.0, -1.0).to(x)

    steep = Map(
        lambda x: torch.cat((x[:, :1], x[:, 1:] * log_scale(x).exp()), 1),
        lambda z: torch.cat((z[:, :1], z[:, 1:] / log_scale(z).exp()), 1),
        lambda x: log_scale(x)[:, 0] * (x.shape[1] - 1),
        lambda z: -log_scale(z)[:, 0] * (z.shape[1] - 1),
    )
    x = torch.ones(20, 3)
    x[1:] *= -1
    m = LogDet(samples=2, many=many).measure(steep, x)
    assert m["slogdet_samples"] == max(many, 2) - 1
    assert m["slogdet_error_max"] < 1e-12
    assert "no determinant in float64" in m.notes[-1]
