"""No measured gain exceeds a proven bound, and no error of an inverse what is stated.

The long versions are `make soak` (benchmarks/tightness.py) and `make soak-bounds` (benchmarks/soundness.py, benchmarks/error_bound.py).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import error_bound
import soundness
from bilip import Box, Chain, Invert, blocks, models
from bilip.blocks import additive_coupling, residual
from bilip.bounds import log_triangular_norm, norms
from bilip.nets import MLP
from bilip.testing import search_gains
from catalogue import CATALOGUE, IDS
from tightness import rows_of


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
