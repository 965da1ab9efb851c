"""Naming the block."""

import math

import pytest
import torch

from bilip import Bijection, Chain, blocks
from bilip.probes import Blame

pytestmark = pytest.mark.numeric


class Shift(Bijection):
    def forward(self, x, context=None):
        return x + 1

    def inverse(self, z, context=None):
        return z - 1

    def forward_and_log_det(self, x, context=None):
        return self(x), x.new_zeros(len(x))

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), z.new_zeros(len(z))


class Forward(Shift):
    def forward(self, x, context=None):
        return torch.where(x[:, :1] > 0, torch.nan, x + 1)


class Backward(Shift):
    def inverse(self, z, context=None):
        return torch.where(z[:, :1] > 0, torch.inf, z - 1)


class Raises(Shift):
    def inverse(self, z, context=None):
        raise RuntimeError("no inverse here")


def chain(defect, place, count=6):
    return Chain(*(defect() if k == place else Shift() for k in range(count)), shape=(3,))


@pytest.mark.parametrize("defect", [Forward, Backward, Raises])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_first_block_that_is_not_finite_is_named(defect, place):
    m = Blame().measure(chain(defect, place), torch.ones(8, 3))
    assert m["first_non_finite"] == str(place)
    assert m["guilty"] == str(place)
    assert m["guilty_kind"] == defect.__name__
    assert m["wrong"] == 8


def test_nobody_is_blamed_for_nothing():
    m = Blame().measure(chain(Shift, 0), torch.ones(8, 3))
    assert (m["guilty"], m["first_non_finite"], m["why"], m["guilty_log_det"], m["wrong"]) == ("", "", "", "", 0)
    assert [row["block"] for row in m.rows] == list("012345")
    assert {row["kind"] for row in m.rows} == {"Shift"}


def test_extremes_of_each_block():
    scales = torch.tensor([4.0, 0.5, 1.0])
    m = Blame().measure(Chain(Shift(), blocks.DiagonalScaling(scales), shape=(3,)), torch.randn(8, 3))
    assert (m.rows[1]["sigma_max"], m.rows[1]["sigma_min"], m.rows[1]["condition"]) == pytest.approx((4.0, 0.5, 8.0))
    assert (m.rows[0]["sigma_max"], m.rows[0]["sigma_min"]) == pytest.approx((1.0, 1.0))
    assert m.rows[1]["log_det_error"] < 1e-6
    m = Blame(spectra=0).measure(Chain(Shift(), shape=(3,)), torch.randn(8, 3))
    assert math.isnan(m.rows[0]["sigma_max"])


def test_the_block_whose_log_determinant_is_false():
    class Liar(Shift):
        def forward_and_log_det(self, x, context=None):
            return self(x), x.new_ones(len(x))

    m = Blame().measure(chain(Liar, 4), torch.ones(8, 3))
    assert m["guilty_log_det"] == m["guilty"] == "4"
    assert m.rows[4]["log_det_error"] == pytest.approx(1.0)
