"""One large coordinate or sample hides no drift of the others: in the first step, and in those after it, when anchors stand."""

import copy

import pytest
import torch
from torch import nn

from bilip import Chain, blocks, models, nets
from bilip.regularizers import FiniteDifference
from bilip.reversible import Guard, Reversible, angle
from catalogue import squash

WITHIN = 1e-3  # radians


def gradients(f, model, loss):
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

    stored, saving = gradients(model, model, loss), Reversible(model, Guard(spot_check=0))
    for _ in range(4):
        assert angle(gradients(saving, model, loss), stored) < WITHIN


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
    stored, exact = gradients(model, model, loss), copy.deepcopy(model).double()
    within = max(WITHIN, 3 * angle(stored, gradients(exact, exact, loss)))
    saving = Reversible(model, Guard(spot_check=0))
    for _ in range(3):
        assert angle(gradients(saving, model, loss), stored) < within


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

    stored, found = gradients(model, model, loss), gradients(wrapped, model, loss)
    assert angle(stored, found) < 1e-2 or wrapped.report().repaired
