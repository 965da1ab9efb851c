import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilip import blocks
from bilip.bounds import BiLipschitz, Box, log_of, log_product, log_sum
from bilip.errors import InputError
from bilip.nets import MLP


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=5))
def test_logs_round_up(values):
    exact = math.fsum(values)
    if exact < 1e300:
        assert log_sum(*(log_of(v) for v in values)) >= math.log(exact)
    assert log_product(*(log_of(v) for v in values)) >= math.fsum(math.log(v) for v in values)


def test_zero_and_infinity():
    assert log_of(0.0) == -math.inf
    assert log_product(-math.inf, math.inf) == -math.inf  # a constant function stays constant
    assert log_sum(-math.inf, 0.0) >= 0.0
    assert log_product(1e308, 1e308) == math.inf


def test_boxes():
    box = Box(-1, torch.tensor([1.0, 2.0]))
    assert box.shape == (2,)
    assert box.magnitude == 2.0
    assert box.contains(torch.tensor([[0.0, 1.5], [1.5, 0.0]])).tolist() == [True, False]
    assert bool(box.contains(box.sample(100)).all())
    assert Box(0, 4, shape=(2,)).intersect(box) == Box(torch.zeros(2), torch.tensor([1.0, 2.0]))
    assert not Box.everything().is_bounded
    assert "shape=(2,)" in repr(box)
    assert Box(0.1, 0.3).low.item() == 0.1  # python numbers keep their double precision


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Box(1, -1), "a lower end lies above"),
        (lambda: Box(math.nan, 1), "an end is NaN"),
        (lambda: Box(torch.zeros(2), torch.ones(3)), "broadcast"),
        (lambda: Box("a", 1), "numbers or tensors"),
        (lambda: Box(0, 1, shape=(2,)).expand((3,)), "broadcast"),
        (lambda: Box(-math.inf, 1).sample(2), "unbounded"),
        (lambda: BiLipschitz(1.0), "exactly one"),
        (lambda: BiLipschitz(1.0, -2.0), "not an upper bound"),
        (lambda: BiLipschitz(math.nan, 1.0), "not an upper bound"),
    ],
)
def test_bad_input(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_lower_bounds_and_huge_constants():
    bound = BiLipschitz(log_forward=2000.0, log_inverse=-5.0)
    assert bound.forward == math.inf
    assert bound.inverse_lower == 0.0
    assert bound.forward_lower == pytest.approx(math.exp(5))
    assert "10^868" in repr(bound)
    assert bound.swap().log_inverse == 2000.0


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: blocks.AffineCoupling(MLP(2, 4)), (6,)),
        (lambda: blocks.InvertibleConv1x1(3), (5,)),
        (lambda: blocks.ActNorm(3, start="identity"), (5,)),
        (lambda: blocks.ActNorm(3, start="identity"), (1,)),
        (lambda: blocks.DiagonalScaling(torch.ones(3)), (1,)),
    ],
)
def test_boxes_of_the_wrong_shape_are_refused(make, shape):
    with pytest.raises(InputError):
        make().bounds(Box(-1, 1, shape=shape))
