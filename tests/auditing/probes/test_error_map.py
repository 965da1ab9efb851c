"""Errors on a grid around two-dimensional data."""

import pytest
import torch

import bilip
from bilip import Bijection, models
from bilip.auditing.probes import ErrorMap


class Right(Bijection):
    """The identity; on the right half of the plane the inverse gives NaN."""

    def forward(self, x, context=None):
        return x

    def inverse(self, z, context=None):
        return torch.where(z[:, :1] > 0, torch.nan, z)


def test_the_map_has_the_right_way_up():
    m = ErrorMap(points=11).measure(Right(), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert (m["low"], m["high"], m["points"], m["data_low"], m["data_high"]) == (-2.0, 2.0, 11, -1.0, 1.0)
    error = torch.tensor(m.series["error"]).reshape(11, 11)
    assert error[:, 6:].isnan().all()  # a row runs along the first coordinate
    assert (error[:, :6] == 0).all()
    assert m["share_non_finite"] == pytest.approx(5 / 11)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2), (2, 1, 1)])
def test_other_shapes_have_no_map(shape):
    m = ErrorMap(points=3).measure(Right(), torch.randn(8, *shape))
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
