"""Drift is told apart from a ReLU's kink that rounding has crossed, and one large coordinate or sample does not hide that of the others."""

import copy

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from bilip import Chain, blocks, models, nets
from bilip.probes import GradientAngle
from bilip.regularizers import FiniteDifference
from bilip.reversible import DriftWarning, Guard, Reversible, angle
from bilip.reversible.kinks import Signs
from catalogue import squash


class AtTheKink(nn.Module):
    """One ReLU whose pre-activation is, for the first sample, the smallest rounding away from zero."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.ones(1)), activation()
        self.kink = 0.0

    def forward(self, x):
        return self.activation((x - self.kink) * self.weight)


def kinked(activation=nn.ReLU):
    """The first block's net stands at its kink; the second squashes what it looks at, so that the walk misses it by a rounding."""
    torch.manual_seed(0)
    first = blocks.AdditiveCoupling(AtTheKink(activation), blocks.Split(swap=True))
    start = blocks.AdditiveCoupling(nn.Linear(1, 1), blocks.Split())
    squashing = blocks.AffineCoupling(nn.Linear(1, 2), partition=blocks.Split())
    model = Chain(start, first, squashing, shape=(2,))
    squash(squashing, 0.1)
    x = torch.randn(64, 2)
    with torch.no_grad():
        before, after = start(x)[:, 1], squashing.inverse(squashing(start(x)))[:, 1]
        row = int((before - after).abs().argmax())
        assert before[row] != after[row]  # the walk is off by a rounding there
        first.t.kink = float(torch.maximum(before[row], after[row]) / 2 + torch.minimum(before[row], after[row]) / 2)
        if (before[row] > first.t.kink) == (after[row] > first.t.kink):
            first.t.kink = float(torch.minimum(before[row], after[row]))
    return model, x, row


def loss_of(f, x, row):
    return (f(x) * torch.linspace(1, 2, 2)).sum(1)[row]


def gradients(f, model, x, row):
    return torch.autograd.grad(loss_of(f, x, row), list(model.parameters()))


@pytest.mark.parametrize("guard", [None, Guard(spot_check=0)], ids=["bare", "guarded"])
def test_the_sides_of_the_forward_pass_are_used_in_every_step(guard):
    model, x, row = kinked()
    stored = gradients(model, model, x, row)
    plain, held = Reversible(model, guard), Reversible(model, guard, keep_signs=True)
    for _ in range(3):
        assert angle(gradients(plain, model, x, row), stored) > 1e-2
        assert angle(gradients(held, model, x, row), stored) < 1e-4


def test_the_probe_states_what_remains():
    model, x, row = kinked()
    m = GradientAngle(64, batch=64, loss=lambda z, log_det: (z * torch.linspace(1, 2, 2)).sum(1)[row]).measure(model, x)
    assert m["angle"] > 1e-2
    assert m["angle_remaining"] < 1e-4


def test_drift_remains():
    model, x, _ = kinked()
    squash(model[2], 1e-8)
    loss = lambda z, log_det: z.square().sum()  # noqa: E731
    m = GradientAngle(64, batch=64, loss=loss).measure(model, x)
    assert m["angle_remaining"] > 0.3 * m["angle"] > 1e-3


def test_a_spot_check_takes_no_kink_for_a_wrong_gradient(recwarn):
    model, x, row = kinked()
    model[
        1
    ].t.stochastic = True  # so that the spot check looks at the whole batch: a part of it may be rounded in another way
    guarded = Reversible(model, Guard(spot_check=1))
    gradients(guarded, model, x, row)
    report = guarded.report()
    assert report.repaired == 0
    assert report.worst_angle > 1e-2
    assert report.worst_remaining < 1e-4
    assert not [w for w in recwarn if issubclass(w.category, DriftWarning)]
    state = guarded.guard_state()
    other = Reversible(copy.deepcopy(model))
    other.load_guard_state({k: v for k, v in state.items() if k != "worst_remaining"})  # as version 0.1 wrote it
    assert other.report().worst_remaining == report.worst_angle


PIECEWISE = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU(0.2),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.7),
    "prelu": nn.PReLU(),
    "selu": nn.SELU(),
    "hardswish": nn.Hardswish(),
    "threshold": nn.Threshold(0.3, 0.3),
    "softshrink": nn.Softshrink(0.2),
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, max=0.25),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1),
    "functional": lambda x: functional.relu(input=x),
}


@pytest.mark.parametrize("name", PIECEWISE)
def test_slopes_on_the_recorded_side(name):
    """Around every kink: moved across it by a rounding, each entry has the slope that it had."""
    f, eps = PIECEWISE[name], 1e-12
    kinks = torch.tensor([-3, -0.5, -0.2, 0, 0.1, 0.2, 0.25, 0.3, 0.7, 3, 6], dtype=torch.float64)
    x = torch.cat((kinks - eps, kinks + eps))
    y = torch.cat((kinks + eps, kinks - eps))
    f = f.double() if isinstance(f, nn.Module) else f

    def slope(points):
        leaf = points.clone().requires_grad_()
        (found,) = torch.autograd.grad(f(leaf * 1).sum(), leaf)
        return found

    signs = Signs()
    with signs.record(3):
        before = slope(x)
    with signs.replay(3):
        held = slope(y)
    assert torch.allclose(held, before, atol=1e-9)
    with signs.replay(4):  # nothing was recorded there
        assert torch.equal(slope(y), slope(y))


def test_kept_signs_change_no_healthy_gradient():
    torch.manual_seed(0)
    from bilip import models

    model = models.glow((3, 8, 8), levels=3, blocks=1, hidden=8, factor_out=True).double()
    x = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    model(x)
    found = []
    for f in (model, Reversible(model, keep_signs=True)):
        z, log_det = f.forward_and_log_det(x)
        found.append(torch.autograd.grad(z.square().sum() - log_det.sum(), list(model.parameters())))
    assert angle(*found) < 1e-7


# ---- one large coordinate or sample: in the first step, and in those after it, when anchors stand


WITHIN = 1e-3  # radians


def gradients_of(f, model, loss):
    return torch.autograd.grad(loss(f), list(model.parameters()))


def test_a_penalty_on_an_inverse_that_explodes():
    """From the second step on, an anchor of the forward walk left the inverse one alone with states like (0.2, 5e10)."""
    torch.manual_seed(1)
    model = models.real_nvp(2, blocks=8, hidden=(32,))
    with torch.no_grad():
        model[2].t.layers[-1].bias[1:] -= 30
    x = torch.randn(64, 2)

    def loss(f):
        z, log_det = f.forward_and_log_det(x)
        task = (z.square().sum(1) / 2 - log_det).mean()
        return task + FiniteDifference(0.05)(f, x, latent=(z, log_det), step=0)

    stored, saving = gradients_of(model, model, loss), Reversible(model, Guard(spot_check=0))
    for _ in range(4):
        assert angle(gradients_of(saving, model, loss), stored) < WITHIN


def raw_table(seed, offset, sigma):
    """A flow that has learned one raw feature, offset (1 + 0.1 n), and passes it on nearly as it is; two blocks squash the others."""
    torch.manual_seed(seed)
    model, scale = models.real_nvp(8, blocks=8, activation="elu"), 0.1 * offset
    for k in (3, 4):
        squash(model[k], sigma)
    with torch.no_grad():
        for k, block in enumerate(model):
            linear = [layer for layer in block.t.modules() if isinstance(layer, nn.Linear)]
            first, last = linear[0], linear[-1]
            if k % 2 == 0:  # looks at it
                weight = first.weight[:, 0].clone()
                first.weight[:, 0] = weight / scale
                first.bias -= weight * offset / scale
            else:  # moves it
                last.weight[[0, 4]] = 0
                last.bias[0], last.bias[4] = 0, 12
    x = torch.randn(256, 8)
    x[:, 0] = offset * (1 + 0.1 * x[:, 0].clamp(-3, 3))

    def loss(f):
        z, log_det = f.forward_and_log_det(x.to(next(f.parameters()).dtype))
        terms = z[:, 1:].square().sum(1) + ((z[:, 0] - offset) / scale).square()
        return (terms / 2 - log_det).mean()

    return model, loss


@pytest.mark.parametrize("offset", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("sigma", [1e-3, 1e-4, 1e-5])
def test_one_raw_feature(offset, sigma):
    model, loss = raw_table(0, offset, sigma)
    stored, exact = gradients_of(model, model, loss), copy.deepcopy(model).double()
    within = max(WITHIN, 3 * angle(stored, gradients_of(exact, exact, loss)))
    saving = Reversible(model, Guard(spot_check=0))
    for _ in range(3):
        assert angle(gradients_of(saving, model, loss), stored) < within


@pytest.mark.numeric
def test_an_outlier_hides_nobody():
    class Spike(nn.Module):
        def forward(self, a):
            return 3e6 * torch.relu(a - 3)

    torch.manual_seed(0)
    strong = blocks.AffineCoupling(nets.MLP(1, 2), scale=blocks.SigmoidScale(1e4, 1e4 + 1))
    model = Chain(strong, blocks.AdditiveCoupling(Spike()), blocks.AdditiveCoupling(nets.MLP(1, 1)), shape=(2,))
    x = torch.randn(16, 2)
    x[0, 0] = 4.0
    wrapped = Reversible(model, Guard(spot_check=0))

    def loss(f):
        z, log_det = f.forward_and_log_det(x)
        return z.square().sum() - log_det.sum()

    stored, found = gradients_of(model, model, loss), gradients_of(wrapped, model, loss)
    assert angle(stored, found) < 1e-2 or wrapped.report().repaired
