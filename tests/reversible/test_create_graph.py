"""Gradients that are differentiated in turn: no history is counted twice, to any order."""

import pytest
import torch

from bilip import models
from bilip.regularizers import FiniteDifference
from bilip.reversible import Reversible, angle


def parts(seed=0):
    torch.manual_seed(seed)
    model = models.real_nvp(4, blocks=3, hidden=(8,), activation="tanh").double()
    return model, Reversible(model), torch.randn(8, 4, dtype=torch.float64)


def same(found):
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_inputs_that_depend_on_the_same_parameters():
    model, saving, x = parts()
    found = []
    for f in (model, saving):
        loss = (f.inverse(f(x) + 0.1) - x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    same(found)
    assert angle(*found) < 1e-7


@pytest.mark.parametrize("log_det", [False, True])
def test_third_derivatives_through_a_cycle(log_det):
    model, saving, x = parts()
    found = []
    for f in (model, saving):
        y = x.clone().requires_grad_()
        if log_det:
            z, log = f.forward_and_log_det(y)
            value = f.inverse(2 * z).sin().sum() + log.square().sum()
        else:
            value = f.inverse(2 * f(y)).sin().sum()
        (first,) = torch.autograd.grad(value, y, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(second.square().sum(), [y, *model.parameters()], allow_unused=True))
    same(found)


def test_contexts_that_depend_on_the_same_parameters():
    from bilip import Chain, blocks, nets

    torch.manual_seed(0)
    net = nets.MLP(2, 2, hidden=(8,), activation="tanh", context=4)
    model = Chain(blocks.AdditiveCoupling(net), shape=(4,)).double()
    x, found = torch.randn(5, 4, dtype=torch.float64), []
    for f in (model, Reversible(model)):
        z = f(f(x, x), f(x, x.cos()))
        first = torch.autograd.grad(z.square().sum(), list(model.parameters()), create_graph=True)
        found.append(
            torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()), allow_unused=True)
        )
    same(found)


def overflowing():
    model = models.real_nvp(4, blocks=6, hidden=(8,), scale="exp")
    with torch.no_grad():
        model[2].t.layers[-1].bias[2:] -= 25.0
        model[5].t.layers[-1].bias[2:] += 100.0
    return model


def test_a_penalty_on_outputs_that_overflow_runs_backward():
    """The stored path must not differentiate what its input has behind it: that was done, and is freed."""
    torch.manual_seed(0)
    model, x = overflowing(), torch.randn(8, 4)
    saving = Reversible(model)
    for _ in range(2):
        z, log_det = saving.forward_and_log_det(x)
        loss = z.square().sum() - log_det.sum()
        with pytest.warns(UserWarning, match="NaN or Inf"):
            loss = loss + FiniteDifference(0.1)(saving, x, latent=(z, log_det), step=0)
        loss.backward()
    back = saving(x)
    (saving.inverse(back).nan_to_num().sum() + log_det.detach().sum()).backward()
