"""The paper's theorem on additive and affine blocks, as tests, and where its wording needs care."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip import Box, blocks
from bilip.bounds import log_triangular_norm
from bilip.errors import NoGlobalBound
from bilip.nets import MLP, matrix_norm
from bilip.testing import search_gains

pytestmark = pytest.mark.numeric


def pair(seed, scale):
    """An additive and an affine block with the same t."""
    torch.manual_seed(seed)
    t, s = MLP(2, 2, hidden=(6,), activation="tanh").double(), MLP(2, 2, hidden=(6,), activation="tanh").double()
    return blocks.AdditiveCoupling(t), blocks.AffineCoupling(t, s, scale=scale)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), side=st.floats(1e-3, 100), scale=st.sampled_from(["sigmoid", "half_sigmoid"]))
def test_affine_bounds_lie_strictly_above_additive_ones(seed, side, scale):
    additive, affine = pair(seed, scale)
    box = Box(-side, side, shape=(4,))
    low, high = additive.bounds(box, formula="paper"), affine.bounds(box, formula="paper")
    assert high.log_forward > low.log_forward
    assert high.log_inverse > low.log_inverse


def test_the_strict_inequality_needs_a_scale_that_reaches_one():
    """Where 1/g < 1 everywhere the paper's own formula puts the affine inverse *below* the additive one.

    The proof of statement (i) adds non-zero terms, but it also multiplies Lip(t) by c_{1/g}, which is below 1 for a
    scale onto
    (4, 5). On a small box the product wins.
    """
    additive, affine = pair(0, blocks.SigmoidScale(4.0, 5.0))
    box = Box(-1e-3, 1e-3, shape=(4,))
    assert affine.bounds(box, formula="paper").inverse < additive.bounds(box, formula="paper").inverse
    assert affine.bounds(box, formula="paper").forward > additive.bounds(box, formula="paper").forward


def test_the_sharper_formula_need_not_obey_the_strict_inequality():
    additive, affine = pair(0, "half_sigmoid")
    box = Box(-1e-3, 1e-3, shape=(4,))
    sharp = affine.bounds(box).forward
    assert sharp < additive.bounds(box).forward  # a scale below 1 makes the whole block smaller
    assert sharp < affine.bounds(box, formula="paper").forward


def test_no_global_bound_for_affine_blocks():
    additive, affine = pair(0, "sigmoid")
    for formula in ("sharp", "paper"):
        assert additive.bounds(formula=formula).forward < math.inf
        with pytest.raises(NoGlobalBound, match=r"Pass a box, for example bounds\(bilip.Box\(-4, 4, shape"):
            affine.bounds(formula=formula)


def test_affine_gain_grows_without_limit_and_additive_gain_does_not():
    """Measured gains, not bounds: with the transformed part ten times larger the affine gain grows about tenfold."""
    additive, affine = pair(3, "half_sigmoid")
    sides = (1e2, 1e3, 1e4, 1e5)
    side = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    grown = [search_gains(affine, Box(-(side + (1 - side) * r), side + (1 - side) * r), points=32) for r in sides]
    for before, after in zip(grown, grown[1:], strict=False):
        assert after.forward > 5 * before.forward
        assert after.inverse > 5 * before.inverse
    limit = additive.bounds()
    for r in sides:
        gains = search_gains(additive, Box(-r, r, shape=(4,)), points=16, steps=10)
        assert gains.forward <= limit.forward
        assert gains.inverse <= limit.inverse


@given(lip=st.floats(0, 1e3))
def test_sharp_additive_formula(lip):
    expected = (lip + math.sqrt(lip**2 + 4)) / 2
    value = math.exp(log_triangular_norm(math.log(lip) if lip else -math.inf, 0.0))
    assert expected * (1 - 1e-12) <= value <= expected * (1 + 1e-12)
    assert value <= 1 + lip + 1e-9


@given(m=st.floats(0, 50), d=st.floats(1e-6, 50))
def test_triangular_norm_equals_svd(m, d):
    value = math.exp(log_triangular_norm(math.log(m) if m else -math.inf, math.log(d)))
    assert value == pytest.approx(matrix_norm(torch.tensor([[1.0, 0.0], [m, d]], dtype=torch.float64)), rel=1e-9)


def test_paper_formulas_by_hand():
    """t(x) = 3x, s(x) = 2x on [-1, 1]^2, g = half sigmoid: the lemma's numbers, written out."""
    t, s = torch.nn.Linear(1, 1, bias=False).double(), torch.nn.Linear(1, 1, bias=False).double()
    t.weight.data.fill_(3.0)
    s.weight.data.fill_(2.0)
    block = blocks.AffineCoupling(t, s, scale="half_sigmoid")
    bound = block.bounds(Box(-1, 1, shape=(2,)), formula="paper")
    sigmoid = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    c_g, c_slope = 0.5 + 0.5 * sigmoid(4), 0.5 * 0.25  # raw scale + 2 in [0, 4]; g' peaks at 0
    assert bound.forward == pytest.approx(max(1, c_g) + 1 * c_slope * 2 + 3, rel=1e-9)
    low, high = block.enclose(Box(-1, 1, shape=(2,))).low, block.enclose(Box(-1, 1, shape=(2,))).high
    side = float(torch.maximum(low.abs(), high.abs()).max())
    u = 0.5 / (0.5 + 2 * 0.5)  # where |(1/g)'| peaks, inside sigmoid([0, 4])? no: clipped to 1/2
    u = min(max(u, 0.5), sigmoid(4))
    c_reciprocal_slope = 0.5 * u * (1 - u) / (0.5 + 0.5 * u) ** 2
    c_reciprocal = 1 / 0.75
    expected = c_reciprocal + side * c_reciprocal_slope * 2 + c_reciprocal_slope * 2 * 3 + c_reciprocal * 3
    assert bound.inverse == pytest.approx(expected, rel=1e-9)
