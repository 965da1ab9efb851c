"""The angle between stored and memory-saving gradients."""

import math

import pytest
import torch
from torch import nn

from bilip import Bijection, Chain, Flow, blocks, models
from bilip.auditing.probes import gradient_angle
from bilip.auditing.probes.gradient_angle import GradientAngle
from bilip.errors import InputError
from bilip.nets import MLP
from bilip.reversible import Reversible

pytestmark = pytest.mark.numeric


def planted(smallest):
    """Affine blocks, one of which scales by almost nothing and adds 1: its inverse magnifies rounding by 1/smallest."""
    torch.manual_seed(0)
    model = models.real_nvp(4, blocks=4, hidden=(8,), scale="exp", activation="elu")
    with torch.no_grad():
        last = [m for m in model[2].modules() if isinstance(m, nn.Linear)][-1]
        last.weight.zero_()
        last.bias[:2] = 1
        last.bias[2:] = math.log(smallest)
    return model


def test_stable_models_have_small_angles():
    """Smooth nets: where a ReLU's input is almost 0, rounding may flip its sign on the way back, and the gradient with it."""
    for coupling in ("additive", "affine"):
        model = models.real_nvp(4, blocks=6, coupling=coupling, activation="elu")
        m = GradientAngle(64).measure(model, torch.randn(64, 4))
        assert m["angle"] < 1e-4
        assert m["angle_median"] <= m["angle"]
        assert (m["share_non_finite"], m["stored_non_finite"], m["batches"], m["samples"]) == (0, 0, 4, 64)
        assert [row["block"] for row in m.rows] == [str(k) for k in range(6)]


def test_the_angle_grows_with_a_planted_defect_and_its_block_shows():
    x = torch.randn(32, 4)
    angles = [GradientAngle(32).measure(planted(s), x)["angle"] for s in (1.0, 1e-4, 1e-7)]
    assert angles[0] < 1e-5 < angles[1] < angles[2]
    assert angles[2] > 1e-2
    m = GradientAngle(32).measure(planted(1e-7), x)
    rows = {row["block"]: row["angle"] for row in m.rows}
    assert rows["3"] < 1e-5  # after the defect: the walk has not met it yet
    assert max(rows, key=rows.get) in ("0", "1", "2")


def test_in_float64_the_effect_disappears():
    """Why gradients are measured in the model's own dtype."""
    x, model = torch.randn(32, 4), planted(1e-7)
    assert GradientAngle(32).measure(model.double(), x)["angle"] < 1e-5


def test_the_angle_is_the_one_between_the_two_gradients():
    model, x = planted(1e-6), torch.randn(16, 4)

    def gradient(m):
        z, log_det = m.forward_and_log_det(x)
        loss = (0.5 * z.square().sum(1) - log_det).mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()

    u, v = gradient(model), gradient(Reversible(model, None))
    cosine = float(u @ v / (u.norm() * v.norm()))
    m = GradientAngle(16, batch=16).measure(model, x)
    assert m["angle"] == pytest.approx(math.acos(min(cosine, 1.0)), rel=1e-3)


def test_not_finite_walk_is_nan_and_counted():
    model, x = planted(1e-60), torch.randn(32, 4)
    m = GradientAngle(32).measure(model, x)
    assert math.isnan(m["angle"])
    assert m["share_non_finite"] == 1.0
    assert math.isnan(m["angle_median"])


def test_not_finite_stored_gradients_are_only_counted():
    model = models.real_nvp(4, blocks=3, activation="elu")
    x = torch.randn(32, 4)
    x[3] = 1e30
    m = GradientAngle(32).measure(model, x)
    assert (m["stored_non_finite"], m["batches"]) == (1, 2)
    assert m["share_non_finite"] == 0.0
    assert m["angle"] < 1e-3
    nothing = GradientAngle(32).measure(model, torch.full((4, 4), 1e30))
    assert math.isnan(nothing["angle"])
    assert math.isnan(nothing["share_non_finite"])


def test_losses():
    model, x = models.real_nvp(4, blocks=3, activation="elu"), torch.randn(32, 4)
    m = GradientAngle(32, loss=lambda z, log_det: z.sin().sum()).measure(model, x)
    assert m["loss"] == "given"
    assert m["angle"] < 1e-4
    with pytest.raises(InputError, match="one number"):
        GradientAngle(32, loss=lambda z, log_det: log_det).measure(model, x)
    with pytest.raises(InputError, match="samples=0"):
        GradientAngle(0)
    with pytest.raises(InputError, match="function"):
        GradientAngle(loss="ce")


class Frozen(Bijection):
    """No gradient passes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, x, context=None):
        return x * float(self.a)

    def inverse(self, z, context=None):
        return z / float(self.a)

    def forward_and_log_det(self, x, context=None):
        return self(x), x.new_zeros(len(x))


@pytest.mark.parametrize(
    ("model", "why"),
    [(Frozen(), "lets no gradients through"), (Chain(blocks.Permutation.reverse(4)), "no parameters")],
)
def test_not_measured(model, why):
    m = GradientAngle().measure(model, torch.randn(8, 4))
    assert not m.measured
    assert why in m.reason


def test_without_a_log_determinant():
    class Bare(blocks.AffineCoupling):
        has_log_det = False

    m = GradientAngle(16).measure(Chain(Bare(MLP(2, 4, activation="elu"))), torch.randn(16, 4))
    assert m["loss"] == "latent"
    assert "no log-determinant" in m.notes[0]
    assert m["angle"] < 1e-4


def test_nothing_about_the_model_changes():
    model, x = models.real_nvp(4, blocks=3, activation="elu").train().requires_grad_(False), torch.randn(16, 4)
    state = torch.get_rng_state()
    with torch.no_grad():
        m = GradientAngle(16).measure(Flow(Reversible(model)), x)
    assert m.measured
    assert len(m.rows) == 3
    assert model.training
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_images_with_levels_that_leave():
    model, x = models.glow((3, 8, 8), levels=2, blocks=1, hidden=8, factor_out=True), torch.randn(8, 3, 8, 8)
    model(x)
    m = GradientAngle(8, batch=4).measure(model, x)
    assert m["angle"] < 1e-3
    assert [row["block"] for row in m.rows][-1].startswith("5.inner")
    assert {"ActNorm", "AffineCoupling"} <= {row["kind"] for row in m.rows}


def test_two_zeros_point_the_same_way():
    p = nn.Parameter(torch.ones(2))
    zero, one = {p: torch.zeros(2)}, {p: torch.ones(2)}
    assert gradient_angle._angle(zero, zero, [p]) == 0.0
    assert gradient_angle._angle(zero, one, [p]) == math.pi
    assert gradient_angle._angle({p: torch.full((2,), 3e38)}, one, [p]) < 1e-6


def test_angles_of_all_blocks_at_once_are_those_of_one_after_the_other():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,), (5,), (2, 2), (0,), (1,), (3,), (6,))]
    stored = {p: torch.randn_like(p) for p in parameters}
    found = {p: g + 1e-5 * torch.randn_like(g) for p, g in stored.items()}
    zero, lost, missing, huge = parameters[2], parameters[3], parameters[5], parameters[6]
    stored[zero], found[zero] = torch.zeros_like(zero), torch.zeros_like(zero)
    found[lost][0, 1] = math.inf
    del found[missing]
    stored[huge], found[huge] = 1e38 * stored[huge].sign(), 3e38 * found[huge].sign()
    chosen = [parameters[:2], [zero], [lost], [parameters[4]], [], [missing], [huge, zero], parameters[7:], parameters]
    alone = [gradient_angle._angle(found, stored, here) if here else None for here in chosen]
    together = gradient_angle.angles_together(found, stored, chosen[:-1])
    together += gradient_angle.angles_together(found, stored, chosen[-1:])
    assert math.isnan(alone[2])
    assert alone[5] == math.pi
    assert together.pop(4) is alone.pop(4) is None
    assert together == pytest.approx(alone, rel=1e-6, abs=1e-12, nan_ok=True)
