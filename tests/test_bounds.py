"""Proven bounds: the paper's theorem, and no measured gain above a bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import error_bound
import soundness
from bilip import Box, Chain, Invert, blocks, models
from bilip.blocks import additive_coupling, residual
from bilip.bounds import BiLipschitz, log_of, log_product, log_sum, log_triangular_norm, norms
from bilip.errors import InputError, NoGlobalBound
from bilip.nets import MLP, matrix_norm
from bilip.testing import search_gains
from catalogue import CATALOGUE, IDS
from tightness import rows_of


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


@pytest.mark.parametrize("side", ["domain", "latent"])
def test_a_bound_still_speaks_about_its_box_when_somebody_writes_into_the_ends(side):
    low = torch.full((4,), -1.0, dtype=torch.float64)
    box = Box(low, 1.0)
    bound = blocks.AffineCoupling(MLP(2, 4), scale="exp").bounds(**{side: box})
    low.fill_(-50.0)
    assert (bound.domain if side == "domain" else bound.image) == box == Box(-1, 1, shape=(4,))


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


# ---- the paper's theorem on additive and affine blocks, as tests, and where its wording needs care


def pair(seed, scale):
    """An additive and an affine block with the same t."""
    torch.manual_seed(seed)
    t, s = MLP(2, 2, hidden=(6,), activation="tanh").double(), MLP(2, 2, hidden=(6,), activation="tanh").double()
    return blocks.AdditiveCoupling(t), blocks.AffineCoupling(t, s, scale=scale)


@pytest.mark.numeric
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), side=st.floats(1e-3, 100), scale=st.sampled_from(["sigmoid", "half_sigmoid"]))
def test_affine_bounds_lie_strictly_above_additive_ones(seed, side, scale):
    additive, affine = pair(seed, scale)
    box = Box(-side, side, shape=(4,))
    low, high = additive.bounds(box, formula="paper"), affine.bounds(box, formula="paper")
    assert high.log_forward > low.log_forward
    assert high.log_inverse > low.log_inverse


@pytest.mark.numeric
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


@pytest.mark.numeric
def test_the_sharper_formula_need_not_obey_the_strict_inequality():
    additive, affine = pair(0, "half_sigmoid")
    box = Box(-1e-3, 1e-3, shape=(4,))
    sharp = affine.bounds(box).forward
    assert sharp < additive.bounds(box).forward  # a scale below 1 makes the whole block smaller
    assert sharp < affine.bounds(box, formula="paper").forward


@pytest.mark.numeric
def test_no_global_bound_for_affine_blocks():
    additive, affine = pair(0, "sigmoid")
    for formula in ("sharp", "paper"):
        assert additive.bounds(formula=formula).forward < math.inf
        with pytest.raises(NoGlobalBound, match=r"Pass a box, for example bounds\(bilip.Box\(-4, 4, shape"):
            affine.bounds(formula=formula)


@pytest.mark.numeric
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


@pytest.mark.numeric
@given(lip=st.floats(0, 1e3))
def test_sharp_additive_formula(lip):
    expected = (lip + math.sqrt(lip**2 + 4)) / 2
    value = math.exp(log_triangular_norm(math.log(lip) if lip else -math.inf, 0.0))
    assert expected * (1 - 1e-12) <= value <= expected * (1 + 1e-12)
    assert value <= 1 + lip + 1e-9


@pytest.mark.numeric
@given(m=st.floats(0, 50), d=st.floats(1e-6, 50))
def test_triangular_norm_equals_svd(m, d):
    value = math.exp(log_triangular_norm(math.log(m) if m else -math.inf, math.log(d)))
    assert value == pytest.approx(matrix_norm(torch.tensor([[1.0, 0.0], [m, d]], dtype=torch.float64)), rel=1e-9)


@pytest.mark.numeric
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


# ---- no measured gain exceeds a proven bound, and no error of an inverse what is stated


@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_bounds_hold_with_plain_and_tripled_weights(entry):
    for factor in (1.0, 3.0):
        rows = rows_of(entry, seed=1, factor=factor, points=6, steps=4)
        assert rows
        assert max(row["excess"] for row in rows) <= 1e-9
        sharp = {(r["where"], r["direction"]): r["log10_bound"] for r in rows if r["formula"] == "sharp"}
        for row in rows:
            if row["formula"] == "paper" and row["log10_bound"] != "inf":
                assert sharp[row["where"], row["direction"]] <= row["log10_bound"] + 1e-9  # sharper, never looser


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    side=st.floats(0.1, 5.0),
    scale=st.sampled_from(["sigmoid", "half_sigmoid", "exp", "tanh_exp"]),
)
def test_latent_boxes(seed, side, scale):
    torch.manual_seed(seed)
    model = models.real_nvp(3, blocks=2, hidden=(6,), scale=scale).double()
    latent = Box(-side, side, shape=(3,))
    gains = search_gains(Invert(model), latent, points=6, steps=4, seed=seed)
    for formula in ("sharp", "paper"):
        bound = model.bounds(latent=latent, formula=formula)
        assert bound.given == "latent"
        assert bound.image == latent
        assert gains.forward <= bound.inverse * (1 + 1e-9)
        assert gains.inverse <= bound.forward * (1 + 1e-9)
        points = model.inverse(latent.sample(50))
        assert bound.domain.contains(points).all()


def test_direct_jacobian_of_the_inverse():
    """The inverse's gains also by differentiating the inverse itself, at images of points of the box."""
    torch.manual_seed(2)
    model = models.real_nvp(4, blocks=3, hidden=(8,), scale="half_sigmoid").double()
    box = Box(-1, 1, shape=(4,))
    bound = model.bounds(box)
    z = model(box.sample(40)).detach()
    jacobians = torch.func.vmap(torch.func.jacfwd(lambda v: model.inverse(v[None])[0]))(z).detach()
    gain = float(torch.linalg.matrix_norm(jacobians, ord=2).max())
    assert bound.inverse_lower <= gain <= bound.inverse


def test_gain_search_can_refute_a_wrong_bound():
    """A bound 1% too small is found out: the search is an adversary, not a formality."""
    block = blocks.AdditiveCoupling(MLP(2, 2, hidden=(), activation="relu")).double()
    gains = search_gains(block, Box(-1, 1, shape=(4,)))
    bound = block.bounds()
    assert gains.forward > 0.99 * bound.forward
    assert gains.inverse > 0.99 * bound.inverse


def test_lower_bounds():
    torch.manual_seed(0)
    model = models.real_nvp(4, blocks=4, hidden=(8,), coupling="additive").double()
    bound = model.bounds()
    gains = search_gains(model, Box(-2, 2, shape=(4,)))
    assert bound.forward_lower <= gains.forward
    assert bound.inverse_lower <= gains.inverse
    assert bound.forward_lower == pytest.approx(1 / bound.inverse)


def test_running_ball_beats_box_by_box_enclosure():
    """Isometries one after the other: boxes alone grow by sqrt(d) a block, the ball keeps its radius."""
    torch.manual_seed(0)
    chain = Chain(*(blocks.InvertibleConv1x1(8, kind="orthogonal") for _ in range(12)), shape=(8,)).double()
    box = Box(-1, 1)
    boxes = box.expand((8,))
    for block in chain:
        boxes = block.interval(boxes)
    assert chain.enclose(box).magnitude < 8**0.5 * 1.001
    assert boxes.magnitude > 50


def test_bounds_hold_at_any_magnitude():
    """Boxes from 1e-300 to 1e290, weights from 1e-30 to 1e4, all dtypes."""
    found = soundness.search(100, seed=11)
    assert found.comparisons >= 100
    assert not found.findings, found.findings[0]


def test_the_search_over_magnitudes_can_refute_a_wrong_bound(monkeypatch):
    """A bound of additive coupling that is one per cent too small."""
    monkeypatch.setattr(additive_coupling, "log_triangular_norm", lambda *logs: log_triangular_norm(*logs) - 0.01)
    monkeypatch.setattr(soundness, "CATALOGUE", CATALOGUE[:1])
    monkeypatch.setattr(soundness, "FLAT", [entry for entry in CATALOGUE if entry.name == "additive plain net"])
    assert soundness.search(1, seed=12).findings


def test_errors_of_inverses_are_stated_at_any_magnitude():
    """Every activation with a reference in 60 digits, right-hand sides over the whole range of each dtype."""
    found = error_bound.search(600, seed=11)
    assert found.inverses >= 600
    assert found.finite > 0.95 * found.inverses
    assert not found.findings, found.findings[0]


def test_the_search_among_inverses_can_refute_a_wrong_error(monkeypatch):
    """A residual that counts a hundredth."""
    monkeypatch.setattr(residual, "norms", lambda values: 0.01 * norms(values))
    assert error_bound.search(100, seed=12).findings


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
