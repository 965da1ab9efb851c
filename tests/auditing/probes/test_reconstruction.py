"""Counting what does not come back, and errors on a grid around two-dimensional data."""

import math

import pytest
import torch

import bilip
from bilip import Bijection, models
from bilip.auditing.probes import ErrorMap, Reconstruction
from catalogue import Map

pytestmark = pytest.mark.numeric


class Spoilt(Bijection):
    """The identity, with an inverse that goes wrong where the first entry says so."""

    def forward(self, x, context=None):
        return x

    def inverse(self, z, context=None):
        if bool((z[:, 0] == 4).any()):
            raise ValueError("four")
        first = z[:, :1]
        z = torch.where(first == 1, torch.nan, z)
        z = torch.where(first == 2, torch.inf, z)
        return torch.where(first == 3, z + 10, z)


def batch(marks, count=100):
    x = torch.full((count, 3), 0.5)
    for k, mark in marks.items():
        x[k, 0] = mark
    return x


def test_kinds_of_failure_are_told_apart():
    x = batch({3: 1, 10: 1, 20: 2, 40: 3, 41: 3, 42: 3, 99: 4})
    m = Reconstruction(batch=16, rounds=1).measure(Spoilt(), x)
    shares = [m[f"share_{kind}"] * 100 for kind in ("nan", "inf", "wrong", "failed")]
    assert shares == pytest.approx([2, 1, 3, 1])
    assert m["failure"] == "ValueError: four"
    assert m["count"] == 100
    assert m["l2_max"] == pytest.approx(math.sqrt(300))
    assert m["max_max"] == pytest.approx(10)
    assert {row["sample"] for row in m.rows} >= {3, 10, 20, 40, 41, 42, 99}
    assert [row["finite"] for row in m.rows[:4]] == [False] * 4
    assert m.histograms["relative"].share_non_finite == pytest.approx(0.04)


def test_a_sample_with_nan_and_inf_is_counted_once():
    class Both(Spoilt):
        def inverse(self, z, context=None):
            return torch.tensor([[math.nan, math.inf]]).expand(len(z), 2)

    m = Reconstruction(rounds=1).measure(Both(), torch.ones(5, 2))
    assert (m["share_nan"], m["share_inf"], m["share_wrong"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_norms_do_not_overflow_where_the_numbers_do_not(size):
    """The square of 1e30 is beyond float32, and the square of 1e-30 below it."""

    class Off(Spoilt):
        def inverse(self, z, context=None):
            return z * 1.5

    m = Reconstruction(rounds=1).measure(Off(), torch.full((4, 4), size))
    assert m["share_inf"] == 0
    assert m["l2_max"] == pytest.approx(size, rel=1e-5)
    assert m["share_wrong"] == (1.0 if size > 1 else m["share_wrong"])


def test_errors_grow_over_rounds():
    class Grows(Spoilt):
        def inverse(self, z, context=None):
            return z * 1.01

    x = torch.ones(4, 2)
    for rounds in (1, 10):
        m = Reconstruction(rounds=rounds).measure(Grows(), x)
        assert m["relative_max"] == pytest.approx(0.01, rel=1e-3)
        once = m["relative_max"]
        assert m["after_relative_max"] == pytest.approx(once * (1.01**rounds - 1) / 0.01, rel=1e-3)
    assert m["latent_relative_max"] == pytest.approx(0.01, rel=1e-3)


def test_the_limit_between_right_and_wrong_is_given():
    class Off(Spoilt):
        def inverse(self, z, context=None):
            return z * 1.01

    x = torch.ones(4, 2)
    assert Reconstruction(rounds=1).measure(Off(), x)["share_wrong"] == 1
    assert Reconstruction(rounds=1, wrong=0.02).measure(Off(), x)["share_wrong"] == 0
    assert Reconstruction(rounds=1).measure(Spoilt(), x)["share_wrong"] == 0


def test_a_model_that_always_raises():
    m = Reconstruction(batch=4, rounds=2).measure(Spoilt(), batch(dict.fromkeys(range(12), 4), 12))
    assert m["share_failed"] == 1
    assert m["share_nan"] == 0


def test_samples_beyond_the_limit_are_left_alone():
    m = Reconstruction(20, batch=8, rounds=1).measure(Spoilt(), batch({30: 4}, 40))
    assert m["count"] == 20
    assert m["share_failed"] == 0


# The identity; on the right half of the plane the inverse gives NaN.
RIGHT = Map(inverse=lambda z: torch.where(z[:, :1] > 0, torch.nan, z))


def test_the_map_has_the_right_way_up():
    m = ErrorMap(points=11).measure(RIGHT, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert (m["low"], m["high"], m["points"], m["data_low"], m["data_high"]) == (-2.0, 2.0, 11, -1.0, 1.0)
    error = torch.tensor(m.series["error"]).reshape(11, 11)
    assert error[:, 6:].isnan().all()  # a row runs along the first coordinate
    assert (error[:, :6] == 0).all()
    assert m["share_non_finite"] == pytest.approx(5 / 11)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2), (2, 1, 1)])
def test_other_shapes_have_no_map(shape):
    m = ErrorMap(points=3).measure(RIGHT, torch.randn(8, *shape))
    assert m.reason == "the model is not two-dimensional"


def test_conditional_models_have_no_map():
    flow = models.real_nvp(2, blocks=1, context=1)
    m = ErrorMap(points=3).measure(flow, (torch.randn(8, 2), torch.randn(8, 1)))
    assert "context" in m.reason


def test_audits_draw_one_where_there_is_one():
    plane, space = models.real_nvp(2, blocks=1), models.real_nvp(3, blocks=1)
    assert "map" not in bilip.audit(space, torch.randn(8, 3), budget="quick").settings["probes"]
    asked = bilip.audit(space, torch.randn(8, 3), budget="quick", probes=["map"])
    assert asked.find("map")[0].reason == "the model is not two-dimensional"
    assert bilip.audit(plane, torch.randn(8, 2), budget="quick", probes=["map"]).find("map")[0].measured
